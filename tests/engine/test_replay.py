"""Show that dead jobs, and only they, can be run again or removed for good."""

from __future__ import annotations

import os
from typing import Any

import pytest

from queue_core import IdempotencyConflict, JobNotFound, Outcome, Queue, Reason, State
from queue_core.clock import FakeClock
from queue_core.engine import Engine
from tests.engine.conftest import (
    QUEUE,
    SECOND_US,
    Fork,
    MakeJob,
    OpenEngine,
    exit_codes,
    new_job,
    put,
    settlement,
    state_of,
    take,
)

ALIVE = [state for state in State if state is not State.DEAD]


@pytest.mark.parametrize("state", ALIVE)
@pytest.mark.parametrize("way", ["replay", "discard"])
def test_only_a_dead_job_can_be_replayed_or_discarded(
    engine: Engine, queue: Queue[Any], make_job: MakeJob, state: State, way: str
) -> None:
    """What lives or ended well is left alone, and the façade says that it found no such job."""
    job = make_job(state)
    before = engine.find(job.id)
    assert getattr(engine, way)(None, [job.id]) == 0
    with pytest.raises(JobNotFound, match=str(job.id)):
        getattr(queue, way)(job.id)
    assert engine.find(job.id) == before


# --- replay -------------------------------------------------------------------------------------


def test_a_replayed_job_is_ready_with_no_attempt_spent(
    engine: Engine, make_job: MakeJob, clock: FakeClock
) -> None:
    """It starts over with all it was put with, and keeps what happened to it."""
    job = make_job(
        State.DEAD, task="mail", payload=b"x" * 4000, headers='{"a":1}', group="g",
        max_attempts=3, priority=4, key="k",
    )  # fmt: skip
    before = engine.find(job.id)
    assert before is not None
    clock.advance(100)
    assert engine.replay(QUEUE, [job.id]) == 1
    after = engine.find(job.id)
    assert after is not None
    assert (after.state, after.attempts, after.deaths) == (State.READY, 0, 0)
    assert (after.reason, after.error, after.finished_us) == (None, None, None)
    for name in (
        "id", "run", "task", "payload", "headers", "group", "max_attempts", "priority", "key",
        "enqueued_us", "ledger",
    ):  # fmt: skip
        assert getattr(after, name) == getattr(before, name), name
    assert after.ready_us == clock.wall_us()
    assert [line.outcome for line in after.ledger] == [Outcome.REJECTED]


def test_a_replayed_job_queues_behind_those_that_wait(engine: Engine, make_job: MakeJob) -> None:
    """It becomes ready now, so it takes its place now; several keep the order of their ids."""
    dead = [make_job(State.DEAD, priority=0).id for _ in range(3)]
    (waiting,) = put(engine)
    assert engine.replay(QUEUE, list(reversed(dead))) == 3
    assert [row.id for row in take(engine, 9)] == [waiting, *dead]


def test_a_replayed_job_does_not_die_of_its_old_expiry(engine: Engine, clock: FakeClock) -> None:
    """Whoever replays an expired job wants it to run."""
    (job_id,) = put(engine, new_job(expires_us=SECOND_US))
    clock.advance(2)
    assert take(engine) == []
    assert engine.replay(None, [job_id]) == 1
    clock.advance(1000)
    assert [row.id for row in take(engine)] == [job_id]


def test_a_replay_ignores_max_depth(engine: Engine, make_job: MakeJob) -> None:
    """The job had been accepted before; a full queue does not keep it dead."""
    job = make_job(State.DEAD)
    engine.configure(QUEUE, max_depth=1)
    put(engine)
    assert engine.replay(QUEUE, [job.id]) == 1
    assert engine.counts(QUEUE)["ready"] == 2


def test_a_replayed_job_holds_its_key_as_long_as_it_lives(
    engine: Engine, make_job: MakeJob, clock: FakeClock
) -> None:
    """The end of its first life no longer counts: the key is held again, without an end."""
    engine.configure(QUEUE, key_ttl_us=60 * SECOND_US)
    job = make_job(State.DEAD, key="k")
    assert engine.replay(QUEUE, [job.id]) == 1
    clock.advance(1000)
    engine.prune(100)
    assert engine.enqueue(QUEUE, [new_job(key="k")])[0].id == job.id
    with pytest.raises(IdempotencyConflict):
        put(engine, new_job(b"other", key="k"))


