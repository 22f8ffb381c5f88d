"""Show that a put stores what was given, once, in order, or refuses it whole."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from queue_core import (
    IdempotencyConflict,
    JobNotFound,
    PayloadInvalid,
    PayloadTooLarge,
    Queue,
    QueueFull,
    State,
)
from queue_core.clock import FakeClock
from queue_core.engine import Engine
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


def test_a_job_keeps_everything_it_was_put_with(engine: Engine, clock: FakeClock) -> None:
    """Nothing a producer says about a job is lost between put and claim."""
    job = new_job(
        b'{"a":1}', task="mail", priority=7, key="k", headers='{"trace":"x"}',
        expires_us=9 * SECOND_US, group="g", max_attempts=3,
    )  # fmt: skip
    (job_id,) = put(engine, job)
    (row,) = take(engine)
    assert (row.id, row.run, row.queue, row.task, row.payload) == (
        job_id, 1, QUEUE, "mail", b'{"a":1}',
    )  # fmt: skip
    assert (row.priority, row.key, row.headers, row.group) == (7, "k", '{"trace":"x"}', "g")
    assert (row.attempts, row.max_attempts, row.deaths) == (0, 3, 0)
    assert (row.enqueued_us, row.ready_us) == (clock.wall_us(), clock.wall_us())
    assert row.expires_us == clock.wall_us() + 9 * SECOND_US


@pytest.mark.parametrize(
    ("delay_us", "state"), [(0, State.READY), (1, State.DELAYED), (5 * SECOND_US, State.DELAYED)]
)
def test_a_delay_decides_between_ready_and_delayed(
    engine: Engine, clock: FakeClock, delay_us: int, state: State
) -> None:
    """Only a job without delay can be claimed at once."""
    (job_id,) = put(engine, new_job(delay_us=delay_us))
    record = engine.find(job_id)
    assert record is not None
    assert record.state is state
    assert record.due_us == (clock.wall_us() + delay_us if delay_us else None)
    assert [row.id for row in take(engine)] == ([] if delay_us else [job_id])


def test_ids_grow_in_the_order_of_puts(engine: Engine) -> None:
    """A batch is stored in its own order, and after what came before."""
    first = put(engine, *[new_job() for _ in range(3)])
    second = put(engine, *[new_job() for _ in range(3)])
    assert first + second == sorted({*first, *second})


def test_an_empty_batch_stores_nothing(engine: Engine, queue: Queue[Any]) -> None:
    """A caller need not look whether its list is empty."""
    assert engine.enqueue(QUEUE, []) == []
    assert queue.put_many([]) == []
    assert engine.select(State.READY) == []


# --- ids ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["discard", "prune"])
def test_an_id_is_never_reused_when_its_row_is_gone(
    engine: Engine, make_job: MakeJob, way: str
) -> None:
    """Whoever wrote an id down can never meet another job under it."""
    engine.configure(QUEUE, keep_done_us=0)
    job_id = make_job(State.DEAD if way == "discard" else State.DONE).id
    assert (engine.discard(QUEUE, [job_id]) if way == "discard" else engine.prune(10)) == 1
    assert engine.find(job_id) is None
    assert put(engine)[0] > job_id


def test_ids_leap_at_the_first_opening_after_a_boot(
    open_engine: OpenEngine, clock: FakeClock
) -> None:
    """A power cut may have undone a put whose id was seen: that id must not come again."""
    before = open_engine()
    (last,) = put(before)
    before.close()
    again = open_engine()
    (same_boot,) = put(again)
    assert same_boot == last + 1
    again.close()
    clock.reboot()
    (after,) = put(open_engine())
    assert after > same_boot + 2**20


def test_a_rolled_back_put_leaves_no_key_and_no_job(engine: Engine) -> None:
    """All of a batch is refused when one of it is: no job, no key, no count remains."""
    put(engine, new_job(b"1", key="taken"))
    with pytest.raises(IdempotencyConflict):
        engine.enqueue(QUEUE, [new_job(b"2", key="free"), new_job(b"2", key="taken")])
    assert len(engine.select(State.READY)) == 1
    (stored,) = engine.enqueue(QUEUE, [new_job(b"other", key="free")])
    assert not stored.duplicate


# --- idempotency keys ---------------------------------------------------------------------------


@pytest.mark.parametrize("state", list(State))
def test_a_key_is_held_in_every_state(engine: Engine, make_job: MakeJob, state: State) -> None:
    """The same put again is the same job, wherever that job has got to."""
    job_id = make_job(state, key="k").id
    (again,) = engine.enqueue(QUEUE, [new_job(key="k")])
    assert (again.id, again.duplicate) == (job_id, True)
    assert state_of(engine, job_id) is state


@pytest.mark.parametrize("state", list(State))
def test_other_data_under_a_held_key_is_refused(
    engine: Engine, make_job: MakeJob, state: State
) -> None:
    """Two different wishes under one key are a mistake of the caller, and are told as one."""
    job_id = make_job(state, key="k").id
    with pytest.raises(IdempotencyConflict, match="'k'") as caught:
        engine.enqueue(QUEUE, [new_job(b"other", key="k")])
    assert caught.value.job_id == job_id


def test_the_data_of_a_key_is_payload_and_task_alone(queue: Queue[Any]) -> None:
    """Headers, delay and priority may differ between two tries of one wish; the task may not."""
    first = queue.put({"a": 1}, key="k")
    again = queue.put({"a": 1}, key="k", headers={"h": 1}, delay=5, priority=3, expires=9)
    assert (again, again.duplicate, first.duplicate) == (first, True, False)
    with pytest.raises(IdempotencyConflict):
        queue.put({"a": 1}, key="k", task="another")


def test_one_key_twice_in_a_batch_is_one_job(engine: Engine) -> None:
    """A batch is judged as if its jobs had come one by one."""
    jobs = [new_job(b"a", key="k"), new_job(b"b"), new_job(b"a", key="k")]
    first, other, again = engine.enqueue(QUEUE, jobs)
    assert (again.id, again.duplicate) == (first.id, True)
    assert other.id != first.id
    assert engine.counts(QUEUE)["ready"] == 2
    with pytest.raises(IdempotencyConflict):
        engine.enqueue(QUEUE, [new_job(b"a", key="m"), new_job(b"b", key="m")])


def test_a_key_belongs_to_its_queue(engine: Engine) -> None:
    """Two queues never disturb each other's keys."""
    put(engine, new_job(b"a", key="k"), queue="one")
    (other,) = engine.enqueue("two", [new_job(b"b", key="k")])
    assert not other.duplicate


