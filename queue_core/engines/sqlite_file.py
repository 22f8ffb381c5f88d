"""Run transactions on one SQLite file, and make them durable.

Every write holds the flock beside the file, so that writers queue fairly and
SQLite's WAL-reset bug cannot be met. A commit is made durable after the lock is
free, by flushing the log, so that concurrent producers share one flush (group
commit).

Boundary: when and how; what is written is `sqlite.py`'s, and opening, locking
and forks are `sqlite_handle`'s.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from queue_core.engines import deferral
from queue_core.engines.sql import SQL
from queue_core.engines.sqlite_handle import SqliteHandle
from queue_core.errors import DatabaseError, DurabilityUnknown, QueueBusy, QueueError

T = TypeVar("T")

CHECKPOINT_BYTES: Final = 4 * 1024 * 1024
"""Log size at which the keeper checkpoints, so that the lock is held for a short time only."""
WRITER_CHECKPOINT_BYTES: Final = 4 * CHECKPOINT_BYTES
"""Log size at which any writer checkpoints, because no keeper has."""
TRUNCATE_BYTES: Final = 64 * 1024 * 1024
COMMITS_PER_LOG_CHECK: Final = 64


class SqliteFile(SqliteHandle):
    """A database file that transactions run on."""

    # ------------------------------------------------------------ transactions

    def write(
        self,
        work: Callable[[sqlite3.Connection], T],
        *,
        flush: bool,
        operation: str = "other",
        ring: Callable[[T], None] | None = None,
    ) -> T:
        """Run `work` in one write transaction under the lock; with `flush`, durable on return.

        `ring` is called with the result once it is committed and the lock is free, before the
        flush. What others make of it is newer in the same log, so a power cut cannot keep that
        and lose this. `work` may run twice if a writer that ignores the lock is in the way, so
        it must only touch the database. Raises QueueBusy after the lock's
        deadline, and a DatabaseError that says what is wrong with the file.
        """
        deadline = time.monotonic() + self.lock_timeout_seconds
        with self._session(deadline):
            connection = self._opened(deadline)
            self._lock_file(connection, deadline, operation)
            try:
                result = self._told(lambda: self._transact(connection, work), deadline)
            finally:
                self._release_lock()
            ticket = self._commits
        try:
            if ring is not None:
                ring(result)
        finally:  # a signal's handler may raise in it
            if flush:
                self.flush(ticket)
        self._relieve(ticket)
        return result

    def _relieve(self, ticket: int) -> None:
        """Checkpoint now and then where no keeper does."""
        if ticket % COMMITS_PER_LOG_CHECK == 0 and self.log_bytes() > WRITER_CHECKPOINT_BYTES:
            with contextlib.suppress(QueueError):  # the work is done; the next one tries again
                self.checkpoint()

    def read(self, work: Callable[[sqlite3.Connection], T], *, snapshot: bool = False) -> T:
        """Run `work` without the lock; with `snapshot`, all its reads see one moment."""
        deadline = time.monotonic() + self.lock_timeout_seconds
        with self._session(deadline):
            if self.user_transaction and self._connection is not None:
                return work(self._connection)
            connection = self._ready(deadline)
            if not snapshot:
                return self._told(lambda: work(connection), deadline)

            def whole() -> T:
                connection.execute(SQL["begin_read"])
                try:
                    return work(connection)
                finally:
                    self._undo(connection)

            return self._told(whole, deadline)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Hold a write transaction open for the caller's own statements; durable on exit."""
        deadline = time.monotonic() + self.lock_timeout_seconds
        with self._session(deadline) as hold:
            connection = self._opened(deadline)
            self._lock_file(connection, deadline, "transaction")
            owner = os.getpid()
            try:
                self._told(lambda: connection.execute(SQL["begin_write"]), deadline)
                try:
                    self.user_transaction = True
                    if hold is not None:
                        hold.rest()
                    yield connection
                finally:
                    if hold is not None:
                        deferral.state.active = hold  # a store, no call: nothing strikes before it
                        hold.resume()
                    self.user_transaction = False
                if os.getpid() != owner:
                    raise QueueError("a transaction belongs to the process that opened it")
                self._told(lambda: connection.execute(SQL["commit"]), deadline)
                self._commits += 1
            finally:
                if os.getpid() == owner:  # a child that touched it would damage the parent's
                    self._undo(connection)
                    self._release_lock()
            ticket = self._commits
        self.flush(ticket)

    def within(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` inside the open `transaction()`, all or nothing of it, whatever fails.

        Its user may catch the error, and commit the rest.
        """
        connection = self._connection
        if connection is None or not connection.in_transaction:
            raise DatabaseError(f"{self.path}: SQLite undid this transaction at an earlier error")

        def whole() -> T:
            connection.execute(SQL["savepoint"])
            try:
                return work(connection)
            except BaseException:
                if connection.in_transaction:
                    connection.execute(SQL["savepoint_undo"])
                raise
            finally:
                if connection.in_transaction:
                    connection.execute(SQL["savepoint_end"])

        return self._told(whole, time.monotonic())

    def is_transaction(self, tx: object) -> bool:
        """Whether this is what the `transaction()` that is open now has yielded."""
        return self.user_transaction and tx is self._connection

    def _transact(
        self, connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], T]
    ) -> T:
        connection.execute(SQL["begin_write"])
        try:
            result = work(connection)
            connection.execute(SQL["commit"])
        except BaseException:
            self._undo(connection)
            raise
        self._commits += 1
        self.times.stored()
        return result

    # ------------------------------------------------------------ durability

    @property
    def commits(self) -> int:
        """Transactions this object has committed."""
        return self._commits

    def flush(self, ticket: int = 0) -> None:
        """Make every commit up to `ticket` (0: all) survive a power cut.

        Raises DurabilityUnknown; puts are then refused until a checkpoint has
        brought the data to the file itself.
        """
        if self.durability == "full":
            self._log.flush(ticket, self._commits)

    def ensure_sure(self) -> None:
        """After a failed flush, checkpoint before more is accepted; raises DurabilityUnknown."""
        if not self._log.unsure:
            return
        try:
            if not self.checkpoint(flush=False):
                raise QueueBusy("a long reader keeps the log from being copied")
            with self._session(time.monotonic() + self.lock_timeout_seconds):
                self._drop()  # the log itself may be gone: begin with the one that is there
        except QueueError as error:
            raise DurabilityUnknown(
                f"{self.path}: an earlier flush failed and the checkpoint that would mend it "
                f"does too ({error}); check the disk"
            ) from error
        self._log.unsure = False

    def log_bytes(self) -> int:
        """Return how much of the log is in use."""
        return self._log.used_bytes()

    def checkpoint(self, *, flush: bool = True, truncate: bool = False) -> bool:
        """Copy the log into the file, under the lock; flushed before, so that the hold is short.

        Returns whether the whole log was copied; a long reader can prevent it.
        """
        if flush:
            self.flush()
        large = truncate or self._log.file_bytes() > TRUNCATE_BYTES

        def work(connection: sqlite3.Connection) -> bool:
            busy, frames, copied = connection.execute(SQL["pragma_checkpoint"]).fetchone()
            whole = bool(busy == 0 and frames == copied)
            if large and whole:
                # Not waited for: a reader that began meanwhile would stall every writer.
                connection.execute(SQL["pragma_no_patience"])
                try:
                    connection.execute(SQL["pragma_checkpoint_truncate"]).fetchone()
                finally:
                    connection.execute(SQL["pragma_busy_timeout"])
            return whole

        return self.alone(work)

    def alone(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` under the lock and outside any transaction, as upkeep of the file needs."""
        deadline = time.monotonic() + self.lock_timeout_seconds
        with self._session(deadline):
            connection = self._opened(deadline)
            self._lock_file(connection, deadline, "checkpoint")
            try:
                return self._told(lambda: work(connection), deadline)
            finally:
                self._release_lock()

    def data_version(self) -> int:
        """Return a number that changes when another connection has committed."""
        return self.read(
            lambda connection: int(connection.execute(SQL["pragma_data_version"]).fetchone()[0])
        )
