"""Bring in tiny-queue's files of JSON lines: pending, in flight and dead, each job once."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path

import pytest

from queue_core import Queue, Reason
from tests.surface.commands import herdsman
from tests.surface.importing import arrived, bring, contents, lines, payloads


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Write the files of two queues as tiny-queue does."""
    folder = tmp_path / "tiny"
    (folder / "nested").mkdir(parents=True)
    later = time.time() + 3600
    (folder / "mail.lock").touch()
    (folder / "mail.pending.ndjson").write_text(lines(
        {"id": "b", "payload": {"n": 2}, "attempts": 0, "created_at": 1_700_000_002.5},
        {"id": "c", "payload": {"n": 3}, "attempts": 1, "last_error": "once",
         "created_at": 1_700_000_003, "available_at": later},
        {"id": "a", "payload": {"n": 1}, "attempts": 1, "created_at": 1_700_000_001},
    ))  # fmt: skip
    (folder / "mail.inflight.ndjson").write_text(lines(
        {"id": "a", "payload": {"n": 1}, "attempts": 1, "created_at": 1_700_000_001},
    ))  # fmt: skip
    (folder / "mail.dead.ndjson").write_text(lines(
        {"id": "d", "payload": "dead", "attempts": 6, "last_error": "Boom: x",
         "created_at": 1_700_000_000},
    ))  # fmt: skip
    (folder / "nested" / "pending.jsonl").write_text(lines({"id": "n", "payload": [1]}))
    return folder


def test_every_job_arrives_as_it_stood(source: Path, database: Path) -> None:
    """In flight before pending, delayed until its time, dead with its error; keyed by its id."""
    said = bring("tiny-queue", source, database)
    assert said["arrived"] == 5
    found = arrived(database, "mail")
    assert payloads(found["ready"]) == [{"n": 1}, {"n": 2}]
    assert [job.attempt for job in found["ready"]] == [2, 1]
    assert found["ready"][1].enqueued_us == 1_700_000_002_500_000
    (delayed,) = found["delayed"]
    assert (delayed.attempt, delayed.ledger[0].error) == (2, "once")
    (dead,) = found["dead"]
    assert (dead.payload, dead.reason, dead.error) == ("dead", Reason.EXHAUSTED, "Boom: x")
    assert dead.ledger[0].run == 6
    assert payloads(arrived(database, "nested")["ready"]) == [[1]]
    with Queue[object](database, "mail") as queue:
        assert queue.put({"n": 2}, key="b").duplicate


def test_a_job_that_a_crash_left_in_two_files_comes_once(source: Path, database: Path) -> None:
    """Job a is pending and in flight: it arrives once, with the claim charged."""
    bring("tiny-queue", source, database, "--only", "mail")
    found = arrived(database, "mail")
    assert [job.key for job in found["ready"]] == ["a", "b"]
    assert arrived(database, "nested")["ready"] == []


def test_nothing_comes_twice_and_nothing_changes(source: Path, database: Path) -> None:
    """A dry run, a run, and another after the jobs were run here: the files stay as they are."""
    before = contents(source)
    told = bring("tiny-queue", source, database, "--dry-run")
    assert not database.exists()
    done = bring("tiny-queue", source, database)
    with Queue[object](database, "mail") as queue:
        queue.ack(queue.get_many(10))
    again = bring("tiny-queue", source, database)
    assert contents(source) == before
    assert told["queues"] == done["queues"]
    assert (again["arrived"], again["known_already"]) == (0, 5)


def test_half_a_line_is_named_and_the_rest_comes(source: Path, database: Path) -> None:
    """The torn line of a crash, a line of nonsense and a job without payload stop nothing."""
    with (source / "mail.pending.ndjson").open("a") as file:
        file.write('[1]\n{"id": "x"}\n\n{"id": "y", "payload": {"n"')
    said = bring("tiny-queue", source, database, code=1)
    assert (said["arrived"], said["unreadable"]) == (5, 3)
    assert "mail.pending.ndjson line 5 is no job: it has no 'payload'" in said["notes"]


def test_a_queue_in_use_is_refused(source: Path, database: Path) -> None:
    """While a process holds the queue's lock, its files may be half moved: stop it first."""
    with (source / "mail.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = herdsman("import", "tiny-queue", source, "-d", database, cwd=source)
    assert done.returncode == 1
    assert "mail.lock is held" in done.stderr


@pytest.mark.parametrize("there", [True, False])
def test_what_is_no_tiny_queue_is_one_sentence(tmp_path: Path, database: Path, there: bool) -> None:
    """A folder without its files and one that is not there are told apart from an empty queue."""
    folder = tmp_path / "wrong"
    if there:
        folder.mkdir()
    done = herdsman("import", "tiny-queue", folder, "-d", database, cwd=tmp_path)
    assert done.returncode == (1 if there else 2)
    assert done.stderr.count("\n") == 1


def test_a_terminal_gets_a_table(source: Path, database: Path) -> None:
    """Without --json the numbers stand in a table, and the sum in a sentence."""
    done = herdsman("import", "tiny-queue", source, "-d", database, cwd=source.parent)
    assert done.returncode == 0
    assert done.stdout.splitlines()[0].split()[:3] == ["queue", "ready", "delayed"]
    assert "5 jobs came in, 0 were here already" in done.stderr
