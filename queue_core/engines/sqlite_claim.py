"""Lease ready jobs: best first, expired ones buried, those without a handler set aside.

Boundary: works inside a write transaction that its caller holds.
"""

from __future__ import annotations

import json
import random
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from queue_core import stats
from queue_core.engine import ClaimRequest
from queue_core.engines import sqlite_finish
from queue_core.engines.sql import SQL
from queue_core.job import Claim, Claimed, Outcome, Reason, Settlement, State
from queue_core.stats import Tally

Taken = list[tuple[Any, ...]]
"""Claimed rows as they came: the fields of `Claimed` but its last, in its order."""
_new: Final[Any] = tuple.__new__
_TASK, _READY_US, _EXPIRES_US = map(Claimed._fields.index, ("task", "ready_us", "expires_us"))

_ASIDE: Final = (0, "")
_NO_HOLDER: Final = (-1, "")
EXPIRED_LIMIT: Final = 500
"""Expired jobs that one look clears beside those it met, so that a heap of them goes fast."""
LOOKS_MAX: Final = 4
"""How often one claim looks again after finding only expired or parked jobs."""


@lru_cache(maxsize=64)
def tasks_json(tasks: frozenset[str]) -> str:
    """Return a set of tasks as the JSON array that the statements take."""
    return json.dumps(sorted(tasks))


def _waiting(
    connection: sqlite3.Connection, holder: int = 0
) -> tuple[list[tuple[int, str]], bool, bool]:
    """Return queues with something to claim; whether jobs were set aside; whether holder is new."""
    rows: list[tuple[int, str]] = connection.execute(
        SQL["claim_queues"], {"holder": holder}
    ).fetchall()
    found = [row for row in rows if row[0] > 0]
    if len(found) == len(rows):
        return found, False, False
    return found, _ASIDE in rows, _NO_HOLDER in rows


def _in_order(rows: list[tuple[int, str]], queues: Sequence[str] | None) -> list[tuple[int, str]]:
    """Return queues in the order to look.

    The caller's order is kept; without one they start at a random place, so
    that none starves behind another.
    """
    if queues is None:
        if len(rows) > 1:
            # Fairness, not secrecy.
            start = random.randrange(len(rows))
            rows = rows[start:] + rows[:start]
        return rows
    by_name = {name: (id_, name) for id_, name in rows}
    return [by_name[name] for name in queues if name in by_name]


def anything(connection: sqlite3.Connection, request: ClaimRequest) -> bool:
    """Whether this claimer would find something."""
    ready, aside, _ = _waiting(connection)
    if _in_order(ready, request.queues):
        return True
    # Set aside for want of a handler, which this claimer may have.
    return aside and _parked_tasks(connection, request) is not None


def _parked_tasks(connection: sqlite3.Connection, request: ClaimRequest) -> str | None:
    """Return the tasks to look for among the parked, as JSON; None when there is none of them."""
    if request.tasks is None:
        found: set[str] = set()
        for name in request.queues or ():
            queue = connection.execute(SQL["queue_id"], {"name": name}).fetchone()
            if queue is not None:
                parked = connection.execute(SQL["claim_parked_in"], {"queue": queue[0]})
                found.update(task for (task,) in parked)
        return tasks_json(frozenset(found)) if found else None
    tasks = tasks_json(request.tasks)
    waits = connection.execute(SQL["claim_parked"], {"tasks": tasks}).fetchone() is not None
    return tasks if waits else None


