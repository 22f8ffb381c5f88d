"""Show that finished jobs go when their time is over, oldest first, and nothing else goes."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from queue_core import Queue, State
from queue_core.clock import FakeClock
from queue_core.engine import Engine, Holder
from tests.engine.conftest import (
    QUEUE,
    SECOND_US,
    MakeJob,
    OpenEngine,
    new_job,
    put,
    settlement,
    state_of,
    take,
)

DAY_US = 24 * 3600 * SECOND_US


@pytest.mark.parametrize("state", [State.READY, State.DELAYED, State.CLAIMED])
def test_a_live_job_is_never_pruned(
    engine: Engine, make_job: MakeJob, clock: FakeClock, state: State
) -> None:
    """Retention is for what is finished, however old the rest is."""
    engine.configure(QUEUE, keep_done_us=0, keep_dead_us=0, key_ttl_us=0)
    job = make_job(state, key="k")
    clock.advance(10**6)
    before = engine.find(job.id)
    assert engine.prune(100) == 0
    assert engine.find(job.id) == before


@pytest.mark.parametrize("state", [State.DONE, State.CANCELLED, State.DEAD])
def test_a_finished_job_is_pruned_after_its_retention(
    engine: Engine, make_job: MakeJob, clock: FakeClock, state: State
) -> None:
    """Kept for as long as the queue says, counted from its end, and gone then."""
    option = "keep_dead_us" if state is State.DEAD else "keep_done_us"
    engine.configure(QUEUE, **{option: 60 * SECOND_US})
    job = make_job(state)
    clock.advance(59)
    assert engine.prune(100) == 0
    assert state_of(engine, job.id) is state
    clock.advance(1)
    assert engine.prune(100) == 1
    assert engine.find(job.id) is None
    counts = engine.counts(QUEUE)
    assert (counts[state], counts[f"pruned_jobs_total:{state}"]) == (0, 1)


@pytest.mark.parametrize("state", [State.DONE, State.CANCELLED, State.DEAD])
def test_without_a_retention_everything_is_kept(
    engine: Engine, make_job: MakeJob, clock: FakeClock, state: State
) -> None:
    """Nothing is thrown away unless somebody said when."""
    job = make_job(state)
    clock.advance(10**8)
    assert engine.prune(100) == 0
    assert state_of(engine, job.id) is state


def test_retention_belongs_to_the_queue(
    engine: Engine, make_job: MakeJob, clock: FakeClock
) -> None:
    """One queue's short memory does not clean another."""
    engine.configure("short", keep_done_us=0)
    engine.configure("long", keep_done_us=3600 * SECOND_US)
    short, long = make_job(State.DONE, queue="short"), make_job(State.DONE, queue="long")
    clock.advance(60)
    assert engine.prune(100) == 1
    assert engine.find(short.id) is None
    assert state_of(engine, long.id) is State.DONE


def test_pruning_is_bounded_and_takes_the_oldest_first(engine: Engine, clock: FakeClock) -> None:
    """However many are over their time, the lock is held for a batch only."""
    engine.configure(QUEUE, keep_done_us=0, keep_dead_us=0)
    ids = put(engine, *[new_job() for _ in range(9)])
    for row in reversed(take(engine, 9)):  # so that the youngest id is the oldest end
        engine.finish([settlement(row)])
        clock.advance(1)
    removed = [engine.prune(4) for _ in range(2)]
    assert removed == [4, 4]
    assert [job.id for job in engine.select(State.DONE)] == ids[:1]
    assert [engine.prune(4) for _ in range(2)] == [1, 0]


def test_the_limit_holds_for_all_kinds_together(engine: Engine, make_job: MakeJob) -> None:
    """Done, cancelled and dead of all queues share one batch."""
    for name in ("a", "b"):
        engine.configure(name, keep_done_us=0, keep_dead_us=0)
        for state in (State.DONE, State.CANCELLED, State.DEAD):
            make_job(state, queue=name)
    assert [engine.prune(4) for _ in range(3)] == [4, 2, 0]


def test_a_clock_that_goes_back_prunes_nothing_early(
    engine: Engine, make_job: MakeJob, clock: FakeClock
) -> None:
    """A job that ended in the future is young."""
    engine.configure(QUEUE, keep_done_us=SECOND_US)
    make_job(State.DONE)
    clock.step_wall(-3600)
    assert engine.prune(100) == 0


