"""Keep the store in order: promote, reap, cancel, replay, discard, prune.

Boundary: works inside a write transaction that its caller holds; every call is
bounded by a limit, so that the lock is held for a short time.
"""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from queue_core import stats
from queue_core.engine import Verdict
from queue_core.engines import sqlite_finish
from queue_core.engines.sql import SQL
from queue_core.engines.sqlite_reads import claimed
from queue_core.job import Reaped, Settled, State
from queue_core.stats import Tally


def due_queues(connection: sqlite3.Connection, now_us: int) -> list[int]:
    """Return the queues that have a delayed job due."""
    return [queue for queue, due in connection.execute(SQL["promote_next"]) if due <= now_us]


def promotable(connection: sqlite3.Connection, now_us: int) -> bool:
    """Whether a delayed job is due, or a suspect may run."""
    return bool(due_queues(connection, now_us)) or suspect_waits(connection)


def suspect_waits(connection: sqlite3.Connection) -> bool:
    """Whether a job that ran when a whole tree died waits for its turn, and none runs."""
    return connection.execute(SQL["promote_suspects_wait"]).fetchone() is not None


def promote(
    connection: sqlite3.Connection, tally: Tally, now_us: int, limit: int
) -> dict[int, int]:
    """Make due jobs ready, and let one suspect run; return how many were due, by queue."""
    promoted: dict[int, int] = {}
    if suspect_waits(connection):
        for (queue,) in connection.execute(SQL["promote_suspect"]).fetchall():
            promoted[queue] = 0
    for queue in due_queues(connection, now_us):
        room = limit - sum(promoted.values())
        if room <= 0:
            break
        ids = [
            row[0]
            for row in connection.execute(
                SQL["promote_due"], {"queue": queue, "now": now_us, "limit": room}
            )
        ]
        last = connection.execute(SQL["stat_sequence"], {"number": len(ids)}).fetchone()[0]
        connection.executemany(
            SQL["promote_job"],
            [
                {"id": id_, "seq": last - len(ids) + 1 + position, "now": now_us}
                for position, id_ in enumerate(ids)
            ],
        )
        tally.move(queue, State.DELAYED, State.READY, len(ids))
        tally.add(queue, "", stats.PROMOTED, "", len(ids))
        promoted[queue] = promoted.get(queue, 0) + len(ids)
    return promoted


def reap(
    connection: sqlite3.Connection,
    tally: Tally,
    now_us: int,
    monotonic_us: int,
    names: dict[int, str],
    decide: Verdict,
    limit: int,
    only: int | None,
) -> tuple[list[Reaped], set[int]]:
    """Settle the claims whose lease ran out; return them and the queues with ready jobs."""
    rows = connection.execute(
        SQL["reap_expired"], {"now": monotonic_us, "limit": limit, "only": only}
    ).fetchall()
    settlements = []
    for row in rows:
        record = claimed(row, names[row[18]])
        settlements.append((row, record, decide(record, record.started)))
    results, woken = sqlite_finish.settle(
        connection, tally, now_us, [settlement for _, _, settlement in settlements]
    )
    reaped = []
    for (row, record, settlement), result in zip(settlements, results, strict=True):
        if isinstance(result, Settled):
            tally.add(row[18], record.task, stats.REAPED, settlement.to)
            reaped.append(
                Reaped(
                    claim=record.claim,
                    queue=record.queue,
                    task=record.task,
                    state=result.state,
                    reason=settlement.reason,
                )
            )
    return reaped, woken


def cancel(
    connection: sqlite3.Connection,
    tally: Tally,
    now_us: int,
    queue: int | None,
    ids: Sequence[int],
) -> int:
    """Move ready and delayed jobs to done with outcome cancelled; they keep their key."""
    rows = [
        row
        for row in connection.execute(SQL["cancel_rows"], {"ids": json.dumps(list(ids))}).fetchall()
        if queue is None or row[1] == queue
    ]
    parameters = [{"id": row[0], "now": now_us} for row in rows]
    connection.executemany(SQL["cancel_done"], parameters)
    connection.executemany(SQL["cancel_remove"], parameters)
    for _, queue_id, task, state, _, parked in rows:
        tally.move(queue_id, state, State.CANCELLED)
        tally.add(queue_id, task, stats.JOBS_FINISHED, "cancelled")
        tally.add(queue_id, task, stats.PARKED, "", -int(parked == 1))
    keys = [(row[1], row[4], row[0]) for row in rows if row[4] is not None]
    sqlite_finish.start_key_life(connection, keys, now_us)
    return len(rows)


