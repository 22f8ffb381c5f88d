"""Own one SQLite file: its connection, write lock, log, and what a fork does to them.

Three rules keep an accepted job safe, and all are here. Every write holds the
flock beside the file, so that writers queue fairly and SQLite's WAL-reset bug
cannot be met. A commit is made durable after the lock is free, by flushing the
log, so that concurrent producers share one flush (group commit). No connection
crosses a fork: the parent's later close would unlink the log under the child.

Boundary: transactions and files; what is written in them is `sqlite.py`'s.
"""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal, TypeVar
from urllib.parse import quote

from queue_core.engines.sql import load
from queue_core.errors import (
    DatabaseCorrupt,
    DatabaseError,
    DatabaseFull,
    DatabaseReadOnly,
    DatabaseUnavailable,
    DurabilityUnknown,
    QueueBusy,
    QueueClosed,
    QueueError,
)
from queue_core.lockfile import FileLock, describe_holder

T = TypeVar("T")
SQL = load("sqlite.sql")

Durability = Literal["full", "normal"]
CHECKPOINT_BYTES: Final = 4 * 1024 * 1024
"""Log size at which the keeper checkpoints, so that the lock is held for a short time only."""
WRITER_CHECKPOINT_BYTES: Final = 4 * CHECKPOINT_BYTES
"""Log size at which any writer checkpoints, because no keeper has."""
TRUNCATE_BYTES: Final = 64 * 1024 * 1024
COMMITS_PER_LOG_CHECK: Final = 64
_FRAME_HEADER_BYTES: Final = 24
_LOG_HEADER_BYTES: Final = 32
_DEFERRED_SIGNALS: Final = frozenset(
    {signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGALRM, signal.SIGHUP}
)

_open_files: weakref.WeakSet[SqliteFile] = weakref.WeakSet()
_forking: list[SqliteFile] = []
_kept_over_fork: list[object] = []


