"""Show that a claim whose lease ran out is taken back, once, and a reboot voids them all."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from queue_core import DatabaseUnavailable, Outcome, Queue, Reason, State
from queue_core.clock import FakeClock
from queue_core.engine import Engine, Holder
from queue_core.engines.sqlite_schema import instance_lock_path
from queue_core.job import TRANSITIONS, Claimed, Reaped, Settlement, Stale
from queue_core.lockfile import InstanceLock
from tests.engine.conftest import (
    LEASE_US,
    QUEUE,
    SECOND_US,
    MakeJob,
    OpenEngine,
    new_job,
    put,
    request,
    settlement,
    state_of,
    take,
)


def back(row: Claimed, _started: bool) -> Settlement:
    """Decide that a job goes back, uncharged."""
    return settlement(row, State.READY)


@pytest.mark.parametrize("state", [state for state in State if state is not State.CLAIMED])
def test_only_a_claimed_job_can_be_reaped(
    engine: Engine, make_job: MakeJob, clock: FakeClock, state: State
) -> None:
    """A lease ends with its claim, so nothing is left to run out."""
    job = make_job(state)
    clock.advance(10**6)
    before = engine.find(job.id)
    assert engine.reap(back, 100) == []
    assert engine.find(job.id) == before


@pytest.mark.parametrize("to", sorted(TRANSITIONS["reap"][1]))
def test_a_job_whose_lease_ran_out_goes_where_was_decided(
    engine: Engine, make_job: MakeJob, clock: FakeClock, to: State
) -> None:
    """The engine finds the lost; what becomes of them is decided outside of it."""
    job = make_job(State.CLAIMED)
    clock.advance(60)
    reason = Reason.EXHAUSTED if to is State.DEAD else None
    assert engine.reap(lambda row, _: settlement(row, to, reason=reason), 9) == [
        Reaped(claim=job, queue=QUEUE, task=QUEUE, state=to, reason=reason)
    ]
    assert state_of(engine, job.id) is to
    assert engine.counts(QUEUE)[f"leases_reaped_total:{to}"] == 1
    assert engine.finish([settlement(job)]) == [Stale(claim=job)]


@pytest.mark.parametrize("starts", [True, False])
def test_the_decision_is_told_whether_the_job_had_started(
    engine: Engine, clock: FakeClock, starts: bool
) -> None:
    """A job that nobody began must not be charged; so who decides must know."""
    put(engine, new_job(b"payload", key="k"))
    (row,) = take(engine, starts=starts)
    clock.advance(60)
    seen: list[tuple[Claimed, bool]] = []

    def decide(claim: Claimed, started: bool) -> Settlement:
        seen.append((claim, started))
        return settlement(claim, State.READY)

    engine.reap(decide, 9)
    assert seen == [(row, starts)]


def test_reaping_is_bounded_and_takes_the_oldest_first(engine: Engine, clock: FakeClock) -> None:
    """However many leases ran out, the lock is held for a batch only."""
    ids = put(engine, *[new_job() for _ in range(5)])
    for _ in ids:
        take(engine)
        clock.advance(1)
    clock.advance(60)
    batches = [[row.claim.id for row in engine.reap(back, 2)] for _ in range(4)]
    assert batches == [ids[:2], ids[2:4], ids[4:], []]


def test_a_lease_lost_again_and_again_spends_all_attempts(
    queue: Queue[Any], clock: FakeClock
) -> None:
    """A job that always outlives its lease ends as dead, and its ledger says why."""
    job_id = queue.put("slow", max_attempts=2)
    for _ in range(2):
        job = queue.get(timeout=0)
        assert job is not None
        clock.advance(60)
        assert queue.get(timeout=0) is None
        clock.advance(3600)
    assert queue.get(timeout=0) is None
    (dead,) = queue.dead(reason=Reason.EXHAUSTED)
    assert dead.id == job_id
    found = queue.find(job_id)
    assert found is not None
    assert [line.outcome for line in found.ledger] == [Outcome.LEASE_LOST] * 2


# --- reboots ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("state", "number"), list(product(State, [1, 2])))
def test_a_reboot_frees_claims_and_changes_nothing_else(
    open_engine: OpenEngine, make_job: MakeJob, engine: Engine, clock: FakeClock,
    state: State, number: int,
) -> None:  # fmt: skip
    """After a power cut claimed jobs are ready, uncharged and in place; the rest is as it was."""
    job = make_job(state, key="k", payload=b"x" * 3000)
    before = engine.find(job.id)
    assert before is not None
    for _ in range(number):
        engine.close()
        clock.reboot()
        engine = open_engine()
        after = engine.find(job.id)
    assert after is not None
    if state is not State.CLAIMED:
        assert after == before
        return
    assert (after.state, after.attempts, after.deaths, after.run) == (State.READY, 0, 0, job.run)
    assert engine.finish([settlement(job)]) == [Stale(claim=job)]
    (row,) = take(engine)
    assert (row.id, row.run) == (job.id, job.run + 1)


def test_claims_of_a_new_boot_are_kept_by_those_who_open_later(
    open_engine: OpenEngine, clock: FakeClock
) -> None:
    """Only the first opening after a boot voids claims."""
    clock.reboot()
    first = open_engine()
    put(first)
    (row,) = take(first)
    second = open_engine()
    assert second.find(row.id) == first.find(row.id)
    assert second.extend([row.claim], LEASE_US) != [Stale(claim=row.claim)]


def test_a_lease_of_an_earlier_boot_is_not_measured_by_the_new_clock(
    open_engine: OpenEngine, clock: FakeClock
) -> None:
    """A lease of an hour must not last until the new boot is as old as the old one was."""
    engine = open_engine()
    ids = put(engine, *[new_job() for _ in range(3)])
    clock.advance(10**6)
    rows = take(engine, 3, lease_us=3600 * SECOND_US)
    engine.close()
    clock.reboot()
    again = open_engine()
    assert again.counts(QUEUE)["ready"] == 3
    assert [row.id for row in take(again, 3)] == ids == [row.id for row in rows]


def test_a_live_supervisor_of_another_boot_id_means_two_kernels_and_is_refused(
    open_engine: OpenEngine, clock: FakeClock, database: Path
) -> None:
    """One file under two kernels has no lock that holds; nothing of it is touched then."""
    engine = open_engine()
    put(engine)
    holder = engine.hold(Holder(worker="w/0", instance="main"))
    (row,) = engine.claim(request(QUEUE), holder=holder)
    engine.close()
    lock = InstanceLock.take(instance_lock_path(database, "main"), {"boot": clock.boot_id()})
    assert lock is not None
    clock.reboot()
    try:
        with pytest.raises(DatabaseUnavailable, match="another kernel"):
            open_engine().counts(QUEUE)
    finally:
        lock.close()
    after = open_engine().find(row.id)
    assert after is not None
    assert after.state is State.READY


def test_a_restarted_supervisor_of_this_boot_is_no_stranger(
    open_engine: OpenEngine, clock: FakeClock, database: Path
) -> None:
    """After a reboot the supervisor takes its lock first and opens then; that must work."""
    engine = open_engine()
    put(engine)
    holder = engine.hold(Holder(worker="w/0", instance="main"))
    engine.claim(request(QUEUE), holder=holder)
    engine.close()
    clock.reboot()
    lock = InstanceLock.take(instance_lock_path(database, "main"), {"boot": clock.boot_id()})
    assert lock is not None
    try:
        assert open_engine().counts(QUEUE)["ready"] == 1
    finally:
        lock.close()