def replay(
    connection: sqlite3.Connection,
    tally: Tally,
    now_us: int,
    queue: int | None,
    ids: Sequence[int],
) -> tuple[int, set[int]]:
    """Make dead jobs ready again, no attempt spent; return how many, and their queues."""
    rows = _dead_rows(connection, queue, ids)
    if not rows:
        return 0, set()
    last = connection.execute(SQL["stat_sequence"], {"number": len(rows)}).fetchone()[0]
    for position, (id_, queue_id, task, key) in enumerate(rows):
        seq = last - len(rows) + 1 + position
        connection.execute(SQL["replay_job"], {"id": id_, "seq": seq, "now": now_us})
        connection.execute(SQL["replay_remove"], {"id": id_})
        if key is not None:
            connection.execute(SQL["replay_key"], {"queue": queue_id, "key": key, "id": id_})
        tally.move(queue_id, State.DEAD, State.READY)
        tally.add(queue_id, task, stats.REPLAYED)
    return len(rows), {row[1] for row in rows}


def discard(
    connection: sqlite3.Connection,
    tally: Tally,
    now_us: int,
    queue: int | None,
    ids: Sequence[int],
) -> int:
    """Remove dead jobs for good, with their key, ledger and body."""
    rows = _dead_rows(connection, queue, ids)
    by_queue: defaultdict[int, list[tuple[int, str, str | None]]] = defaultdict(list)
    for id_, queue_id, task, key in rows:
        by_queue[queue_id].append((id_, task, key))
    for queue_id, jobs in by_queue.items():
        _remove(
            connection, "prune_dead_job", queue_id, [(id_, key) for id_, _, key in jobs], now_us
        )
        tally.move(queue_id, State.DEAD, None, len(jobs))
        for _, task, _ in jobs:
            tally.add(queue_id, task, stats.JOBS_FINISHED, "discarded")
    return len(rows)


def _dead_rows(
    connection: sqlite3.Connection, queue: int | None, ids: Sequence[int]
) -> list[tuple[int, int, str, str | None]]:
    parameters = {"ids": json.dumps(list(ids)), "queue": queue}
    return connection.execute(SQL["replay_rows"], parameters).fetchall()


def prune(
    connection: sqlite3.Connection, tally: Tally, now_us: int, limit: int, holders_before_us: int
) -> int:
    """Remove finished jobs past the retention of their queue, oldest first, and dead keys."""
    removed = 0
    for listing, removal, column in (
        ("prune_done", "prune_done_job", 3),
        ("prune_dead", "prune_dead_job", 4),
    ):
        for queue in [row[0] for row in connection.execute(SQL["queue_ids"]).fetchall()]:
            options = connection.execute(SQL["queue_options"], {"queue": queue}).fetchone()
            if options[column] is None or removed >= limit:
                continue
            rows: list[tuple[Any, ...]] = connection.execute(
                SQL[listing],
                {"queue": queue, "before": now_us - options[column], "limit": limit - removed},
            ).fetchall()
            _remove(connection, removal, queue, [(row[0], row[3]) for row in rows], now_us)
            for _, task, outcome, _ in rows:
                state = State.DONE if outcome == "succeeded" else State(outcome)
                tally.move(queue, state, None)
                tally.add(queue, task, stats.PRUNED, state)
            removed += len(rows)
    connection.execute(SQL["prune_keys"], {"now": now_us, "limit": limit})
    connection.execute(SQL["prune_holders"], {"before": holders_before_us})
    return removed


def prunable(connection: sqlite3.Connection, now_us: int) -> bool:
    """Whether there is something to prune; read without the lock, so that idle means no write."""
    for queue in [row[0] for row in connection.execute(SQL["queue_ids"]).fetchall()]:
        options = connection.execute(SQL["queue_options"], {"queue": queue}).fetchone()
        for listing, keep_us in (("prune_done", options[3]), ("prune_dead", options[4])):
            if keep_us is not None:
                parameters = {"queue": queue, "before": now_us - keep_us, "limit": 1}
                if connection.execute(SQL[listing], parameters).fetchone() is not None:
                    return True
    return connection.execute(SQL["prune_keys_due"], {"now": now_us}).fetchone() is not None


def _remove(
    connection: sqlite3.Connection,
    removal: str,
    queue: int,
    jobs: Sequence[tuple[int, str | None]],
    now_us: int,
) -> None:
    parameters = [{"id": id_} for id_, _ in jobs]
    for statement in (removal, "prune_body", "prune_attempts"):
        connection.executemany(SQL[statement], parameters)
    for id_, key in jobs:
        if key is not None:
            connection.execute(
                SQL["prune_key"], {"queue": queue, "key": key, "id": id_, "now": now_us}
            )
