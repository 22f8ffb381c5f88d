"""Show that every number is exact, whoever counts, and that jobs can be found and listed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from queue_core import PayloadInvalid, Queue, State
from queue_core.clock import FakeClock
from queue_core.engine import Engine
from queue_core.stats import ATTEMPTS, DURATION, LATENCY, WAIT
from tests.engine.conftest import (
    QUEUE,
    SECOND_US,
    MakeJob,
    OpenEngine,
    Recount,
    new_job,
    put,
    settlement,
    take,
)


@pytest.mark.parametrize("state", list(State))
def test_each_state_is_counted_as_itself(
    engine: Engine, make_job: MakeJob, recount: Recount, state: State
) -> None:
    """A job is in one state, and the counters say which."""
    make_job(state)
    make_job(state, queue="other")
    counts = engine.counts(QUEUE)
    assert {one: counts[one] for one in State} == {one: int(one is state) for one in State}
    assert recount()[QUEUE] == {one.value: counts[one] for one in State}


def test_a_queue_that_never_was_counts_nothing(engine: Engine) -> None:
    """Asking is no reason to make it."""
    assert set(engine.counts("nowhere").values()) == {0}
    assert engine.snapshot().queues == ()


def test_the_totals_tell_what_happened(engine: Engine, clock: FakeClock) -> None:
    """Every transition has its number, and they add up."""
    put(engine, *[new_job(task="t") for _ in range(4)], new_job(task="t", delay_us=1))
    rows = take(engine, 4)
    clock.advance(2)
    ends = [State.DONE, State.DEAD, State.DELAYED, State.READY]
    engine.finish(
        [
            settlement(row, to, started_us=row.claimed_us, duration_us=2 * SECOND_US)
            for row, to in zip(rows, ends, strict=True)
        ]
    )
    engine.promote(9)
    engine.replay(None, [rows[1].id])
    engine.cancel(None, [rows[1].id])
    counts = engine.counts(QUEUE)
    assert {name: value for name, value in counts.items() if name.count("_")} == {
        "jobs_enqueued_total": 5,
        "claims_total": 4,
        "attempts_started_total": 4,
        "attempts_finished_total:succeeded": 1,
        "attempts_finished_total:rejected": 1,
        "attempts_finished_total:failed": 1,
        "attempts_finished_total:interrupted": 1,
        "retries_total:failed": 1,
        "errors_total:__other__": 2,
        "jobs_finished_total:succeeded": 1,
        "jobs_finished_total:dead": 1,
        "jobs_finished_total:cancelled": 1,
        "dead_letters_total:rejected": 1,
        "jobs_promoted_total": 1,
        "jobs_replayed_total": 1,
    }


def test_histograms_tell_wait_duration_latency_and_attempts(
    engine: Engine, clock: FakeClock
) -> None:
    """Each job is in each histogram once, with the time it really took."""
    put(engine, new_job(delay_us=100 * SECOND_US))
    clock.advance(103)
    engine.promote(1)
    (row,) = take(engine)
    clock.advance(4)
    engine.finish([settlement(row, started_us=row.claimed_us, duration_us=4 * SECOND_US)])
    found = engine.snapshot().histograms
    totals = {name: (h.total, sum(h.counts)) for (name, of, _, _), h in found.items() if of}
    assert totals == {WAIT: (3, 1), DURATION: (4, 1), LATENCY: (7, 1), ATTEMPTS: (1, 1)}


def test_numbers_outlive_whoever_counted_them(open_engine: OpenEngine, clock: FakeClock) -> None:
    """Totals are kept with the jobs: over a close, and over a reboot."""
    first = open_engine()
    put(first, new_job(), new_job())
    first.finish([settlement(take(first)[0])])
    before = first.counts(QUEUE)
    first.close()
    assert open_engine().counts(QUEUE) == before
    clock.reboot()
    assert open_engine().counts(QUEUE) == before


def test_numbers_are_seen_by_every_process(open_engine: OpenEngine) -> None:
    """A counter has one value, whoever asks."""
    one, two = open_engine(), open_engine()
    put(one)
    put(two)
    assert one.counts(QUEUE) == two.counts(QUEUE)
    assert one.counts(QUEUE)["ready"] == 2


# --- snapshot -----------------------------------------------------------------------------------


def test_a_snapshot_tells_ages_pauses_and_late_leases(engine: Engine, clock: FakeClock) -> None:
    """One read gives an operator everything about every queue."""
    engine.configure(QUEUE, max_depth=10)
    engine.configure("paused", paused=True)
    put(engine, new_job(priority=1), new_job())
    take(engine)
    clock.advance(70)
    put(engine, new_job(priority=5))
    snapshot = engine.snapshot()
    jobs, paused = snapshot.queues
    assert (jobs.name, jobs.paused, jobs.max_depth) == (QUEUE, False, 10)
    assert (jobs.depth["ready"], jobs.depth["claimed"]) == (2, 1)
    assert (jobs.oldest_ready_age_seconds, jobs.oldest_claimed_age_seconds) == (70, 70)
    assert jobs.stale_leases == 1
    assert (paused.name, paused.paused, paused.oldest_ready_age_seconds) == ("paused", True, 0)
    assert snapshot.taken_us == clock.wall_us()
    assert snapshot.database_bytes > 0


def test_a_clock_that_goes_back_gives_no_negative_age(engine: Engine, clock: FakeClock) -> None:
    """An age is never below nothing."""
    put(engine, new_job(), new_job())
    take(engine)
    clock.step_wall(-1000)
    (facts,) = engine.snapshot().queues
    assert (facts.oldest_ready_age_seconds, facts.oldest_claimed_age_seconds) == (0, 0)


def test_the_version_changes_with_every_commit_of_anybody(open_engine: OpenEngine) -> None:
    """Who shows numbers reads them again only when something happened."""
    one, two = open_engine(), open_engine()
    put(one)
    seen = [one.version()]
    put(two)
    seen.append(one.version())
    put(one)
    seen.append(one.version())
    assert len(set(seen)) == 3
    assert one.version() == seen[-1]


# --- find and select ----------------------------------------------------------------------------


@pytest.mark.parametrize("state", list(State))
def test_a_job_is_found_in_every_state(
    engine: Engine, queue: Queue[Any], make_job: MakeJob, state: State
) -> None:
    """An id is enough to learn where its job stands, with all it was put with."""
    job = make_job(state, payload=b'{"a":1}', task="mail", key="k", headers='{"h":1}', group="g")
    found = queue.find(job.id)
    assert found is not None
    assert (found.id, found.run, found.state, found.queue) == (job.id, job.run, state, QUEUE)
    assert (found.payload, found.task, found.key) == ({"a": 1}, "mail", "k")
    assert (found.headers, found.group) == ({"h": 1}, "g")
    other: Queue[Any] = Queue("unused", "other", engine=engine)
    assert other.find(job.id) is None


@pytest.mark.parametrize("state", list(State))
def test_jobs_of_a_state_are_listed_in_pages(
    engine: Engine, make_job: MakeJob, state: State
) -> None:
    """Pages follow each other by id; queue and task narrow them."""
    ids = [make_job(state, task=f"t{number % 2}").id for number in range(7)]
    for other in State:
        if other is not state:
            make_job(other)
    elsewhere = make_job(state, queue="other").id
    pages: list[int] = []
    while page := engine.select(state, limit=3, after=pages[-1] if pages else 0):
        pages.extend(record.id for record in page)
    assert pages == [*ids, elsewhere]
    assert [job.id for job in engine.select(state, queue=QUEUE)] == ids
    assert [job.id for job in engine.select(state, queue=QUEUE, task="t1")] == ids[1::2]
    assert engine.select(state, queue="nowhere") == []
    assert {job.state for job in engine.select(state)} == {state}


@pytest.mark.parametrize("limit", [0, -1])
def test_a_page_of_nothing_is_empty(engine: Engine, make_job: MakeJob, limit: int) -> None:
    """A negative limit means none, not all."""
    make_job(State.READY)
    assert engine.select(State.READY, limit=limit) == []


def test_an_option_that_does_not_exist_is_refused(engine: Engine) -> None:
    """A slip in an option's name is told, and stores nothing."""
    with pytest.raises(PayloadInvalid, match="max_dept"):
        engine.configure(QUEUE, max_dept=3)
    assert engine.snapshot().queues == ()


def test_peek_shows_what_would_be_claimed_next(database: Path) -> None:
    """Priority first, as with a claim, and nothing is claimed by looking."""
    with Queue[str](database) as queue:
        assert queue.peek() is None
        queue.put("low")
        queue.put("high", priority=5)
        assert queue.peek().state is State.READY  # type: ignore[union-attr]
        assert queue.counts().claimed == 0
        assert queue.peek().payload == "high"  # type: ignore[union-attr]
        assert queue.get(timeout=0).payload == "high"  # type: ignore[union-attr]
        assert queue.peek().payload == "low"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "call",
    [
        lambda queue: queue.find("1"),
        lambda queue: queue.jobs(State.READY, limit="1"),
        lambda queue: queue.dead(after=None),
        lambda queue: queue.get(timeout="soon"),
        lambda queue: queue.get_many(1, timeout=-1),
    ],
)
def test_a_number_that_is_none_is_told_in_a_sentence(
    queue: Queue[Any], call: Callable[[Queue[Any]], object]
) -> None:
    """A slip of types is an error of ours, not of something deep inside."""
    with pytest.raises(PayloadInvalid, match=r"number|seconds"):
        call(queue)
