"""`herdsman queues` and `herdsman backup`: queues held back and let go, and a copy kept apart."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from queue_core import Queue
from tests.conftest import wait_until
from tests.process.service import Maker, services
from tests.surface.commands import Finished, document, herdsman

ZERO = dict.fromkeys(("ready", "delayed", "claimed", "done", "dead", "cancelled", "parked"), 0)


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue[Any]]:
    """A queue `emails` in `jobs.db`, opened in this process too."""
    with Queue(tmp_path / "jobs.db", "emails", max_depth=5000) as opened:
        yield opened


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Maker]:
    """Prepare services, and end them."""
    with services(tmp_path) as maker:
        yield maker


def on(tmp_path: Path, *args: object) -> Finished:
    """Run a command on the database."""
    return herdsman(*args, "-d", tmp_path / "jobs.db", cwd=tmp_path)


def test_the_list_has_counts_limit_and_pause(tmp_path: Path, queue: Queue[Any]) -> None:
    """Every queue is a row, one that only the configuration names too; JSON has the same keys."""
    queue.put_many([1, 2])
    queue.put(3, delay=60)
    with Queue[Any](tmp_path / "jobs.db", "other") as other:
        other.pause()
    (tmp_path / "herdsman.toml").write_text(
        'database = "jobs.db"\n[handlers.later]\npython = "os:getpid"\n'
    )
    found = document(herdsman("queues", "list", "--json", cwd=tmp_path))
    assert found["queues"] == [
        {"queue": "emails", **ZERO, "ready": 2, "delayed": 1, "paused": False, "max_depth": 5000},
        {"queue": "later", **ZERO, "paused": False, "max_depth": None},
        {"queue": "other", **ZERO, "paused": True, "max_depth": None},
    ]
    head, first, _, last = herdsman("queues", "list", cwd=tmp_path).stdout.splitlines()
    assert head.split()[-3:] == ["parked", "max_depth", "note"]
    assert first.split() == ["emails", "2", "1", "0", "0", "0", "0", "0", "5000", "-"]
    assert last.split()[-1] == "paused"


def test_a_job_that_nobody_can_run_is_listed_as_parked(make: Maker) -> None:
    """It stays ready, and the list says how many such wait."""
    service = make()
    service.queue().put("nothing", task="nobody")
    service.started()

    def parked() -> bool:
        done = herdsman("queues", "list", "--json", "-c", service.config, cwd=service.folder)
        (work,) = document(done)["queues"]
        return (work["ready"], work["parked"]) == (1, 1)

    wait_until(parked, what="the job is parked")


def test_a_paused_queue_is_claimed_from_only_when_resumed(make: Maker) -> None:
    """Pause and resume reach a running service at once, and lose nothing."""
    service = make()
    queue = service.queue()
    first = queue.put("nothing")
    service.started()
    wait_until(lambda: service.done(first))

    def run(word: str, *names: str) -> Finished:
        return herdsman("queues", word, *names, "-c", service.config, cwd=service.folder)

    assert run("pause", "work").stdout == "paused work\n"
    assert run("pause", "work").stdout == "work was paused already\n"
    held = queue.put("nothing")
    other = service.queue("elsewhere")
    other.put("nothing", task="work")
    wait_until(lambda: other.counts().done == 1, what="another queue goes on")
    assert queue.counts().ready == 1
    done = run("resume", "work", "--json")
    assert document(done)["queues"] == [{"queue": "work", "paused": False, "changed": True}]
    wait_until(lambda: service.done(held), what="the job runs")


def test_an_unknown_queue_is_a_sentence_and_nothing_is_changed(
    tmp_path: Path, queue: Queue[Any]
) -> None:
    """A slip of the pen makes no queue, and pauses none of those beside it."""
    queue.put(1)
    done = on(tmp_path, "queues", "pause", "emails", "email")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "herdsman: there is no queue 'email'; there are: emails\n"
    assert [(q.name, q.paused) for q in queue.engine.snapshot().queues] == [("emails", False)]
    assert on(tmp_path, "queues", "resume").returncode == 2
    missing = herdsman("queues", "list", "-d", "none.db", cwd=tmp_path)
    assert missing.returncode == 69
    assert not (tmp_path / "none.db").exists()


def test_a_configuration_that_says_otherwise_is_pointed_at(tmp_path: Path) -> None:
    """A pause that a reload would undo is not left to surprise."""
    (tmp_path / "herdsman.toml").write_text(
        'database = "jobs.db"\n[queues.emails]\npaused = false\n'
    )
    Queue[Any](tmp_path / "jobs.db", "other").put(1)
    done = herdsman("queues", "pause", "emails", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "paused emails\n")
    assert "queues.emails.paused is false" in done.stderr


def test_pauses_by_command_count_as_such(tmp_path: Path, queue: Queue[Any]) -> None:
    """The metric of operators' actions says that it was the command line, once per change."""
    queue.put(1)
    for word in ("pause", "pause", "resume"):
        assert on(tmp_path, "queues", word, "emails").returncode == 0
    counters = queue.engine.snapshot().counters
    told = {at[3]: n for at, n in counters.items() if at[0] == "operator_actions_total"}
    assert told == {"pause|cli": 1, "resume|cli": 1}


def test_a_backup_is_a_sound_copy_of_its_own(tmp_path: Path, queue: Queue[Any]) -> None:
    """It is made while the database is in use, only its owner can read it, and it opens."""
    jobs = queue.put_many([{"number": n} for n in range(500)])
    queue.get(timeout=0)
    done = on(tmp_path, "backup", "copy.db", "--json")
    found = document(done)
    copy = tmp_path / "copy.db"
    assert (found["path"], found["size_bytes"]) == (str(copy), copy.stat().st_size)
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.glob("*copy*")) == ["copy.db"]
    queue.put("later")
    with Queue[Any](copy, "emails") as restored:
        assert restored.counts().live == len(jobs)
        assert restored.check(full=True) == []


def test_a_backup_writes_over_nothing(tmp_path: Path, queue: Queue[Any]) -> None:
    """An existing file, the database itself above all, is refused with a sentence; exit code 1."""
    queue.put(1)
    (tmp_path / "kept").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    for taken in ("kept", "link", "jobs.db", "."):
        done = on(tmp_path, "backup", taken)
        assert (done.returncode, done.stdout) == (1, "")
        assert "exists; a backup never overwrites: name another file" in done.stderr
    assert (tmp_path / "kept").read_text() == "mine"
    assert queue.counts().ready == 1
    assert on(tmp_path, "backup", "no/such/folder/copy.db").returncode == 69
    assert herdsman("backup", "x.db", "-d", "none.db", cwd=tmp_path).returncode == 69
