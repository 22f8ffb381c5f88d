"""Keep the file itself in order: import, vacuum, backup, check, recount, newest, diagnostics.

Boundary: what an operator asks for now and then. Each long piece of work runs on
a connection of its own, so that threads which share the engine go on meanwhile.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from queue_core.engines import sqlite_backup, sqlite_import, sqlite_reads, sqlite_schema
from queue_core.engines.sql import SQL
from queue_core.engines.sqlite_base import SqliteBase
from queue_core.engines.sqlite_file import SqliteFile
from queue_core.engines.sqlite_import import UPKEEP_SQL
from queue_core.errors import PayloadInvalid, QueueError
from queue_core.job import Enqueued, Reason, Record, State
from queue_core.lockfile import describe_holder
from queue_core.stats import DEPTH, Tally
from queue_core.upkeep import (
    IMPORT_BATCH_MAX,
    PROBLEMS_MAX,
    BackedUp,
    Diagnostics,
    Drift,
    ImportJob,
    Vacuumed,
)

T = TypeVar("T")

ID_MAX: Final = 2**63 - 1
STOP_LOOK_STEPS: Final = 10_000
"""Steps of SQLite's machine between two looks whether to stop: some milliseconds."""
JOIN_SECONDS: Final = 0.2
OWN_ENDINGS: Final = ("-wal", "-shm", "-journal", ".lock", ".bells")


