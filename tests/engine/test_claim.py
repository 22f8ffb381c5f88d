"""Show that claims are fair, exclusive and fenced, and take only what may be taken."""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Any

import pytest

from queue_core import Queue, Reason, State
from queue_core.clock import FakeClock
from queue_core.engine import Engine, Holder
from tests.engine.conftest import (
    LEASE_US,
    QUEUE,
    SECOND_US,
    Fork,
    MakeJob,
    OpenEngine,
    exit_codes,
    new_job,
    put,
    request,
    settlement,
    state_of,
    take,
)


@pytest.mark.parametrize("state", [state for state in State if state is not State.READY])
def test_only_a_ready_job_can_be_claimed(engine: Engine, make_job: MakeJob, state: State) -> None:
    """A job that is waiting, taken or finished is nobody's to take."""
    job = make_job(state)
    assert take(engine) == []
    record = engine.find(job.id)
    assert record is not None
    assert (record.state, record.run) == (state, job.run)


def test_a_claim_is_one_run_more(engine: Engine) -> None:
    """Each claim of a job has its own number, which never comes again."""
    (job_id,) = put(engine)
    for run in (1, 2, 3):
        (row,) = take(engine)
        assert (row.id, row.run, row.attempts) == (job_id, run, 0)
        engine.finish([settlement(row, State.READY)])


def test_an_empty_queue_gives_nothing_and_writes_nothing(engine: Engine) -> None:
    """Idle workers cost the disk no byte."""
    holder = engine.hold(Holder(worker="w"))
    engine.claim(request("never made"), holder=holder)
    before = engine.version()
    for _ in range(5):
        assert engine.claim(request(QUEUE), holder=holder) == []
        assert engine.turn((), request(QUEUE), holder=holder) == ([], [])
        assert engine.promote(100) == 0
        assert engine.reap(lambda row, _: settlement(row, State.READY), 100) == []
        assert engine.prune(100) == 0
    assert engine.version() == before


# --- order --------------------------------------------------------------------------------------


def test_claims_go_by_priority_and_then_by_arrival(engine: Engine) -> None:
    """Larger priority first; inside one priority, first in, first out."""
    priorities = random.Random(7).choices([-5, 0, 0, 3, 2**31 - 1], k=60)
    ids = put(engine, *[new_job(priority=priority) for priority in priorities])
    expected = sorted(ids, key=lambda id_: (-priorities[ids.index(id_)], id_))
    taken: list[int] = []
    while rows := take(engine, random.Random(len(taken)).randint(1, 7)):
        taken.extend(row.id for row in rows)
    assert taken == expected


def test_a_released_job_goes_back_to_its_place(engine: Engine) -> None:
    """Who was first stays first when a worker hands a job back unstarted."""
    ids = put(engine, *[new_job() for _ in range(4)])
    rows = take(engine, 3)
    engine.finish([settlement(row, State.READY) for row in reversed(rows)])
    assert [row.id for row in take(engine, 10)] == ids


def test_a_clock_that_goes_back_lets_nobody_jump_the_queue(
    engine: Engine, clock: FakeClock
) -> None:
    """Order is by arrival; what the producer's wall clock says has no part in it."""
    (first,) = put(engine)
    clock.step_wall(-3600)
    (second,) = put(engine)
    assert [row.id for row in take(engine, 2)] == [first, second]


def test_a_promoted_job_queues_behind_those_that_were_ready(
    engine: Engine, clock: FakeClock
) -> None:
    """A job takes its place when it becomes ready, not when it was put."""
    (late,) = put(engine, new_job(delay_us=5 * SECOND_US))
    (early,) = put(engine)
    clock.advance(5)
    assert engine.promote(10) == 1
    assert [row.id for row in take(engine, 2)] == [early, late]


def test_delayed_jobs_of_high_priority_stay_out_of_claims(engine: Engine) -> None:
    """A thousand future jobs, however important, neither come early nor hide what is ready."""
    put(engine, *[new_job(priority=9, delay_us=SECOND_US) for _ in range(1000)])
    (ready,) = put(engine)
    assert [row.id for row in take(engine, 5)] == [ready]
    assert take(engine, 5) == []


def test_listed_queues_are_served_in_their_order(engine: Engine) -> None:
    """A worker says which queue comes first; priority counts inside a queue only."""
    (low,) = put(engine, new_job(priority=9), queue="low")
    (high,) = put(engine, queue="high")
    holder = engine.hold(Holder(worker="w"))
    rows = engine.claim(request("missing", "high", "low", limit=5), holder=holder)
    assert [(row.id, row.queue) for row in rows] == [(high, "high"), (low, "low")]


