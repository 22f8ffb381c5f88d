"""Store new jobs: keys first, then room, then the rows.

Boundary: works inside a write transaction, or a savepoint of the user's own, that
its caller holds and undoes when a put is refused.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from queue_core import stats
from queue_core.engines.sql import SQL
from queue_core.errors import IdempotencyConflict, QueueFull
from queue_core.job import Enqueued, NewJob, State
from queue_core.stats import Tally

BODY_BYTES: Final = 2048
"""Payloads longer than this get a row of their own, so that moving a job does not rewrite them."""


class Stored(NamedTuple):
    """What became of our own jobs, and the queues that have a ready job more."""

    results: list[Enqueued]
    ready: list[str]


def fits_a_board(jobs: Sequence[NewJob]) -> bool:
    """Whether another process may store this put: one job, and not a long one."""
    return len(jobs) == 1 and len(jobs[0].payload) <= BODY_BYTES


def packed(queue: str, job: NewJob) -> bytes:
    """Return a put as what another process can store."""
    return _head(queue, *job[1:]) + b"\n" + job.payload


def unpacked(body: bytes) -> tuple[str, NewJob]:
    """Return the queue and the job of a body; raises ValueError and TypeError."""
    head, _, payload = body.partition(b"\n")
    queue, fields = _of_head(head)
    return queue, NewJob(payload, *fields)


# Most puts of a program differ in their payloads only.


@lru_cache(maxsize=64)
def _head(queue: str, *fields: Any) -> bytes:
    job = NewJob(b"", *fields)
    digest = None if job.digest is None else job.digest.hex()
    return json.dumps([queue, *job._replace(digest=None)[1:], digest]).encode()


@lru_cache(maxsize=64)
def _of_head(head: bytes) -> tuple[str, tuple[Any, ...]]:
    queue, *fields, digest = json.loads(head.decode())
    job = NewJob(b"", *fields)
    return queue, job._replace(digest=None if digest is None else bytes.fromhex(digest))[1:]


def together(
    queue: str,
    jobs: Sequence[NewJob],
    bodies: Sequence[bytes],
    store: Callable[[str, Sequence[NewJob]], tuple[list[Enqueued], bool]],
) -> tuple[Stored, list[int]]:
    """Store our own jobs and those of others, a queue at a time; return also the answers.

    `store` returns a result each, and whether one of them is ready now.
    """
    by_queue: dict[str, list[tuple[int, NewJob]]] = {queue: [(-1, job) for job in jobs]}
    for position, body in enumerate(bodies):
        name, job = unpacked(body)
        by_queue.setdefault(name, []).append((position, job))
    own: list[Enqueued] = []
    answers = [0] * len(bodies)
    rung: list[str] = []
    for name, asked in by_queue.items():
        results, ready = store(name, [job for _, job in asked])
        if ready:
            rung.append(name)
        for (position, _), result in zip(asked, results, strict=True):
            if position < 0:
                own.append(result)
            else:
                answers[position] = answer_of(result)
    return Stored(own, rung), answers


def answer_of(result: Enqueued) -> int:
    """Return a result as one number."""
    return result.id << 1 | result.duplicate


def result_of(answer: int) -> Enqueued:
    """Return the result that a number stands for."""
    return Enqueued(id=answer >> 1, duplicate=bool(answer & 1))


def enqueue(
    connection: sqlite3.Connection,
    tally: Tally,
    now_us: int,
    queue: tuple[int, str],
    jobs: Sequence[NewJob],
) -> tuple[list[Enqueued], bool]:
    """Store jobs of one queue; return a result each, and whether one is ready now.

    Raises IdempotencyConflict and QueueFull, for the caller to undo what was written.
    """
    queue_id = queue[0]
    results: list[Enqueued] = []
    stored: list[tuple[int, NewJob]] = []
    if [job.key for job in jobs].count(None) == len(jobs):
        next_id = _first_id(connection, queue, len(jobs))
        stored = list(enumerate(jobs, start=next_id))
        results = [Enqueued(id_) for id_, _ in stored]
    else:
        holders = _key_holders(connection, queue, jobs, now_us)
        number = sum(holder is None for holder in holders)
        next_id = _first_id(connection, queue, number) if number else 0
        for job, holder in zip(jobs, holders, strict=True):
            if holder is None:
                results.append(Enqueued(next_id))
                stored.append((next_id, job))
                next_id += 1
            else:
                # A key given twice in one batch points at the job of its first mention.
                known = holder if holder > 0 else results[-holder - 1].id
                results.append(Enqueued(known, duplicate=True))
                tally.add(queue_id, job.task, stats.REJECTED, "duplicate")
    _insert(connection, queue_id, now_us, stored)
    delayed = 0
    for _, job in stored:
        tally.add(queue_id, job.task, stats.ENQUEUED)
        delayed += job.delay_us > 0
    ready = len(stored) - delayed
    if delayed:
        tally.move(queue_id, None, State.DELAYED, delayed)
    if ready:
        tally.move(queue_id, None, State.READY, ready)
    return results, ready > 0


def _key_holders(
    connection: sqlite3.Connection, queue: tuple[int, str], jobs: Sequence[NewJob], now_us: int
) -> list[int | None]:
    """Return for each job the id that holds its key, or None where it is new.

    A negative number -n points at the n-th job of this batch (counted from 1).
    """
    queue_id, queue_name = queue
    seen: dict[str, tuple[int, bytes | None]] = {}
    found: list[int | None] = []
    for position, job in enumerate(jobs, start=1):
        if job.key is None:
            found.append(None)
            continue
        holder = seen.get(job.key)
        if holder is None:
            row = connection.execute(
                SQL["enqueue_key_get"], {"queue": queue_id, "key": job.key}
            ).fetchone()
            if row is not None and (row[2] is None or row[2] > now_us):
                holder = (row[0], row[1])
        if holder is None:
            seen[job.key] = (-position, job.digest)
            found.append(None)
            continue
        if holder[1] != job.digest:
            raise IdempotencyConflict(
                f"key {job.key!r} of queue {queue_name!r} is held by job "
                f"{holder[0] if holder[0] > 0 else 'earlier in this batch'} with other data; "
                "use another key, or the same payload",
                job_id=max(holder[0], 0),
            )
        found.append(holder[0])
    return found


def _first_id(connection: sqlite3.Connection, queue: tuple[int, str], number: int) -> int:
    """Return the first of so many fresh ids, if the queue has room for as many jobs."""
    queue_id, queue_name = queue
    last, limit = connection.execute(
        SQL["enqueue_sequence"], {"number": number, "queue": queue_id}
    ).fetchone()
    if limit is not None:
        depth = connection.execute(SQL["enqueue_depth"], {"queue": queue_id}).fetchone()[0]
        if depth + number > limit:
            never = number > limit
            raise QueueFull(
                f"queue {queue_name!r} holds {depth} jobs of at most {limit} and cannot take "
                f"{number} more; {'split the batch' if never else 'wait'}, or raise max_depth"
            )
    return int(last) - number + 1


def _insert(
    connection: sqlite3.Connection, queue_id: int, now_us: int, stored: list[tuple[int, NewJob]]
) -> None:
    rows, bodies, keys = [], [], []
    for id_, job in stored:
        payload, task, delay_us, priority, key, digest, headers, expires_us, group, attempts = job
        delayed = delay_us > 0
        starts_us = now_us + delay_us if delayed else now_us
        if long := len(payload) > BODY_BYTES:
            bodies.append((id_, payload))
        if key is not None:
            keys.append({"queue": queue_id, "key": key, "job": id_, "digest": digest})
        rows.append((
            id_, queue_id,
            "delayed" if delayed else "ready",
            priority,
            None if delayed else id_,
            attempts, task, key, headers, group,
            now_us,
            max(0, delay_us),
            starts_us if delayed else None,
            None if delayed else now_us,
            None if expires_us is None else starts_us + expires_us,
            None if long else payload,
        ))  # fmt: skip
    connection.executemany(SQL["enqueue_job"], rows)
    if bodies:
        connection.executemany(SQL["enqueue_body"], bodies)
    if keys:
        connection.executemany(SQL["enqueue_key_set"], keys)
