"""Show that the benchmarks run, and that nothing is claimed but what was measured."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import board, durability, facts, harness, measure, report
from benchmarks.contenders import EVERYONE
from benchmarks.harness import QUICK, Options

ROOT = Path(__file__).parents[2]
TINY = dataclasses.replace(QUICK, seconds=0.5, peer_seconds=0.5)
WITH_A_PEER = frozenset({"herdsman", "synchronous=FULL, our lock", "litequeue"})


def ran(key: str, options: Options) -> dict[str, Any]:
    """Run a workload, and return what would be stored of it."""
    result = report.module(key).run(options)
    about = {"machine": facts.machine(), "load": facts.load(), "absent": {}}
    told = dataclasses.asdict(options) | {"only": sorted(options.only)}
    stored: dict[str, Any] = json.loads(json.dumps(about | {"options": told, "result": result}))
    return stored


def ours(found: Any) -> Iterator[dict[str, Any]]:
    """Yield the medians of herdsman, wherever they stand in a result."""
    if isinstance(found, dict):
        for name, value in found.items():
            if name.startswith("herdsman") and "median" in value:
                yield value["median"]
            else:
                yield from ours(value)


@pytest.mark.parametrize("key", report.WORKLOADS)
def test_a_workload_runs_and_is_reported(key: str, tmp_path: Path) -> None:
    """Each script works at a tiny size: it measures something, and tables come out of it."""
    # A peer that never reruns a job would be waited for, for its time.
    only = frozenset({"herdsman"}) if key == "9" else WITH_A_PEER
    results = {key: ran(key, dataclasses.replace(TINY, only=only))}
    report.save(results, tmp_path)
    text = (tmp_path / "results.md").read_text()
    assert f"## {key}. {report.module(key).TITLE}" in text
    assert "its figures mean nothing" in text
    assert "failed" not in (tmp_path / "results.json").read_text()
    assert report.load(tmp_path) == results
    for median in ours(results):
        # A peer can starve in so short a time, and so few jobs may be over before the window opens.
        assert median.get("jobs_per_second", 1) > 0 or median["jobs"] == 0
        assert median.get("put_per_second", 1) > 0


def test_the_window_begins_when_all_have_started(tmp_path: Path) -> None:
    """Jobs before the window, and the time they took, are no part of the rate."""
    board.create(tmp_path)
    pen = board.Pen(tmp_path)

    def work() -> None:
        for _ in range(100):
            pen.count()
            time.sleep(0.01)

    worker = threading.Thread(target=work)
    worker.start()
    window = board.watch(tmp_path, expected=100, seconds=30, warm_seconds=0.3)
    worker.join()
    assert 0 < window.jobs < 90
    assert window.seconds < 1.5
    assert window.jobs_per_second == pytest.approx(window.jobs / window.seconds)


def test_a_queue_that_does_nothing_is_no_figure(tmp_path: Path) -> None:
    """No job seen is a failure and not a rate of 0."""
    board.create(tmp_path)
    with pytest.raises(TimeoutError, match="no job was done"):
        board.watch(tmp_path, expected=1, seconds=1, start_seconds=0.05)


def test_a_peer_that_fails_is_reported_and_we_must_not_fail() -> None:
    """One broken peer does not end an hour of measurements; a fault of ours does."""

    def broken() -> dict[str, Any]:
        raise RuntimeError("out of order")

    runs = {"herdsman": lambda: {"rate": 4}, "another": broken}
    found = harness.interleave(dataclasses.replace(QUICK, rounds=3), runs)
    assert found["herdsman"]["median"]["rate"] == 4
    assert found["another"]["failed"] == "RuntimeError: out of order"
    with pytest.raises(RuntimeError, match="out of order"):
        harness.interleave(QUICK, {"herdsman, 2 workers": broken})


def test_numbers_are_boiled_down_as_said() -> None:
    """Percentiles by nearest rank, medians over rounds, larger than the other by so much."""
    found = measure.quantiles_ms(range(1_000_000, 1_001_000_000, 1_000_000))
    assert found["samples"] == 1000
    assert (found["p50_ms"], found["p99_ms"], found["worst_ms"]) == (501, 991, 1000)
    rounds = [{"rate": 1, "name": "x"}, {"rate": 9, "name": "x"}, {"rate": 2, "name": "x"}]
    assert measure.medians(rounds) == {"rate": 2}
    both = {"herdsman": {"median": {"rate": 6}}, "other": {"median": {"rate": 2}}, "failed": {}}
    assert harness.ratios(both, "rate") == {"other": 3}


def test_a_missed_bar_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program that compares says by its exit code whether what we claim was so."""
    group = {"puts_per_second": 900.0, "worst_put_ms": 9.0, "fewest_of_a_producer": 1.0}
    full = {"puts_per_second": 300.0, "worst_put_ms": 30.0, "fewest_of_a_producer": 1.0}
    for ours, theirs, code in ((group, full, 0), (full, group, 1), (full, full, 1)):
        rounds = dict(zip(durability.KINDS, (ours, theirs), strict=True))
        monkeypatch.setattr(durability, "measure", lambda _1, kind, *_2, r=rounds: r[kind])
        for arguments in ((), ("--json",)):
            monkeypatch.setattr("sys.argv", ["durability.py", "--rounds", "1", *arguments])
            assert durability.main() == code
    assert "no more puts per second than" in capsys.readouterr().out


