"""Show that a caller's own rows and its jobs are stored together, or not at all."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from queue_core import (
    IdempotencyConflict,
    PayloadInvalid,
    Queue,
    QueueBusy,
    QueueError,
    QueueFull,
    StaleClaim,
    State,
)
from queue_core.engine import Engine
from tests.conftest import wait_until
from tests.engine.conftest import QUEUE, OpenEngine, settlement, take


@pytest.fixture
def orders(queue: Queue[Any], database: Path) -> Iterator[Queue[Any]]:
    """Give a queue whose file has a table of the user's own."""
    with queue.transaction() as tx:
        tx.execute("CREATE TABLE orders (name TEXT)")
    yield queue
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


class Undo(Exception):
    """End a transaction so that it is undone."""


@contextmanager
def undone(queue: Queue[Any]) -> Iterator[Any]:
    """Open a transaction that fails at its end."""
    with suppress(Undo), queue.transaction() as tx:
        yield tx
        raise Undo


def stored(database: Path) -> list[str]:
    """Return the user's rows, as another program sees them."""
    with closing(sqlite3.connect(database)) as connection:
        return [name for (name,) in connection.execute("SELECT name FROM orders")]


def test_a_row_and_its_job_are_committed_together(orders: Queue[Any], database: Path) -> None:
    """Neither is seen by anybody before the end, and both are there after it."""
    with orders.transaction() as tx:
        tx.execute("INSERT INTO orders VALUES ('a')")
        job_id = orders.put({"order": "a"}, key="a", tx=tx)
        assert stored(database) == []
        with closing(sqlite3.connect(database)) as other:
            assert other.execute("SELECT count(*) FROM job").fetchone() == (0,)
    assert stored(database) == ["a"]
    found = orders.find(job_id)
    assert found is not None
    assert (found.payload, found.key) == ({"order": "a"}, "a")
    assert orders.counts().totals["jobs_enqueued_total"] == 1


def test_an_exception_undoes_row_job_key_and_count(orders: Queue[Any], database: Path) -> None:
    """Nothing of a failed transaction is left; the error itself comes through."""

    def fail() -> None:
        with orders.transaction() as tx:
            tx.execute("INSERT INTO orders VALUES ('a')")
            orders.put("x" * 5000, key="k", tx=tx)
            raise Undo

    with pytest.raises(Undo):
        fail()
    assert stored(database) == []
    assert orders.counts().ready == 0
    assert not orders.put("other", key="k").duplicate


def test_a_queue_made_in_a_transaction_that_failed_was_never_made(
    engine: Engine, orders: Queue[Any]
) -> None:
    """What a transaction read of itself is not remembered after its end."""
    fresh: Queue[Any] = Queue("unused", "fresh", engine=engine)
    with undone(fresh) as tx:
        fresh.put(1, tx=tx)
        fresh.put(2, tx=tx)
    Queue("unused", "another", engine=engine).put("takes the number that is free again")
    job_id = fresh.put(3)
    assert [job.id for job in fresh.jobs("ready")] == [job_id]
    assert fresh.counts().ready == 1


def test_a_keyed_put_inside_finds_and_holds_keys(orders: Queue[Any]) -> None:
    """Keys work in a transaction as they do outside, also among its own puts."""
    before = orders.put("same", key="before")
    with orders.transaction() as tx:
        assert orders.put("same", key="before", tx=tx) == before
        inside = orders.put("same", key="inside", tx=tx)
        again = orders.put("same", key="inside", tx=tx)
        assert (again, again.duplicate) == (inside, True)
    assert orders.put("same", key="inside") == inside
    assert orders.counts().ready == 2


@pytest.mark.parametrize("error", [QueueFull, IdempotencyConflict])
def test_a_refused_put_leaves_the_transaction_whole(
    engine: Engine, orders: Queue[Any], database: Path, error: type[QueueError]
) -> None:
    """A caller that catches the refusal commits its own rows, and no part of the refused batch."""
    orders.put("taken", key="k")
    if error is QueueFull:
        engine.configure(QUEUE, max_depth=2)
    with orders.transaction() as tx:
        tx.execute("INSERT INTO orders VALUES ('before')")
        second = None if error is QueueFull else "k"
        with pytest.raises(error):
            orders.put_many(["a", "b"], keys=["new", second], tx=tx)
        tx.execute("INSERT INTO orders VALUES ('after')")
    assert stored(database) == ["before", "after"]
    assert orders.counts().ready == 1
    assert not orders.put("other", key="new").duplicate


def test_other_writers_wait_for_the_end(
    orders: Queue[Any], open_engine: OpenEngine, database: Path
) -> None:
    """A transaction is alone; a writer that cannot wait that long is told who holds it up."""
    impatient: Queue[Any] = Queue("unused", QUEUE, engine=open_engine(lock_timeout_seconds=0.2))
    impatient.counts()
    with orders.transaction() as tx:
        orders.put(1, tx=tx)
        with pytest.raises(QueueBusy, match="process"):
            impatient.put(2)
        assert impatient.counts().ready == 0  # readers never wait
    impatient.put(3)
    assert orders.counts().ready == 2


