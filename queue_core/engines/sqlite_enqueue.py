"""Store new jobs: keys first, then room, then the rows.

Boundary: works inside a write transaction that its caller holds. Everything
that can refuse a put is read before the first row is written, so that a
refusal inside a user's own transaction leaves nothing behind.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Final

from queue_core import stats
from queue_core.engines.sql import SQL
from queue_core.errors import IdempotencyConflict, QueueFull
from queue_core.job import Enqueued, NewJob, State
from queue_core.stats import Tally

BODY_BYTES: Final = 2048
"""Payloads longer than this get a row of their own, so that moving a job does not rewrite them."""


def enqueue(
    connection: sqlite3.Connection,
    tally: Tally,
    now_us: int,
    queue: tuple[int, str],
    jobs: Sequence[NewJob],
) -> tuple[list[Enqueued], bool]:
    """Store jobs of one queue; return a result each, and whether one is ready now.

    Raises IdempotencyConflict and QueueFull before anything is written.
    """
    queue_id = queue[0]
    holders = _key_holders(connection, queue, jobs, now_us)
    fresh = [job for job, holder in zip(jobs, holders, strict=True) if holder is None]
    _check_room(connection, queue, len(fresh))
    last = (
        connection.execute(SQL["stat_sequence"], {"number": len(fresh)}).fetchone()[0]
        if fresh
        else 0
    )
    next_id = last - len(fresh) + 1
    results: list[Enqueued] = []
    for job, holder in zip(jobs, holders, strict=True):
        if holder is None:
            results.append(Enqueued(id=next_id))
            next_id += 1
        else:
            # A key given twice in one batch points at the job of its first mention.
            known = holder if holder > 0 else results[-holder - 1].id
            results.append(Enqueued(id=known, duplicate=True))
            tally.add(queue_id, job.task, stats.REJECTED, "duplicate")
    stored = [
        (result.id, job) for result, job in zip(results, jobs, strict=True) if not result.duplicate
    ]
    _insert(connection, queue_id, now_us, stored)
    for _, job in stored:
        tally.add(queue_id, job.task, stats.ENQUEUED)
        tally.move(queue_id, None, State.DELAYED if job.delay_us > 0 else State.READY)
    return results, any(job.delay_us <= 0 for _, job in stored)


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


def _check_room(connection: sqlite3.Connection, queue: tuple[int, str], number: int) -> None:
    queue_id, queue_name = queue
    options = connection.execute(SQL["queue_options"], {"queue": queue_id}).fetchone()
    limit = options[1] if options else None
    if limit is None or number == 0:
        return
    depth = connection.execute(SQL["enqueue_depth"], {"queue": queue_id}).fetchone()[0]
    if depth + number > limit:
        never = number > limit
        raise QueueFull(
            f"queue {queue_name!r} holds {depth} jobs of at most {limit} and cannot take "
            f"{number} more; {'split the batch' if never else 'wait'}, or raise max_depth"
        )


def _insert(
    connection: sqlite3.Connection, queue_id: int, now_us: int, stored: list[tuple[int, NewJob]]
) -> None:
    bodies = [(id_, job.payload) for id_, job in stored if len(job.payload) > BODY_BYTES]
    connection.executemany(
        SQL["enqueue_job"],
        [
            (
                id_, queue_id,
                "delayed" if job.delay_us > 0 else "ready",
                job.priority,
                None if job.delay_us > 0 else id_,
                job.max_attempts, job.task, job.key, job.headers, job.group,
                now_us,
                max(0, job.delay_us),
                now_us + job.delay_us if job.delay_us > 0 else None,
                None if job.delay_us > 0 else now_us,
                None if job.expires_us is None else now_us + max(0, job.delay_us) + job.expires_us,
                None if len(job.payload) > BODY_BYTES else job.payload,
            )
            for id_, job in stored
        ],
    )  # fmt: skip
    if bodies:
        connection.executemany(SQL["enqueue_body"], bodies)
    for id_, job in stored:
        if job.key is not None:
            connection.execute(
                SQL["enqueue_key_set"],
                {"queue": queue_id, "key": job.key, "job": id_, "digest": job.digest},
            )
