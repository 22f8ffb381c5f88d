"""Carry out settlements: move claimed rows on, write the ledger, count.

Boundary: works inside a write transaction that its caller holds; decides
nothing, and touches only rows whose claim `(id, run)` still stands.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from queue_core import stats
from queue_core.engines.sql import SQL
from queue_core.job import (
    ERROR_CHARS_MAX,
    TRACEBACK_CHARS_MAX,
    Outcome,
    Settled,
    Settlement,
    Stale,
    State,
)
from queue_core.stats import Tally

_new: Final[Any] = tuple.__new__  # for hundreds at once; the call of a NamedTuple takes twice it


@dataclass(frozen=True, slots=True)
class _Held:
    """The columns of a claimed row that its settlement needs."""

    run: int
    queue: int
    task: str
    attempts: int
    ready_us: int
    eligible_us: int
    claimed_us: int
    key: str | None
    started: bool


def settle(
    connection: sqlite3.Connection,
    tally: Tally,
    now_us: int,
    settlements: Sequence[Settlement],
) -> tuple[list[Settled | Stale], set[int]]:
    """Settle each claim that still stands; return the results and the queues that got ready jobs.

    A claim named twice in one call is settled once, by its first settlement.
    """
    held = _held(connection, [settlement.claim.id for settlement in settlements])
    results: list[Settled | Stale] = []
    groups: defaultdict[State, list[dict[str, Any]]] = defaultdict(list)
    attempts: list[dict[str, Any]] = []
    keys: list[tuple[int, str, int]] = []
    woken: set[int] = set()
    for settlement in settlements:
        claim = settlement.claim
        row = held.get(claim.id)
        if row is None and settlement.row is not None and _is_done(connection, settlement):
            # The keeper settled what this worker had finished, while a long job kept it busy.
            results.append(Settled(claim=claim, state=State.DONE))
            continue
        if row is None or row.run != claim.run:
            results.append(Stale(claim=claim))
            # Worker and keeper may both hand back a job that never started; that is no anomaly.
            if settlement.to is not State.READY or settlement.started_us is not None:
                tally.add(row.queue if row else 0, "", stats.STALE)
            continue
        del held[claim.id]
        results.append(Settled(claim=claim, state=settlement.to))
        parameters = _parameters(settlement, row, now_us)
        groups[settlement.to].append(parameters)
        if parameters["started"] is not None and settlement.to is not State.DONE:
            attempts.append(_ledger_line(settlement, parameters["started"], now_us))
        if row.key is not None and settlement.to in {State.DONE, State.DEAD}:
            keys.append((row.queue, row.key, claim.id))
        if settlement.to is State.READY:
            woken.add(row.queue)
        count(tally, settlement, row, now_us)
    if attempts:
        connection.executemany(SQL["finish_attempt"], attempts)
        connection.executemany(SQL["finish_ledger_trim"], attempts)
    _give_places(connection, groups.get(State.READY, []))
    for state, rows in groups.items():
        _move(connection, state, rows)
    start_key_life(connection, keys, now_us)
    return results, woken


def _is_done(connection: sqlite3.Connection, settlement: Settlement) -> bool:
    parameters = {"id": settlement.claim.id, "run": settlement.claim.run}
    return (
        settlement.to is State.DONE
        and connection.execute(SQL["finish_is_done"], parameters).fetchone() is not None
    )


class SomeStale(Exception):
    """A claim of a plain batch no longer stands: settle the batch claim by claim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """A batch of plain successes, made ready for the disk before the lock is taken."""

    results: list[Settled | Stale]
    ids: list[int]
    runs: list[tuple[int, dict[str, Any]]]
    """For each run how many claims have it, and the parameters of `finish_plain`."""
    tally: Tally


