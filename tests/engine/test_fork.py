"""Show that forks and threads lose no job: nothing that belongs to one process crosses over."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from queue_core import Queue, QueueError
from queue_core.engine import Engine
from tests.engine.conftest import QUEUE, Fork, OpenEngine, exit_codes


def payloads(database: Path) -> list[str]:
    """Return the stored payloads, as a program of its own reads them from a whole file."""
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return sorted(text.decode() for (text,) in connection.execute("SELECT payload FROM job"))


@pytest.fixture
def shared(database: Path) -> Any:
    """Give a queue as a user has it: real clock, real durability."""
    queue: Queue[Any] = Queue(database, QUEUE)
    yield queue
    queue.close()


@pytest.mark.parametrize("round_", range(20))
def test_parent_and_child_may_both_put_and_close(database: Path, fork: Fork, round_: int) -> None:
    """A connection carried over a fork would let the parent's close unlink the child's log."""
    queue: Queue[Any] = Queue(database, QUEUE)
    queue.put("parent before")

    def child() -> None:
        for number in range(5):
            queue.put(f"child {number}")
        if round_ % 2:
            queue.close()

    pid = fork(child)
    queue.put("parent after")
    queue.close()
    assert exit_codes([pid]) == [0]
    assert payloads(database) == sorted(
        f'"{text}"' for text in ("parent before", "parent after", *(f"child {n}" for n in range(5)))
    )


def test_a_grandchild_may_put_too(shared: Queue[Any], database: Path, fork: Fork) -> None:
    """Each generation opens for itself."""
    shared.put("parent")

    def child() -> None:
        shared.put("child")
        if (pid := os.fork()) == 0:
            shared.put("grandchild")
            os._exit(0)
        assert exit_codes([pid]) == [0]
        shared.put("child again")

    assert exit_codes([fork(child)]) == [0]
    shared.put("parent again")
    assert len(payloads(database)) == 5


def test_a_child_inherits_no_open_file(shared: Queue[Any], database: Path, fork: Fork) -> None:
    """No descriptor of database, log, lock or bell is there in a forked child."""
    shared.get(timeout=0)
    shared.engine.listen([QUEUE])
    shared.put(1)

    def child() -> None:
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{name}")
                assert not target.startswith(str(database)), target

    assert exit_codes([fork(child)]) == [0]


def test_a_fork_waits_for_the_put_of_another_thread(
    shared: Queue[Any], database: Path, fork: Fork
) -> None:
    """A child never starts in the middle of a transaction, nor with a lock nobody will free."""
    stop = threading.Event()
    done: list[int] = []

    def producer() -> None:
        while not stop.is_set():
            done.append(shared.put("thread"))

    threads = [threading.Thread(target=producer) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        codes = [exit_codes([fork(lambda: shared.put("child"))]) for _ in range(20)]
    finally:
        stop.set()
        for thread in threads:
            thread.join(20)
    assert codes == [[0]] * 20
    found = Counter(payloads(database))
    assert found == {'"thread"': len(done), '"child"': 20}
    assert len(set(done)) == len(done)


def test_threads_may_fork_at_the_same_time(shared: Queue[Any], database: Path) -> None:
    """Two forks at once do not mix up what each has to open again."""
    failed: list[Any] = []

    def forker() -> None:
        for _ in range(15):
            if (pid := os.fork()) == 0:
                code = 1
                with suppress(BaseException):
                    shared.put("child")
                    code = 0
                os._exit(code)
            if exit_codes([pid]) != [0]:
                failed.append(pid)
            shared.put("parent")

    threads = [threading.Thread(target=forker, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert failed == []
    assert Counter(payloads(database)) == {'"child"': 45, '"parent"': 45}


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves the block", "exits inside"])
def test_a_fork_inside_a_transaction_leaves_it_to_the_parent(
    shared: Queue[Any], database: Path, leaves: bool
) -> None:
    """The child has no part in it: it is told so when it leaves, and nothing is stored twice."""
    pid, told = -1, False
    try:
        with shared.transaction() as tx:
            shared.put("inside, before", tx=tx)
            if (pid := os.fork()) == 0:
                with suppress(QueueError):
                    shared.put("child", tx=tx)
                if not leaves:
                    os._exit(0)
            else:
                shared.put("inside, after", tx=tx)
                if not leaves:
                    assert exit_codes([pid]) == [0]
    except QueueError:
        told = True
        assert pid == 0
    finally:
        if pid == 0:
            os._exit(0 if told else 1)
    if leaves:
        assert exit_codes([pid]) == [0]
    shared.put("outside")
    assert payloads(database) == ['"inside, after"', '"inside, before"', '"outside"']


def test_a_forked_child_claims_under_its_own_name(shared: Queue[Any], fork: Fork) -> None:
    """Claims tell which process holds them."""
    shared.put_many([1, 2])
    mine = shared.get(timeout=0)
    assert mine is not None

    def child() -> None:
        theirs = shared.get(timeout=0)
        assert theirs is not None
        found = shared.find(theirs.id)
        assert found is not None
        assert found.worker == f"pid {os.getpid()}"

    assert exit_codes([fork(child)]) == [0]
    found = shared.find(mine.id)
    assert found is not None
    assert found.worker == f"pid {os.getpid()}"


# --- threads ------------------------------------------------------------------------------------


def test_threads_share_one_queue(engine: Engine, queue: Queue[Any]) -> None:
    """Eight threads put and acknowledge through one object; every job is done by one of them."""
    done: list[int] = []

    def work() -> None:
        for number in range(200):
            queue.put(number)
            job = queue.get(timeout=10)
            assert job is not None
            queue.ack(job)
            done.append(job.id)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(done) == len(set(done)) == 1600
    counts = engine.counts(QUEUE)
    assert (counts["done"], counts["ready"], counts["claimed"]) == (1600, 0, 0)
    assert counts["jobs_finished_total:succeeded"] == 1600


def test_threads_with_an_engine_each_share_one_file(open_engine: OpenEngine) -> None:
    """A flock does not part threads of one process; it must not make them part of each other."""
    queues: list[Queue[Any]] = [Queue("unused", QUEUE, engine=open_engine()) for _ in range(6)]

    def work(queue: Queue[Any]) -> None:
        for number in range(50):
            queue.put(number)

    threads = [threading.Thread(target=work, args=(queue,)) for queue in queues]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert queues[0].counts().ready == 300
