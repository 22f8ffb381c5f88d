"""Keep a database in order while it is used: bulk moves, lists, backup, check, recount, import."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from queue_core import (
    Backoff,
    DatabaseError,
    IdempotencyConflict,
    Outcome,
    PayloadInvalid,
    Queue,
    QueueClosed,
    QueueError,
    QueueFull,
    Reason,
    State,
    codec,
)
from queue_core.engines import sqlite_backup
from queue_core.engines.sqlite import SqliteEngine
from queue_core.engines.sqlite_schema import has_wal_reset_bug
from queue_core.upkeep import PROBLEMS_MAX, ImportJob, Upkeep
from tests.conftest import wait_until

ROW_PAYLOAD = "x" * 3000  # lives in a row of its own


@pytest.fixture
def queue(database: Path) -> Iterator[Queue[Any]]:
    """Open a queue."""
    with Queue[Any](database, "jobs", backoff=Backoff(base_seconds=0)) as made:
        yield made


def kill(queue: Queue[Any], number: int, *, task: str | None = None) -> list[int]:
    """Put jobs and make them dead."""
    ids = queue.put_many(list(range(number)), task=task)
    jobs = queue.get_many(number)
    queue.fail(jobs, error="no good")
    return [int(id_) for id_ in ids]


def upkeep(queue: Queue[Any]) -> Upkeep:
    """Return the engine as one that can be kept in order."""
    assert isinstance(queue.engine, Upkeep)
    return queue.engine


# --- bulk replay and discard --------------------------------------------------------------------


def test_all_dead_jobs_are_replayed_across_slices(queue: Queue[Any]) -> None:
    """More than one transaction's worth come back, each once, with no attempt spent."""
    kill(queue, 1200)
    assert queue.replay_all() == 1200
    counts = queue.counts()
    assert (counts.ready, counts.dead) == (1200, 0)
    job = queue.get(0)
    assert job is not None
    assert job.attempt == 1


def test_a_bulk_replay_takes_what_matches(queue: Queue[Any]) -> None:
    """Task and reason narrow it; the limit bounds it, oldest first."""
    plain = kill(queue, 3)
    mails = kill(queue, 3, task="mail")
    assert queue.replay_all(task="mail", limit=2) == 2
    assert [job.id for job in queue.jobs("ready")] == mails[:2]
    assert queue.replay_all(reason="exhausted") == 0
    assert queue.replay_all(reason=Reason.REJECTED, limit=0) == 0
    assert queue.replay_all(reason="rejected") == 4
    assert {job.id for job in queue.jobs("ready")} == {*plain, *mails}


def test_a_dry_run_changes_nothing(queue: Queue[Any]) -> None:
    """It says how many match, for discard as for replay."""
    kill(queue, 3)
    assert queue.replay_all(dry_run=True) == 3
    assert queue.discard_all(dry_run=True, limit=2) == 2
    assert queue.counts().dead == 3


def test_discarded_jobs_leave_nothing_behind(queue: Queue[Any]) -> None:
    """Row, body, ledger and key are gone; another queue's dead jobs stay."""
    with Queue[Any](queue.engine.path, "other") as other:  # type: ignore[attr-defined]
        kill(other, 1)
        queue.put(ROW_PAYLOAD, key="k")
        job = queue.get(0)
        assert job is not None
        queue.fail(job, error="no good")
        assert queue.discard_all() == 1
        assert queue.find(job.id) is None
        assert not queue.put("other data", key="k").duplicate
        assert queue.check(full=True) == []
        assert other.counts().dead == 1