@pytest.mark.parametrize("state", [State.DONE, State.DEAD, State.CANCELLED])
def test_a_finished_job_frees_its_key_after_key_ttl(
    engine: Engine, make_job: MakeJob, clock: FakeClock, state: State
) -> None:
    """`key_ttl` counts from the end of the job, and then the key names a new one."""
    engine.configure(QUEUE, key_ttl_us=60 * SECOND_US)
    held = make_job(state, key="k").id
    clock.advance(59)
    assert engine.enqueue(QUEUE, [new_job(key="k")])[0].id == held
    clock.advance(1)
    (fresh,) = engine.enqueue(QUEUE, [new_job(b"other", key="k")])
    assert not fresh.duplicate
    assert fresh.id != held


@pytest.mark.parametrize("state", [State.READY, State.DELAYED, State.CLAIMED])
def test_a_live_job_holds_its_key_beyond_key_ttl(
    engine: Engine, make_job: MakeJob, clock: FakeClock, state: State
) -> None:
    """A long backlog must not let the same wish in twice."""
    engine.configure(QUEUE, key_ttl_us=SECOND_US)
    held = make_job(state, key="k").id
    clock.advance(1000)
    engine.prune(100)
    assert engine.enqueue(QUEUE, [new_job(key="k")])[0].id == held


def test_the_end_of_an_older_job_does_not_free_the_key_of_a_newer(
    engine: Engine, make_job: MakeJob, clock: FakeClock
) -> None:
    """A key that was taken again belongs to the later job alone."""
    engine.configure(QUEUE, key_ttl_us=SECOND_US, keep_dead_us=0)
    old = make_job(State.DEAD, key="k").id
    clock.advance(2)
    newer = make_job(State.READY, key="k").id
    assert engine.discard(QUEUE, [old]) == 1
    clock.advance(10)
    engine.prune(100)
    assert engine.enqueue(QUEUE, [new_job(key="k")])[0].id == newer


# --- capacity -----------------------------------------------------------------------------------


def test_a_full_queue_refuses_and_says_so(engine: Engine) -> None:
    """`max_depth` bounds ready, delayed and claimed jobs together."""
    engine.configure(QUEUE, max_depth=3)
    put(engine, new_job(), new_job(delay_us=SECOND_US), new_job())
    (row,) = take(engine)
    with pytest.raises(QueueFull, match="3"):
        put(engine)
    engine.finish([settlement(row)])
    put(engine)
    assert engine.counts(QUEUE)["jobs_rejected_total:full"] == 1


