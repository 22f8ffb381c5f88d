"""Read jobs and numbers without the lock: find, lists, counts, snapshot.

Boundary: functions over a connection inside a read transaction; they write nothing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from queue_core.engines.sql import SQL
from queue_core.errors import PayloadInvalid
from queue_core.job import Attempt, Claimed, Outcome, Reason, Record, State
from queue_core.stats import DEPTH, GAUGES, QueueFacts, Recent, Snapshot, assemble

LIST_LIMIT_MAX = 10_000
RECENT = 20
"""Examples a snapshot brings of attempts that ended well, and of those that did not."""
PLACES = {
    State.READY: "live", State.DELAYED: "live", State.CLAIMED: "live",
    State.DONE: "done", State.CANCELLED: "done", State.DEAD: "dead",
}  # fmt: skip
"""Which table, and so which statements, the jobs of a state are in."""


def claimed(row: tuple[Any, ...], queue: str) -> Claimed:
    """Return a claimed row of the claim, held and reap statements as a record."""
    return Claimed._make((row[0], row[1], queue, *row[2:16], bool(row[16])))


def find(connection: sqlite3.Connection, names: Mapping[int, str], job_id: int) -> Record | None:
    """Return a job in whatever state, with its ledger; None for a number that is no id."""
    if not 0 < job_id < 2**63:  # what SQLite holds; anything may be typed
        return None
    for statement in ("counts_find_live", "counts_find_done", "counts_find_dead"):
        row = connection.execute(SQL[statement], {"id": job_id}).fetchone()
        if row is not None:
            return _record(row, names, _ledger(connection, row))
    return None


def _record(
    row: tuple[Any, ...], names: Mapping[int, str], ledger: tuple[Attempt, ...] = ()
) -> Record:
    (id_, run, queue, task, state, payload, attempts, max_attempts, deaths, priority, key, headers,
     group, enqueued, due, ready, claimed_us, finished, expires, worker, reason, error,
     traceback) = row[:23]  # fmt: skip
    return Record(
        id=id_,
        run=run,
        queue=names.get(queue, str(queue)),
        task=task,
        state=State(state),
        payload=payload,
        attempts=attempts,
        max_attempts=max_attempts,
        deaths=deaths,
        priority=priority,
        key=key,
        headers=headers,
        group=group,
        enqueued_us=enqueued,
        due_us=due,
        ready_us=ready,
        claimed_us=claimed_us,
        finished_us=finished,
        expires_us=expires,
        worker=worker,
        reason=Reason(reason) if reason else None,
        error=error,
        traceback=traceback,
        ledger=ledger,
    )


def _ledger(connection: sqlite3.Connection, row: tuple[Any, ...]) -> tuple[Attempt, ...]:
    """Return the stored attempts, and after them the one that succeeded."""
    lines = [
        Attempt(
            run=run,
            started_us=started,
            finished_us=finished,
            outcome=Outcome(outcome),
            cause=cause,
            error=error,
            worker=worker,
        )
        for run, started, finished, outcome, cause, error, worker in connection.execute(
            SQL["counts_ledger"], {"id": row[0]}
        )
    ]
    state, started_us = row[4], row[23]
    if state == State.DONE and started_us is not None:
        lines.append(
            Attempt(
                run=row[1],
                started_us=started_us,
                finished_us=row[17],
                outcome=Outcome.SUCCEEDED,
                worker=row[19],
            )
        )
    return tuple(lines)


def select(
    connection: sqlite3.Connection,
    names: Mapping[int, str],
    state: State,
    *,
    queue: int | None,
    task: str | None,
    reason: Reason | None,
    limit: int,
    after: int,
    newest: bool,
) -> list[Record]:
    """Return one page of the jobs in a state, by id; dead ones by death too, the latest first."""
    if newest:
        return _latest(connection, names, state, queue, min(limit, LIST_LIMIT_MAX))
    place = PLACES[state]
    parameters = {
        "state": "succeeded" if state is State.DONE else state.value,
        "queue": queue,
        "task": task,
        "reason": reason,
        "after": after,
        "limit": max(0, min(limit, LIST_LIMIT_MAX)),
    }
    if state is State.DEAD and queue is not None:
        place = "dead_of"  # a queue's few dead are not looked for among all
    ids = [row[0] for row in connection.execute(SQL[f"counts_list_{place}"], parameters).fetchall()]
    return records(connection, names, state, ids)


def peek(connection: sqlite3.Connection, names: Mapping[int, str], queue: int) -> Record | None:
    """Return the job of a queue that would be claimed next."""
    row = connection.execute(SQL["counts_peek"], {"queue": queue}).fetchone()
    return None if row is None else records(connection, names, State.READY, [row[0]])[0]


def _latest(
    connection: sqlite3.Connection,
    names: Mapping[int, str],
    state: State,
    queue: int | None,
    limit: int,
) -> list[Record]:
    if state is not State.DEAD:
        raise PayloadInvalid("only dead jobs are listed by when they ended")
    found = [
        row
        for one in ([queue] if queue is not None else names)
        for row in connection.execute(SQL["counts_latest_dead"], {"queue": one, "limit": limit})
    ]
    found.sort(reverse=True)
    return records(connection, names, state, [id_ for _, id_ in found[: max(0, limit)]])


def records(
    connection: sqlite3.Connection, names: Mapping[int, str], state: State, ids: Sequence[int]
) -> list[Record]:
    """Return jobs that are known to be in a state, in the order of their ids as given."""
    finding = SQL[f"counts_find_{PLACES[state]}"]
    rows = (connection.execute(finding, {"id": id_}).fetchone() for id_ in ids)
    return [_record(row, names) for row in rows]


def counts(connection: sqlite3.Connection, queue: int) -> dict[str, int]:
    """Return jobs per state now and, as `<name>` or `<name>:<label>`, the totals of a queue."""
    found: dict[str, int] = {state.value: 0 for state in State}
    for _task, name, label, value in connection.execute(SQL["counts_queue"], {"queue": queue}):
        if name == DEPTH:
            found[label] = value
        elif "|" not in label and name not in GAUGES:
            at = f"{name}:{label}" if label else name
            found[at] = found.get(at, 0) + value
    return found


def snapshot(
    connection: sqlite3.Connection, now_us: int, monotonic_us: int, log_bytes: int
) -> Snapshot:
    """Read every number at one moment; the cost grows with queues, not with jobs."""
    names = {row[0]: row for row in connection.execute(SQL["counts_queues"])}
    stats = connection.execute(SQL["counts_all"]).fetchall()
    depths: dict[int, dict[str, int]] = {id_: {s.value: 0 for s in State} for id_ in names}
    for queue, _task, name, label, value in stats:
        if name == DEPTH and queue in depths:
            depths[queue][label] = value
    claims = {
        row[0]: row[1:] for row in connection.execute(SQL["counts_claimed"], {"now": monotonic_us})
    }
    dues = dict(connection.execute(SQL["promote_next"]).fetchall())
    facts = []
    for id_, name, paused, max_depth in sorted(names.values(), key=lambda row: row[1]):
        oldest = connection.execute(SQL["counts_oldest_ready"], {"queue": id_}).fetchone()[0]
        claimed_us, stale = claims.get(id_, (None, 0))
        facts.append(
            QueueFacts(
                name=name,
                depth=depths[id_],
                paused=bool(paused),
                max_depth=max_depth,
                oldest_ready_age_seconds=_age_seconds(now_us, oldest),
                oldest_claimed_age_seconds=_age_seconds(now_us, claimed_us),
                stale_leases=stale or 0,
                next_due_us=dues.get(id_),
            )
        )
    counters, histograms = assemble(
        (names[queue][1] if queue in names else "", task, name, label, value)
        for queue, task, name, label, value in stats
    )
    return Snapshot(
        taken_us=now_us,
        queues=tuple(facts),
        counters=counters,
        histograms=histograms,
        database_bytes=int(connection.execute(SQL["pragma_page_bytes"]).fetchone()[0]),
        log_bytes=log_bytes,
        recent=tuple(_recent(connection, {id_: row[1] for id_, row in names.items()})),
    )


def _recent(connection: sqlite3.Connection, names: Mapping[int, str]) -> Iterator[Recent]:
    """Yield some attempts that ended lately, newest ids first: a few rows by primary key."""
    for statement, series in (("counts_recent_done", "ok"), ("counts_recent_failed", "error")):
        for row in connection.execute(SQL[statement], {"limit": RECENT}):
            job, queue, task, ready_us, started_us, finished_us, headers = row
            yield Recent(
                job=job,
                queue=names.get(queue, ""),
                task=task,
                series=series,
                finished_us=finished_us,
                duration_seconds=_age_seconds(finished_us, started_us),
                wait_seconds=None if ready_us is None else _age_seconds(started_us, ready_us),
                headers=headers,
            )


def _age_seconds(now_us: int, since_us: int | None) -> float:
    return 0.0 if since_us is None else max(0, now_us - since_us) / 1_000_000
