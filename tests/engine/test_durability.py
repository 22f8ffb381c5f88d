"""Show that what was accepted survives: kills, failed flushes, long readers, a growing log."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from queue_core import DurabilityUnknown, Queue, State
from queue_core.clock import FakeClock
from queue_core.engine import Engine, Holder
from queue_core.engines import sqlite_log
from queue_core.engines.sqlite import SqliteEngine
from queue_core.job import Claimed, Settlement
from tests.conftest import wait_until
from tests.engine.conftest import (
    LEASE_US,
    QUEUE,
    SECOND_US,
    Fork,
    new_job,
    put,
    request,
    settlement,
    take,
)


def test_a_put_that_returned_survives_a_kill(database: Path, fork: Fork, tmp_path: Path) -> None:
    """A producer killed at any moment loses nothing that it was told is stored."""
    told = tmp_path / "told"

    def produce() -> None:
        queue: Queue[Any] = Queue(database, QUEUE)
        with told.open("ab", buffering=0) as out:
            while True:
                out.write(b"%d\n" % queue.put("x" * random.choice([10, 5000])))

    for round_ in range(5):
        pid = fork(produce)
        enough = 40 * round_ + (told.stat().st_size if told.exists() else 0)
        wait_until(lambda enough=enough: told.exists() and told.stat().st_size > enough)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    ids = {int(line) for line in told.read_bytes().split()}
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        stored = {row[0] for row in connection.execute("SELECT id FROM job")}
    assert ids <= stored
    assert len(stored) <= len(ids) + 5  # at most one a kill, stored and not told


def test_file_and_log_copied_after_a_put_hold_the_job(database: Path, tmp_path: Path) -> None:
    """What is on the disk when put returns is enough, without memory shared or process alive."""
    with Queue[Any](database, QUEUE) as queue:
        for number in range(20):
            job_id = queue.put(number)
            copy = tmp_path / f"copy{number}" / database.name
            copy.parent.mkdir()
            for end in ("", "-wal"):
                shutil.copy(f"{database}{end}", f"{copy}{end}")
            with closing(sqlite3.connect(copy)) as connection:
                assert connection.execute("SELECT max(id) FROM job").fetchone() == (job_id,)


# --- which calls flush --------------------------------------------------------------------------


@pytest.fixture
def flushes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record every flush that really goes to the disk."""
    seen: list[int] = []
    real = sqlite_log.sync_data

    def recorded(descriptor: int) -> None:
        seen.append(os.fstat(descriptor).st_ino)
        real(descriptor)

    monkeypatch.setattr(sqlite_log, "sync_data", recorded)
    return seen


@pytest.fixture
def full(database: Path, clock: FakeClock) -> Any:
    """Give an engine that flushes as a library user's does."""
    engine = SqliteEngine(database, clock=clock, durability="full")
    yield engine
    engine.close()


def claimed(engine: Engine) -> Claimed:
    """Put a job and claim it."""
    put(engine)
    (row,) = take(engine)
    return row


def dead(engine: Engine) -> int:
    """Make a dead job, and return its id."""
    row = claimed(engine)
    engine.finish([settlement(row, State.DEAD)])
    return row.id


def expire(engine: Engine, clock: FakeClock) -> None:
    """Claim a job, and let its lease run out."""
    claimed(engine)
    clock.advance(60)


def back(row: Claimed, _started: bool) -> Settlement:
    """Decide that a job goes back."""
    return settlement(row, State.READY)


def turn(engine: Engine, row: Claimed) -> None:
    """Take a worker's turn."""
    holder = engine.hold(Holder(worker="w"))
    engine.turn([settlement(row)], request(QUEUE), holder=holder)