def test_without_a_list_no_queue_starves(engine: Engine) -> None:
    """A claimer of all queues does not always begin with the same one."""
    for name in ("a", "b", "c"):
        put(engine, *[new_job() for _ in range(60)], queue=name)
    holder = engine.hold(Holder(worker="w"))
    first = {engine.claim(request(), holder=holder)[0].queue for _ in range(60)}
    assert first == {"a", "b", "c"}  # the chance of a miss is below 3 * (2/3)**60


def test_a_claim_takes_at_most_its_limit_over_all_queues(engine: Engine) -> None:
    """The limit is the claimer's room, wherever the jobs come from."""
    for name in ("a", "b"):
        put(engine, *[new_job() for _ in range(3)], queue=name)
    holder = engine.hold(Holder(worker="w"))
    assert len(engine.claim(request("a", "b", limit=4), holder=holder)) == 4
    assert len(engine.claim(request("a", "b", limit=4), holder=holder)) == 2


# --- pause --------------------------------------------------------------------------------------


def test_a_paused_queue_takes_puts_and_gives_nothing(engine: Engine, queue: Queue[Any]) -> None:
    """A pause holds back claims of every kind; what is claimed can still be settled."""
    queue.put(1)
    job = queue.get(timeout=0)
    assert job is not None
    queue.pause()
    waiting = queue.put(2)
    holder = engine.hold(Holder(worker="w"))
    assert queue.get(timeout=0) is None
    assert engine.claim(request(limit=9), holder=holder) == []
    assert engine.claim(request(QUEUE, limit=9), holder=holder) == []
    queue.ack(job)
    queue.resume()
    after = queue.get(timeout=0)
    assert after is not None
    assert after.id == waiting


# --- expiry -------------------------------------------------------------------------------------


def test_a_job_that_was_not_started_in_time_is_dead_as_expired(
    engine: Engine, clock: FakeClock
) -> None:
    """An outdated job is kept for people to see, and is never run."""
    (job_id,) = put(engine, new_job(expires_us=5 * SECOND_US, key="k"))
    clock.advance(5)
    assert take(engine) == []
    record = engine.find(job_id)
    assert record is not None
    assert (record.state, record.reason, record.attempts) == (State.DEAD, Reason.EXPIRED, 0)
    assert record.ledger == ()


def test_an_expired_job_counts_as_dead_and_not_as_an_attempt(
    engine: Engine, clock: FakeClock
) -> None:
    """Attempts that ended never outnumber attempts that began."""
    put(engine, new_job(expires_us=SECOND_US))
    clock.advance(1)
    assert take(engine, starts=True) == []
    counts = engine.counts(QUEUE)
    assert counts["dead_letters_total:expired"] == 1
    finished = sum(n for name, n in counts.items() if name.startswith("attempts_finished_total"))
    assert (counts.get("attempts_started_total", 0), finished) == (0, 0)
    assert counts.get("claims_total", 0) == 0


def test_expiry_counts_from_the_moment_a_job_is_due(engine: Engine, clock: FakeClock) -> None:
    """A delayed job gets its whole time after its delay."""
    (job_id,) = put(engine, new_job(delay_us=10 * SECOND_US, expires_us=5 * SECOND_US))
    clock.advance(14.999)
    engine.promote(1)
    assert [row.id for row in take(engine)] == [job_id]


@pytest.mark.parametrize("number", [1, 5, 40, 300])
def test_expired_jobs_do_not_hide_the_live_one_behind_them(
    engine: Engine, clock: FakeClock, number: int
) -> None:
    """A claim comes back empty only when there is nothing to claim."""
    put(engine, *[new_job(expires_us=SECOND_US) for _ in range(number)])
    (live,) = put(engine)
    clock.advance(2)
    assert [row.id for row in take(engine, 1)] == [live]
    assert engine.counts(QUEUE)["dead"] == number


# --- parked tasks -------------------------------------------------------------------------------


def test_a_job_without_a_handler_steps_aside_and_stays_ready(engine: Engine) -> None:
    """A task nobody knows blocks no one, is not dead, and is shown as ready."""
    (unknown,) = put(engine, new_job(task="unknown", priority=9))
    (known,) = put(engine, new_job(task="known"))
    rows = take(engine, tasks=frozenset({"known"}))
    assert [row.id for row in rows] == [known]
    assert take(engine, tasks=frozenset({"known"})) == []
    assert state_of(engine, unknown) is State.READY
    assert engine.counts(QUEUE)["ready"] == 1


def test_a_parked_job_comes_back_when_a_claimer_has_its_task(engine: Engine) -> None:
    """A deploy that adds the handler finds the jobs, in their place."""
    first, second = put(engine, new_job(task="new"), new_job(task="new"))
    (other,) = put(engine, new_job(task="old"))
    assert [row.id for row in take(engine, 9, tasks=frozenset({"old"}))] == [other]
    rows = take(engine, 9, tasks=frozenset({"old", "new"}))
    assert [row.id for row in rows] == [first, second]


