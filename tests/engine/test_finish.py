"""Show that a claim ends once, by who holds it, in the state that was decided."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from queue_core import Outcome, PayloadInvalid, Queue, Reason, StaleClaim, State
from queue_core.clock import FakeClock
from queue_core.engine import Engine, Holder
from queue_core.job import (
    ERROR_CHARS_MAX,
    TRACEBACK_CHARS_MAX,
    TRANSITIONS,
    Claim,
    Settled,
    Stale,
)
from tests.engine.conftest import (
    QUEUE,
    SECOND_US,
    MakeJob,
    new_job,
    put,
    request,
    settlement,
    state_of,
    take,
)

ENDS = sorted(TRANSITIONS["finish"][1])


@pytest.mark.parametrize(
    ("state", "to"), list(product([s for s in State if s is not State.CLAIMED], ENDS))
)
def test_only_a_claimed_job_can_finish(
    engine: Engine, make_job: MakeJob, state: State, to: State
) -> None:
    """A settlement of what is not claimed is stale, and changes nothing."""
    job = make_job(state)
    before = engine.find(job.id)
    for run in (job.run, job.run + 1):
        claim = Claim(id=job.id, run=run)
        assert engine.finish([settlement(claim, to)]) == [Stale(claim=claim)]
    assert engine.find(job.id) == before


@pytest.mark.parametrize("to", ENDS)
def test_a_claim_ends_in_the_state_that_was_decided(
    engine: Engine, make_job: MakeJob, clock: FakeClock, to: State
) -> None:
    """The engine decides nothing: the settlement says where the job goes, and when."""
    job = make_job(State.CLAIMED)
    clock.advance(3)
    assert engine.finish([settlement(job, to)]) == [Settled(claim=job, state=to)]
    record = engine.find(job.id)
    assert record is not None
    assert (record.state, record.run) == (to, job.run)
    assert record.attempts == (0 if to is State.READY else 1)
    assert record.worker == (None if to in {State.READY, State.DELAYED} else "test/0")
    assert record.due_us == (clock.wall_us() + 10 * SECOND_US if to is State.DELAYED else None)
    assert record.finished_us == (clock.wall_us() if to in {State.DONE, State.DEAD} else None)
    assert record.reason == (Reason.REJECTED if to is State.DEAD else None)


# --- fencing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ENDS)
def test_an_old_run_cannot_settle_the_claim_of_a_later(
    engine: Engine, clock: FakeClock, to: State
) -> None:
    """A worker that lost its lease cannot end, delay or free what another is doing."""
    (job_id,) = put(engine)
    (old,) = take(engine)
    clock.advance(61)
    engine.reap(lambda row, _: settlement(row, State.READY), 1)
    (new,) = take(engine)
    assert (new.id, new.run) == (job_id, old.run + 1)
    before = engine.find(job_id)
    assert engine.finish([settlement(old, to)]) == [Stale(claim=old.claim)]
    assert engine.find(job_id) == before
    assert engine.finish([settlement(new)]) == [Settled(claim=new.claim, state=State.DONE)]


def test_an_old_run_stays_stale_after_a_replay(engine: Engine) -> None:
    """A replay begins no new numbering of runs."""
    (job_id,) = put(engine)
    (old,) = take(engine)
    engine.finish([settlement(old, State.DEAD)])
    engine.replay(None, [job_id])
    (new,) = take(engine)
    assert (new.id, new.run) == (job_id, old.run + 1)
    assert engine.finish([settlement(old)]) == [Stale(claim=old.claim)]


@pytest.mark.parametrize(("first", "second"), list(product(ENDS, ENDS)))
def test_a_claim_named_twice_is_settled_once_by_the_first(
    engine: Engine, make_job: MakeJob, first: State, second: State
) -> None:
    """Two words about one claim, in one batch or in two: the first one holds."""
    job = make_job(State.CLAIMED)
    assert engine.finish([settlement(job, first), settlement(job, second)]) == [
        Settled(claim=job, state=first), Stale(claim=job),
    ]  # fmt: skip
    assert state_of(engine, job.id) is first
    assert engine.finish([settlement(job, second)]) == [Stale(claim=job)]
    assert state_of(engine, job.id) is first


def test_a_batch_settles_the_live_and_names_the_stale(engine: Engine, make_job: MakeJob) -> None:
    """One lost claim costs the others nothing; each gets its answer, in order."""
    done = make_job(State.DONE)
    live = [make_job(State.CLAIMED) for _ in range(4)]
    ready = make_job(State.READY)
    old = Claim(id=live[0].id, run=live[0].run - 1)
    unknown = Claim(id=10**12, run=1)
    batch = [
        settlement(done), settlement(live[0]), settlement(old), settlement(live[1], State.DEAD),
        settlement(unknown), settlement(live[2], State.DELAYED), settlement(ready),
        settlement(live[3], State.READY), settlement(live[0], State.DEAD),
    ]  # fmt: skip
    assert engine.finish(batch) == [
        Stale(claim=done), Settled(claim=live[0], state=State.DONE), Stale(claim=old),
        Settled(claim=live[1], state=State.DEAD), Stale(claim=unknown),
        Settled(claim=live[2], state=State.DELAYED), Stale(claim=ready),
        Settled(claim=live[3], state=State.READY), Stale(claim=live[0]),
    ]  # fmt: skip
    assert engine.finish([]) == []


def test_handing_back_what_was_handed_back_is_no_anomaly(engine: Engine, make_job: MakeJob) -> None:
    """Worker and keeper may both release an unstarted job; only other stale writes count."""
    job = make_job(State.CLAIMED)
    assert engine.finish([settlement(job, State.READY)]) == [Settled(claim=job, state=State.READY)]
    assert engine.finish([settlement(job, State.READY)]) == [Stale(claim=job)]
    assert ("stale_claims_total", "", "", "") not in engine.snapshot().counters
    engine.finish([settlement(job)])
    assert engine.snapshot().counters[("stale_claims_total", "", "", "")] == 1


# --- what a settlement writes -------------------------------------------------------------------


@pytest.mark.parametrize("to", [State.READY, State.DELAYED, State.DEAD])
def test_charges_and_deaths_add_up(engine: Engine, make_job: MakeJob, to: State) -> None:
    """A job is charged with what its settlements say, over all its runs."""
    job = make_job(State.CLAIMED)
    engine.finish([settlement(job, State.READY, charge=True, death=True)])
    engine.finish([settlement(take(engine)[0], State.READY)])
    (row,) = take(engine)
    assert (row.attempts, row.deaths) == (1, 1)
    engine.finish([settlement(row, to, charge=True, death=True)])
    record = engine.find(job.id)
    assert record is not None
    assert (record.attempts, record.deaths) == (2, 2)


def test_the_ledger_tells_every_attempt_in_order(engine: Engine, clock: FakeClock) -> None:
    """What happened to a job can be read from it: when, how, why and where."""
    (job_id,) = put(engine)
    outcomes = [Outcome.FAILED, Outcome.CRASHED, Outcome.TIMED_OUT, Outcome.LEASE_LOST]
    for outcome in outcomes:
        (row,) = take(engine)
        clock.advance(2)
        engine.finish([
            settlement(
                row, State.READY, charge=True, outcome=outcome, started_us=row.claimed_us,
                cause="why", error=f"it {outcome}",
            )
        ])  # fmt: skip
    (unstarted,) = take(engine, starts=False)
    engine.finish([settlement(unstarted, State.READY)])
    (last,) = take(engine)
    clock.advance(1)
    engine.finish([settlement(last, started_us=last.claimed_us)])
    record = engine.find(job_id)
    assert record is not None
    assert [line.outcome for line in record.ledger] == [*outcomes, Outcome.SUCCEEDED]
    assert [line.run for line in record.ledger] == [1, 2, 3, 4, 6]
    assert [line.error for line in record.ledger] == [*[f"it {one}" for one in outcomes], None]
    assert {line.worker for line in record.ledger} == {"test/0"}
    assert [line.finished_us - line.started_us for line in record.ledger] == [
        *[2 * SECOND_US] * 4, SECOND_US,
    ]  # fmt: skip


def test_the_ledger_keeps_the_newest_hundred(engine: Engine, database: Path) -> None:
    """A job that fails for ever does not fill the disk with its history."""
    (job_id,) = put(engine)
    holder = engine.hold(Holder(worker="w"))
    for _ in range(130):
        (row,) = engine.claim(request(QUEUE), holder=holder)
        engine.finish([settlement(row, State.READY, charge=True, started_us=row.claimed_us)])
    record = engine.find(job_id)
    assert record is not None
    assert [line.run for line in record.ledger] == list(range(31, 131))
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT count(*) FROM attempt").fetchone() == (100,)


@pytest.mark.parametrize("length", [10, 10**6])
def test_errors_are_bounded_and_storable(engine: Engine, make_job: MakeJob, length: int) -> None:
    """What a handler says cannot break the store: no NUL, no lone surrogate, no megabytes."""
    job = make_job(State.CLAIMED)
    text = "the start" + "\ud800\0é" * length + "the end"
    engine.finish(
        [settlement(job, State.DEAD, error=text, traceback=text, started_us=1)]
    )  # fmt: skip
    record = engine.find(job.id)
    assert record is not None
    assert record.error is not None
    assert record.traceback is not None
    assert record.error.startswith("the start")
    assert record.traceback.endswith("the end")
    for kept, most in ((record.error, ERROR_CHARS_MAX), (record.traceback, TRACEBACK_CHARS_MAX)):
        assert len(kept) <= most
        assert "\0" not in kept
        kept.encode("utf-8")


# --- a worker's turn ----------------------------------------------------------------------------


def test_a_turn_settles_and_claims_in_one_go(engine: Engine) -> None:
    """A worker's turn is one transaction: what it finished, and what it does next."""
    first, second, third = put(engine, *[new_job() for _ in range(3)])
    holder = engine.hold(Holder(worker="w"))
    _, (one,) = engine.turn((), request(QUEUE), holder=holder)
    results, (two, three) = engine.turn([settlement(one)], request(QUEUE, limit=5), holder=holder)
    assert results == [Settled(claim=one.claim, state=State.DONE)]
    assert (one.id, two.id, three.id) == (first, second, third)
    results, none = engine.turn([settlement(two), settlement(one)], None, holder=holder)
    assert results == [Settled(claim=two.claim, state=State.DONE), Stale(claim=one.claim)]
    assert none == []