# name: (what has to be there first, the call that flushes or does not with what was made).
Step = tuple[Callable[[Engine, FakeClock], Any], Callable[[Engine, Any], object]]
FLUSHED: dict[str, Step] = {
    "put": (lambda e, c: None, lambda e, _: put(e)),
    "duplicate put": (lambda e, c: put(e, new_job(key="k")), lambda e, _: put(e, new_job(key="k"))),
    "ack": (lambda e, c: claimed(e), lambda e, row: e.finish([settlement(row)])),
    "cancel": (lambda e, c: put(e), lambda e, ids: e.cancel(None, ids)),
    "reap": (expire, lambda e, _: e.reap(back, 1)),
    "replay": (lambda e, c: dead(e), lambda e, id_: e.replay(None, [id_])),
    "discard": (lambda e, c: dead(e), lambda e, id_: e.discard(None, [id_])),
    "prune": (
        lambda e, c: (dead(e), e.configure(QUEUE, keep_dead_us=0)),
        lambda e, _: e.prune(1),
    ),
    "configure": (lambda e, c: None, lambda e, _: e.configure(QUEUE, paused=True)),
}
LAZY: dict[str, Step] = {
    "claim": (lambda e, c: put(e), lambda e, _: take(e)),
    "extend": (lambda e, c: claimed(e), lambda e, row: e.extend([row.claim], LEASE_US)),
    "promote": (
        lambda e, c: (put(e, new_job(delay_us=SECOND_US)), c.advance(1)),
        lambda e, _: e.promote(1),
    ),
    "turn": (lambda e, c: claimed(e), turn),
}


@pytest.mark.parametrize("name", sorted(FLUSHED))
def test_a_promise_is_flushed_before_it_is_given(
    full: Engine, clock: FakeClock, flushes: list[int], name: str, database: Path
) -> None:
    """Each of these is on the disk when it returns; the log itself is what is flushed."""
    prepare, call = FLUSHED[name]
    made = prepare(full, clock)
    full.counts(QUEUE)  # opening flushes, too
    flushes.clear()
    call(full, made)
    assert flushes == [os.stat(f"{database}-wal").st_ino]


@pytest.mark.parametrize("name", sorted(LAZY))
def test_what_may_be_done_again_waits_for_no_disk(
    full: Engine, clock: FakeClock, flushes: list[int], name: str
) -> None:
    """Losing one of these with the power means doing it again, so none of them waits."""
    prepare, call = LAZY[name]
    made = prepare(full, clock)
    flushes.clear()
    call(full, made)
    assert flushes == []
    full.flush()
    assert len(flushes) == 1


def test_a_transaction_is_flushed_once_at_its_end(full: Engine, flushes: list[int]) -> None:
    """However many jobs a transaction puts, the disk is waited for once."""
    put(full)
    flushes.clear()
    with full.transaction() as tx:
        for _ in range(5):
            full.enqueue(QUEUE, [new_job()], tx=tx)
        assert flushes == []
    assert len(flushes) == 1


def test_acks_are_left_to_the_keeper_where_there_is_one(database: Path, flushes: list[int]) -> None:
    """Under a supervisor acks wait for nobody; the keeper flushes."""
    engine = SqliteEngine(database, flush_finishes=False)
    row = claimed(engine)
    flushes.clear()
    engine.finish([settlement(row)])
    assert flushes == []
    engine.close()


def test_without_durability_nothing_is_flushed(database: Path, flushes: list[int]) -> None:
    """`normal` is for those who can lose the last moments to a power cut."""
    engine = SqliteEngine(database, durability="normal")
    put(engine)
    flushes.clear()
    put(engine)
    engine.flush()
    assert flushes == []
    engine.close()