class SqliteFile:
    """A database file, opened when first used and again after a close or a fork.

    `lock` "off" leaves out the flock, for filesystems without it; SQLite's own
    lock still keeps it correct. `durability` "normal" leaves out the flush.
    """

    def __init__(
        self,
        path: Path,
        *,
        check: Callable[[], None],
        prepare: Callable[[sqlite3.Connection], None],
        abandon: Callable[[], None],
        lock: Literal["flock", "off"] = "flock",
        durability: Durability = "full",
        lock_timeout_seconds: float = 30.0,
    ) -> None:
        self.path = path
        self.log_path = Path(f"{path}-wal")
        self.lock_path = Path(f"{path}.lock")
        self.lock_timeout_seconds = lock_timeout_seconds
        self.durability = durability
        self._check = check
        self._prepare = prepare
        self._abandon = abandon
        self._lock = FileLock(self.lock_path) if lock == "flock" else None
        self._mutex = threading.RLock()
        self._flush_mutex = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._log_fd = -1
        self._commits = 0
        self._flushed = 0
        self._unsure = False
        self._closed = False
        self.user_transaction = False
        """Whether a `transaction()` is open; only its own thread can see True."""
        _open_files.add(self)

    # ------------------------------------------------------------ transactions

    def write(self, work: Callable[[sqlite3.Connection], T], *, flush: bool) -> T:
        """Run `work` in one write transaction under the lock; with `flush`, durable on return.

        `work` may run twice if a writer that ignores the lock is in the way, so
        it must only touch the database. Raises QueueBusy after the lock's
        deadline, and a DatabaseError that says what is wrong with the file.
        """
        deadline = time.monotonic() + self.lock_timeout_seconds
        self._enter(deadline)
        try:
            result = self._locked(lambda connection: self._transact(connection, work), deadline)
            ticket = self._commits
        finally:
            self._mutex.release()
        if flush:
            self.flush(ticket)
        if ticket % COMMITS_PER_LOG_CHECK == 0 and self.log_bytes() > WRITER_CHECKPOINT_BYTES:
            self.checkpoint()
        return result

    def read(self, work: Callable[[sqlite3.Connection], T], *, snapshot: bool = False) -> T:
        """Run `work` without the lock; with `snapshot`, all its reads see one moment."""
        deadline = time.monotonic() + self.lock_timeout_seconds
        self._enter(deadline)
        try:
            connection = self._connection or self._open(deadline)
            if not snapshot or connection.in_transaction:
                return self._told(lambda: work(connection), deadline)

            def whole() -> T:
                connection.execute(SQL["begin_read"])
                try:
                    return work(connection)
                finally:
                    connection.execute(SQL["rollback"])

            return self._told(whole, deadline)
        finally:
            self._mutex.release()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Hold a write transaction open for the caller's own statements; durable on exit."""
        deadline = time.monotonic() + self.lock_timeout_seconds
        self._enter(deadline)
        try:
            connection = self._connection or self._open(deadline)
            self._take_lock(deadline)
            self.user_transaction = True
            try:
                self._told(lambda: connection.execute(SQL["begin_write"]), deadline)
                try:
                    yield connection
                    self._told(lambda: connection.execute(SQL["commit"]), deadline)
                    self._commits += 1
                finally:
                    if connection.in_transaction:
                        connection.execute(SQL["rollback"])
            finally:
                self.user_transaction = False
                self._release_lock()
            ticket = self._commits
        finally:
            self._mutex.release()
        self.flush(ticket)

    def _enter(self, deadline: float) -> None:
        if self._closed:
            raise QueueClosed(f"{self.path} was closed; make a new Queue to use it again")
        if not self._mutex.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise QueueBusy(
                f"{self.path}: another thread of this process held the connection for "
                f"{self.lock_timeout_seconds:g} s; use a Queue per thread"
            )

    def _locked(self, work: Callable[[sqlite3.Connection], T], deadline: float) -> T:
        """Run `work` holding the flock, with signal handlers deferred.

        A handler that raises (Ctrl-C, a soft timeout) could otherwise strike
        between BEGIN and the roll-back, and leave the lock held.
        """
        if self.user_transaction:
            raise QueueError(
                "a transaction is open in this thread: pass it as tx=, or end it first"
            )
        connection = self._connection or self._open(deadline)
        main = threading.current_thread() is threading.main_thread()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _DEFERRED_SIGNALS) if main else None
        try:
            if self._lock is not None and not self._lock.acquire(0.0):
                if before is not None:  # Ctrl-C must work while we wait.
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)
                self._take_lock(deadline)
                if before is not None:
                    signal.pthread_sigmask(signal.SIG_BLOCK, _DEFERRED_SIGNALS)
            return work(connection)
        finally:
            if connection.in_transaction:
                connection.execute(SQL["rollback"])
            self._release_lock()
            if before is not None:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _transact(
        self, connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], T]
    ) -> T:
        deadline = time.monotonic() + self.lock_timeout_seconds

        def whole() -> T:
            connection.execute(SQL["begin_write"])
            try:
                result = work(connection)
                connection.execute(SQL["commit"])
            except BaseException:
                # A full disk makes SQLite roll back by itself.
                if connection.in_transaction:
                    connection.execute(SQL["rollback"])
                raise
            self._commits += 1
            return result

        return self._told(whole, deadline)

    def _take_lock(self, deadline: float) -> None:
        if self._lock is None:
            return
        try:
            if self._lock.acquire(max(0.0, deadline - time.monotonic())):
                return
        except OSError as error:
            raise self._fault_of_os(error) from error
        raise QueueBusy(
            f"{self.lock_path} was held for {self.lock_timeout_seconds:g} s by "
            f"{describe_holder(self.lock_path)}; stop it, or raise lock_timeout_seconds"
        )

    def _release_lock(self) -> None:
        if self._lock is not None and self._lock.held:
            self._lock.release()

    # ------------------------------------------------------------ faults

    def _told(self, work: Callable[[], T], deadline: float) -> T:
        """Run `work`, again while the file is busy, and turn SQLite's errors into ours."""
        pause = 0.001
        while True:
            try:
                return work()
            except sqlite3.Error as error:
                code = getattr(error, "sqlite_errorcode", 0) & 0xFF
                if code in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED} and (
                    time.monotonic() + pause < deadline
                ):
                    time.sleep(pause)
                    pause = min(pause * 2, 0.05)
                    continue
                raise self.fault(error, code) from error

    def fault(self, error: sqlite3.Error, code: int) -> QueueError:
        """Return our error for SQLite's: what, where, and what to do next."""
        where = str(self.path)
        match code:
            case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
                return QueueBusy(f"{where} is locked by a program that does not use {where}.lock")
            case sqlite3.SQLITE_FULL:
                return DatabaseFull(f"{where}: the disk is full; free space, then try again")
            case sqlite3.SQLITE_READONLY:
                return DatabaseReadOnly(f"{where} cannot be written by this user; check its owner")
            case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
                return DatabaseCorrupt(
                    f"{where} is not a database, or is damaged ({error}); "
                    "restore a backup, or name another file"
                )
            case sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM | sqlite3.SQLITE_AUTH:
                return DatabaseUnavailable(f"{where} cannot be opened ({error}); check its folder")
            case sqlite3.SQLITE_IOERR:
                return DatabaseUnavailable(f"{where}: the disk failed ({error}); check its health")
            case _:
                return DatabaseError(f"{where}: {error}")

    def _fault_of_os(self, error: OSError) -> QueueError:
        match error.errno:
            case errno.ENOSPC | errno.EDQUOT:
                return DatabaseFull(f"{self.path}: the disk is full; free space, then try again")
            case errno.EROFS | errno.EACCES | errno.EPERM:
                return DatabaseReadOnly(
                    f"{error.filename or self.path} cannot be written by this user; check its owner"
                )
            case _:
                return DatabaseUnavailable(f"{self.path}: {error.strerror or error}")

    # ------------------------------------------------------------ open and close

    def _open(self, deadline: float) -> sqlite3.Connection:
        self._check()
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._take_lock(deadline)
        except OSError as error:
            raise self._fault_of_os(error) from error
        try:
            if not self.path.exists():
                # Created by us first, so that the file and the log that takes
                # its mode are private. No connection can have it open yet.
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            connection = self._told(self._connect, deadline)
            try:
                self._told(lambda: self._prepare(connection), deadline)
            except BaseException:
                if connection.in_transaction:
                    connection.execute(SQL["rollback"])
                connection.close()
                raise
        except OSError as error:
            raise self._fault_of_os(error) from error
        finally:
            self._release_lock()
        self._connection = connection
        return connection

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"file:{quote(str(self.path))}?mode=rw",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
        )
        for name in ("busy_timeout", "synchronous", "no_autocheckpoint", "untrusted_schema"):
            connection.execute(SQL[f"pragma_{name}"])
        return connection

    def close(self) -> None:
        """Close for good; the last connection of all checkpoints, so it closes under the lock."""
        with self._mutex:
            self._drop()
            self._closed = True
            if self._lock is not None:
                self._lock.close()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        with self._flush_mutex:
            if self._log_fd >= 0:
                os.close(self._log_fd)
                self._log_fd = -1
        try:
            self._take_lock(time.monotonic() + self.lock_timeout_seconds)
        except QueueError:
            pass  # Closing without the lock is correct too, only less polite.
        try:
            connection.close()
        finally:
            self._release_lock()

    # ------------------------------------------------------------ forks

    def before_fork(self) -> None:
        """Wait for the running transaction, then close everything; keeps other threads out."""
        self._mutex.acquire()
        if self.user_transaction:
            return  # The forking thread itself is inside transaction(): keep it whole.
        self._drop()
        if self._lock is not None:
            self._lock.close()

    def after_fork_in_parent(self) -> None:
        """Let other threads in again; the connection opens when next used."""
        self._mutex.release()

    def after_fork_in_child(self) -> None:
        """Start afresh; what the parent still had open is dropped without being closed."""
        if self._connection is not None:
            # Closing it here would checkpoint and unlink the parent's log.
            _kept_over_fork.append(self._connection)
            self._connection = None
        if self._log_fd >= 0:
            os.close(self._log_fd)
            self._log_fd = -1
        if self._lock is not None:
            self._lock.abandon()
        self._abandon()
        self._mutex = threading.RLock()
        self._flush_mutex = threading.Lock()
        self.user_transaction = False

    # ------------------------------------------------------------ durability

    @property
    def commits(self) -> int:
        """Transactions this object has committed."""
        return self._commits

    def flush(self, ticket: int | None = None) -> None:
        """Make every commit up to `ticket` (all, if None) survive a power cut.

        Threads that wait here share one flush, and processes share it in the
        kernel. Raises DurabilityUnknown; puts are then refused until a
        checkpoint has brought the data to the file itself.
        """
        if self.durability != "full":
            return
        with self._flush_mutex:
            if ticket is not None and self._flushed >= ticket:
                return
            upto = self._commits
            try:
                descriptor = self._log_descriptor()
                if descriptor >= 0:
                    fdatasync(descriptor)
            except OSError as error:
                self._unsure = True
                raise DurabilityUnknown(
                    f"{self.log_path} could not be flushed ({error.strerror}): the change is "
                    "stored but may not survive a power cut; check the disk"
                ) from error
            self._flushed = upto

    def ensure_sure(self) -> None:
        """After a failed flush, checkpoint before more is accepted; raises DurabilityUnknown."""
        if not self._unsure:
            return
        try:
            self.checkpoint(flush=False)
        except QueueError as error:
            raise DurabilityUnknown(
                f"{self.path}: an earlier flush failed and the checkpoint that would mend it "
                f"does too ({error}); check the disk"
            ) from error
        self._unsure = False

    def _log_descriptor(self) -> int:
        """Return a descriptor of the log, or -1 when there is none and so nothing to flush."""
        try:
            found = os.stat(self.log_path)
        except FileNotFoundError:
            return -1
        if self._log_fd >= 0 and os.fstat(self._log_fd).st_ino != found.st_ino:
            os.close(self._log_fd)
            self._log_fd = -1
        if self._log_fd < 0:
            self._log_fd = os.open(self.log_path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        return self._log_fd

    def log_bytes(self) -> int:
        """Return how much of the log is in use.

        The file keeps its size when SQLite starts it again from the top, so the
        frames are counted: each repeats the salt of the header, and those of
        the round before have another (SQLite file format, section 4). They
        stand in front, so a binary search finds the last.
        """
        with self._flush_mutex:
            descriptor = self._log_descriptor()
            if descriptor < 0:
                return 0
            header = os.pread(descriptor, _LOG_HEADER_BYTES, 0)
            if len(header) < _LOG_HEADER_BYTES:
                return 0
            page_bytes = struct.unpack_from(">I", header, 8)[0]
            salt = header[16:24]
            frame_bytes = page_bytes + _FRAME_HEADER_BYTES
            low, high = 0, (os.fstat(descriptor).st_size - _LOG_HEADER_BYTES) // frame_bytes
            while low < high:
                middle = (low + high) // 2
                at = _LOG_HEADER_BYTES + middle * frame_bytes + 8
                if os.pread(descriptor, 8, at) == salt:
                    low = middle + 1
                else:
                    high = middle
            return low * frame_bytes

    def checkpoint(self, *, flush: bool = True) -> bool:
        """Copy the log into the file, under the lock; flushed before, so that the hold is short.

        Returns whether the whole log was copied; a long reader can prevent it.
        """
        if flush:
            self.flush()
        deadline = time.monotonic() + self.lock_timeout_seconds
        self._enter(deadline)
        try:
            large = self.log_path.exists() and self.log_path.stat().st_size > TRUNCATE_BYTES
            name = "pragma_checkpoint_truncate" if large else "pragma_checkpoint"

            def copy(connection: sqlite3.Connection) -> bool:
                busy, frames, copied = self._told(
                    lambda: connection.execute(SQL[name]).fetchone(), deadline
                )
                return busy == 0 and frames == copied

            return self._locked(copy, deadline)
        finally:
            self._mutex.release()

    def data_version(self) -> int:
        """Return a number that changes when another connection has committed."""
        return self.read(
            lambda connection: int(connection.execute(SQL["pragma_data_version"]).fetchone()[0])
        )


def fdatasync(descriptor: int) -> None:
    """Bring a file's data to the disk itself; on macOS that takes F_FULLFSYNC."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(descriptor)
    else:  # pragma: no cover - macOS
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)


def _before_fork() -> None:
    _forking.extend(_open_files)
    for file in _forking:
        file.before_fork()


def _after_fork_in_parent() -> None:
    while _forking:
        _forking.pop().after_fork_in_parent()


def _after_fork_in_child() -> None:
    while _forking:
        _forking.pop().after_fork_in_child()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
