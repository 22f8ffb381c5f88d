"""Check what a scrape says: against the catalogue, a real queue, real slots, and broken ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

from queue_core import Queue, open_engine, stats
from queue_core.errors import DatabaseUnavailable, DurabilityUnknown, StaleClaim
from queue_core.stats import Histogram, QueueFacts, Snapshot
from supervisor import catalogue, settings
from supervisor.catalogue import BY_NAME, CATALOGUE, OTHER, PAIRS_MAX, Expected, Names
from supervisor.metrics import Registries, render
from supervisor.policy import Cause, code_of
from supervisor.processes import CpuMeter, ProcessFacts, read_processes
from supervisor.reading import Readable, Reader, ReadFailed, numbers
from supervisor.slots import Kind, SlotState, SlotTable

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
EMAILS = Expected(
    queues=("emails",),
    pairs=(("emails", "emails"),),
    target_wait_seconds={"emails": 90.0},
    config_hash="0123456789ab",
)


class Fake:
    """A database whose answers the test decides."""

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        self.answer = snapshot or Snapshot(taken_us=0)
        self.fault: Exception | None = None
        self.flush_fault: Exception | None = None
        self.gate: threading.Event | None = None
        self.calls: list[str] = []

    def snapshot(self) -> Snapshot:
        """Answer, fail, or hang until the gate opens."""
        self.calls.append("snapshot")
        if self.gate is not None:
            assert self.gate.wait(20)
        if self.fault is not None:
            raise self.fault
        return self.answer

    def flush(self) -> None:
        """Note that the log was flushed."""
        self.calls.append("flush")
        if self.flush_fault is not None:
            raise self.flush_fault


def registries(
    engine: Readable,
    expected: Expected = EMAILS,
    look: Callable[[], ProcessFacts] | None = None,
    wait_seconds: float = 5.0,
) -> Registries:
    """Build what the web serves, without its cache."""
    reader = numbers(engine, cache_seconds=0.0)
    return Registries(
        reader, expected, look=look, version="1.2.3", engine="sqlite", wait_seconds=wait_seconds
    )


def scrape(registry: CollectorRegistry) -> Samples:
    """Scrape, parse, and return every sample; two of the same labels are an error."""
    body, content_type = render(registry, None)
    assert content_type.startswith("text/plain; version=0.0.4")
    found: Samples = {}
    for family in parse_text(body.decode()):
        for sample in family.samples:
            at = (sample.name, frozenset(sample.labels.items()))
            assert at not in found, f"{at} is there twice"
            found[at] = sample.value
    return found


def value(samples: Samples, name: str, /, **labels: str) -> float | None:
    """Return one sample, without the prefix of its name; None when it is absent."""
    return samples.get((f"herdsman_{name}", frozenset(labels.items())))


@pytest.fixture
def table(tmp_path: Path) -> Iterator[SlotTable]:
    """Make the slots of a tree with a keeper and two workers of a pool of three."""
    table = SlotTable.create(
        tmp_path / "t.slots", instance_uuid=str(uuid.uuid4()), pools=["default"], capacity=12
    )
    now_ns = time.monotonic_ns()
    table.tick(now_ns)
    for name, processes in (("default", 3), ("@keeper", 1), ("@web", 1)):
        table.pools[name].active, table.pools[name].processes = 1, processes
    for pool, name, kind in (
        (0, "default/0", Kind.WORKER),
        (0, "default/1", Kind.WORKER),
        (1, "keeper", Kind.KEEPER),
    ):
        slot = table.take()
        assert slot is not None
        slot.open(name=name, pool_index=pool, kind=kind, now_ns=now_ns)
        slot.enter(SlotState.IDLE)
    yield table
    table.close()


# ---- the catalogue ------------------------------------------------------------------------


def test_a_scrape_has_every_family_of_the_catalogue_and_no_other(table: SlotTable) -> None:
    """Names, types and labels on the wire are those of the table, library defaults left out."""
    facts = QueueFacts(name="emails", depth={}, max_depth=9, next_due_us=1_000_000)
    fake = Fake(Snapshot(taken_us=0, queues=(facts,)))
    table.record_duty("reap", 1, 2)
    everything = registries(fake, look=lambda: read_processes(table)).everything
    seen: dict[str, tuple[str, set[str]]] = {}
    for family in parse_text(render(everything, None)[0].decode()):
        name = family.name + "_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        seen[name] = (family.type, labels)
    wanted = {
        family.name: ("gauge" if family.type == "info" else family.type, set(family.labels))
        for family in CATALOGUE
    }
    assert wanted == seen


def test_every_stored_number_of_the_queue_is_in_the_catalogue() -> None:
    """A counter or histogram that the queue keeps cannot be forgotten by the exporter."""
    stored = {family.stored for family in CATALOGUE if family.stored}
    assert {*stats.COUNTERS, *stats.HISTOGRAMS, stats.PARKED} == stored


def test_no_family_is_named_twice_and_each_has_a_sentence() -> None:
    """Help texts are sentences, names carry the prefix, counters end in _total."""
    assert len(CATALOGUE) == len(BY_NAME)
    for family in CATALOGUE:
        assert family.help.endswith(".")
        assert family.name.startswith("herdsman_")
        assert family.name.endswith("_total") == (family.type == "counter")


def test_configured_names_are_zero_before_anything_happened() -> None:
    """The first failure is a step from 0 to 1, which `increase()` can see."""
    samples = scrape(registries(Fake()).everything)
    pair = {"queue": "emails", "task": "emails"}
    assert value(samples, "jobs_enqueued_total", **pair) == 0
    for outcome in ("succeeded", "failed", "timed_out", "crashed", "lease_lost"):
        assert value(samples, "attempts_finished_total", **pair, outcome=outcome) == 0
    for reason in ("exhausted", "rejected", "poison", "expired", "undecodable", "invalid"):
        assert value(samples, "dead_letters_total", **pair, reason=reason) == 0
    assert value(samples, "queue_wait_seconds_count", **pair) == 0
    assert value(samples, "attempt_duration_seconds_count", **pair, outcome="error") == 0
    assert value(samples, "queue_jobs", queue="emails", state="ready") == 0
    assert value(samples, "queue_paused", queue="emails") == 0
    assert value(samples, "queue_target_wait_seconds", queue="emails") == 90.0
    assert value(samples, "queue_max_depth", queue="emails") is None
    assert value(samples, "stale_claims_total", queue="emails") == 0
    assert value(samples, "stale_claims_total", queue="") == 0


def test_expected_names_come_from_handlers_queues_and_pools(tmp_path: Path) -> None:
    """A handler counts under its queue; a queue without one under its own name."""
    (tmp_path / "herdsman.toml").write_text(
        'database = "h.db"\n[handlers.welcome]\npython = "a:b"\nqueue = "emails"\n'
        '[handlers.charge]\npython = "a:c"\n[queues.reports]\ntarget_wait = "5m"\n'
        '[pools.default]\nqueues = ["emails", "reports", "charge"]\n'
    )
    expected = catalogue.expected(settings.load(tmp_path / "herdsman.toml", {}))
    assert expected.queues == ("charge", "emails", "reports")
    assert expected.pairs == (("charge", "charge"), ("emails", "welcome"), ("reports", "reports"))
    assert dict(expected.target_wait_seconds) == {"reports": 300.0}


# ---- against a real queue -----------------------------------------------------------------


def test_values_are_those_of_a_real_queue(database: Path) -> None:
    """Every transition done here is in the next scrape, exactly."""
    with Queue[dict[str, int]](str(database), "emails") as queue:
        for number in range(6):
            queue.put({"n": number})
        queue.put({"n": 6}, key="once")
        assert queue.put({"n": 6}, key="once").duplicate
        queue.put({"n": 7}, delay=3600)
        first, second, third = (queue.get(timeout=0) for _ in range(3))
        assert first
        assert second
        assert third
        queue.ack(first)
        queue.nack(second, error="ValueError: no")
        queue.fail(third, error="ValueError: never")
        with pytest.raises(StaleClaim):
            queue.ack(first)
        assert queue.get(timeout=0) is not None
        samples = scrape(registries(open_engine(database)).everything)
    pair = {"queue": "emails", "task": "emails"}
    expected = {
        "jobs_enqueued_total": 8.0,
        "claims_total": 4.0,
        "attempts_started_total": 4.0,
        "queue_wait_seconds_count": 4.0,
    }
    assert expected == {name: value(samples, name, **pair) for name in expected}
    assert value(samples, "jobs_rejected_total", **pair, reason="duplicate") == 1
    assert value(samples, "attempts_finished_total", **pair, outcome="succeeded") == 1
    assert value(samples, "attempts_finished_total", **pair, outcome="failed") == 1
    assert value(samples, "retries_total", **pair, reason="failed") == 1
    assert value(samples, "dead_letters_total", **pair, reason="rejected") == 1
    assert value(samples, "jobs_finished_total", **pair, outcome="succeeded") == 1
    depth = {"ready": 3, "delayed": 2, "claimed": 1, "done": 1, "dead": 1, "cancelled": 0}
    assert depth == {
        state: value(samples, "queue_jobs", queue="emails", state=state) for state in depth
    }
    assert value(samples, "stale_claims_total", queue="") == 1
    assert value(samples, "database_up") == 1
    assert (value(samples, "database_size_bytes") or 0) > 4096
    assert value(samples, "errors_total", task="emails", exception="ValueError") == 2
    assert value(samples, "errors_total", task="emails", exception=OTHER) == 0
    folded = {at for at in samples if ("queue", OTHER) in at[1] or ("task", OTHER) in at[1]}
    assert folded == set()


def test_histograms_are_cumulative_and_bounded_as_the_library_writes_them() -> None:
    """Each bucket holds those before it, +Inf is the count, and 30 s is written 30.0."""
    counts = (1, 0, 2) + (0,) * 15 + (4,)
    histogram = Histogram(counts=counts, total=12.5)
    fake = Fake(Snapshot(taken_us=0, histograms={(stats.WAIT, "emails", "emails", ""): histogram}))
    samples = scrape(registries(fake).database)
    pair = {"queue": "emails", "task": "emails"}
    buckets = {
        dict(labels)["le"]: number
        for (name, labels), number in samples.items()
        if name == "herdsman_queue_wait_seconds_bucket"
    }
    assert tuple(buckets[le] for le in ("0.001", "0.005", "0.01", "30.0")) == (1, 1, 3, 3)
    assert buckets["+Inf"] == 7 == value(samples, "queue_wait_seconds_count", **pair)
    assert value(samples, "queue_wait_seconds_sum", **pair) == 12.5
    assert sorted(buckets.values()) == [buckets[le] for le in sorted(buckets, key=float)]


def test_a_state_the_catalogue_does_not_know_still_counts() -> None:
    """Sums over a label stay right, whatever a newer library wrote into the database."""
    key = (stats.FINISHED, "emails", "emails", "abducted")
    samples = scrape(registries(Fake(Snapshot(taken_us=0, counters={key: 3}))).database)
    pair = {"queue": "emails", "task": "emails"}
    assert value(samples, "attempts_finished_total", **pair, outcome=OTHER) == 3


# ---- many and hostile names ---------------------------------------------------------------


def test_over_the_cap_pairs_are_folded_and_sums_stay_right() -> None:
    """A producer that invents a task per job cannot flood the scrape."""
    counters = {(stats.ENQUEUED, "emails", f"t{n}", ""): n for n in range(1000)}
    fake = Fake(Snapshot(taken_us=0, counters=counters))
    everything = registries(fake).everything
    samples = scrape(everything)
    enqueued = {at: v for at, v in samples.items() if at[0] == "herdsman_jobs_enqueued_total"}
    assert len(enqueued) == PAIRS_MAX + 1
    assert sum(enqueued.values()) == sum(range(1000))
    assert (value(samples, "jobs_enqueued_total", queue="emails", task=OTHER) or 0) > 0
    assert value(samples, "series_dropped_total") == 1000 + 1 - PAIRS_MAX
    assert value(scrape(everything), "series_dropped_total") == 1000 + 1 - PAIRS_MAX


def test_who_has_a_series_keeps_it() -> None:
    """A name that sorts before the others does not push one of them into __other__."""
    counters = {(stats.ENQUEUED, "emails", f"t{n}", ""): 1 for n in range(300)}
    fake = Fake(Snapshot(taken_us=0, counters=counters))
    everything = registries(fake).everything
    before = scrape(everything)
    fake.answer = Snapshot(taken_us=1, counters={**counters, (stats.ENQUEUED, "a", "a", ""): 1})
    after = scrape(everything)
    for at, number in before.items():
        if at[0].endswith("_total"):
            assert after[at] >= number, f"{at} went back"


def test_many_queues_are_folded_too() -> None:
    """A thousand queues give a bounded scrape that still counts every job."""
    queues = tuple(
        QueueFacts(name=f"q{n}", depth={"ready": 1}, oldest_ready_age_seconds=n)
        for n in range(1000)
    )
    samples = scrape(registries(Fake(Snapshot(taken_us=0, queues=queues))).database)
    ready = {
        dict(labels)["queue"]: number
        for (name, labels), number in samples.items()
        if name == "herdsman_queue_jobs" and ("state", "ready") in labels
    }
    assert sum(ready.values()) == 1000
    assert len(ready) == catalogue.QUEUES_MAX + 1
    assert value(samples, "queue_oldest_ready_age_seconds", queue=OTHER) == 999
    assert value(samples, "queue_paused", queue=OTHER) == 0


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ('a"b\\c', 'a"b\\c'),
        ("two\nlines", "two_lines"),
        ("lone\ud800surrogate", "lone?surrogate"),
        ("turned\u202eround", "turned_round"),
        ("naïve 🐑", "naïve 🐑"),
        ("x" * 5000, "x" * 128),
    ],
)
def test_hostile_names_cannot_break_the_scrape(name: str, label: str) -> None:
    """Whatever a queue is called, each format parses, and shows one clean label."""
    key = (stats.ENQUEUED, name, "t", "")
    everything = registries(Fake(Snapshot(taken_us=0, counters={key: 1}))).everything
    assert value(scrape(everything), "jobs_enqueued_total", queue=label, task="t") == 1
    body, _ = render(everything, "application/openmetrics-text; version=1.0.0")
    assert list(parse_openmetrics(body.decode()))


@given(
    st.dictionaries(
        st.tuples(st.text(max_size=3), st.text(max_size=3)), st.integers(0, 100), max_size=30
    ),
    st.integers(0, 12),
)
def test_folding_loses_nothing(rows: dict[tuple[str, str], int], cap: int) -> None:
    """Whatever the names and the cap, the sum over all labels is the sum of all rows."""
    names = Names(Expected())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalogue, "PAIRS_MAX", cap)
        patch.setattr(catalogue, "QUEUES_MAX", cap)
        names.admit({queue for queue, _ in rows}, rows)
        folded: dict[tuple[str, str], int] = {}
        for pair, number in rows.items():
            at = names.pair(*pair)
            folded[at] = folded.get(at, 0) + number
    assert sum(rows.values()) == sum(folded.values())
    assert len(names.pairs) <= cap
    assert len(folded) <= 3 * cap + 3


# ---- reading ------------------------------------------------------------------------------


def test_a_failed_read_leaves_families_out_rather_than_old() -> None:
    """Absent beats frozen: the page still answers, and says that the database is down."""
    fake = Fake()
    everything = registries(fake).everything
    assert value(scrape(everything), "database_up") == 1
    fake.fault = DatabaseUnavailable("the file is gone")
    samples = scrape(everything)
    database = {family.name for family in CATALOGUE if family.source == "database"}
    assert {"herdsman_database_up"} == {
        name for name, _ in samples if any(name.startswith(one) for one in database)
    }
    assert value(samples, "database_up") == 0
    assert value(samples, "collector_errors_total") == 1
    fake.fault = None
    samples = scrape(everything)
    assert value(samples, "database_up") == 1
    assert abs((value(samples, "collector_last_success_timestamp_seconds") or 0) - time.time()) < 60


def test_a_broken_file_is_a_database_that_is_down(database: Path) -> None:
    """A file that is no database gives an answer and no traceback."""
    database.write_bytes(b"this is no database, but long enough to be looked at" * 100)
    samples = scrape(registries(open_engine(database)).everything)
    assert value(samples, "database_up") == 0


def test_what_is_read_is_flushed_before_it_is_shown() -> None:
    """A value once shown survives a power cut; one that may not is not shown."""
    fake = Fake(Snapshot(taken_us=0, database_bytes=7))
    everything = registries(fake).everything
    assert value(scrape(everything), "database_size_bytes") == 7
    assert fake.calls == ["snapshot", "flush"]
    fake.flush_fault = DurabilityUnknown("the disk failed")
    assert value(scrape(everything), "database_size_bytes") is None


def test_a_slow_database_holds_a_scrape_no_longer_than_its_limit() -> None:
    """The scrape answers in time, and no second read is started beside the slow one."""
    fake = Fake()
    fake.gate = threading.Event()
    everything = registries(fake, wait_seconds=0.1).everything
    try:
        began = time.monotonic()
        for _ in range(3):
            assert value(scrape(everything), "database_up") == 0
        assert time.monotonic() - began < 5
        assert fake.calls == ["snapshot"]
    finally:
        fake.gate.set()


def test_many_callers_share_one_read() -> None:
    """Twenty scrapes at the same time cost the database one."""
    fake = Fake()
    fake.gate = threading.Event()
    reader = numbers(fake)
    answers: list[Snapshot] = []
    threads = [threading.Thread(target=lambda: answers.append(reader.read())) for _ in range(20)]
    for thread in threads:
        thread.start()
    fake.gate.set()
    for thread in threads:
        thread.join(20)
    assert len(answers) == 20
    assert fake.calls == ["snapshot", "flush"]


def test_an_answer_is_kept_for_a_second_and_no_longer() -> None:
    """The cache spares the database, and never lives longer than it was given."""
    calls: list[int] = []

    def read() -> int:
        calls.append(1)
        return len(calls)

    reader = Reader(read, cache_seconds=60)
    assert (reader.read(), reader.read()) == (1, 1)
    short = Reader(read, cache_seconds=0)
    assert (short.read(), short.read()) == (2, 3)


def test_a_failure_without_words_names_its_kind() -> None:
    """An empty exception text still gives a sentence to show."""

    def read() -> int:
        raise MemoryError

    with pytest.raises(ReadFailed, match="MemoryError"):
        Reader(read).read()


# ---- formats ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        (None, "text/plain; version=0.0.4"),
        ("*/*", "text/plain; version=0.0.4"),
        ("text/plain;version=1.0.0", "text/plain; version=1.0.0"),
        ("application/openmetrics-text;version=1.0.0,text/plain;q=0.5", "application/openmetrics"),
        ("application/openmetrics-text;version=abc", "text/plain; version=0.0.4"),
        ("application/openmetrics-text;version=9\x0bSet-Cookie: x", "text/plain; version=0.0.4"),
        ("application/openmetrics-text;version=" + "9" * 500, "text/plain; version=0.0.4"),
    ],
)
def test_the_format_is_what_was_asked_for(accept: str | None, content_type: str) -> None:
    """OpenMetrics to who asks for it, and plain text to who asks for nonsense."""
    body, got = render(registries(Fake()).everything, accept)
    assert got.startswith(content_type)
    assert b"_created" not in body
    parse = parse_openmetrics if "openmetrics" in got else parse_text
    assert any(family.name == "herdsman_jobs_enqueued" for family in parse(body.decode()))


# ---- the process tree ---------------------------------------------------------------------


def test_workers_are_counted_by_state(table: SlotTable) -> None:
    """A running one is busy, a booting one starts, and who waits for a restart backs off."""
    running = next(slot for slot in table.live() if slot.name == "default/0")
    running.begin_batch([(77, 1)])
    assert running.start(0)
    table.pools["default"].backoff_until_ns = time.monotonic_ns() + 30_000_000_000
    samples = scrape(registries(Fake(), look=lambda: read_processes(table)).process)
    states = {"starting": 0, "idle": 1, "busy": 1, "draining": 0, "backoff": 1}
    assert states == {
        state: value(samples, "workers", pool="default", state=state) for state in states
    }
    assert value(samples, "workers_configured", pool="default") == 3
    assert value(samples, "workers_configured", pool="@keeper") is None
    assert 25 < (value(samples, "worker_backoff_seconds", pool="default") or 0) <= 30
    assert (value(samples, "longest_running_job_seconds", pool="default") or 0) > 0
    table.draining = True
    samples = scrape(registries(Fake(), look=lambda: read_processes(table)).process)
    assert value(samples, "workers", pool="default", state="draining") == 2
    assert value(samples, "supervisor_draining") == 1


def test_exits_are_counted_by_cause(table: SlotTable) -> None:
    """Every cause of the closed list is there, and those that happened are counted."""
    pool = table.pools["default"]
    pool.count_exit(code_of(Cause.OOM))
    pool.count_exit(code_of(Cause.OOM))
    pool.restarts, pool.parked, pool.crash_loop = 2, 1, 1
    samples = scrape(registries(Fake(), look=lambda: read_processes(table)).process)
    exits = {
        str(cause): value(samples, "worker_exits_total", pool="default", cause=str(cause))
        for cause in Cause
    }
    assert {**dict.fromkeys(map(str, Cause), 0.0), "oom": 2.0} == exits
    assert value(samples, "worker_restarts_total", pool="default") == 2
    assert value(samples, "worker_pool_parked", pool="default") == 1
    assert value(samples, "worker_pool_crash_loop", pool="default") == 1
    assert value(samples, "worker_exits_total", pool="@keeper", cause="hang") == 0


def test_heartbeats_are_instants(table: SlotTable) -> None:
    """The supervisor's and the keeper's last signs of life are wall-clock times."""
    look = lambda: read_processes(table)  # noqa: E731 - one word for the test's subject
    samples = scrape(registries(Fake(), look=look).process)
    for name in ("supervisor", "keeper"):
        beat = value(samples, f"{name}_heartbeat_timestamp_seconds")
        assert beat is not None
        assert abs(beat - time.time()) < 60
    keeper = next(slot for slot in table.live() if slot.kind is Kind.KEEPER)
    keeper.bury(cause=1, signal=9, exit_code=0, now_ns=time.monotonic_ns())
    assert value(scrape(registries(Fake(), look=look).process),
                 "keeper_heartbeat_timestamp_seconds") is None  # fmt: skip


def test_the_start_of_the_supervisor_is_told_and_stays_the_same(table: SlotTable) -> None:
    """It is the instant this process started, and no two scrapes tell another."""
    registry = registries(Fake(), look=lambda: read_processes(table)).process
    uptime = time.clock_gettime(time.CLOCK_BOOTTIME)
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = uptime - ticks / os.sysconf("SC_CLK_TCK")
    seen = {value(scrape(registry), "supervisor_start_timestamp_seconds") for _ in range(20)}
    (started,) = seen
    assert started is not None
    assert abs(started - (time.time() - age)) < 2  # the kernel notes its boot in whole seconds


def test_cpu_time_outlives_the_process_that_used_it(table: SlotTable) -> None:
    """A pool's CPU counter does not go back when a worker dies and its record is reused."""
    meter = CpuMeter()
    slot = next(slot for slot in table.live() if slot.name == "default/0")
    slot.cpu_us = 4_000_000
    assert meter.seconds(read_processes(table))["default"] == 4.0
    slot.cpu_us = 5_000_000
    slot.bury(cause=1, signal=9, exit_code=0, now_ns=time.monotonic_ns())
    assert meter.seconds(read_processes(table))["default"] == 5.0
    slot.free()
    slot.open(name="default/0", pool_index=0, kind=Kind.WORKER, now_ns=time.monotonic_ns())
    slot.cpu_us = 1_000_000
    assert meter.seconds(read_processes(table))["default"] == 6.0