def test_nobody_holds_the_lock_while_the_disk_works(
    full: Engine, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others write while we wait for the disk; that is what lets them share a flush."""
    put(full)
    free: list[bool] = []

    def look(_descriptor: int) -> None:
        with open(f"{database}.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free.append(True)

    monkeypatch.setattr(sqlite_log, "sync_data", look)
    put(full)
    assert free == [True]


def test_a_put_does_not_ask_for_the_times_of_the_log(
    full: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file whose times were asked for gets new ones when it is written, and a slower flush."""
    put(full)
    asked: list[object] = []
    for name in ("stat", "lstat", "fstat"):
        real = getattr(os, name)

        def recorded(file: object, real: Callable[..., Any] = real, **options: Any) -> Any:
            asked.append(os.readlink(f"/proc/self/fd/{file}") if type(file) is int else file)
            return real(file, **options)

        monkeypatch.setattr(os, name, recorded)
    put(full)
    monkeypatch.undo()
    assert asked, "this test sees what is asked"
    assert not [file for file in asked if str(file).endswith("-wal")]


def test_producers_share_flushes(full: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a slow disk, many threads' puts are made durable together."""
    put(full)
    flushed: list[int] = []

    def slow(_descriptor: int) -> None:
        time.sleep(0.02)
        flushed.append(1)

    monkeypatch.setattr(sqlite_log, "sync_data", slow)
    threads = [threading.Thread(target=lambda: [put(full) for _ in range(10)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert full.counts(QUEUE)["ready"] == 81
    assert len(flushed) < 60


def test_a_handler_may_put_while_its_own_thread_flushes(
    full: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is held back during a flush: what a signal's handler puts there is durable too."""
    put(full)  # opening flushes as well, and holds handlers back
    flushed: list[int] = []

    def sync(_descriptor: int) -> None:
        flushed.append(1)
        if len(flushed) == 1:
            signal.raise_signal(signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, lambda *_: put(full))
    monkeypatch.setattr(sqlite_log, "sync_data", sync)
    try:
        put(full)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert full.counts(QUEUE)["ready"] == 3
    assert len(flushed) == 2
    put(full)
    assert len(flushed) == 3, "what came later is not taken for flushed"


# --- a flush that fails -------------------------------------------------------------------------


def failing(_descriptor: int) -> None:
    """Fail as a disk does."""
    raise OSError(5, "Input/output error")


def test_a_failed_flush_is_told_and_mended_by_a_checkpoint(
    full: Engine, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller learns that the disk is not sure; the next put first makes it so."""
    put(full)
    with monkeypatch.context() as broken:
        broken.setattr(sqlite_log, "sync_data", failing)
        with pytest.raises(DurabilityUnknown, match="disk"):
            put(full)
    assert full.counts(QUEUE)["ready"] == 2  # it is stored, and said to be unsure
    put(full)
    # Each page the failed flush concerned is in the file itself: a copy without the log has it.
    alone = database.with_name("alone.db")
    shutil.copy(database, alone)
    with closing(sqlite3.connect(alone)) as connection:
        assert connection.execute("SELECT count(*) FROM job").fetchone()[0] >= 2


def test_after_a_failed_flush_no_put_is_accepted_until_a_checkpoint_succeeds(
    full: Engine, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that keeps the log from being copied keeps the doubt, and so the refusal."""
    put(full)
    with closing(sqlite3.connect(database, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM job").fetchone()
        with monkeypatch.context() as broken:
            broken.setattr(sqlite_log, "sync_data", failing)
            with pytest.raises(DurabilityUnknown):
                put(full)
        with pytest.raises(DurabilityUnknown):
            put(full)
        reader.execute("COMMIT")
    put(full)
    assert full.counts(QUEUE)["ready"] == 3


# --- the log ------------------------------------------------------------------------------------


def test_a_checkpoint_empties_the_log(full: Engine) -> None:
    """After one, the log is used from its beginning, and due again only when it has grown."""
    big = new_job(b"x" * 1_000_000)
    put(full, *[big] * 5)
    assert full.checkpoint_due()
    assert full.checkpoint()
    put(full)
    assert not full.checkpoint_due()
    assert full.snapshot().log_bytes < 200_000


def test_a_long_reader_holds_a_checkpoint_back_and_sees_its_own_moment(
    full: Engine, database: Path
) -> None:
    """The checkpoint says that it could not finish; nobody waits, and nothing is lost."""
    put(full)
    with closing(sqlite3.connect(database, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM job").fetchone() == (1,)
        put(full)
        assert not full.checkpoint()
        put(full)
        assert reader.execute("SELECT count(*) FROM job").fetchone() == (1,)
        reader.execute("COMMIT")
    assert full.checkpoint()
    assert full.counts(QUEUE)["ready"] == 3


def test_without_a_keeper_writers_keep_the_log_short(database: Path) -> None:
    """A library user alone does not fill the disk with a log."""
    engine = SqliteEngine(database, durability="normal")
    jobs = [new_job(b"x" * 500_000)] * 4
    for _ in range(65 * 2):
        put(engine, *jobs[:1])
    assert engine.snapshot().log_bytes < 50_000_000
    assert os.stat(f"{database}-wal").st_size < 50_000_000
    engine.close()
