"""Store jobs in one SQLite file: every transition, in the order of a job's life.

Boundary: transitions only. Connection, lock, flush and forks are `sqlite_file`'s,
opening and waiting `sqlite_base`'s; settling is shared by several transitions
and lives in `sqlite_finish`; the statements are in `sqlite.sql`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Sequence
from typing import Any, Final

from queue_core import stats
from queue_core.clock import time_namespace
from queue_core.engine import Abandoned, ClaimRequest, Holder, Verdict
from queue_core.engines import (
    sqlite_claim,
    sqlite_finish,
    sqlite_reads,
    sqlite_upkeep,
)
from queue_core.engines.sql import SQL
from queue_core.engines.sqlite_put import SqlitePut
from queue_core.errors import IdempotencyConflict, QueueError, QueueFull
from queue_core.job import (
    Claim,
    Claimed,
    Enqueued,
    Extended,
    NewJob,
    Reaped,
    Settled,
    Settlement,
    Stale,
)
from queue_core.stats import Tally

LOOKS_MAX: Final = 200
"""Looks of one claim past expired and parked jobs; each clears hundreds, and all take seconds."""
HOLDER_KEPT_US: Final = 7 * 24 * 3600 * 1_000_000


class SqliteEngine(SqlitePut):
    """The engine over one SQLite file; see `queue_core.engine.Engine` for each method."""

    # ------------------------------------------------------------ enqueue

    def enqueue(
        self, queue: str, jobs: Sequence[NewJob], *, tx: object | None = None, quiet: bool = False
    ) -> list[Enqueued]:
        """Store jobs, all or none, and return one result each, in order."""
        self._file.ensure_sure()
        if tx is not None:
            return self._put_within(tx, queue, jobs)
        if not jobs:
            return []
        try:
            # Whoever asks again and again whether there is room would spoil others' puts.
            return self._put(queue, jobs, shares=not quiet)
        except (QueueFull, IdempotencyConflict) as error:
            if not quiet:
                self._reject(queue, jobs, "full" if isinstance(error, QueueFull) else "conflict")
            raise

    # ------------------------------------------------------------ claim

    def hold(self, holder: Holder) -> int:
        """Register who claims, and return the number that its claims carry."""
        parameters = {
            "worker": holder.worker,
            "instance": holder.instance,
            "pid": os.getpid(),
            "boot": self.clock.boot_id(),
            "time_namespace": time_namespace(),
            "now": self.clock.wall_us(),
        }

        def work(connection: sqlite3.Connection) -> dict[str, Any]:
            number = connection.execute(SQL["stat_sequence"], {"number": 1}).fetchone()[0]
            registered = parameters | {"id": number}
            connection.execute(SQL["hold_insert"], registered)
            return registered

        registered = self._file.write(work, flush=False)
        self._holders[registered["id"]] = registered
        return int(registered["id"])

    def claim(self, request: ClaimRequest, *, holder: int) -> list[Claimed]:
        """Lease ready jobs, best first; an empty list when there is none."""
        return self.turn((), request, holder=holder)[1]

    def turn(
        self, settlements: Sequence[Settlement], request: ClaimRequest | None, *, holder: int
    ) -> tuple[list[Settled | Stale], list[Claimed]]:
        """Settle what is finished and claim what is next, in one transaction."""
        if not settlements and (request is None or not self._expected(request)):
            return [], []
        plain = None
        if settlements and (own := self._holders.get(holder)):
            now_us = self.clock.wall_us()
            plain = sqlite_finish.plain(settlements, self._ids, now_us, own["worker"])
        try:
            results, taken = self._take_turn(settlements, plain, request, holder)
        except sqlite_finish.SomeStale:
            results, taken = self._take_turn(settlements, None, request, holder)
        with contextlib.suppress(QueueError):  # what was settled stands, whatever comes now
            for _ in range(LOOKS_MAX):
                if not request or request.limit <= 0 or taken or not self._claimable(request):
                    break
                # Only expired and parked jobs were met, out of the way now: look behind them.
                taken = self._take_turn((), None, request, holder)[1]
        if settlements and request is not None and not taken:
            self._looked = True
        if request is not None and len(taken) == request.limit:
            # Probably more is left: pass the wake-up on, so that none is lost or piled up.
            self._bell.ring(taken[-1].queue)
        return results, taken

    def _take_turn(
        self,
        settlements: Sequence[Settlement],
        plain: sqlite_finish.Plain | None,
        request: ClaimRequest | None,
        holder: int,
    ) -> tuple[list[Settled | Stale], list[Claimed]]:
        """Run one transaction of a turn; raises SomeStale if `plain` was not so plain."""
        woken: set[int] = set()

        def work(
            connection: sqlite3.Connection, tally: Tally, now_us: int
        ) -> tuple[list[Settled | Stale], sqlite_claim.Taken]:
            results: list[Settled | Stale] = []
            taken: sqlite_claim.Taken = []
            if plain is not None:
                sqlite_finish.store(connection, plain)
                results = plain.results
            elif settlements:
                results, ready = sqlite_finish.settle(connection, tally, now_us, settlements)
                woken.update(ready)
            if request is not None:
                # Taken here, after the lock is held: a lease never begins part-spent.
                lease_us = self.clock.monotonic_us() + request.lease_us
                known = self._holders.get(holder)
                taken = sqlite_claim.claim(
                    connection, tally, now_us, lease_us, request, holder, known, self._ids
                )
            return results, taken

        results, taken = self._write(
            work,
            flush=False,
            operation="finish" if request is None else "claim",
            tally=plain.tally if plain else None,
        )
        self._ring_ids(woken)
        return results, sqlite_claim.records(taken, request is not None and request.starts)

    def _expected(self, request: ClaimRequest) -> bool:
        """Whether to take the lock for a claim: there is something, or a bell says so.

        A bell is believed once after each look that found nothing, for it may ring in vain.
        """
        rung, self._rung = self._rung, False
        if rung and self._looked:
            self._looked = False
            return True
        self._looked = not (found := self._claimable(request))
        return found

    def _claimable(self, request: ClaimRequest) -> bool:
        """Look without the lock: an idle claimer writes nothing."""
        return self._file.read(lambda connection: sqlite_claim.anything(connection, request))

    def held(self, holder: int) -> list[Claimed]:
        """Return the claims a holder has now, best first."""

        def work(connection: sqlite3.Connection) -> list[Claimed]:
            names = self._all_names(connection)
            rows = connection.execute(SQL["claim_held"], {"holder": holder}).fetchall()
            return [sqlite_reads.claimed(row, names[row[18]]) for row in rows]

        return self._file.read(work, snapshot=True)

    def abandoned(self, instance: str, living: Sequence[int], limit: int) -> list[Abandoned]:
        """Return claims of a supervisor's holders that are not among the living."""
        parameters = {"instance": instance, "living": json.dumps(list(living)), "limit": limit}

        def work(connection: sqlite3.Connection) -> list[Abandoned]:
            names = self._all_names(connection)
            rows = connection.execute(SQL["claim_abandoned"], parameters).fetchall()
            return [
                Abandoned(
                    holder=row[19],
                    row=sqlite_reads.claimed(row, names[row[18]]),
                    suspect=bool(row[20]),
                )
                for row in rows
            ]

        return self._file.read(work, snapshot=True)

    # ------------------------------------------------------------ extend

    def extend(self, claims: Sequence[Claim], lease_us: int) -> list[Extended | Stale]:
        """Set each lease to end `lease_us` from now."""

        def work(
            connection: sqlite3.Connection, tally: Tally, now_us: int
        ) -> list[Extended | Stale]:
            until_us = self.clock.monotonic_us() + lease_us
            results: list[Extended | Stale] = []
            for claim in claims:
                parameters = {"id": claim.id, "run": claim.run, "lease": until_us}
                changed = connection.execute(SQL["extend_lease"], parameters).rowcount
                results.append(Extended(claim=claim) if changed else Stale(claim=claim))
                if not changed:
                    tally.add(0, "", stats.STALE)
            return results

        return self._write(work, flush=False, operation="extend")

    def extend_holders(self, holders: Sequence[int], lease_us: int) -> int:
        """Renew every lease of these holders in one transaction; return how many."""

        def work(connection: sqlite3.Connection, _tally: Tally, _now_us: int) -> int:
            until_us = self.clock.monotonic_us() + lease_us
            parameters = {"holders": json.dumps(list(holders)), "lease": until_us}
            return connection.execute(SQL["extend_holders"], parameters).rowcount

        return self._write(work, flush=False, operation="extend") if holders else 0

    # ------------------------------------------------------------ finish

    def finish(
        self, settlements: Sequence[Settlement], *, tx: object | None = None
    ) -> list[Settled | Stale]:
        """Settle claims in one transaction, the caller's if given; a claim not held is Stale."""
        woken: set[int] = set()

        def work(
            connection: sqlite3.Connection, tally: Tally, now_us: int
        ) -> list[Settled | Stale]:
            results, ready = sqlite_finish.settle(connection, tally, now_us, settlements)
            woken.update(ready)
            return results

        if not settlements:
            return []
        if tx is not None:
            self._check_transaction(tx)
            results = self._file.within(lambda connection: self._counted(connection, work))
            names = self._file.within(self._all_names) if woken else {}
            self._rung_after.update(names[queue] for queue in woken)
            return results
        return self._write(
            work,
            flush=self._flush_finishes,
            operation="finish",
            ring=lambda _: self._ring_ids(woken),
        )

    def cancel(self, queue: str | None, ids: Sequence[int]) -> int:
        """Cancel ready and delayed jobs; return how many were."""

        def work(connection: sqlite3.Connection, tally: Tally, now_us: int) -> int:
            scope = self._scope(connection, queue)
            number = sqlite_upkeep.cancel(connection, tally, now_us, scope, ids)
            self._operated(tally, "cancel", number)
            return number

        return self._write(work, flush=True, operation="finish")

    # ------------------------------------------------------------ promote

    def promote(self, limit: int) -> int:
        """Make delayed jobs that are due ready; return how many. A suspect may run again, too."""
        now_us = self.clock.wall_us()
        if not self._file.read(lambda connection: sqlite_upkeep.promotable(connection, now_us)):
            return 0
        promoted = self._write(
            lambda connection, tally, now_us: sqlite_upkeep.promote(
                connection, tally, now_us, limit
            ),
            flush=False,
            operation="promote",
        )
        self._ring_ids(promoted)
        return sum(promoted.values())

    def next_due_us(self) -> int | None:
        """Return microseconds until the next delayed job is due; None when there is none."""
        dues = self._file.read(
            lambda connection: [row[1] for row in connection.execute(SQL["promote_next"])]
        )
        return max(0, min(dues) - self.clock.wall_us()) if dues else None

    # ------------------------------------------------------------ reap

    def reap(self, decide: Verdict, limit: int, queue: str | None = None) -> list[Reaped]:
        """Settle claims whose lease ran out, as `decide` says; of one queue, if it is named."""
        first = self._file.read(
            lambda connection: connection.execute(
                SQL["reap_next"], {"only": self._scope(connection, queue)}
            ).fetchone()
        )
        if first is None or first[0] > self.clock.monotonic_us():
            return []
        woken: set[int] = set()

        def work(connection: sqlite3.Connection, tally: Tally, now_us: int) -> list[Reaped]:
            reaped, ready = sqlite_upkeep.reap(
                connection, tally, now_us, self.clock.monotonic_us(),
                dict(self._all_names(connection)), decide, limit, self._scope(connection, queue),
            )  # fmt: skip
            woken.update(ready)
            return reaped

        return self._write(work, flush=True, operation="reap", ring=lambda _: self._ring_ids(woken))

    # ------------------------------------------------------------ replay

    def replay(self, queue: str | None, ids: Sequence[int]) -> int:
        """Make dead jobs ready with no attempt spent; return how many were dead."""

        def work(connection: sqlite3.Connection, tally: Tally, now_us: int) -> tuple[int, set[int]]:
            scope = self._scope(connection, queue)
            number, queues = sqlite_upkeep.replay(connection, tally, now_us, scope, ids)
            self._operated(tally, "replay", number)
            return number, queues

        number, _ = self._write(
            work, flush=True, operation="replay", ring=lambda done: self._ring_ids(done[1])
        )
        return number

    def discard(self, queue: str | None, ids: Sequence[int]) -> int:
        """Remove dead jobs for good; return how many were."""

        def work(connection: sqlite3.Connection, tally: Tally, now_us: int) -> int:
            scope = self._scope(connection, queue)
            number = sqlite_upkeep.discard(connection, tally, now_us, scope, ids)
            self._operated(tally, "discard", number)
            return number

        return self._write(work, flush=True, operation="replay")

    # ------------------------------------------------------------ prune

    def prune(self, limit: int) -> int:
        """Remove finished jobs past their retention, at most `limit`; return how many."""
        now_us = self.clock.wall_us()
        if not self._file.read(lambda connection: sqlite_upkeep.prunable(connection, now_us)):
            return 0

        def work(connection: sqlite3.Connection, tally: Tally, now_us: int) -> int:
            number = sqlite_upkeep.prune(connection, tally, now_us, limit, now_us - HOLDER_KEPT_US)
            self._operated(tally, "prune", number)
            return number

        return self._write(work, flush=True, operation="prune")