def test_without_a_tree_only_the_build_is_told() -> None:
    """A scrape with no supervisor to look at invents no workers."""
    samples = scrape(registries(Fake()).process)
    info = {"version": "1.2.3", "engine": "sqlite"}
    config = {"hash": "0123456789ab"}
    assert {
        ("herdsman_build_info", frozenset(info.items())): 1.0,
        ("herdsman_config_info", frozenset(config.items())): 1.0,
    } == samples


# ---- the command --------------------------------------------------------------------------


def _herdsman(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "supervisor", *arguments],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command_prints_one_scrape(database: Path) -> None:
    """`herdsman metrics` says on standard output what the web would, in each format."""
    with Queue[int](str(database), "emails") as queue:
        queue.put(1)
    plain = _herdsman("metrics", "--database", str(database))
    assert (plain.returncode, plain.stderr) == (0, "")
    line = 'herdsman_jobs_enqueued_total{queue="emails",task="emails"} 1.0'
    assert line in plain.stdout.splitlines()
    assert list(parse_text(plain.stdout))
    openmetrics = _herdsman("metrics", "--database", str(database), "--openmetrics")
    assert openmetrics.stdout.endswith("# EOF\n")
    assert list(parse_openmetrics(openmetrics.stdout))
    document = json.loads(_herdsman("metrics", "--database", str(database), "--json").stdout)
    assert document["schema_version"] == 1
    wanted = {
        "name": "herdsman_jobs_enqueued_total",
        "labels": {"queue": "emails", "task": "emails"},
        "value": 1,
    }
    assert wanted in document["samples"]


def test_the_command_says_when_the_database_is_away(database: Path) -> None:
    """It still prints what it knows, one sentence on standard error, and exits 69."""
    done = _herdsman("metrics", "--database", str(database))
    assert done.returncode == 69
    assert "herdsman_database_up 0.0" in done.stdout.splitlines()
    assert done.stderr.startswith("the database could not be read: ")
    assert done.stderr.count("\n") == 1
    assert not database.exists()
