"""Do everything that an engine can do to a stock of jobs, each thing by its name.

Boundary: no test is here. Each operation may be done again on what it has left, and then changes
nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from queue_core.clock import FakeClock
from queue_core.codec import digest
from queue_core.engine import ClaimRequest, Holder
from queue_core.engines.sqlite import SqliteEngine
from queue_core.engines.sqlite_board import Board
from queue_core.engines.sqlite_enqueue import packed
from queue_core.errors import QueueFull
from queue_core.job import Claimed, NewJob, Reason, Settlement, State
from queue_core.upkeep import ImportJob
from tests.fault.conftest import ASIDE, LARGE, QUEUE, SECOND_US, Stock, settled

MINE = "/* mine */"
PLACES = (State.READY, State.DONE, State.DEAD)
"""One state of each table."""
Operation = Callable[[SqliteEngine, Stock], object]


def _bury(row: Claimed, _started: bool) -> Settlement:
    return settled(row.claim, State.DELAYED if row.id % 2 else State.DEAD)


def _new(position: int, delay_us: int = 0) -> NewJob:
    payload = LARGE if position == 1 else b"1"
    return NewJob(
        payload=payload, task=QUEUE, key=f"new-{position}", digest=digest(QUEUE, payload),
        delay_us=delay_us,
    )  # fmt: skip


def _wanted(*queues: str, task: str | None = None) -> ClaimRequest:
    tasks = None if task is None else frozenset({task})
    return ClaimRequest(queues=queues or None, limit=100, lease_us=60 * SECOND_US, tasks=tasks)


# --- enqueue, claim, finish ---------------------------------------------------------------------


def _put(engine: SqliteEngine, _stock: Stock) -> None:
    engine.enqueue(QUEUE, [_new(0), _new(1), _new(2, delay_us=SECOND_US)])


def _put_new_queue(engine: SqliteEngine, _stock: Stock) -> None:
    engine.enqueue("another", [_new(0)])


def _put_too_many(engine: SqliteEngine, _stock: Stock) -> None:
    with pytest.raises(QueueFull):
        engine.enqueue(QUEUE, [NewJob(payload=b"1", task=QUEUE)] * 99)


def _put_with_mine(engine: SqliteEngine, _stock: Stock) -> None:
    with engine.transaction() as tx:
        # Marked, since the failing of a user's own statement is that user's affair.
        tx.execute(f"UPDATE queue SET paused = paused {MINE}")
        engine.enqueue(QUEUE, [_new(0), _new(1)], tx=tx)


def _put_too_many_with_mine(engine: SqliteEngine, _stock: Stock) -> None:
    with engine.transaction() as tx:
        with suppress(QueueFull):  # its user goes on, and commits the rest
            engine.enqueue(QUEUE, [NewJob(payload=b"1", task=QUEUE)] * 99, tx=tx)
        engine.enqueue(QUEUE, [_new(0)], tx=tx)


def _put_in_company(engine: SqliteEngine, _stock: Stock) -> None:
    """Find on the board what another process wants to put, and store it with our own."""
    board = Board(Path(f"{engine.path}.bells"), engine.clock)
    durable = SqliteEngine(engine.path, clock=engine.clock, lock_timeout_seconds=0.005)
    try:
        assert board.post(packed(QUEUE, _new(3)))
        durable.enqueue(QUEUE, [_new(0)])
    finally:
        board.close()
        durable.close()


def _claim(engine: SqliteEngine, stock: Stock) -> None:
    engine.claim(_wanted(QUEUE), holder=stock.holder)


def _claim_for_no_task(engine: SqliteEngine, stock: Stock) -> None:
    assert engine.claim(_wanted(task="another"), holder=stock.holder) == []


def _claim_what_stood_aside(engine: SqliteEngine, stock: Stock) -> None:
    engine.claim(_wanted(ASIDE, task=ASIDE), holder=stock.holder)


def _turn(engine: SqliteEngine, stock: Stock) -> None:
    done = [settled(claim, State.DONE) for claim in stock.claims("running")]
    engine.turn(done, _wanted(QUEUE), holder=stock.holder)


def _turn_of_plain_successes(engine: SqliteEngine, stock: Stock) -> None:
    """Do as a worker does: it holds what it claimed, and knows the queue's number."""
    holder = engine.hold(Holder(worker="stock/1"))
    engine.counts(QUEUE)
    rows = [row for row in stock.rows["running"] if row.key is None]
    done = [Settlement.success(row, row.claimed_us, 5) for row in rows]
    engine.turn(done, _wanted(QUEUE), holder=holder)