def test_a_replay_leaves_a_key_to_the_job_that_took_it_since(
    engine: Engine, make_job: MakeJob, clock: FakeClock
) -> None:
    """Two live jobs may have had one key; it stays with the later."""
    engine.configure(QUEUE, key_ttl_us=SECOND_US)
    old = make_job(State.DEAD, key="k")
    clock.advance(2)
    (newer,) = put(engine, new_job(key="k"))
    assert engine.replay(QUEUE, [old.id]) == 1
    assert engine.enqueue(QUEUE, [new_job(key="k")])[0].id == newer


def test_ids_given_twice_unknown_or_of_another_queue_are_not_counted(
    engine: Engine, make_job: MakeJob
) -> None:
    """The number that comes back is the number of jobs that changed."""
    job = make_job(State.DEAD).id
    other = make_job(State.DEAD, queue="other").id
    assert engine.replay(QUEUE, [job, job, other, 10**9]) == 1
    assert engine.replay("no such queue", [other]) == 0
    assert engine.replay(QUEUE, []) == 0
    assert state_of(engine, other) is State.DEAD
    assert engine.counts(QUEUE)["jobs_replayed_total"] == 1


def test_of_two_who_replay_one_job_one_wins(
    open_engine: OpenEngine, make_job: MakeJob, fork: Fork, engine: Engine
) -> None:
    """Operators at two terminals cannot make one job into two."""
    ids = [make_job(State.DEAD).id for _ in range(20)]

    def replay_all() -> None:
        own: Queue[Any] = Queue("unused", QUEUE, engine=open_engine())
        lost = 0
        for job_id in ids:
            try:
                own.replay(job_id)
            except JobNotFound:
                lost += 1
        os._exit(lost)  # the number is the exit code

    lost = exit_codes([fork(replay_all) for _ in range(2)])
    assert sum(lost) == len(ids)
    assert engine.counts(QUEUE)["ready"] == len(ids)


# --- discard ------------------------------------------------------------------------------------


def test_a_discarded_job_is_gone_with_its_key(engine: Engine, make_job: MakeJob) -> None:
    """Nothing of it is left, and its key is free for a new wish."""
    job = make_job(State.DEAD, key="k", payload=b"x" * 4000)
    assert engine.discard(QUEUE, [job.id, job.id]) == 1
    assert engine.find(job.id) is None
    assert engine.discard(QUEUE, [job.id]) == 0
    (fresh,) = engine.enqueue(QUEUE, [new_job(b"other", key="k")])
    assert not fresh.duplicate
    counts = engine.counts(QUEUE)
    assert (counts["dead"], counts["jobs_finished_total:discarded"]) == (0, 1)


def test_a_discard_keeps_to_its_queue(engine: Engine, make_job: MakeJob) -> None:
    """An id of another queue is not touched by a slip."""
    other = make_job(State.DEAD, queue="other")
    assert engine.discard(QUEUE, [other.id]) == 0
    assert engine.discard(None, [other.id]) == 1


# --- the dead, listed ---------------------------------------------------------------------------


def test_the_dead_can_be_paged_by_reason(engine: Engine, queue: Queue[Any]) -> None:
    """An operator goes through them page by page, without one twice or one missed."""
    ids = put(engine, *[new_job() for _ in range(10)])
    for row in take(engine, 10):
        reason = Reason.POISON if row.id % 2 else Reason.EXHAUSTED
        engine.finish([settlement(row, State.DEAD, reason=reason, error=f"job {row.id}")])
    pages: list[int] = []
    while page := queue.dead(limit=3, after=pages[-1] if pages else 0):
        pages.extend(job.id for job in page)
    assert pages == ids
    poison = queue.dead(reason="poison", limit=100)
    assert [job.id for job in poison] == [id_ for id_ in ids if id_ % 2]
    assert [job.error for job in poison] == [f"job {job.id}" for job in poison]