def claim(
    connection: sqlite3.Connection,
    tally: Tally,
    now_us: int,
    lease_us: int,
    request: ClaimRequest,
    holder: int,
    known: Mapping[str, Any] | None,
    ids: dict[str, int],
) -> Taken:
    """Lease up to `request.limit` jobs until the monotonic instant `lease_us`.

    `known` is what is to be stored of the holder, if its row is gone. `ids` learns the numbers
    of the queues that were claimed from.
    """
    ready, aside, new = _waiting(connection, holder)
    if new and known is not None:
        connection.execute(SQL["hold_insert"], known)
    if aside and (parked := _parked_tasks(connection, request)) is not None:
        tasks = {"tasks": parked}
        for queue_id, task, number in connection.execute(SQL["claim_parked_count"], tasks):
            # Read in this transaction: with these jobs gone, none is left.
            tally.add(queue_id, task, stats.PARKED, "", -number)
        connection.execute(SQL["claim_unpark"], tasks)
        ready = _waiting(connection)[0]
    taken: Taken = []
    for queue_id, name in _in_order(ready, request.queues):
        for _ in range(LOOKS_MAX):
            wanted = request.limit - len(taken)
            if wanted <= 0:
                return taken
            parameters = {
                "queue": queue_id, "name": name, "limit": wanted, "holder": holder,
                "lease": lease_us, "now": now_us, "started": int(request.starts),
            }  # fmt: skip
            rows = connection.execute(SQL["claim_rows"], parameters).fetchall()
            if not rows:
                break
            parameters["ids"] = str([row[0] for row in rows])  # reads the same in JSON
            if connection.execute(SQL["claim_jobs"], parameters).rowcount != len(rows):
                raise sqlite3.DatabaseError("claim_jobs did not find what claim_rows had read")
            fit = _sift(connection, tally, now_us, queue_id, request, holder, rows)
            _count(tally, now_us, queue_id, request, fit)
            ids[name] = queue_id
            taken.extend(fit)
            if len(rows) < wanted:
                break
    return taken


def records(taken: Taken, starts: bool) -> list[Claimed]:
    """Return claimed rows as records; done when the lock is free again."""
    return [_new(Claimed, (*row, starts)) for row in taken]


def _sift(
    connection: sqlite3.Connection,
    tally: Tally,
    now_us: int,
    queue_id: int,
    request: ClaimRequest,
    holder: int,
    rows: list[tuple[Any, ...]],
) -> list[tuple[Any, ...]]:
    """Return the rows to hand out; the expired die, those without a handler step aside."""
    fit, expired, aside = [], [], []
    for row in rows:
        if row[_EXPIRES_US] is not None and row[_EXPIRES_US] <= now_us:
            expired.append(row)
        elif request.tasks is not None and row[_TASK] not in request.tasks:
            aside.append(row)
        else:
            fit.append(row)
    if aside:
        connection.executemany(SQL["claim_park"], [(row[0], row[1]) for row in aside])
        for row in aside:
            tally.add(queue_id, row[_TASK], stats.PARKED)
    if expired:
        claims = [(row[0], row[1]) for row in expired]
        parameters = {
            "queue": queue_id, "holder": holder, "lease": now_us, "now": now_us,
            "limit": EXPIRED_LIMIT,
        }  # fmt: skip
        claims += connection.execute(SQL["claim_expired"], parameters).fetchall()
        tally.move(queue_id, State.READY, State.CLAIMED, len(claims))
        expiries = [_expiry(id_, run) for id_, run in claims]
        sqlite_finish.settle(connection, tally, now_us, expiries)
    return fit


def _expiry(id_: int, run: int) -> Settlement:
    return Settlement(
        claim=Claim(id=id_, run=run),
        to=State.DEAD,
        outcome=Outcome.REJECTED,
        charge=False,
        reason=Reason.EXPIRED,
        error="the job was not started before it expired",
    )


def _count(
    tally: Tally, now_us: int, queue_id: int, request: ClaimRequest, rows: list[tuple[Any, ...]]
) -> None:
    if not rows:
        return
    tally.move(queue_id, State.READY, State.CLAIMED, len(rows))
    for task, number in Counter([row[_TASK] for row in rows]).items():
        tally.add(queue_id, task, stats.CLAIMS, "", number)
    if request.starts:
        for row in rows:
            tally.add(queue_id, row[_TASK], stats.STARTED)
            tally.observe_us(queue_id, row[_TASK], stats.WAIT, now_us - row[_READY_US])