def test_a_turn_may_claim_what_it_just_released(engine: Engine) -> None:
    """Settling comes first, so a released job is there to be claimed, as a new run."""
    put(engine)
    holder = engine.hold(Holder(worker="w"))
    (row,) = engine.claim(request(QUEUE), holder=holder)
    _, (again,) = engine.turn([settlement(row, State.READY)], request(QUEUE), holder=holder)
    assert (again.id, again.run) == (row.id, row.run + 1)


def test_an_attempt_that_counts_as_started_stands_in_the_ledger_too(engine: Engine) -> None:
    """A worker may die between its claim, which is the start, and its note that it begins."""
    put(engine)
    (row,) = take(engine, starts=True)
    engine.finish([settlement(row, State.READY, outcome=Outcome.INTERRUPTED)])
    counts = engine.counts(QUEUE)
    record = engine.find(row.id)
    assert record is not None
    (line,) = record.ledger
    assert (line.run, line.outcome) == (row.run, Outcome.INTERRUPTED)
    assert line.started_us == row.claimed_us
    assert counts["attempts_started_total"] == 1
    assert counts["attempts_finished_total:interrupted"] == 1


def test_a_batch_that_was_not_started_is_counted_when_it_starts(
    engine: Engine, clock: FakeClock
) -> None:
    """With batches a claim is no attempt: the wait ends, and the attempt begins, at the start."""
    put(engine)
    (row,) = take(engine, starts=False)
    assert "attempts_started_total" not in engine.counts(QUEUE)
    clock.advance(7)
    engine.finish([settlement(row, started_us=clock.wall_us(), duration_us=2 * SECOND_US)])
    counts = engine.counts(QUEUE)
    assert (counts["claims_total"], counts["attempts_started_total"]) == (1, 1)
    histograms = engine.snapshot().histograms
    assert histograms[("queue_wait_seconds", QUEUE, QUEUE, "")].total == 7
    assert histograms[("attempt_duration_seconds", QUEUE, QUEUE, "ok")].total == 2