def test_every_contender_has_its_own_driver() -> None:
    """Each is driven by a file of its own that says how."""
    for one in EVERYONE:
        source = (ROOT / "benchmarks" / "peers" / f"{one.module}.py").read_text()
        assert "def commands(" in source
        assert source.startswith('"""Drive ')
    assert len({one.name for one in EVERYONE}) == len(EVERYONE)


def test_the_readme_claims_no_figure_but_the_stored_ones() -> None:
    """Between its marks stands what the results say; no speed is claimed anywhere else."""
    text = (ROOT / "README.md").read_text()
    before, begin, rest = text.partition(report.BEGIN)
    section, end, after = rest.partition(report.END)
    if begin:
        assert end, f"{report.BEGIN} without {report.END}"
        stored = report.readme_section(report.load())
        assert begin + section + end == stored, "run python -m benchmarks.report --readme"
    claims = re.findall(r"[\d,.]+ ?(?:jobs|puts)(?:/s| a second| per second)", before + after)
    assert claims == []


def test_the_readme_section_is_written_between_its_marks(tmp_path: Path) -> None:
    """The rest of the README is left alone; without marks nothing is written."""
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.write_readme({}, readme)
    text = readme.read_text()
    assert text.startswith(f"before\n{report.BEGIN}\n")
    assert text.endswith(f"{report.END}\nafter\n")
    assert "old" not in text
    readme.write_text("no marks\n")
    with pytest.raises(ValueError, match="has no line"):
        report.write_readme({}, readme)
    assert readme.read_text() == "no marks\n"


def test_the_committed_report_says_what_was_measured() -> None:
    """Every workload was run in earnest, beside every peer, and report and README say just that."""
    results = report.load()
    assert [*results] == [*report.WORKLOADS], "run make bench"
    for key, found in results.items():
        assert not found["options"]["quick"], f"workload {key} was only tried"
        assert found["options"]["only"] == [], f"workload {key} was run with some contenders only"
        assert found["absent"] == {}, f"workload {key} was run without some peers"
        assert found["options"]["seconds"] >= 20, f"workload {key} was too short"
    drained = results["1"]["result"]["contenders"]
    assert {one.name for one in EVERYONE if one.name != "herdsman"} < {*drained}
    assert len(drained["herdsman, 2 workers"]["rounds"]) >= 3
    assert (report.RESULTS / "results.md").read_text() == report.markdown(results), (
        "run python -m benchmarks.report"
    )
    for name in ("throughput.svg", "backlog.svg"):
        assert (report.RESULTS / name).read_text().rstrip().endswith("</svg>")
    readme = (ROOT / "README.md").read_text()
    _, begin, rest = readme.partition(report.BEGIN)
    section, end, _ = rest.partition(report.END)
    assert begin, f"README.md needs a line {report.BEGIN} and a line {report.END}"
    assert end, f"{report.BEGIN} without {report.END}"
    assert begin + section + end == report.readme_section(results), (
        "run python -m benchmarks.report --readme"
    )