class SqliteMaintenance(SqliteBase):
    """The upkeep of one file; see `queue_core.upkeep.Upkeep` for each method."""

    def import_jobs(self, queue: str, jobs: Sequence[ImportJob]) -> list[Enqueued]:
        """Store jobs of another queue, all or none, each origin once."""
        if len(jobs) > IMPORT_BATCH_MAX:
            raise PayloadInvalid(f"{len(jobs)} jobs at once; import at most {IMPORT_BATCH_MAX}")
        if not jobs:
            return []
        self._file.ensure_sure()

        def work(
            connection: sqlite3.Connection, tally: Tally, now_us: int
        ) -> tuple[list[Enqueued], bool]:
            known = (self._queue_made(connection, queue, now_us), queue)
            return sqlite_import.import_jobs(connection, tally, now_us, known, jobs)

        results, _ = self._write(
            work,
            flush=True,
            operation="enqueue",
            ring=lambda done: self._bell.ring(queue) if done[1] else None,
        )
        return results

    def imported(self, origins: Sequence[str]) -> set[str]:
        """Return those of the origins that `import_jobs` has seen before."""
        parameters = {"origins": json.dumps(list(origins))}
        return self._file.read(
            lambda connection: {
                row[0] for row in connection.execute(UPKEEP_SQL["import_origins"], parameters)
            }
        )

    def vacuum(self) -> Vacuumed:
        """Give free pages back to the filesystem; everybody else waits meanwhile."""
        before_bytes = self.snapshot().database_bytes

        def work(file: SqliteFile, stop: threading.Event) -> None:
            def pack(connection: sqlite3.Connection) -> None:
                connection.set_progress_handler(stop.is_set, STOP_LOOK_STEPS)
                connection.execute(UPKEEP_SQL["vacuum_pack"])

            file.alone(pack)
            file.checkpoint(truncate=True)

        self._apart(work)
        return Vacuumed(before_bytes=before_bytes, after_bytes=self.snapshot().database_bytes)

    def backup(self, path: Path) -> BackedUp:
        """Copy the store while it is in use, verify the copy, then give it its name.

        The copy is of one moment, however long it takes. Raises QueueError if
        `path` exists or the copy is not sound; nothing is left behind then.
        """
        if os.path.realpath(path) in {f"{self.path}{end}" for end in OWN_ENDINGS}:
            raise QueueError(
                f"{path} is a name that SQLite gives to files of this database, and removes; "
                "name another file"
            )

        def work(file: SqliteFile, stop: threading.Event) -> BackedUp:
            return file.read(
                lambda source: sqlite_backup.backup(source, Path(path), stop), snapshot=True
            )

        return self._apart(work)

    def check(self, *, full: bool = False) -> list[str]:
        """Return what is wrong with the file, at most PROBLEMS_MAX sentences.

        The quick check reads every page; the full one compares indexes with
        their tables too, and looks for jobs and payloads without each other.
        """

        def work(file: SqliteFile, stop: threading.Event) -> list[str]:
            def look(connection: sqlite3.Connection) -> list[str]:
                connection.set_progress_handler(stop.is_set, STOP_LOOK_STEPS)
                return sqlite_backup.problems(connection, full=full)[:PROBLEMS_MAX]

            return file.read(look, snapshot=True)

        return self._apart(work)

    def recount(self, *, mend: bool = False) -> list[Drift]:
        """Compare the counters with the rows, at one moment; with `mend`, correct them."""

        def drifts(connection: sqlite3.Connection) -> list[tuple[int, str, int, int]]:
            counted = {
                (queue, state): number
                for queue, state, number in connection.execute(UPKEEP_SQL["recount_rows"])
            }
            stored = {
                (queue, state): number
                for queue, state, number in connection.execute(UPKEEP_SQL["recount_stored"])
            }
            return [
                (*at, counted.get(at, 0), stored.get(at, 0))
                for at in sorted(counted.keys() | stored.keys())
                if counted.get(at, 0) != stored.get(at, 0)
            ]

        def named(connection: sqlite3.Connection) -> list[Drift]:
            names = self._all_names(connection)
            return [
                Drift(
                    queue=names.get(queue, f"number {queue}"),
                    state=State(state),
                    counted=counted,
                    stored=stored,
                )
                for queue, state, counted, stored in drifts(connection)
            ]

        def work(connection: sqlite3.Connection, tally: Tally, _now_us: int) -> list[Drift]:
            found = named(connection)
            for queue, state, counted, stored in drifts(connection):
                tally.add(queue, "", DEPTH, state, counted - stored)
            return found

        if mend:
            return self._write(work, flush=True, operation="other")
        return self._file.read(named, snapshot=True)

    def newest(
        self,
        state: State,
        *,
        queue: str | None = None,
        task: str | None = None,
        reason: Reason | None = None,
        limit: int = 100,
        before: int | None = None,
    ) -> list[Record]:
        """Return one page of jobs in a state, largest id first, below the id `before`."""
        statement = UPKEEP_SQL[f"newest_{sqlite_reads.PLACES[state]}"]

        def work(connection: sqlite3.Connection) -> list[Record]:
            parameters = {
                "state": "succeeded" if state is State.DONE else state.value,
                "queue": self._scope(connection, queue),
                "task": task,
                "reason": reason,
                "before": ID_MAX if before is None else before,
                "limit": max(0, min(limit, sqlite_reads.LIST_LIMIT_MAX)),
            }
            ids = [row[0] for row in connection.execute(statement, parameters)]
            return sqlite_reads.records(connection, self._all_names(connection), state, ids)

        return self._file.read(work, snapshot=True)

    def diagnostics(self) -> Diagnostics:
        """Return what is true of the store now; the cost grows with queues and claims only."""
        whole = self.snapshot()

        def work(connection: sqlite3.Connection) -> Diagnostics:
            page_bytes, pages, free, journal, schema = connection.execute(
                UPKEEP_SQL["diagnostics_pages"]
            ).fetchone()
            now_us = self.clock.monotonic_us()
            dues = [row[1] for row in connection.execute(SQL["promote_next"])]
            leases, expired, first = connection.execute(
                UPKEEP_SQL["diagnostics_leases"], {"now": now_us}
            ).fetchone()
            return Diagnostics(
                taken_us=whole.taken_us,
                path=self.path,
                sqlite_version=sqlite3.sqlite_version,
                wal_reset_bug=sqlite_schema.has_wal_reset_bug(sqlite3.sqlite_version_info),
                schema_version=schema,
                journal_mode=journal,
                durability=self._file.durability,
                lock=self._file.lock_kind,
                lock_holder=self._lock_holder(),
                page_bytes=page_bytes,
                pages=pages,
                pages_free=free,
                database_bytes=page_bytes * pages,
                log_bytes=whole.log_bytes,
                log_file_bytes=_file_bytes(Path(f"{self.path}-wal")),
                boot=connection.execute(SQL["meta_get"], {"name": "boot"}).fetchone()[0],
                created_us=int(
                    connection.execute(SQL["meta_get"], {"name": "created_us"}).fetchone()[0]
                ),
                holders=connection.execute(UPKEEP_SQL["diagnostics_holders"]).fetchone()[0],
                leases=leases,
                leases_expired=expired,
                next_lease_end_seconds=(
                    None if first is None else max(0, first - now_us) / 1_000_000
                ),
                next_due_seconds=(max(0, min(dues) - whole.taken_us) / 1_000_000 if dues else None),
                queues=whole.queues,
            )

        return self._file.read(work, snapshot=True)

    def _lock_holder(self) -> str | None:
        found = describe_holder(self._file.lock_path)
        return None if found == "an unknown process" else found

    # ------------------------------------------------------------ helpers

    def _apart(self, work: Callable[[SqliteFile, threading.Event], T]) -> T:
        """Run long work on a connection of its own, where Ctrl-C and time-outs can end it.

        The main thread defers signals while it uses a connection; so there the
        work runs in a thread, and the main thread waits where signals reach it.
        """
        self._file.read(lambda connection: None)  # opens it, or says why not
        stop = threading.Event()
        file = SqliteFile(
            self.path,
            check=self.check_place,
            prepare=lambda connection: None,  # has been, just now: it is ours, and of this boot
            abandon=lambda: None,
            lock=self._file.lock_kind,
            durability=self._file.durability,
            lock_timeout_seconds=self._file.lock_timeout_seconds,
        )

        def run() -> T:
            try:
                return work(file, stop)
            finally:
                file.close()

        if threading.current_thread() is not threading.main_thread():
            return run()
        outcome: list[T] = []
        fault: list[BaseException] = []

        def runner() -> None:
            try:
                outcome.append(run())
            except BaseException as error:
                fault.append(error)
            finally:
                ended.set()

        # Not by join: a Ctrl-C in it makes Python 3.11 take the thread for ended.
        ended = threading.Event()
        thread = threading.Thread(target=runner, name="herdsman-upkeep")
        thread.start()
        try:
            while not ended.wait(JOIN_SECONDS):
                pass
        finally:
            stop.set()
            ended.wait()
        if fault:
            raise fault[0]
        if not outcome:
            raise QueueError(f"{self.path}: the work ended without a result")
        return outcome[0]


def _file_bytes(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