@pytest.mark.parametrize("state", [State.DONE, State.CANCELLED, State.DEAD])
def test_a_key_without_a_life_of_its_own_goes_with_the_row(
    engine: Engine, make_job: MakeJob, clock: FakeClock, state: State
) -> None:
    """After prune the key is free for other data."""
    engine.configure(QUEUE, keep_done_us=60 * SECOND_US, keep_dead_us=60 * SECOND_US)
    held = make_job(state, key="k").id
    clock.advance(59)
    assert engine.enqueue(QUEUE, [new_job(key="k")])[0].id == held
    clock.advance(1)
    assert engine.prune(100) == 1
    (fresh,) = engine.enqueue(QUEUE, [new_job(b"other", key="k")])
    assert not fresh.duplicate


@pytest.mark.parametrize("state", [State.DONE, State.CANCELLED, State.DEAD])
def test_a_key_with_a_longer_life_outlives_the_row(
    engine: Engine, make_job: MakeJob, clock: FakeClock, state: State
) -> None:
    """`key_ttl` is a promise about the wish, not about the row."""
    engine.configure(QUEUE, keep_done_us=0, keep_dead_us=0, key_ttl_us=60 * SECOND_US)
    held = make_job(state, key="k").id
    assert engine.prune(100) == 1
    clock.advance(59)
    (again,) = engine.enqueue(QUEUE, [new_job(key="k")])
    assert (again.id, again.duplicate) == (held, True)
    clock.advance(1)
    assert not engine.enqueue(QUEUE, [new_job(b"other", key="k")])[0].duplicate


def rows_left(database: Path) -> dict[str, int]:
    """Count the rows of every table that holds something of a job."""
    tables = ("job", "done", "dead", "body", "attempt", "idempotency")
    with closing(sqlite3.connect(database)) as connection:
        return {
            table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in tables
        }


@pytest.mark.parametrize("state", [State.DONE, State.CANCELLED, State.DEAD])
def test_nothing_of_a_pruned_job_is_left(
    engine: Engine, make_job: MakeJob, clock: FakeClock, database: Path, state: State
) -> None:
    """Row, body, ledger and key go together; nothing piles up unseen."""
    engine.configure(QUEUE, keep_done_us=0, keep_dead_us=0, key_ttl_us=SECOND_US)
    (job_id,) = put(engine, new_job(b"x" * 5000, key="k"))
    (row,) = take(engine)
    back = settlement(row, State.READY, charge=True, started_us=row.claimed_us)
    engine.finish([back])
    if state is State.CANCELLED:
        engine.cancel(None, [job_id])
    else:
        engine.finish([settlement(take(engine)[0], state, started_us=row.claimed_us)])
    clock.advance(1)
    assert engine.prune(100) == 1
    assert set(rows_left(database).values()) == {0}


def test_expired_keys_alone_are_reason_to_prune(
    engine: Engine, make_job: MakeJob, clock: FakeClock, database: Path
) -> None:
    """Keys go by their own time, with their rows still there."""
    engine.configure(QUEUE, key_ttl_us=SECOND_US)
    job = make_job(State.DONE, key="k")
    clock.advance(1)
    assert engine.prune(100) == 0
    assert rows_left(database) | {"idempotency": 0, "done": 1} == rows_left(database)
    assert state_of(engine, job.id) is State.DONE


def test_holders_of_long_ago_are_forgotten_unless_they_hold_something(
    open_engine: OpenEngine, clock: FakeClock, database: Path
) -> None:
    """The table of holders stays short; a claim never loses its holder."""
    engine = open_engine()
    engine.configure(QUEUE, keep_done_us=0)
    for _ in range(5):
        engine.hold(Holder(worker="idle"))
    put(engine, new_job(), new_job())
    (kept,) = take(engine, lease_us=100 * DAY_US)
    (done,) = take(engine)
    engine.finish([settlement(done)])
    engine.close()
    clock.advance(8 * 24 * 3600)
    again = open_engine()
    assert again.prune(100) == 1
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT count(*) FROM holder").fetchone() == (1,)
    record = again.find(kept.id)
    assert record is not None
    assert record.worker == "test/0"


def test_a_user_of_the_library_says_how_long_finished_jobs_are_kept(database: Path) -> None:
    """Without a supervisor, too: what the queue was opened with is stored with it."""
    clock = FakeClock()
    with Queue[int](database, keep_done_seconds=60, keep_dead_seconds=600, clock=clock) as queue:
        queue.put_many([1, 2])
        done, dead = queue.get_many(2)
        queue.ack(done)
        queue.fail(dead)
        clock.advance(61)
        assert queue.prune() == 1
        assert (queue.counts().done, queue.counts().dead) == (0, 1)
        clock.advance(600)
        assert queue.prune() == 1
        assert queue.counts().dead == 0
