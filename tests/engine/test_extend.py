"""Show that a lease can be renewed by who holds it, and by no other."""

from __future__ import annotations

from typing import Any

import pytest

from queue_core import PayloadInvalid, Queue, StaleClaim, State
from queue_core.clock import FakeClock
from queue_core.engine import Engine, Holder
from queue_core.job import Claim, Extended, Stale
from tests.engine.conftest import (
    LEASE_US,
    QUEUE,
    SECOND_US,
    MakeJob,
    new_job,
    put,
    request,
    settlement,
    take,
)


def reaped(engine: Engine) -> list[int]:
    """Reap what may be reaped, back to ready, and return the ids."""
    rows = engine.reap(lambda row, _: settlement(row, State.READY), 1000)
    return [row.claim.id for row in rows]


@pytest.mark.parametrize("state", [state for state in State if state is not State.CLAIMED])
def test_only_a_claimed_job_can_be_extended(
    engine: Engine, make_job: MakeJob, state: State
) -> None:
    """A lease that is over stays over: the claim is stale, and counted so."""
    job = make_job(state)
    before = engine.find(job.id)
    assert engine.extend([job], LEASE_US) == [Stale(claim=job)]
    assert engine.find(job.id) == before
    assert engine.snapshot().counters[("stale_claims_total", "", "", "")] == 1


def test_a_lease_ends_so_long_after_it_was_extended(
    engine: Engine, make_job: MakeJob, clock: FakeClock
) -> None:
    """The new length counts from now, not from the end of the old lease."""
    job = make_job(State.CLAIMED)
    clock.advance(50)
    assert engine.extend([job], 30 * SECOND_US) == [Extended(claim=job)]
    clock.advance(29)
    assert reaped(engine) == []
    clock.advance(1)
    assert reaped(engine) == [job.id]


def test_a_lease_can_be_made_shorter(engine: Engine, make_job: MakeJob, clock: FakeClock) -> None:
    """The holder decides; it may also give up early."""
    job = make_job(State.CLAIMED)
    engine.extend([job], SECOND_US)
    clock.advance(1)
    assert reaped(engine) == [job.id]


def test_a_batch_tells_live_and_stale_claims_apart(engine: Engine, make_job: MakeJob) -> None:
    """Each claim of a batch gets its own answer, in order."""
    live, done = make_job(State.CLAIMED), make_job(State.DONE)
    old, unknown = Claim(id=live.id, run=live.run - 1), Claim(id=10**9, run=1)
    assert engine.extend([done, live, old, unknown], LEASE_US) == [
        Stale(claim=done), Extended(claim=live), Stale(claim=old), Stale(claim=unknown),
    ]  # fmt: skip
    assert engine.extend([], LEASE_US) == []


def test_an_expired_lease_that_nobody_reaped_can_still_be_extended(
    engine: Engine, make_job: MakeJob, clock: FakeClock
) -> None:
    """Until another takes the job, the late worker loses nothing."""
    job = make_job(State.CLAIMED)
    clock.advance(3600)
    assert engine.extend([job], LEASE_US) == [Extended(claim=job)]
    assert reaped(engine) == []


def test_the_claim_of_an_earlier_run_cannot_extend_the_later(
    engine: Engine, make_job: MakeJob
) -> None:
    """A worker that lost its lease cannot prolong the lease of its successor."""
    first = make_job(State.CLAIMED)
    engine.finish([settlement(first, State.READY)])
    (second,) = take(engine)
    assert second.id == first.id
    assert engine.extend([first], LEASE_US) == [Stale(claim=first)]


def test_holders_leases_are_renewed_together(engine: Engine, clock: FakeClock) -> None:
    """A keeper renews all live workers in one go, and nobody else."""
    put(engine, *[new_job() for _ in range(6)])
    holders = [engine.hold(Holder(worker=f"w/{number}", instance="main")) for number in range(3)]
    rows = {h: engine.claim(request(QUEUE, limit=2), holder=h) for h in holders}
    clock.advance(50)
    assert engine.extend_holders(holders[:2], LEASE_US) == 4
    assert engine.extend_holders([], LEASE_US) == 0
    clock.advance(20)
    assert sorted(reaped(engine)) == [row.id for row in rows[holders[2]]]


def test_renewal_for_all_never_shortens_a_lease(engine: Engine, clock: FakeClock) -> None:
    """A handler that asked for an hour keeps it when the keeper renews by a minute."""
    put(engine)
    holder = engine.hold(Holder(worker="w"))
    (row,) = engine.claim(request(QUEUE), holder=holder)
    engine.extend([row.claim], 3600 * SECOND_US)
    assert engine.extend_holders([holder], LEASE_US) == 0
    clock.advance(3599)
    assert reaped(engine) == []


# --- clocks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_seconds", [-86_400, -1, 1, 86_400, 10**8])
def test_a_step_of_the_wall_clock_neither_ends_nor_prolongs_a_lease(
    engine: Engine, make_job: MakeJob, clock: FakeClock, step_seconds: int
) -> None:
    """NTP and operators set the wall clock; leases do not look at it."""
    job = make_job(State.CLAIMED)
    clock.step_wall(step_seconds)
    clock.advance(59)
    assert reaped(engine) == []
    clock.advance(1)
    assert reaped(engine) == [job.id]


def test_a_suspended_host_wakes_with_its_leases_alive(
    engine: Engine, make_job: MakeJob, clock: FakeClock
) -> None:
    """Suspend stops the workers and the monotonic clock alike; only wall time goes on."""
    job = make_job(State.CLAIMED)
    clock.step_wall(8 * 3600)
    assert reaped(engine) == []
    assert engine.extend([job], LEASE_US) == [Extended(claim=job)]


# --- the façade ---------------------------------------------------------------------------------


def test_extending_a_lost_claim_raises(queue: Queue[Any], clock: FakeClock) -> None:
    """A user who ignores a lost lease would work for nothing; so it is an error."""
    queue.put(1)
    job = queue.get(timeout=0)
    assert job is not None
    queue.extend(job, 90)
    clock.advance(89)
    assert queue.get(timeout=0) is None
    clock.advance(1)
    assert queue.get(timeout=0) is None  # reaped, and backing off
    with pytest.raises(StaleClaim) as caught:
        queue.extend(job, 60)
    assert caught.value.claims == ((job.id, job.run),)


@pytest.mark.parametrize("seconds", [-1, float("nan"), "60"])
def test_a_length_that_is_no_duration_is_refused(queue: Queue[Any], seconds: Any) -> None:
    """A lease of nonsense would end at once, or never."""
    queue.put(1)
    job = queue.get(timeout=0)
    assert job is not None
    with pytest.raises(PayloadInvalid, match="seconds"):
        queue.extend(job, seconds)