# --- cancel -------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", list(State))
def test_only_a_waiting_job_can_be_cancelled(
    engine: Engine, make_job: MakeJob, state: State
) -> None:
    """What runs is not torn away, and what is finished stays as it ended."""
    job = make_job(state)
    waiting = state in TRANSITIONS["cancel"][0]
    assert engine.cancel(QUEUE, [job.id]) == int(waiting)
    assert state_of(engine, job.id) is (State.CANCELLED if waiting else state)
    assert engine.cancel(QUEUE, [job.id]) == 0


def test_cancelling_counts_each_job_once_and_only_in_its_queue(
    engine: Engine, make_job: MakeJob
) -> None:
    """Ids given twice, unknown ids and ids of another queue are not counted."""
    job = make_job(State.READY).id
    other = make_job(State.READY, queue="other").id
    assert engine.cancel(QUEUE, [job, job, other, 10**9]) == 1
    assert state_of(engine, other) is State.READY
    assert engine.cancel(None, [job, other]) == 1
    assert engine.cancel("no such queue", [job]) == 0
    assert engine.counts(QUEUE)["jobs_finished_total:cancelled"] == 1


# --- the façade ---------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["ack", "nack", "fail", "release"])
def test_settling_twice_raises_and_names_the_claim(queue: Queue[Any], way: str) -> None:
    """A double settlement is a fault of the caller that must not pass unseen."""
    queue.put(1)
    job = queue.get(timeout=0)
    assert job is not None
    getattr(queue, way)(job)
    for again in ("ack", "nack", "fail", "release"):
        with pytest.raises(StaleClaim, match=f"job {job.id} run {job.run}") as caught:
            getattr(queue, again)(job)
        assert caught.value.claims == ((job.id, job.run),)


