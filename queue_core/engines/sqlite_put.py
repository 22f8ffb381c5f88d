"""Store a put: alone, together with others' puts, or in its user's transaction.

Boundary: which way, and which bells are rung; rows are `sqlite_enqueue`'s, and how several
processes share a transaction is `sqlite_shared`'s.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from queue_core import stats
from queue_core.engines import sqlite_enqueue
from queue_core.engines.sqlite_enqueue import Stored
from queue_core.engines.sqlite_maintenance import SqliteMaintenance
from queue_core.errors import PayloadInvalid
from queue_core.job import Enqueued, NewJob
from queue_core.stats import Tally


class SqlitePut(SqliteMaintenance):
    """The engine's ways to store new jobs."""

    def _put(self, queue: str, jobs: Sequence[NewJob], *, shares: bool) -> list[Enqueued]:
        """Store jobs in a transaction of our own, or in that of a process that puts as well."""

        def store(
            connection: sqlite3.Connection, bodies: Sequence[bytes] = ()
        ) -> tuple[Stored, list[int]]:
            return self._store(connection, queue, jobs, bodies)

        if shares and self._file.shares and sqlite_enqueue.fits_a_board(jobs):
            done = self._file.put(
                lambda: sqlite_enqueue.packed(queue, jobs[0]),
                store,
                ring=lambda stored: self._ring([queue] if stored is None else stored.ready),
            )
            return [sqlite_enqueue.result_of(done)] if isinstance(done, int) else done.results
        alone, _ = self._file.write(
            store, flush=True, operation="enqueue", ring=lambda done: self._ring(done[0].ready)
        )
        return alone.results

    def _put_within(self, tx: object, queue: str, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Store jobs in the open `transaction()`, whose end rings."""
        self._check_transaction(tx)
        stored, _ = self._file.within(lambda connection: self._store(connection, queue, jobs, ()))
        self._rung_after.add(queue)
        return stored.results

    def _check_transaction(self, tx: object) -> None:
        if not isinstance(tx, sqlite3.Connection) or not self._file.is_transaction(tx):
            raise PayloadInvalid("tx= takes what this queue's open transaction() yielded")

    def _store(
        self,
        connection: sqlite3.Connection,
        queue: str,
        jobs: Sequence[NewJob],
        bodies: Sequence[bytes],
    ) -> tuple[Stored, list[int]]:
        def work(
            connection: sqlite3.Connection, tally: Tally, now_us: int
        ) -> tuple[Stored, list[int]]:
            def some(name: str, jobs: Sequence[NewJob]) -> tuple[list[Enqueued], bool]:
                known = (self._queue_made(connection, name, now_us), name)
                return sqlite_enqueue.enqueue(connection, tally, now_us, known, jobs)

            if bodies:
                return sqlite_enqueue.together(queue, jobs, bodies, some)
            results, ready = some(queue, jobs)
            return Stored(results, [queue] if ready else []), []

        return self._counted(connection, work)

    def _reject(self, queue: str, jobs: Sequence[NewJob], reason: str) -> None:
        """Count refused jobs, in a transaction of its own: theirs was rolled back."""

        def work(connection: sqlite3.Connection, tally: Tally, now_us: int) -> None:
            queue_id = self._queue_made(connection, queue, now_us)
            for job in jobs:
                tally.add(queue_id, job.task, stats.REJECTED, reason)

        self._write(work, flush=False, operation="enqueue")
