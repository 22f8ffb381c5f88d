"""Store jobs that lived in another queue before, each of them once.

Boundary: works inside a write transaction that its caller holds. What has been
imported is remembered by its origin in the same transaction, so that an import
that was killed goes on where it stood.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from queue_core import stats
from queue_core.engines import sqlite_finish
from queue_core.engines.sql import SQL, load
from queue_core.engines.sqlite_enqueue import BODY_BYTES
from queue_core.errors import IdempotencyConflict
from queue_core.job import ERROR_CHARS_MAX, Enqueued, State
from queue_core.stats import Tally
from queue_core.upkeep import ImportJob

UPKEEP_SQL = load("maintenance.sql")


def import_jobs(
    connection: sqlite3.Connection,
    tally: Tally,
    now_us: int,
    queue: tuple[int, str],
    jobs: Sequence[ImportJob],
) -> tuple[list[Enqueued], bool]:
    """Store jobs; return a result each, and whether one is ready now. Raises IdempotencyConflict.

    A job whose origin was imported before, or whose key is held by a job with
    the same data, is a duplicate and stores nothing.
    """
    queue_id, _ = queue
    results: list[Enqueued] = []
    ready = False
    for job in jobs:
        known = _known(connection, job)
        if known is not None:
            results.append(Enqueued(id=known, duplicate=True))
            continue
        holder = _key_holder(connection, queue, job, now_us)
        if holder is None:
            id_ = int(connection.execute(SQL["stat_sequence"], {"number": 1}).fetchone()[0])
            _insert(connection, queue_id, id_, now_us, job)
            _count(tally, queue_id, job)
            ready = ready or job.state is State.READY
        else:
            id_ = holder
            tally.add(queue_id, job.task, stats.REJECTED, "duplicate")
        connection.execute(UPKEEP_SQL["import_origin_set"], {"origin": job.origin, "job": id_})
        results.append(Enqueued(id=id_, duplicate=holder is not None))
    return results, ready


def _known(connection: sqlite3.Connection, job: ImportJob) -> int | None:
    row = connection.execute(UPKEEP_SQL["import_origin_get"], {"origin": job.origin}).fetchone()
    return None if row is None else int(row[0])


def _key_holder(
    connection: sqlite3.Connection, queue: tuple[int, str], job: ImportJob, now_us: int
) -> int | None:
    """Return the job that holds this job's key with the same data, None where it is free."""
    if job.key is None:
        return None
    parameters = {"queue": queue[0], "key": job.key}
    row = connection.execute(SQL["enqueue_key_get"], parameters).fetchone()
    if row is None or (row[2] is not None and row[2] <= now_us):
        return None
    if row[1] != job.digest:
        raise IdempotencyConflict(
            f"key {job.key!r} of queue {queue[1]!r} is held by job {row[0]} with other data than "
            f"{job.origin}; import into another queue",
            job_id=row[0],
        )
    return int(row[0])


def _insert(
    connection: sqlite3.Connection, queue_id: int, id_: int, now_us: int, job: ImportJob
) -> None:
    large = len(job.payload) > BODY_BYTES
    delayed = job.state is State.DELAYED
    # An instant of another clock may lie ahead of ours: nothing has finished in the future.
    finished_us = min(now_us, job.finished_us if job.finished_us is not None else now_us)
    parameters: dict[str, Any] = {
        "id": id_,
        "queue": queue_id,
        "state": job.state.value,
        "priority": job.priority,
        "seq": None if delayed else id_,
        "attempts": job.attempts,
        "max_attempts": job.max_attempts,
        "task": job.task,
        "key": job.key,
        "headers": job.headers,
        "enqueued": min(now_us, job.enqueued_us),
        "now": now_us,
        "due": (job.due_us if job.due_us is not None else now_us) if delayed else None,
        "ready": None if delayed else now_us,
        "finished": finished_us,
        "reason": job.reason,
        "error": sqlite_finish.cut(job.error, ERROR_CHARS_MAX),
        "payload": None if large else job.payload,
    }
    place = job.state.value if job.state in {State.DEAD, State.DONE} else "live"
    connection.execute(UPKEEP_SQL[f"import_{place}"], parameters)
    if large:
        connection.execute(SQL["enqueue_body"], (id_, job.payload))
    if job.error is not None and job.attempts > 0:
        connection.execute(UPKEEP_SQL["import_attempt"], parameters)
    if job.key is not None:
        connection.execute(
            SQL["enqueue_key_set"],
            {"queue": queue_id, "key": job.key, "job": id_, "digest": job.digest},
        )
        if place != "live":
            sqlite_finish.start_key_life(connection, [(queue_id, job.key, id_)], now_us)


def _count(tally: Tally, queue_id: int, job: ImportJob) -> None:
    """Count an arrival, and its end too where it had come to it, so that the sums agree.

    It did not die here: it is no dead letter of these workers.
    """
    tally.add(queue_id, job.task, stats.ENQUEUED)
    tally.move(queue_id, None, job.state)
    if job.state in {State.DEAD, State.DONE}:
        ended = "dead" if job.state is State.DEAD else "succeeded"
        tally.add(queue_id, job.task, stats.JOBS_FINISHED, ended)