def test_threads_of_one_queue_wait_for_the_end(orders: Queue[Any]) -> None:
    """Another thread's put neither joins the transaction nor is lost."""
    started = threading.Event()

    def other() -> None:
        started.set()
        orders.put("thread")

    thread = threading.Thread(target=other)
    with undone(orders) as tx:
        thread.start()
        started.wait(10)
        orders.put("inside", tx=tx)
    thread.join(20)
    assert not thread.is_alive()
    assert [job.payload for job in orders.jobs("ready")] == ["thread"]


def test_a_put_without_tx_inside_a_transaction_is_refused(
    orders: Queue[Any], database: Path
) -> None:
    """It would deadlock, or be undone unseen; the message says what to do instead."""
    with orders.transaction() as tx:
        tx.execute("INSERT INTO orders VALUES ('a')")
        with pytest.raises(QueueError, match="tx="):
            orders.put(1)
        with pytest.raises(QueueError, match="tx="):
            orders.get(timeout=0)
    assert stored(database) == ["a"]
    assert orders.counts().ready == 0


def test_only_the_open_transaction_is_taken_as_tx(orders: Queue[Any], database: Path) -> None:
    """A stranger's connection, and a transaction that is over, are refused in one sentence."""
    with orders.transaction() as tx:
        pass
    with pytest.raises(PayloadInvalid, match="tx="):
        orders.put(1, tx=tx)
    with closing(sqlite3.connect(database)) as stranger:
        with pytest.raises(PayloadInvalid, match="tx="):
            orders.put(1, tx=stranger)
        with orders.transaction(), pytest.raises(PayloadInvalid, match="tx="):
            orders.put(1, tx=stranger)
    with pytest.raises(PayloadInvalid, match="tx="):
        orders.put(1, tx=object())
    assert orders.counts().ready == 0


def test_a_caller_who_ends_the_transaction_inside_is_told(orders: Queue[Any]) -> None:
    """COMMIT in the block would store jobs that an exception after it should undo."""

    def end_inside() -> None:
        with orders.transaction() as tx:
            orders.put(1, tx=tx)
            tx.execute("ROLLBACK")

    with pytest.raises(QueueError):
        end_inside()
    assert orders.counts().ready == 0
    orders.put(2)
    assert orders.counts().ready == 1


def test_a_put_in_a_transaction_wakes_who_waits(orders: Queue[Any], engine: Engine) -> None:
    """The bell rings after the commit, so that the woken one finds the job."""
    got: list[Any] = []
    waiter = threading.Thread(target=lambda: got.append(orders.get(timeout=20)))
    waiter.start()
    with orders.transaction() as tx:
        job_id = orders.put(1, tx=tx)
    waiter.join(20)
    assert [job.id for job in got] == [job_id]


def test_a_release_in_a_transaction_wakes_who_waits(
    orders: Queue[Any], engine: Engine, open_engine: OpenEngine
) -> None:
    """The job is ready with the commit; whoever sleeps hears of it then."""
    orders.put("again")
    (row,) = take(engine)
    waiter = open_engine()
    waiter.listen([QUEUE])
    bell = waiter._bell  # type: ignore[attr-defined]
    assert not bell.wait([QUEUE], 0)
    with orders.transaction() as tx:
        engine.finish([settlement(row, State.READY, charge=False)], tx=tx)
        assert not bell.wait([QUEUE], 0)
    assert bell.wait([QUEUE], 20)


def test_two_transactions_of_one_thread_do_not_nest(orders: Queue[Any]) -> None:
    """A second one is refused at once, and the first goes on."""
    with orders.transaction() as tx:
        orders.put(1, tx=tx)
        with pytest.raises(QueueError), orders.transaction():
            pass
    assert orders.counts().ready == 1


def test_settling_takes_part_in_no_transaction(orders: Queue[Any], engine: Engine) -> None:
    """A claim is settled by its own transaction, after the user's."""
    orders.put(1)
    (row,) = take(engine)
    with orders.transaction() as tx:
        tx.execute("INSERT INTO orders VALUES ('a')")
        with pytest.raises(QueueError, match="transaction"):
            engine.extend([row.claim], 1)
    wait_until(lambda: engine.counts(QUEUE)["claimed"] == 1)


def test_a_job_is_consumed_and_another_produced_together_or_not_at_all(database: Path) -> None:
    """An ack inside a transaction stands or falls with the put beside it."""
    with Queue[str](database, "orders") as queue:
        first = queue.put("order")
        job = queue.get(timeout=0)
        assert job is not None
        with suppress(ZeroDivisionError), queue.transaction() as tx:
            queue.put("invoice", tx=tx)
            queue.ack(job, tx=tx)
            raise ZeroDivisionError
        assert (queue.counts().claimed, queue.counts().ready) == (1, 0)
        with queue.transaction() as tx:
            second = queue.put("invoice", tx=tx)
            queue.ack(job, tx=tx)
        assert (queue.counts().done, queue.counts().ready) == (1, 1)
        assert queue.find(first).state == "done"  # type: ignore[union-attr]
        assert queue.find(second).state == "ready"  # type: ignore[union-attr]
        with pytest.raises(StaleClaim), queue.transaction() as tx:
            queue.ack(job, tx=tx)