def test_a_batch_with_a_stale_claim_settles_the_rest(queue: Queue[Any]) -> None:
    """The error names who was refused; all others are settled."""
    queue.put_many([1, 2, 3])
    jobs = queue.get_many(3)
    queue.release(jobs[1])
    with pytest.raises(StaleClaim) as caught:
        queue.ack(jobs)
    assert caught.value.claims == ((jobs[1].id, jobs[1].run),)
    counts = queue.counts()
    assert (counts.done, counts.ready, counts.claimed) == (2, 1, 0)


def test_a_job_is_tried_as_often_as_allowed_and_then_dead(
    queue: Queue[Any], clock: FakeClock
) -> None:
    """`max_attempts` counts the first attempt, and releases spend none."""
    job_id = queue.put("x", max_attempts=3)
    for attempt in (1, 2, 3):
        job = queue.get(timeout=0)
        assert job is not None
        assert (job.id, job.attempt, job.max_attempts) == (job_id, attempt, 3)
        queue.release(job)
        job = queue.get(timeout=0)
        assert job is not None
        assert job.attempt == attempt
        queue.nack(job, error=f"no {attempt}", delay=5)
        assert queue.get(timeout=0) is None
        clock.advance(5)
    (dead,) = queue.dead()
    assert (dead.id, dead.reason, dead.error) == (job_id, Reason.EXHAUSTED, "no 3")
    found = queue.find(job_id)
    assert found is not None
    failed = [line.error for line in found.ledger if line.outcome is Outcome.FAILED]
    assert failed == ["no 1", "no 2", "no 3"]


def test_a_failed_job_is_dead_at_once(queue: Queue[Any]) -> None:
    """`fail` asks for no other attempt."""
    job_id = queue.put("x")
    job = queue.get(timeout=0)
    assert job is not None
    queue.fail(job, error="never")
    (dead,) = queue.dead(reason=Reason.REJECTED)
    assert (dead.id, dead.error) == (job_id, "never")


def test_a_charged_retry_stands_at_the_end_and_a_released_job_where_it_stood(
    engine: Engine,
) -> None:
    """A job that fails again and again does not keep the others waiting."""
    first, second, third = put(engine, new_job(), new_job(), new_job())
    failing, released = take(engine, 2)
    assert (failing.id, released.id) == (first, second)
    engine.finish(
        [settlement(failing, State.READY, charge=True), settlement(released, State.READY)]
    )
    assert [row.id for row in take(engine, 3)] == [second, third, first]


def test_a_job_that_has_started_no_longer_expires(engine: Engine, clock: FakeClock) -> None:
    """Expiry is about jobs that nobody began: a late retry is better than none."""
    (job_id,) = put(engine, new_job(expires_us=SECOND_US))
    (row,) = take(engine)
    engine.finish([settlement(row, State.READY, charge=True)])
    clock.advance(10)
    assert [again.id for again in take(engine)] == [job_id]


def test_a_lease_is_extended_by_a_number_of_seconds(database: Path) -> None:
    """None is no length of time: it would have ended the lease at once."""
    with Queue[int](database) as queue:
        queue.put(1)
        job = queue.get(timeout=0)
        assert job is not None
        with pytest.raises(PayloadInvalid, match="number of seconds"):
            queue.extend(job, None)  # type: ignore[arg-type]
