"""Show that delayed jobs become ready when they are due, in order, and not before."""

from __future__ import annotations

import random
from typing import Any

import pytest

from queue_core import Queue, State
from queue_core.clock import FakeClock
from queue_core.engine import Engine
from tests.engine.conftest import (
    QUEUE,
    SECOND_US,
    MakeJob,
    new_job,
    put,
    settlement,
    state_of,
    take,
)


@pytest.mark.parametrize("state", [state for state in State if state is not State.DELAYED])
def test_only_a_delayed_job_can_be_promoted(
    engine: Engine, make_job: MakeJob, clock: FakeClock, state: State
) -> None:
    """Whatever is ready, taken or finished is left as it is."""
    job = make_job(state)
    clock.advance(10**6)
    before = engine.find(job.id)
    assert engine.promote(100) == 0
    assert engine.find(job.id) == before


def test_a_job_is_promoted_when_it_is_due_and_not_before(engine: Engine, clock: FakeClock) -> None:
    """A delay is kept to the microsecond by the clock of the store."""
    (job_id,) = put(engine, new_job(delay_us=10 * SECOND_US))
    clock.advance(9.999_999)
    assert engine.promote(100) == 0
    assert engine.next_due_us() == 1
    clock.advance(0.000_001)
    assert engine.next_due_us() == 0
    assert engine.promote(100) == 1
    assert state_of(engine, job_id) is State.READY
    assert engine.next_due_us() is None
    assert engine.counts(QUEUE)["jobs_promoted_total"] == 1


def test_jobs_are_promoted_earliest_first(engine: Engine, clock: FakeClock) -> None:
    """Of many that are due, the one due first goes first; of equals, the one put first."""
    delays = random.Random(3).choices(range(1, 20), k=40)
    ids = put(engine, *[new_job(delay_us=delay * SECOND_US) for delay in delays])
    expected = [id_ for _, id_ in sorted(zip(delays, ids, strict=True))]
    clock.advance(20)
    while engine.promote(7):
        pass
    assert [row.id for row in take(engine, 40)] == expected


def test_a_promotion_is_bounded_and_says_how_many(engine: Engine, clock: FakeClock) -> None:
    """However many are due, the lock is held for a batch only."""
    for name in ("a", "b"):
        put(engine, *[new_job(delay_us=1) for _ in range(5)], queue=name)
    clock.advance(1)
    assert [engine.promote(4) for _ in range(4)] == [4, 4, 2, 0]


def test_priority_counts_among_the_promoted(engine: Engine, clock: FakeClock) -> None:
    """A delay changes when a job may run, not how important it is."""
    low, high = put(
        engine, new_job(delay_us=1, priority=-1), new_job(delay_us=SECOND_US, priority=5)
    )
    (middle,) = put(engine)
    clock.advance(1)
    engine.promote(10)
    assert [row.id for row in take(engine, 3)] == [high, middle, low]


def test_the_wait_counts_from_when_a_job_was_due(engine: Engine, clock: FakeClock) -> None:
    """A keeper that comes late cannot hide how late the job is."""
    put(engine, new_job(delay_us=10 * SECOND_US))
    clock.advance(25)
    engine.promote(1)
    (row,) = take(engine)
    assert row.claimed_us - row.ready_us == 15 * SECOND_US
    assert engine.snapshot().histograms[("queue_wait_seconds", QUEUE, QUEUE, "")].total == 15


def test_a_nacked_job_waits_for_its_back_off(
    engine: Engine, make_job: MakeJob, clock: FakeClock
) -> None:
    """A retry is a delayed job like any other."""
    job = make_job(State.CLAIMED)
    engine.finish([settlement(job, State.DELAYED, delay_us=30 * SECOND_US)])
    clock.advance(29)
    assert engine.promote(1) == 0
    clock.advance(1)
    assert engine.promote(1) == 1
    assert [row.id for row in take(engine)] == [job.id]


def test_a_step_of_the_wall_clock_moves_due_dates_with_it(engine: Engine, clock: FakeClock) -> None:
    """Due dates are wall time: a clock set forward makes them due, set back it makes them wait."""
    (job_id,) = put(engine, new_job(delay_us=60 * SECOND_US))
    clock.step_wall(-3600)
    assert engine.next_due_us() == 3660 * SECOND_US
    clock.step_wall(3660)
    assert engine.promote(1) == 1
    assert [row.id for row in take(engine)] == [job_id]


def test_a_clock_that_goes_back_gives_no_negative_wait(engine: Engine, clock: FakeClock) -> None:
    """Differences across a clock step count as nothing, never as less."""
    put(engine)
    clock.step_wall(-1000)
    (row,) = take(engine)
    clock.step_wall(-1000)
    engine.finish([settlement(row, started_us=row.claimed_us)])
    totals = [found.total for found in engine.snapshot().histograms.values()]
    assert min(totals) >= 0


def test_a_get_without_a_keeper_promotes_by_itself(queue: Queue[Any], clock: FakeClock) -> None:
    """A user of the library alone needs no keeper for delays to work."""
    job_id = queue.put("later", delay=30)
    assert queue.get(timeout=0) is None
    clock.advance(30)
    job = queue.get(timeout=0)
    assert job is not None
    assert job.id == job_id