def _turn_after_the_keepers(engine: SqliteEngine, stock: Stock) -> None:
    done = [Settlement.success(row, row.claimed_us, 5) for row in stock.rows["done"]]
    engine.turn(done, None, holder=stock.holder)


def _finish(to: State) -> Operation:
    return lambda engine, stock: engine.finish(
        [settled(claim, to) for claim in stock.claims("running")]
    )


# --- prune, upkeep ------------------------------------------------------------------------------


def _prune_keys(engine: SqliteEngine, stock: Stock) -> None:
    """Prune at a moment when no row is old enough yet, and a key is."""
    engine.clock = FakeClock(boot_id=stock.clock.boot_id(), wall_us=stock.begun_us + SECOND_US // 2)
    engine.prune(100)


def _import(engine: SqliteEngine, stock: Stock) -> None:
    now_us = stock.clock.wall_us()
    jobs = [
        ImportJob(
            origin=f"test:{state}", payload=LARGE if state is State.READY else b"1", task=QUEUE,
            state=state, enqueued_us=now_us, attempts=2, error="as told", key=f"import-{state}",
            digest=b"d", reason=Reason.REJECTED if state is State.DEAD else None,
        )
        for state in (State.READY, State.DELAYED, State.DEAD, State.DONE)
    ]  # fmt: skip
    engine.import_jobs(QUEUE, jobs)


def _backup(engine: SqliteEngine, _stock: Stock) -> None:
    copy = Path(f"{engine.path}.copy")
    copy.unlink(missing_ok=True)
    engine.backup(copy)


OPERATIONS: dict[str, Operation] = {
    "enqueue": _put,
    "enqueue in a new queue": _put_new_queue,
    "enqueue beyond the limit": _put_too_many,
    "enqueue in a transaction": _put_with_mine,
    "enqueue beyond the limit in a transaction": _put_too_many_with_mine,
    "enqueue in company": _put_in_company,
    "hold": lambda engine, _: engine.hold(Holder(worker="stock/1")),
    "claim": _claim,
    "claim and set aside": _claim_for_no_task,
    "claim what stood aside": _claim_what_stood_aside,
    "turn": _turn,
    "turn of plain successes": _turn_of_plain_successes,
    "turn after the keeper's": _turn_after_the_keepers,
    "extend": lambda engine, stock: engine.extend(stock.claims("running"), 60 * SECOND_US),
    "extend holders": lambda engine, stock: engine.extend_holders([stock.holder], 7200 * SECOND_US),
    "ack": _finish(State.DONE),
    "nack": _finish(State.DELAYED),
    "fail": _finish(State.DEAD),
    "release": _finish(State.READY),
    "cancel": lambda engine, stock: engine.cancel(QUEUE, stock.ids["ready"] + stock.ids["later"]),
    "promote": lambda engine, _: engine.promote(100),
    "reap": lambda engine, _: engine.reap(_bury, 100),
    "replay": lambda engine, stock: engine.replay(QUEUE, stock.ids["dead"]),
    "discard": lambda engine, stock: engine.discard(None, stock.ids["dead"]),
    "prune": lambda engine, _: engine.prune(100),
    "prune keys": _prune_keys,
    "configure": lambda engine, _: engine.configure(QUEUE, paused=True, max_depth=7),
    "import": _import,
    "recount and mend": lambda engine, _: engine.recount(mend=True),
    "checkpoint": lambda engine, _: engine.checkpoint(),
    "vacuum": lambda engine, _: engine.vacuum(),
    "backup": _backup,
    "held": lambda engine, stock: engine.held(stock.holder),
    "abandoned": lambda engine, _: engine.abandoned("gone", [], 100),
    "counts": lambda engine, _: engine.counts(QUEUE),
    "snapshot": lambda engine, _: engine.snapshot(),
    "diagnostics": lambda engine, _: engine.diagnostics(),
    "find": lambda engine, stock: engine.find(stock.ids["done"][0]),
    "peek": lambda engine, _: engine.peek(QUEUE),
    "select": lambda engine, _: [engine.select(state, limit=1) for state in PLACES],
    "select of a queue": lambda engine, _: engine.select(State.DEAD, queue=QUEUE),
    "select the latest dead": lambda engine, _: engine.select(State.DEAD, newest=True),
    "newest": lambda engine, _: [engine.newest(state, limit=1) for state in PLACES],
    "imported": lambda engine, _: engine.imported(["test:ready"]),
    "check": lambda engine, _: engine.check(),
    "check in full": lambda engine, _: engine.check(full=True),
    "version": lambda engine, _: engine.version(),
}

LOOKS = frozenset(list(OPERATIONS)[list(OPERATIONS).index("held") :])
"""Those that write nothing."""
