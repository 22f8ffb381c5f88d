"""Look at a store from outside: is it whole, do its numbers hold, is its lock free."""

from __future__ import annotations

import fcntl
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

STATES = """
SELECT queue, state AS state, id FROM job
UNION ALL SELECT queue, CASE outcome WHEN 'succeeded' THEN 'done' ELSE outcome END, id FROM done
UNION ALL SELECT queue, 'dead', id FROM dead
"""

SHAPE = """
SELECT 'job', id, queue, state, run, attempts, deaths, job_key FROM job
UNION ALL SELECT 'done', id, queue, outcome, run, attempts, deaths, job_key FROM done
UNION ALL SELECT 'dead', id, queue, reason, run, attempts, deaths, job_key FROM dead
UNION ALL SELECT 'body', id, length(payload), 0, 0, 0, 0, 0 FROM body
UNION ALL SELECT 'attempt', job, run, outcome, 0, 0, 0, 0 FROM attempt
UNION ALL SELECT 'key', job, queue, job_key, 0, 0, 0, 0 FROM idempotency
UNION ALL SELECT 'queue', id, name, paused, max_depth, keep_done_us, 0, 0 FROM queue
UNION ALL SELECT 'depth', queue, label, value, 0, 0, 0, 0 FROM stat
    WHERE name = 'queue_jobs' AND value <> 0
"""
"""Everything but times, totals and holders: what two equal histories have in common."""


def faults(path: Path) -> Iterator[str]:
    """Yield what is wrong with a store, over a connection of our own, trusting no counter."""
    with closing(sqlite3.connect(path, timeout=5)) as connection:

        def rows(statement: str) -> list[tuple[object, ...]]:
            return connection.execute(statement).fetchall()

        for (line,) in rows("PRAGMA integrity_check"):
            if line != "ok":
                yield f"integrity: {line}"
        if not rows("SELECT 1 FROM sqlite_master WHERE name = 'job'"):
            return  # killed before its schema was made
        counted = {
            (queue, state): number
            for queue, state, number in rows(
                f"SELECT queue, state, count(*) FROM ({STATES}) GROUP BY queue, state"
            )
        }
        stored = {
            (queue, label): value
            for queue, label, value in rows(
                "SELECT queue, label, value FROM stat WHERE name = 'queue_jobs' AND value <> 0"
            )
        }
        if counted != stored:
            yield f"counters say {stored}, rows {counted}"
        for (job,) in rows(f"SELECT id FROM ({STATES}) GROUP BY id HAVING count(*) > 1"):
            yield f"job {job} stands in two states"
        for (job,) in rows(f"SELECT id FROM body WHERE id NOT IN (SELECT id FROM ({STATES}))"):
            yield f"a payload is kept for job {job}, which is gone"
        for place in ("job", "done", "dead"):
            for (job,) in rows(
                f"SELECT id FROM {place} WHERE payload IS NULL AND id NOT IN (SELECT id FROM body)"
            ):
                yield f"job {job} lost its payload"
        for (job,) in rows(
            f"SELECT job FROM idempotency WHERE expires_us IS NULL"
            f" AND job NOT IN (SELECT id FROM ({STATES}))"
        ):
            yield f"a key is held by job {job}, which is gone"
        for (job,) in rows(
            f"SELECT id FROM ({STATES}) WHERE id > (SELECT value FROM stat WHERE name = 'sequence')"
        ):
            yield f"job {job} is beyond the sequence"


def shape(path: Path) -> list[tuple[object, ...]]:
    """Return everything that stands in a store, but for times, totals and holders."""
    with closing(sqlite3.connect(path, timeout=5)) as connection:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'job'").fetchone():
            return []
        return sorted(connection.execute(SHAPE).fetchall(), key=repr)


def is_whole(path: Path) -> bool:
    """Say whether nothing is wrong with a store; the assertion tells what is."""
    found = list(faults(path))
    assert found == []
    return True


def lock_is_free(path: Path) -> bool:
    """Say whether another opener gets both the lock beside a file and SQLite's own, at once."""
    lock = Path(f"{path}.lock")
    if lock.exists():
        with lock.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
    with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        connection.execute("ROLLBACK")
    return True