def plain(
    settlements: Sequence[Settlement], queues: Mapping[str, int], now_us: int, worker: str
) -> Plain | None:
    """Prepare a worker's batch of successes of jobs without keys; None if it is no such batch.

    Most batches are, and all the counting for them is done here, where nobody
    waits for us. `store` then only has to write.
    """
    groups: defaultdict[tuple[str, str], list[Settlement]] = defaultdict(list)
    ids: list[int] = []
    runs: defaultdict[int, list[str]] = defaultdict(list)
    done = State.DONE
    for settlement in settlements:
        row, started_us = settlement.row, settlement.started_us
        if (
            settlement.to is not done
            or row is None
            or row.key is not None
            or started_us is None
            or row.queue not in queues
        ):
            return None
        groups[(row.queue, row.task)].append(settlement)
        ids.append(row.id)
        runs[row.run].append(f'"{row.id}":{started_us}')
    if len(set(ids)) != len(ids):
        return None  # a claim named twice is settled once
    tally = Tally()
    for (queue, task), group in groups.items():
        _count_plain(tally, queues[queue], task, group, now_us)
    return Plain(
        results=[_new(Settled, (settlement.claim, done)) for settlement in settlements],
        ids=ids,
        runs=[
            (
                len(each),
                {"run": run, "now": now_us, "worker": worker, "started": f"{{{','.join(each)}}}"},
            )
            for run, each in runs.items()
        ],
        tally=tally,
    )


def store(connection: sqlite3.Connection, batch: Plain) -> None:
    """Write a plain batch; raises SomeStale, for a roll-back, if a claim no longer stands."""
    for number, parameters in batch.runs:
        if connection.execute(SQL["finish_plain"], parameters).rowcount != number:
            raise SomeStale
    ids = {"ids": str(batch.ids)}  # a list of integers reads the same in JSON
    if connection.execute(SQL["finish_removes"], ids).rowcount != len(batch.ids):
        raise SomeStale


def _count_plain(
    tally: Tally, queue: int, task: str, group: Sequence[Settlement], now_us: int
) -> None:
    """Count what `count` would, for successes of one queue and task."""
    number = len(group)
    rows = [settlement.row for settlement in group if settlement.row is not None]
    unstarted = [
        settlement.started_us - row.ready_us
        for settlement, row in zip(group, rows, strict=True)
        if settlement.started_us is not None and not row.started
    ]
    tally.move(queue, State.CLAIMED, State.DONE, number)
    if unstarted:
        tally.add(queue, task, stats.STARTED, "", len(unstarted))
        tally.observe_many_us(queue, task, stats.WAIT, unstarted)
    tally.add(queue, task, stats.FINISHED, Outcome.SUCCEEDED, number)
    tally.add(queue, task, stats.JOBS_FINISHED, "succeeded", number)
    durations = [settlement.duration_us for settlement in group]
    tally.observe_many_us(queue, task, stats.DURATION, durations, "ok")
    tally.observe_many_us(queue, task, stats.LATENCY, [now_us - row.eligible_us for row in rows])
    for attempts, times in Counter([row.attempts + 1 for row in rows]).items():
        tally.observe_attempts(queue, task, attempts, times)


def _held(connection: sqlite3.Connection, ids: Sequence[int]) -> dict[int, _Held]:
    rows = connection.execute(SQL["finish_rows"], {"ids": json.dumps(list(ids))})
    return {
        id_: _Held(run, queue, task, attempts, ready, eligible, claimed, key, bool(started))
        for id_, run, queue, task, attempts, ready, eligible, claimed, key, started in rows
    }


def _parameters(settlement: Settlement, row: _Held, now_us: int) -> dict[str, Any]:
    started_us = settlement.started_us
    if started_us is None and row.started:
        started_us = row.claimed_us
    return {
        "id": settlement.claim.id,
        "run": settlement.claim.run,
        "now": now_us,
        "started": started_us,
        "charge": int(settlement.charge),
        "death": int(settlement.death),
        "tree_death": int(settlement.tree_death),
        "suspect": int(settlement.suspect),
        "due": now_us + settlement.delay_us,
        "reason": settlement.reason,
        "error": cut(settlement.error, ERROR_CHARS_MAX),
        "traceback": cut(settlement.traceback, TRACEBACK_CHARS_MAX, keep_end=True),
    }


def _ledger_line(settlement: Settlement, started_us: int, now_us: int) -> dict[str, Any]:
    return {
        "id": settlement.claim.id,
        "run": settlement.claim.run,
        "started": started_us,
        "now": now_us,
        "outcome": settlement.outcome,
        "cause": settlement.cause,
        "error": cut(settlement.error, ERROR_CHARS_MAX),
    }


