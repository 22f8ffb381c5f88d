"""Fork at every moment: whatever the threads of the parent were doing, nothing is lost or stuck."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from queue_core import DatabaseUnavailable, Queue, QueueError, State
from queue_core.engines import sqlite_backup, sqlite_claim, sqlite_finish, sqlite_log
from tests.conftest import wait_until
from tests.fault.checks import is_whole, lock_is_free
from tests.fault.conftest import Fork, exit_codes

CHILDREN = 8
EACH = 15
HOLD_SECONDS = 0.3

Busy = Callable[[Queue[Any], threading.Event], None]


@pytest.fixture
def queue(database: Path) -> Iterator[Queue[Any]]:
    """Give a queue as a user has it."""
    made: Queue[Any] = Queue(database, "jobs")
    yield made
    made.close()


def _work(queue: Queue[Any]) -> None:
    """Put, and take and acknowledge as many."""
    for number in range(EACH):
        queue.put(f"{os.getpid()} {number}")
        job = queue.get(timeout=10)
        assert job is not None
        queue.ack(job)


@pytest.mark.parametrize("closes", [True, False], ids=["closes", "goes on"])
def test_eight_children_and_their_parent_lose_nothing(
    queue: Queue[Any], database: Path, fork: Fork, closes: bool
) -> None:
    """A parent that has put forks eight times, and closes or goes on at once."""
    queue.put_many(["the parent's"] * EACH)
    pids = []
    for _ in range(CHILDREN):
        pids.append(fork(lambda: _work(queue)))
        if not closes:
            queue.put("between")
    if closes:
        queue.close()
    else:
        _work(queue)
    assert exit_codes(pids) == [0] * CHILDREN
    with Queue(database, "jobs") as after:
        counts = after.counts()
    workers, between = (CHILDREN, 0) if closes else (CHILDREN + 1, CHILDREN)
    assert (counts.done, counts.ready, counts.claimed) == (EACH * workers, EACH + between, 0)
    assert is_whole(database)


# --- what a thread does at that moment ------------------------------------------------------------


def _in_a_transaction(queue: Queue[Any], busy: threading.Event) -> None:
    with queue.transaction() as tx:
        queue.put("by the thread", tx=tx)
        busy.set()
        time.sleep(HOLD_SECONDS)


def _in_a_flush(queue: Queue[Any], busy: threading.Event) -> None:
    _slowly(sqlite_log, "sync_data", busy, lambda: queue.put("by the thread"))


def _in_a_wait(queue: Queue[Any], busy: threading.Event) -> None:
    name, queue.name = queue.name, "idle"
    busy.set()
    assert queue.get(timeout=HOLD_SECONDS) is None
    queue.name = name
    queue.put("by the thread")


def _in_a_wait_for_the_lock(queue: Queue[Any], busy: threading.Event) -> None:
    path = queue.engine._file.lock_path  # type: ignore[attr-defined]
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        release = threading.Timer(HOLD_SECONDS, lambda: fcntl.flock(file, fcntl.LOCK_UN))
        release.start()
        threading.Timer(HOLD_SECONDS / 3, busy.set).start()
        queue.put("by the thread")
        release.join()


def _slowly(module: Any, name: str, busy: threading.Event, work: Callable[[], object]) -> None:
    """Do something while one of its functions takes its time before it begins, in this process."""
    real, owner = getattr(module, name), os.getpid()

    def slow(*arguments: Any) -> Any:
        if os.getpid() == owner:
            busy.set()
            time.sleep(HOLD_SECONDS)
        return real(*arguments)

    setattr(module, name, slow)
    try:
        work()
    finally:
        setattr(module, name, real)


def _in_a_claim(queue: Queue[Any], busy: threading.Event) -> None:
    def take_and_give_back() -> None:
        job = queue.get(timeout=10)
        assert job is not None
        queue.release(job)

    _slowly(sqlite_claim, "claim", busy, take_and_give_back)
    queue.put("by the thread")


def _in_a_settlement(queue: Queue[Any], busy: threading.Event) -> None:
    job = queue.get(timeout=10)
    assert job is not None
    _slowly(sqlite_finish, "settle", busy, lambda: queue.release(job))
    queue.put("by the thread")


def _in_a_backup(queue: Queue[Any], busy: threading.Event) -> None:
    copy = Path(f"{queue.engine.path}.copy")  # type: ignore[attr-defined]
    _slowly(sqlite_backup, "_copy", busy, lambda: queue.backup(copy))
    queue.put("by the thread")


MOMENTS = [
    _in_a_transaction, _in_a_flush, _in_a_wait, _in_a_wait_for_the_lock, _in_a_claim,
    _in_a_settlement, _in_a_backup,
]  # fmt: skip


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_fork_while_a_thread_is_busy_harms_neither_side(
    queue: Queue[Any], database: Path, fork: Fork, moment: Busy
) -> None:
    """The child works on at once with the inherited queue, and the thread ends what it began."""
    queue.put("before")
    own: Queue[Any] = Queue(database, queue.name) if moment is _in_a_wait else queue
    busy = threading.Event()
    thread = threading.Thread(target=moment, args=(own, busy))
    thread.start()
    assert busy.wait(10)
    pids = [fork(lambda: _work(queue)) for _ in range(3)]
    assert exit_codes(pids) == [0] * 3
    thread.join(20)
    assert not thread.is_alive()
    if own is not queue:
        own.close()
    counts = queue.counts()
    assert (counts.done, counts.ready) == (3 * EACH, 2)
    assert lock_is_free(database)
    queue.close()
    assert is_whole(database)
    if moment is _in_a_backup:
        assert is_whole(Path(f"{database}.copy"))


def test_a_child_that_leaves_its_parents_transaction_commits_nothing(
    queue: Queue[Any], database: Path, fork: Fork
) -> None:
    """The block is the parent's: a child that falls out of it is told, and told what it cannot do.

    To SQLite the inherited transaction is the child's own, and would block it for ever.
    """

    def child_falls_out() -> int:
        with queue.transaction() as tx:
            queue.put("the parent's", tx=tx)
            return os.fork()

    parent = os.getpid()
    try:
        pid = child_falls_out()
    except QueueError as error:
        if os.getpid() == parent:
            raise
        # A child must not run on as a second test run.
        told = "belongs to the process" in str(error)
        try:
            for own in (queue, Queue(database, "jobs")):
                with pytest.raises(DatabaseUnavailable, match="forked inside a transaction"):
                    own.put("the child's own")
        except BaseException:
            os._exit(1)
        os._exit(0 if told else 3)
    if os.getpid() != parent:
        os._exit(2)
    assert exit_codes([pid]) == [0]
    assert [job.payload for job in queue.jobs(State.READY)] == ["the parent's"]
    queue.put("goes on")
    assert is_whole(database)


def test_a_fork_under_a_held_back_signal_holds_none_back_in_the_child(
    queue: Queue[Any], database: Path, fork: Fork
) -> None:
    """A thread may fork while the main thread waits for it: the child still hears Ctrl-C."""
    pids: list[int] = []

    def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    def child() -> None:
        with pytest.raises(KeyboardInterrupt):
            interrupted()

    def hold_and_fork() -> None:
        with queue.transaction():
            waiting.wait(10)
            time.sleep(HOLD_SECONDS)
            pids.append(fork(child))

    waiting = threading.Event()
    thread = threading.Thread(target=hold_and_fork)
    thread.start()
    wait_until(lambda: not lock_is_free(database), what="the thread holds the lock")
    waiting.set()
    queue.put("by the main thread")
    thread.join(20)
    assert exit_codes(pids) == [0]
    assert queue.counts().ready == 1