def test_a_batch_that_does_not_fit_is_refused_whole(engine: Engine) -> None:
    """All or none: half a batch would have to be found and put again."""
    engine.configure(QUEUE, max_depth=2)
    with pytest.raises(QueueFull, match="split the batch"):
        put(engine, new_job(), new_job(), new_job())
    assert engine.counts(QUEUE)["ready"] == 0


def test_of_two_limits_the_later_one_holds_and_is_logged(
    database: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who gives none leaves the stored one; who gives another changes it for all, and visibly."""
    with Queue[int](database, "jobs", max_depth=2) as first:
        first.put_many([1, 2])
        with Queue[int](database, "jobs") as second, pytest.raises(QueueFull):
            second.put(3)
        with Queue[int](database, "jobs", max_depth=2):
            assert caplog.messages == [], "nobody disagreed"
        with Queue[int](database, "jobs", max_depth=3, keep_done_seconds=9):
            assert first.put(3)
            assert caplog.messages == ["queue 'jobs': max_depth was 2 and is now 3, for everybody"]
        (facts,) = first.engine.snapshot().queues
        assert facts.max_depth == 3
        first.engine.configure("jobs", max_depth=None)
        first.put_many([4] * 9)
        assert len(caplog.messages) == 2


def test_a_duplicate_needs_no_room(engine: Engine) -> None:
    """A producer that asks again at capacity learns that its job is stored."""
    engine.configure(QUEUE, max_depth=1)
    (job_id,) = put(engine, new_job(key="k"))
    (again,) = engine.enqueue(QUEUE, [new_job(key="k")])
    assert (again.id, again.duplicate) == (job_id, True)
    with pytest.raises(QueueFull):
        engine.enqueue(QUEUE, [new_job(key="k"), new_job()])


def test_a_conflict_is_counted_as_refused(engine: Engine) -> None:
    """Operators see refused puts by why: duplicate, full or conflict."""
    put(engine, new_job(b"a", key="k"))
    put(engine, new_job(b"a", key="k"))
    with pytest.raises(IdempotencyConflict):
        put(engine, new_job(b"b", key="k"))
    counts = engine.counts(QUEUE)
    assert counts["jobs_rejected_total:duplicate"] == 1
    assert counts.get("jobs_rejected_total:conflict") == 1
    assert counts["jobs_enqueued_total"] == 1


# --- bodies -------------------------------------------------------------------------------------


def bodies(database: Path) -> int:
    """Count the payloads that have a row of their own."""
    with closing(sqlite3.connect(database)) as connection:
        return int(connection.execute("SELECT count(*) FROM body").fetchone()[0])


@pytest.mark.parametrize(("length", "rows"), [(0, 0), (2048, 0), (2049, 1), (1024 * 1024, 1)])
def test_a_long_payload_has_a_row_of_its_own(
    engine: Engine, database: Path, length: int, rows: int
) -> None:
    """Moving a job never rewrites a long payload, and every reader gets it whole."""
    payload = b"x" * length
    (job_id,) = put(engine, new_job(payload))
    assert bodies(database) == rows
    (row,) = take(engine)
    assert row.payload == payload
    engine.finish([settlement(row)])
    record = engine.find(job_id)
    assert record is not None
    assert record.payload == payload
    assert bodies(database) == rows


@pytest.mark.parametrize("state", [State.DONE, State.DEAD, State.CANCELLED])
def test_a_body_goes_with_its_job(
    engine: Engine, database: Path, make_job: MakeJob, state: State
) -> None:
    """A payload that nobody can reach any more takes no room."""
    engine.configure(QUEUE, keep_done_us=0, keep_dead_us=0)
    job_id = make_job(state, payload=b"x" * 5000).id
    assert bodies(database) == 1
    if state is State.DEAD:
        assert engine.discard(None, [job_id]) == 1
    else:
        assert engine.prune(10) == 1
    assert bodies(database) == 0


# --- hostile input ------------------------------------------------------------------------------


def nested(depth: int) -> list[Any]:
    """Return a list in a list in a list."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)

BAD_PAYLOADS = {
    "lone surrogate": "\ud800",
    "surrogate in a key": {"\udfff": 1},
    "nan": float("nan"),
    "infinity": [float("inf")],
    "huge int": 10**5000,
    "deep nesting": nested(100_000),
    "circle": CIRCLE,
    "object": object(),
    "bytes": b"raw",
}


@pytest.mark.parametrize("name", sorted(BAD_PAYLOADS))
def test_a_payload_that_json_cannot_hold_is_refused(queue: Queue[Any], name: str) -> None:
    """One clear sentence, and nothing stored, not even the good ones of the batch."""
    with pytest.raises(PayloadInvalid, match="payload"):
        queue.put_many([{"good": 1}, BAD_PAYLOADS[name]])
    assert sum(depths(queue).values()) == 0


def depths(queue: Queue[Any]) -> dict[str, int]:
    """Return jobs per state."""
    counts = queue.counts()
    return {state.value: getattr(counts, state.value) for state in State}


def test_a_payload_over_the_cap_is_refused(engine: Engine) -> None:
    """The cap is on the encoded bytes, and the message says both numbers."""
    small: Queue[Any] = Queue("unused", QUEUE, engine=engine, payload_bytes_max=10)
    small.put("x" * 8)
    with pytest.raises(PayloadTooLarge, match=r"11 bytes of at most 10"):
        small.put("x" * 9)
    assert small.counts().ready == 1


BAD_OPTIONS: dict[str, dict[str, Any]] = {
    "nul in the key": {"key": "a\0b"},
    "surrogate in the key": {"key": "\ud800"},
    "empty key": {"key": ""},
    "long key": {"key": "k" * 513},
    "number as key": {"key": 7},
    "nul in the task": {"task": "a\0b"},
    "line break in the task": {"task": "a\nb"},
    "long task": {"task": "t" * 129},
    "surrogate in the group": {"group": "\udc00"},
    "nan in headers": {"headers": {"a": float("nan")}},
    "surrogate in headers": {"headers": {"a": "\ud800"}},
    "number as header name": {"headers": {1: "a"}},
    "long headers": {"headers": {"a": "x" * 20_000}},
    "negative delay": {"delay": -1},
    "nan as delay": {"delay": float("nan")},
    "infinite delay": {"delay": float("inf")},
    "huge delay": {"delay": 10**400},
    "text as delay": {"delay": "5"},
    "huge priority": {"priority": 2**63},
    "boolean priority": {"priority": True},
    "fraction as priority": {"priority": 1.5},
    "no attempts": {"max_attempts": 0},
    "huge attempts": {"max_attempts": 2**63},
    "negative expiry": {"expires": -1},
}


@pytest.mark.parametrize("name", sorted(BAD_OPTIONS))
def test_an_option_that_cannot_be_stored_is_refused(queue: Queue[Any], name: str) -> None:
    """No option reaches the store unchecked, and the error is ours, not the database's."""
    with pytest.raises(PayloadInvalid):
        queue.put({}, **BAD_OPTIONS[name])
    assert sum(depths(queue).values()) == 0


@pytest.mark.parametrize("name", ["", "a\0b", "\ud800", "q" * 129, "a\tb", 5])
def test_a_queue_name_that_cannot_be_shown_is_refused(engine: Engine, name: Any) -> None:
    """A queue's name is a label, a log field and a part of a page."""
    with pytest.raises(PayloadInvalid, match="queue's name"):
        Queue("unused", name, engine=engine)


def test_keys_must_match_the_payloads(queue: Queue[Any]) -> None:
    """A list of keys of another length is the caller's slip, told as such."""
    with pytest.raises(PayloadInvalid):
        queue.put_many([1, 2], keys=["a"])
    assert queue.counts().ready == 0


@pytest.mark.parametrize("job_id", [0, -1, 2**63, 2**64, 10**30])
def test_an_id_that_no_job_can_have_is_not_found(queue: Queue[Any], job_id: int) -> None:
    """An id typed by an operator may be any number; it is answered, not a traceback."""
    assert queue.find(job_id) is None
    assert queue.cancel(job_id) == 0
    with pytest.raises(JobNotFound):
        queue.replay(job_id)
    with pytest.raises(JobNotFound):
        queue.discard(job_id)


def test_text_that_looks_like_sql_is_only_text(queue: Queue[Any]) -> None:
    """Every value travels as a parameter."""
    text = "'); DROP TABLE job; --"
    job_id = queue.put(text, key=text, task=text, group=text, headers={text: text})
    job = queue.find(job_id)
    assert job is not None
    assert (job.payload, job.key, job.task, job.group) == (text, text, text, text)


def test_waiting_for_room_is_one_refusal_at_most(database: Path) -> None:
    """Polls are not counted; a put that found room in the end was not refused."""
    with Queue[int](database, max_depth=1) as queue:
        queue.put(1)
        with pytest.raises(QueueFull):
            queue.put(2, timeout=0.3)
        assert queue.counts().totals["jobs_rejected_total:full"] == 1
        job = queue.get(timeout=0)
        assert job is not None
        threading.Timer(0.1, lambda: Queue[int](database).ack(job)).start()
        queue.put(2, block=True, timeout=20)
        assert queue.counts().totals["jobs_rejected_total:full"] == 1