def test_a_parked_job_is_there_for_a_claimer_of_any_task(engine: Engine) -> None:
    """A library's `get` takes every task, parked or not."""
    (job_id,) = put(engine, new_job(task="unknown"))
    assert take(engine, tasks=frozenset({"known"})) == []
    assert [row.id for row in take(engine, tasks=None)] == [job_id]


def test_parked_jobs_do_not_hide_the_known_one_behind_them(engine: Engine) -> None:
    """However many step aside, the claim goes on to what it can do."""
    put(engine, *[new_job(task="unknown") for _ in range(50)])
    (known,) = put(engine, new_job(task="known"))
    assert [row.id for row in take(engine, 1, tasks=frozenset({"known"}))] == [known]


@pytest.mark.parametrize("way", ["cancel", "prune"])
def test_a_parked_job_can_be_cancelled(engine: Engine, way: str) -> None:
    """Setting a job aside takes nothing from what people may do with it."""
    (job_id,) = put(engine, new_job(task="unknown"))
    take(engine, tasks=frozenset({"known"}))
    assert engine.cancel(None, [job_id]) == 1
    assert engine.counts(QUEUE)["cancelled"] == 1
    if way == "prune":
        engine.configure(QUEUE, keep_done_us=0)
        assert engine.prune(1) == 1


def test_claimers_of_other_queues_leave_a_parked_job_alone(engine: Engine) -> None:
    """A worker that has the task but not the queue must not stir the job for ever."""
    put(engine, new_job(task="mail"), queue="theirs")
    put(engine, new_job(task="mail"), queue="ours")
    assert take(engine, queue="theirs", tasks=frozenset({"other"})) == []
    ours = engine.hold(Holder(worker="ours"))
    wanted = request("ours", tasks=frozenset({"mail"}))
    assert len(engine.claim(wanted, holder=ours)) == 1
    before = engine.version()
    assert engine.claim(wanted, holder=ours) == []
    assert engine.version() == before


# --- fencing and holders ------------------------------------------------------------------------


def test_claims_of_one_holder_can_be_listed_and_handed_back(engine: Engine) -> None:
    """A supervisor finds what a dead worker held."""
    put(engine, *[new_job() for _ in range(5)])
    one = engine.hold(Holder(worker="a/0", instance="main"))
    two = engine.hold(Holder(worker="a/1", instance="main"))
    library = engine.hold(Holder(worker="pid 1"))
    first = engine.claim(request(QUEUE, limit=2), holder=one)
    second = engine.claim(request(QUEUE, limit=2), holder=two)
    engine.claim(request(QUEUE), holder=library)
    assert engine.held(one) == first
    assert engine.held(two) == second
    found = engine.abandoned("main", [one], 9)
    assert [(one.holder, one.row) for one in found] == [(two, row) for row in second]
    assert len(engine.abandoned("main", [], 3)) == 3
    assert engine.abandoned("other", [], 9) == []
    engine.finish([settlement(row, State.READY) for row in first])
    assert engine.held(one) == []


def test_a_holders_number_is_never_given_again(engine: Engine, clock: FakeClock) -> None:
    """Two processes with one number could renew and hand back each other's claims."""
    numbers = [engine.hold(Holder(worker="w")) for _ in range(3)]
    engine.configure(QUEUE, keep_done_us=0)
    put(engine)
    clock.advance(8 * 24 * 3600)
    (row,) = engine.claim(request(QUEUE), holder=numbers[0])
    engine.finish([settlement(row)])
    assert engine.prune(100) == 1
    assert engine.hold(Holder(worker="w")) not in numbers


def test_a_worker_that_lives_for_weeks_is_still_named(engine: Engine, clock: FakeClock) -> None:
    """Pruning forgets holders of long ago, but not one that goes on claiming."""
    queue: Queue[Any] = Queue("unused", QUEUE, engine=engine)
    engine.configure(QUEUE, keep_done_us=0)
    for _ in range(2):
        queue.put(1)
        job = queue.get(timeout=0)
        assert job is not None
        record = engine.find(job.id)
        assert record is not None
        assert record.worker == f"pid {os.getpid()}"
        queue.ack(job)
        clock.advance(8 * 24 * 3600)
        assert queue.prune() == 1


def test_no_job_is_claimed_twice_by_processes_at_once(
    open_engine: OpenEngine, fork: Fork, tmp_path: Any
) -> None:
    """Claims exclude each other across processes: every job goes to exactly one."""
    engine = open_engine()
    put(engine, *[new_job() for _ in range(400)])

    def claimer(name: str) -> None:
        own = open_engine()
        holder = own.hold(Holder(worker=name))
        with (tmp_path / name).open("w") as seen:
            while rows := own.claim(request(QUEUE, limit=7), holder=holder):
                seen.writelines(f"{row.id} {row.run}\n" for row in rows)

    names = [f"claimer{number}" for number in range(4)]
    assert exit_codes([fork(lambda name=name: claimer(name)) for name in names]) == [0] * 4
    seen = [line for name in names for line in (tmp_path / name).read_text().splitlines()]
    assert len(seen) == len(set(seen)) == 400
    assert engine.counts(QUEUE)["claimed"] == 400