def test_of_two_who_replay_all_each_job_has_one_winner(queue: Queue[Any]) -> None:
    """Two bulk replays at once share the jobs: the numbers add up, and no job comes twice."""
    kill(queue, 900)
    won: list[int] = []
    start = threading.Barrier(3)

    def race() -> None:
        with Queue[Any](queue.engine.path, "jobs") as mine:  # type: ignore[attr-defined]
            start.wait(10)
            won.append(mine.replay_all())

    threads = [threading.Thread(target=race) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(won) == 900
    assert (queue.counts().ready, queue.counts().dead) == (900, 0)


@pytest.mark.parametrize("options", [{"reason": "bad luck"}, {"limit": -1}])
def test_a_wrong_filter_is_refused(queue: Queue[Any], options: dict[str, Any]) -> None:
    """A reason that does not exist would silently match nothing."""
    with pytest.raises(PayloadInvalid):
        queue.replay_all(**options)


# --- lists and conveniences ---------------------------------------------------------------------


@pytest.mark.parametrize("state", ["ready", "dead", "done"])
def test_lists_go_forward_and_backward(queue: Queue[Any], state: str) -> None:
    """Pages after an id go up, newest pages before an id go down; together they miss nothing."""
    ids = [int(id_) for id_ in queue.put_many(list(range(7)))]
    if state != "ready":
        jobs = queue.get_many(7)
        queue.fail(jobs) if state == "dead" else queue.ack(jobs)
    up: list[int] = []
    while page := queue.jobs(state, limit=3, after=up[-1] if up else 0):
        up += [job.id for job in page]
    down: list[int] = []
    while page := queue.jobs(state, limit=3, newest=True, before=down[-1] if down else None):
        down += [job.id for job in page]
    assert up == ids
    assert down == ids[::-1]


def test_the_newest_dead_come_first_by_reason(queue: Queue[Any]) -> None:
    """The page that an operator wants to see first."""
    ids = kill(queue, 3)
    assert [job.id for job in queue.dead(newest=True, limit=2, reason="rejected")] == ids[:0:-1]
    assert queue.dead(newest=True, reason="poison") == []
    assert queue.dead(newest=True)[0].error == "no good"


@pytest.mark.parametrize("options", [{"newest": True, "after": 1}, {"before": 1}])
def test_a_page_has_one_direction(queue: Queue[Any], options: dict[str, Any]) -> None:
    """`after` belongs to going up, `before` to going down."""
    with pytest.raises(PayloadInvalid):
        queue.jobs("ready", **options)


def test_a_state_that_does_not_exist_is_refused(queue: Queue[Any]) -> None:
    """The sentence names those that do."""
    with pytest.raises(PayloadInvalid, match="ready, delayed, claimed"):
        queue.jobs("lost")


def test_sizes_count_what_can_be_claimed(database: Path) -> None:
    """Only ready jobs count for qsize and empty; live ones count for full."""
    with Queue[int](database, max_depth=2) as queue:
        assert (queue.qsize(), queue.empty(), queue.full()) == (0, True, False)
        queue.put(1, delay=100)
        assert (queue.qsize(), queue.empty(), queue.full()) == (0, True, False)
        queue.put(2)
        assert (queue.qsize(), queue.empty(), queue.full()) == (1, False, True)
        job = queue.get(0)
        assert job is not None
        assert (queue.qsize(), queue.full()) == (0, True)
        assert queue.counts().live == 2
        queue.ack(job)
        assert not queue.full()


def test_a_queue_that_was_never_used_is_empty_and_not_full(database: Path) -> None:
    """Asking does not need a queue to be there."""
    with Queue[int](database) as used, Queue[int](database, "unused") as unused:
        used.put(1)
        assert (unused.empty(), unused.full(), unused.peek()) == (True, False, None)


# --- put that waits -----------------------------------------------------------------------------


def test_a_blocking_put_waits_for_room(database: Path) -> None:
    """It is stored as soon as a job is done, and not before."""
    with Queue[int](database, max_depth=1) as queue:
        queue.put(1)
        stored: list[int] = []
        thread = threading.Thread(
            target=lambda: stored.append(queue.put(2, block=True, timeout=20))
        )
        thread.start()
        thread.join(0.1)
        assert stored == []
        job = queue.get(0)
        assert job is not None
        queue.ack(job)
        thread.join(20)
        assert len(stored) == 1


def test_a_blocking_put_gives_up_in_time(database: Path) -> None:
    """QueueFull comes after the time-out, and at once for what can never fit."""
    with Queue[int](database, max_depth=1) as queue:
        queue.put(1, key="k")
        with pytest.raises(QueueFull):
            queue.put(2, block=True, timeout=0.1)
        with pytest.raises(QueueFull, match="split the batch"):
            queue.put_many([2, 3], block=True)
        assert queue.put(1, key="k", block=True).duplicate  # needs no room


def test_closing_ends_the_waits_of_others(database: Path) -> None:
    """A get and a put that wait in other threads learn that the queue was closed."""
    queue = Queue[int](database, "jobs", max_depth=1)
    queue.put(1, delay=100)  # neither to be had nor gone
    told: list[BaseException] = []

    def waits(call: Callable[[], object]) -> None:
        try:
            call()
        except QueueClosed as error:
            told.append(error)

    calls = (queue.get, lambda: queue.put(1, block=True))
    threads = [threading.Thread(target=waits, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
        thread.join(0.05)
    queue.close()
    for thread in threads:
        thread.join(20)
    assert len(told) == 2


# --- vacuum -------------------------------------------------------------------------------------


def test_vacuum_gives_space_back(queue: Queue[Any]) -> None:
    """What a thousand discarded bodies took is free for others again, and nothing else is lost."""
    keep = queue.put("kept")
    queue.put_many([ROW_PAYLOAD] * 1000, task="drop")
    queue.fail([job for job in queue.get_many(1001) if job.task == "drop"])
    queue.discard_all()
    packed = queue.vacuum()
    assert packed.before_bytes > 3_000_000
    assert packed.after_bytes < 500_000
    assert os.stat(queue.engine.path).st_size == packed.after_bytes  # type: ignore[attr-defined]
    assert queue.find(keep) is not None
    assert queue.check(full=True) == []


# --- backup -------------------------------------------------------------------------------------


def test_a_backup_is_sound_private_and_complete(queue: Queue[Any], tmp_path: Path) -> None:
    """The copy is one file of mode 0600 that opens as a queue with the same jobs."""
    ids = queue.put_many(["a", ROW_PAYLOAD])
    copy = tmp_path / "copies"
    copy.mkdir()
    done = queue.backup(copy / "one.db")
    assert os.listdir(copy) == ["one.db"]
    assert done.path == copy / "one.db"
    assert done.size_bytes == os.stat(done.path).st_size
    assert stat.S_IMODE(os.stat(done.path).st_mode) == 0o600
    with Queue[Any](done.path, "jobs") as restored:
        found = [restored.find(id_) for id_ in ids]
        assert [job.payload for job in found if job is not None] == ["a", ROW_PAYLOAD]
        assert restored.check(full=True) == []
        assert restored.recount() == []


def test_a_restored_backup_voids_claims_and_skips_ids(queue: Queue[Any], tmp_path: Path) -> None:
    """Nobody holds the copy's claims; an id given after the backup never names another job."""
    queue.put("held")
    job = queue.get(0)
    assert job is not None
    copy = queue.backup(tmp_path / "copy.db").path
    later = queue.put("after the backup")
    with Queue[Any](copy, "jobs") as restored:
        again = restored.get(0)
        assert again is not None
        assert (again.id, again.attempt) == (job.id, 1)
        assert restored.put("new") > later
        with pytest.raises(QueueError):
            restored.ack(job)


def test_a_backup_never_overwrites(queue: Queue[Any], tmp_path: Path) -> None:
    """A file, a link to nowhere or the database itself in the way is refused, unharmed."""
    queue.put(1)
    taken = tmp_path / "taken.db"
    taken.write_text("precious")
    link = tmp_path / "link.db"
    link.symlink_to(tmp_path / "nowhere")
    for path in (taken, link, queue.engine.path):  # type: ignore[attr-defined]
        with pytest.raises(QueueError, match="never overwrites"):
            queue.backup(path)
    assert taken.read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()
    assert queue.check(full=True) == []


def test_a_backup_into_a_folder_that_is_not_there_is_one_sentence(
    queue: Queue[Any], tmp_path: Path
) -> None:
    """It is a DatabaseError that names the folder's file, and leaves nothing."""
    queue.put(1)
    with pytest.raises(DatabaseError, match="cannot be written"):
        queue.backup(tmp_path / "missing" / "copy.db")


def test_a_commit_between_any_two_steps_does_not_begin_the_copy_anew(
    queue: Queue[Any], tmp_path: Path
) -> None:
    """A copy that began anew after each commit of others would never end under load."""
    queue.put_many([ROW_PAYLOAD] * 100)
    with Queue[Any](queue.engine.path, "jobs") as other:  # type: ignore[attr-defined]
        left: list[int] = []

        class Watched(sqlite3.Connection):
            def backup(self, target: sqlite3.Connection, **options: Any) -> None:
                def progress(status: int, pages_left: int, pages: int) -> None:
                    left.append(pages_left)
                    assert len(left) < 1000
                    other.put("meanwhile")
                    options["progress"](status, pages_left, pages)

                super().backup(target, pages=5, progress=progress, sleep=0)

        path = queue.engine.path  # type: ignore[attr-defined]
        with closing(sqlite3.connect(path, factory=Watched, isolation_level=None)) as source:
            source.execute("BEGIN")
            sqlite_backup.backup(source, tmp_path / "copy.db", threading.Event())
    assert len(left) > 5
    assert left == sorted(left, reverse=True)


def test_a_stopped_backup_leaves_nothing(queue: Queue[Any], tmp_path: Path) -> None:
    """Ctrl-C during a copy removes what there is of it."""
    queue.put_many([ROW_PAYLOAD] * 100)
    stop, folder = threading.Event(), tmp_path / "copies"
    folder.mkdir()
    stop.set()
    path = queue.engine.path  # type: ignore[attr-defined]
    with closing(sqlite3.connect(path, isolation_level=None)) as source:
        source.execute("BEGIN")
        with pytest.raises(QueueError, match="was stopped"):
            sqlite_backup.backup(source, folder / "copy.db", stop)
    assert os.listdir(folder) == []


def test_ctrl_c_at_a_backup_leaves_nothing(
    queue: Queue[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It strikes while the main thread waits for the copy; what there is of that goes."""
    folder = tmp_path / "copies"
    folder.mkdir()
    seen: list[list[str]] = []

    def interrupt(*_: object) -> None:
        seen.append(os.listdir(folder))
        raise KeyboardInterrupt

    def copy(source: sqlite3.Connection, part: Path, stop: threading.Event) -> None:
        whole(source, part, stop)
        os.kill(os.getpid(), signal.SIGALRM)
        assert stop.wait(20), "the main thread did not ask to stop"

    whole = sqlite_backup._copy
    monkeypatch.setattr(sqlite_backup, "_copy", copy)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            queue.backup(folder / "copy.db")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(seen[0]) == 1, "there was a copy to remove"
    assert os.listdir(folder) == []


@pytest.mark.parametrize("ending", ["-wal", "-shm", "-journal", ".lock", ".bells"])
def test_a_backup_takes_no_name_that_sqlite_removes(queue: Queue[Any], ending: str) -> None:
    """SQLite deletes a stray journal, and with it would go the backup."""
    path = queue.engine.path  # type: ignore[attr-defined]
    with pytest.raises(QueueError, match="name another file"):
        queue.backup(Path(f"{path}{ending}"))


@pytest.mark.parametrize("name", [b"\xff\xfe.db", b"n" * 255])
def test_a_backup_takes_any_name_the_file_system_takes(
    queue: Queue[Any], tmp_path: Path, name: bytes
) -> None:
    """Names that are not UTF-8, and the longest ones."""
    done = queue.backup(tmp_path / os.fsdecode(name))
    assert done.path.stat().st_size == done.size_bytes > 0


def test_a_backup_is_of_one_moment_while_others_write(queue: Queue[Any], tmp_path: Path) -> None:
    """Writers go on during the copy, and it still ends, with counters that equal its rows."""
    queue.put_many([ROW_PAYLOAD] * 1500)
    stop = threading.Event()
    written: list[int] = []

    def write() -> None:
        with Queue[Any](queue.engine.path, "jobs") as mine:  # type: ignore[attr-defined]
            while not stop.is_set():
                written.append(mine.put("meanwhile"))

    thread = threading.Thread(target=write)
    thread.start()
    wait_until(lambda: len(written) > 5)
    before = len(written)
    copy = queue.backup(tmp_path / "copy.db").path
    during = len(written) - before
    stop.set()
    thread.join(20)
    assert during > 0
    with Queue[Any](copy, "jobs") as restored:
        assert restored.recount() == []
        assert restored.counts().ready >= 1500


# --- check --------------------------------------------------------------------------------------


def test_a_sound_database_has_no_problems(queue: Queue[Any]) -> None:
    """Neither the quick nor the full check finds anything."""
    kill(queue, 3)
    queue.put(ROW_PAYLOAD)
    assert queue.check() == []
    assert queue.check(full=True) == []


def test_a_damaged_page_is_found(queue: Queue[Any]) -> None:
    """Bytes overwritten by a failing disk are reported as sentences, not as an exception."""
    queue.put_many([ROW_PAYLOAD] * 300)
    queue.vacuum()
    path = queue.engine.path  # type: ignore[attr-defined]
    queue.close()
    with open(path, "r+b") as file:
        for page in range(20, 60):
            file.seek(page * 4096)
            file.write(b"\xff" * 64)
    with Queue[Any](path, "jobs") as damaged:
        found = damaged.check(full=True)
    assert 0 < len(found) <= PROBLEMS_MAX


def test_what_sql_by_hand_broke_is_found(queue: Queue[Any]) -> None:
    """A lost payload, a payload of nobody and a job in two places are each named."""
    lost, _ = queue.put_many([ROW_PAYLOAD, 2])
    path = queue.engine.path  # type: ignore[attr-defined]
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE body SET id = 999")
        raw.execute(
            "INSERT INTO dead (id, queue, reason, priority, run, attempts, deaths, task, "
            "enqueued_us, finished_us, payload) SELECT id, queue, 'invalid', 0, 0, 0, 0, task, "
            "enqueued_us, enqueued_us, x'31' FROM job WHERE payload IS NOT NULL"
        )
    raw.close()
    assert queue.check() == []
    assert queue.check(full=True) == [
        f"job {lost} has lost its payload",
        "a payload is kept for job 999, which does not exist",
        f"job {lost + 1} stands in two states at once",
    ]


# --- recount ------------------------------------------------------------------------------------


def test_counters_that_drifted_are_named_and_mended(queue: Queue[Any]) -> None:
    """SQL by hand makes counters wrong; recount says by how much, and sets them right."""
    queue.put_many([1, 2, 3])
    assert queue.recount() == []
    with sqlite3.connect(queue.engine.path) as raw:  # type: ignore[attr-defined]
        raw.execute("DELETE FROM job WHERE id = 2")
    raw.close()
    (drift,) = queue.recount()
    assert (drift.queue, drift.state, drift.counted, drift.stored) == ("jobs", State.READY, 2, 3)
    assert queue.counts().ready == 3
    assert queue.recount(mend=True) == [drift]
    assert queue.counts().ready == 2
    assert queue.recount() == []


# --- diagnostics --------------------------------------------------------------------------------


def test_diagnostics_tell_what_is_true_now(database: Path) -> None:
    """Versions, sizes, leases and times to come, read without changing anything."""
    with Queue[int](database, "jobs", lease_seconds=100) as queue:
        queue.put(1)
        queue.put(2, delay=50)
        assert queue.get(0) is not None
        seen = queue.diagnostics()
    assert seen.path == database.resolve()
    assert seen.sqlite_version == sqlite3.sqlite_version
    assert (seen.schema_version, seen.journal_mode, seen.lock) == (1, "wal", "flock")
    assert (seen.durability, seen.lock_holder) == ("full", None)
    assert seen.database_bytes == seen.page_bytes * seen.pages
    assert seen.log_bytes > 0
    assert (seen.leases, seen.leases_expired, seen.holders) == (1, 0, 1)
    assert 90 < (seen.next_lease_end_seconds or 0) <= 100
    assert 40 < (seen.next_due_seconds or 0) <= 50
    assert seen.queues[0].depth["delayed"] == 1


def test_diagnostics_name_who_holds_the_lock(queue: Queue[Any]) -> None:
    """An operator sees which process keeps the others waiting."""
    queue.put(1)
    with Queue[Any](queue.engine.path, "jobs") as other, other.transaction():  # type: ignore[attr-defined]
        assert f"process {os.getpid()}" in (queue.diagnostics().lock_holder or "")


@pytest.mark.parametrize(("version", "bug"), [
    ((3, 6, 23), False), ((3, 7, 0), True), ((3, 40, 1), True), ((3, 44, 5), True),
    ((3, 44, 6), False), ((3, 45, 3), True), ((3, 50, 6), True), ((3, 50, 7), False),
    ((3, 51, 2), True), ((3, 51, 3), False), ((3, 52, 0), False),
])  # fmt: skip
def test_builds_with_the_log_bug_are_known(version: tuple[int, ...], bug: bool) -> None:
    """Those that can corrupt a database when the log starts again, and those that were mended."""
    assert has_wal_reset_bug(version) is bug


# --- import -------------------------------------------------------------------------------------


def coming(number: int, **options: Any) -> ImportJob:
    """Return a job of another queue."""
    given: dict[str, Any] = {
        "origin": f"test:{number}", "payload": b"%d" % number, "task": "t", "state": State.READY,
        "enqueued_us": 1_600_000_000_000_000 + number,
    } | options  # fmt: skip
    if given.get("key") is not None:
        given["digest"] = codec.digest(given["task"], given["payload"])
    return ImportJob(**given)


def test_imported_jobs_stand_where_they_stood(queue: Queue[Any]) -> None:
    """State, attempts, error, key and time of entry come along, in order."""
    stored = upkeep(queue).import_jobs("jobs", [
        coming(1, attempts=2, error="last time", max_attempts=4, key="one"),
        coming(2, state=State.DELAYED, due_us=9_000_000_000_000_000),
        coming(3, state=State.DEAD, reason=Reason.EXHAUSTED, attempts=5, error="five times",
               finished_us=1_600_000_009_000_000),
        coming(4, state=State.DONE, key="four"),
        coming(5, payload=b'"' + b"y" * 5000 + b'"'),
    ])  # fmt: skip
    assert not any(result.duplicate for result in stored)
    first, second, third, fourth, fifth = (queue.find(result.id) for result in stored)
    assert first is not None
    assert second is not None
    assert third is not None
    assert fourth is not None
    assert fifth is not None
    assert (first.state, first.attempt, first.max_attempts, first.key) == ("ready", 3, 4, "one")
    assert first.enqueued_us == 1_600_000_000_000_001
    assert [(line.outcome, line.error) for line in first.ledger] == [(Outcome.FAILED, "last time")]
    assert (second.state, second.due_us) == ("delayed", 9_000_000_000_000_000)
    assert (third.state, third.reason, third.error) == ("dead", "exhausted", "five times")
    assert third.finished_us == 1_600_000_009_000_000
    assert (fourth.state, fifth.payload) == ("done", "y" * 5000)
    assert queue.put(1, key="one", task="t").duplicate
    assert queue.put(4, key="four", task="t").duplicate
    assert [job.id for job in queue.get_many(5)] == [first.id, fifth.id]
    assert queue.recount() == []
    assert queue.check(full=True) == []


def test_a_claim_of_an_imported_job_is_fenced_and_charged(queue: Queue[Any]) -> None:
    """An imported job with one attempt left dies with the next failure."""
    upkeep(queue).import_jobs("jobs", [coming(1, attempts=2, max_attempts=3, error="before")])
    job = queue.get(0)
    assert job is not None
    queue.nack(job, error="again")
    dead = queue.find(job.id)
    assert dead is not None
    assert (dead.state, dead.reason) == ("dead", "exhausted")
    assert [line.error for line in dead.ledger] == ["before", "again"]


def test_an_origin_comes_once(queue: Queue[Any]) -> None:
    """The same batch again stores nothing, also when its jobs are done and gone meanwhile."""
    first = upkeep(queue).import_jobs("jobs", [coming(1), coming(2)])
    queue.ack(queue.get_many(2))
    again = upkeep(queue).import_jobs("jobs", [coming(1), coming(2), coming(3)])
    assert [(result.id, result.duplicate) for result in again[:2]] == [
        (first[0].id, True), (first[1].id, True),
    ]  # fmt: skip
    assert not again[2].duplicate
    assert upkeep(queue).imported(["test:1", "test:3", "test:9"]) == {"test:1", "test:3"}
    assert (queue.counts().ready, queue.counts().done) == (1, 2)


def test_a_key_that_is_taken_is_a_duplicate_or_a_conflict(queue: Queue[Any]) -> None:
    """Same data: the job that is here counts. Other data: nothing of the batch is stored."""
    held = queue.put(7, key="k", task="t")
    (same,) = upkeep(queue).import_jobs("jobs", [coming(7, key="k")])
    assert (same.id, same.duplicate) == (held, True)
    with pytest.raises(IdempotencyConflict):
        upkeep(queue).import_jobs("jobs", [coming(8), coming(9, key="k")])
    assert queue.counts().ready == 1
    assert upkeep(queue).imported(["test:7", "test:8", "test:9"]) == {"test:7"}


def test_an_import_needs_no_room(database: Path) -> None:
    """Its jobs had been accepted before; the limit holds for what is put."""
    with Queue[int](database, "jobs", max_depth=1) as queue:
        upkeep(queue).import_jobs("jobs", [coming(1), coming(2)])
        assert queue.counts().ready == 2
        assert queue.full()


def test_an_import_is_bounded(queue: Queue[Any]) -> None:
    """A batch that would hold the lock long is refused; none at all is fine."""
    assert upkeep(queue).import_jobs("jobs", []) == []
    with pytest.raises(PayloadInvalid):
        upkeep(queue).import_jobs("jobs", [coming(number) for number in range(1001)])


def test_an_import_wakes_a_waiting_get(queue: Queue[Any]) -> None:
    """A worker that sleeps hears of imported jobs as of those put."""
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(queue.get(timeout=20)))
    thread.start()
    with closing(SqliteEngine(queue.engine.path)) as other_engine:  # type: ignore[attr-defined]
        other_engine.import_jobs("jobs", [coming(1)])
    thread.join(20)
    assert got[0].payload == 1


def test_a_copy_of_a_database_can_be_made_by_hand_too(queue: Queue[Any], tmp_path: Path) -> None:
    """After a close the file alone is the whole database: nothing is left in the log."""
    queue.put(1)
    path = queue.engine.path  # type: ignore[attr-defined]
    queue.close()
    shutil.copy(path, tmp_path / "copy.db")
    with Queue[Any](tmp_path / "copy.db", "jobs") as copied:
        assert copied.counts().ready == 1