def cut(text: str | None, length: int, *, keep_end: bool = False) -> str | None:
    """Bound a text that came from a handler, and replace what no database takes."""
    if text is None:
        return None
    text = text.encode("utf-8", "replace").decode("utf-8").replace("\0", "\\0")
    if len(text) <= length:
        return text
    return "…" + text[1 - length :] if keep_end else text[: length - 1] + "…"


_MOVES = {
    State.DONE: ("finish_done", "finish_remove"),
    State.DEAD: ("finish_dead", "finish_remove"),
    State.READY: ("finish_ready",),
    State.DELAYED: ("finish_delayed",),
}


def _move(connection: sqlite3.Connection, state: State, rows: list[dict[str, Any]]) -> None:
    for name in _MOVES[state]:
        changed = connection.executemany(SQL[name], _bound(name, rows)).rowcount
        if changed != len(rows):
            # The rows were read under the lock a moment ago: only a damaged
            # file, or a writer without any lock, can make these differ.
            raise sqlite3.DatabaseError(f"{name} changed {changed} rows of {len(rows)}")


def _give_places(connection: sqlite3.Connection, rows: list[dict[str, Any]]) -> None:
    """Let charged retries stand at the end of their queue; the others keep their place."""
    anew = [row for row in rows if row["charge"] and not row["death"]]
    for row in rows:
        row["seq"] = None
    if anew:
        numbers = {"number": len(anew)}
        last = connection.execute(SQL["stat_sequence"], numbers).fetchone()[0]
        for place, row in enumerate(anew):
            row["seq"] = last - len(anew) + 1 + place


def _bound(name: str, rows: list[dict[str, Any]]) -> Sequence[Any]:
    if name == "finish_done":
        return [(row["id"], row["run"], row["started"], row["now"]) for row in rows]
    if name == "finish_remove":
        return [(row["id"], row["run"]) for row in rows]
    return rows


def start_key_life(
    connection: sqlite3.Connection, keys: Sequence[tuple[int, str, int]], now_us: int
) -> None:
    """Let the keys of finished jobs expire, in the queues that say when."""
    lives: dict[int, int | None] = {}
    for queue, key, job in keys:
        if queue not in lives:
            row = connection.execute(SQL["queue_options"], {"queue": queue}).fetchone()
            lives[queue] = row[2] if row else None
        life_us = lives[queue]
        if life_us is not None:
            connection.execute(
                SQL["finish_key"],
                {"queue": queue, "key": key, "id": job, "expires": now_us + life_us},
            )


def count(tally: Tally, settlement: Settlement, row: _Held, now_us: int) -> None:
    """Count one settlement: depth, attempt, retry or end, and how long each took."""
    queue, task, to = row.queue, row.task, settlement.to
    tally.move(queue, State.CLAIMED, to)
    if settlement.tree_death:
        tally.add(queue, task, stats.TREE_DEATHS)
    started_us = settlement.started_us
    if started_us is None and row.started:
        started_us = row.claimed_us
    if started_us is not None:
        if not row.started:
            tally.add(queue, task, stats.STARTED)
            tally.observe_us(queue, task, stats.WAIT, started_us - row.ready_us)
        tally.add(queue, task, stats.FINISHED, settlement.outcome)
        series = "ok" if to is State.DONE else "error"
        tally.observe_us(queue, task, stats.DURATION, settlement.duration_us, series)
        if settlement.charge and to in {State.READY, State.DELAYED}:
            tally.add(queue, task, stats.RETRIES, settlement.outcome)
        if settlement.charge and to is not State.DONE:
            tally.add_error(queue, task, settlement.error)
    if to is State.DONE:
        tally.add(queue, task, stats.JOBS_FINISHED, "succeeded")
        tally.observe_us(queue, task, stats.LATENCY, now_us - row.eligible_us)
        tally.observe_attempts(queue, task, row.attempts + 1)
    elif to is State.DEAD:
        tally.add(queue, task, stats.JOBS_FINISHED, "dead")
        tally.add(queue, task, stats.DEAD_LETTERS, settlement.reason or "invalid")
        tally.observe_attempts(queue, task, row.attempts + int(settlement.charge))