# --- waiting ------------------------------------------------------------------------------------


def test_get_without_waiting_returns_at_once(queue: Queue[Any]) -> None:
    """`timeout=0` is a look."""
    before = time.monotonic()
    assert queue.get(timeout=0) is None
    assert time.monotonic() - before < 1


def test_a_waiting_get_is_woken_by_a_put(queue: Queue[Any]) -> None:
    """A consumer need not poll: the put wakes it."""
    got: list[Any] = []
    waiter = threading.Thread(target=lambda: got.append(queue.get(timeout=20)))
    waiter.start()
    job_id = queue.put("x")
    waiter.join(20)
    assert not waiter.is_alive()
    assert got[0].id == job_id


# --- what cannot be decoded ---------------------------------------------------------------------


class Raw:
    """Store bytes as they are."""

    def dumps(self, payload: bytes, /) -> bytes:
        """Return them."""
        return payload

    def loads(self, data: bytes, /) -> bytes:
        """Return them."""
        return data


BAD_BYTES = [b"\xff\xfe", b"{", b"", b"[" * 100_000]


@pytest.mark.parametrize("raw", BAD_BYTES, ids=["no utf-8", "cut off", "empty", "too deep"])
def test_bytes_that_do_not_decode_are_dead_with_the_bytes_kept(
    engine: Engine, queue: Queue[Any], raw: bytes
) -> None:
    """The reader sees no exception, and an operator can still see what was there."""
    job_id = Queue("unused", QUEUE, engine=engine, serializer=Raw()).put(raw)
    assert queue.get(timeout=0) is None
    (dead,) = queue.dead()
    assert (dead.id, dead.reason, dead.payload_bytes) == (job_id, Reason.UNDECODABLE, raw)
    assert dead.payload is None
    assert dead.payload_error
    assert "does not decode" in (dead.error or "")


def test_bytes_that_do_not_decode_do_not_hide_the_job_behind_them(
    engine: Engine, queue: Queue[Any]
) -> None:
    """`get` returns None only when there is nothing to get."""
    raw = Queue("unused", QUEUE, engine=engine, serializer=Raw())
    for _ in range(3):
        raw.put(b"\xff")
    good = queue.put("good")
    job = queue.get(timeout=0)
    assert job is not None
    assert (job.id, job.payload) == (good, "good")


def test_a_lease_begins_when_the_claim_is_made(engine: Engine, clock: FakeClock) -> None:
    """The whole lease is there for the work, however long the wait for the lock was."""
    put(engine)
    clock.advance(1000)
    (row,) = take(engine, lease_us=LEASE_US)
    clock.advance(59.9)
    assert engine.reap(lambda claim, _: settlement(claim, State.READY), 10) == []
    clock.advance(0.1)
    assert [one.claim for one in engine.reap(lambda c, _: settlement(c, State.READY), 10)] == [
        row.claim
    ]


def test_a_heap_of_expired_jobs_does_not_hide_the_live_one_behind_it(
    engine: Engine, clock: FakeClock
) -> None:
    """Thousands of them are cleared in one call, in few transactions, and counted one by one."""
    put(engine, *[new_job(expires_us=SECOND_US) for _ in range(5_000)])
    (live,) = put(engine)
    clock.advance(2)
    before = engine.version()
    assert [row.id for row in take(engine)] == [live]
    assert engine.version() - before < 40, "one look cleared too few of them"
    counts = engine.counts(QUEUE)
    assert (counts["dead"], counts["claimed"]) == (5_000, 1)
    assert counts["dead_letters_total:expired"] == 5_000


def test_a_bell_that_rings_in_vain_costs_the_lock_every_other_time_at_most(
    open_engine: OpenEngine,
) -> None:
    """A paused queue is put into: its waiter looks, and a look takes no lock."""
    putter, claimer = open_engine(), open_engine()
    putter.configure(QUEUE, paused=True)
    holder = claimer.hold(Holder(worker="w"))
    claimer.listen([QUEUE])
    before = claimer._file.commits  # type: ignore[attr-defined]
    for _ in range(6):
        putter.enqueue(QUEUE, [new_job()])
        assert claimer.wait([QUEUE], 20)
        assert claimer.turn((), request(QUEUE), holder=holder) == ([], [])
    assert claimer._file.commits - before == 3  # type: ignore[attr-defined]
