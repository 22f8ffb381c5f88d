"""Open one SQLite file, take its lock, close it, and say what a fork does to it.

No connection crosses a fork: the parent's later close would unlink the log
under the child, and committed jobs with it.

Boundary: the file, its lock and its connection; `sqlite_file` runs transactions
on them. Whatever fails here leaves neither lock nor transaction behind.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, TypeVar
from urllib.parse import quote

from queue_core.engines import deferral, forks, sqlite_faults
from queue_core.engines.sql import SQL
from queue_core.engines.sqlite_log import Log, file_identity, make_folder
from queue_core.engines.sqlite_times import LockTimes
from queue_core.errors import DatabaseUnavailable, QueueBusy, QueueClosed, QueueError
from queue_core.lockfile import FileLock, describe_holder

T = TypeVar("T")

Durability = Literal["full", "normal"]
BUSY_PAUSE_SECONDS_MAX: Final = 0.05
_kept: list[object] = []
"""Connections that must never be closed, since their log is not theirs to remove."""
_inherited: set[tuple[int, int] | None] = set()
"""Files of which this process inherited an open transaction: to SQLite it is this process's own,
for ever, and would stand in the way of every other."""


class SqliteHandle:
    """A database file, opened when first used and again after a fork.

    `check` may refuse the place before anything is made there, `prepare` gets
    each new connection, and `abandon` is called in a forked child. `lock` "off"
    leaves out the flock, for filesystems without it; SQLite's own lock still
    keeps it correct. `durability` "normal" leaves out the flush.
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
        self._name = os.fspath(path)
        self.lock_path = Path(f"{path}.lock")
        self.lock_timeout_seconds = lock_timeout_seconds
        self.durability: Durability = durability
        self._check = check
        self._prepare = prepare
        self._abandon = abandon
        self.lock_kind: Literal["flock", "off"] = lock
        self._lock = FileLock(self.lock_path) if lock == "flock" else None
        self._mutex = threading.RLock()
        self._log = Log(Path(f"{path}-wal"))
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        self._commits = 0
        self._closed = False
        self.times = LockTimes()
        self._locked_ns, self._operation = 0, "other"
        self.user_transaction = False
        """Whether a `transaction()` is open; only its own thread can see True."""
        forks.watch(self)

    # ------------------------------------------------------------ one user at a time

    def _session(self, deadline: float) -> _Session:
        """Hold the mutex, and hold signal handlers back, in a with block; gives the hold."""
        if self._closed:
            raise QueueClosed(f"{self.path} was closed; make a new Queue to use it again")
        return _Session(self, deadline)

    def _wait_for_mutex(self, mutex: threading.RLock, deadline: float) -> bool:
        while (left := deadline - time.monotonic()) > 0:
            deferral.heed()  # Ctrl-C must work while we wait.
            if mutex.acquire(timeout=min(left, deferral.HEED_SECONDS)):
                return True
        raise QueueBusy(
            f"{self.path}: another thread of this process held the connection for "
            f"{self.lock_timeout_seconds:g} s; use a Queue per thread"
        )

    def _ready(self, deadline: float) -> sqlite3.Connection:
        """Return the connection, free of any transaction, to the file that has its name now."""
        connection = self._opened(deadline)
        self._check_same_file(connection)
        return connection

    def _opened(self, deadline: float) -> sqlite3.Connection:
        """Return it unchecked, for who will wait for the lock, and has to check after that."""
        if self.user_transaction:
            raise QueueError("a transaction is open in this thread: pass it as tx=, or end it")
        if self._connection is not None:
            self._undo(self._connection)
        return self._connection or self._open(deadline)

    def _check_same_file(self, connection: sqlite3.Connection) -> None:
        """Notice that the file was removed or replaced: what is stored there now would be lost.

        Also by a signal's handler, which came while we waited, and opened what is there now.
        """
        if connection is self._connection:
            if file_identity(self._name) == self._identity:
                return
            # Never closed: that would remove the log of whatever has this name now.
            _kept.append(connection)
            self._connection = None
            self._log.drop(lambda: None)
        raise DatabaseUnavailable(
            f"{self.path} was removed or replaced while in use, and this call did nothing; "
            "the next one opens what is there then: restore the file before"
        )

    def _undo(self, connection: sqlite3.Connection) -> None:
        """Leave no transaction open: roll back, and where even that fails, give up the file."""
        try:
            if connection.in_transaction:  # a full disk makes SQLite roll back by itself
                connection.execute(SQL["rollback"])
        except sqlite3.Error:
            if connection is self._connection:
                self._connection = None
            self._log.drop(connection.close)

    def _take_lock(
        self, deadline: float, operation: str = "other", began_ns: int | None = None
    ) -> None:
        """Wait for the lock; `began_ns` is when the waiting began, if not now."""
        if self._lock is None:
            return
        began_ns = time.monotonic_ns() if began_ns is None else began_ns
        try:
            if not self._lock.held:
                self._wait_for_lock(self._lock, deadline)
        finally:
            self._locked_ns, self._operation = time.monotonic_ns(), operation
            self.times.waited(operation, self._locked_ns - began_ns)

    def _lock_file(
        self,
        connection: sqlite3.Connection,
        deadline: float,
        operation: str,
        began_ns: int | None = None,
    ) -> None:
        """Take the lock, for a connection to the file that has its name now that it is taken.

        Whatever is raised, the lock is free.
        """
        self._take_lock(deadline, operation, began_ns)
        try:
            self._check_same_file(connection)
        except BaseException:
            self._release_lock()
            raise

    def _wait_for_lock(self, lock: FileLock, deadline: float) -> None:
        try:
            taken = lock.acquire(0.0)
            while not taken and (left := deadline - time.monotonic()) > 0:
                deferral.heed()
                # Our place in the queue is the lock's helper thread's, and is kept meanwhile.
                taken = lock.acquire(min(left, deferral.HEED_SECONDS))
        except OSError as error:
            raise sqlite_faults.of_os(self.path, error) from error
        if not taken:
            raise QueueBusy(
                f"{self.lock_path} was held for {self.lock_timeout_seconds:g} s by "
                f"{describe_holder(self.lock_path)}; stop it, or raise lock_timeout_seconds"
            )

    def _release_lock(self) -> None:
        if self._lock is not None and self._lock.held:
            self._lock.release()
            self.times.held(self._operation, time.monotonic_ns() - self._locked_ns)

    def _told(self, work: Callable[[], T], deadline: float) -> T:
        """Run `work`, again while the file is busy, and turn SQLite's errors into ours."""
        pause = 0.001
        while True:
            try:
                return work()
            except sqlite3.Error as error:
                if not (sqlite_faults.is_busy(error) and time.monotonic() + pause < deadline):
                    raise sqlite_faults.of_sqlite(self.path, error) from error
                deferral.heed()
                time.sleep(pause)
                pause = min(pause * 2, BUSY_PAUSE_SECONDS_MAX)

    # ------------------------------------------------------------ open and close

    def _open(self, deadline: float) -> sqlite3.Connection:
        try:
            self._check()
            make_folder(self.path.parent)
            self._take_lock(deadline)
            if not self.path.exists():
                # Made by us first, so that it is private, and with it the log that
                # takes its mode. No connection can have it open yet.
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._identity = file_identity(self.path)
            if self._identity in _inherited:
                raise DatabaseUnavailable(
                    f"{self.path}: this process was forked inside a transaction of its parent and "
                    "cannot use this database; fork outside of transaction()"
                )
            connection = self._told(self._connect, deadline)
            try:
                self._told(lambda: self._prepared(connection), deadline)
            except BaseException:
                connection.close()
                raise
        except OSError as error:
            raise sqlite_faults.of_os(self.path, error) from error
        finally:
            self._release_lock()
        self._connection = connection
        self._log.flush(0, self._commits)  # what prepare wrote: a schema, a leap of the ids
        return connection

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"file:{quote(os.fsencode(self.path))}?mode=rw",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
        )
        try:
            for name in ("busy_timeout", "synchronous", "no_autocheckpoint", "untrusted_schema"):
                connection.execute(SQL[f"pragma_{name}"])
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepared(self, connection: sqlite3.Connection) -> None:
        try:
            self._prepare(connection)
        finally:
            if connection.in_transaction:  # it failed in there, and may be tried again
                connection.execute(SQL["rollback"])

    def close(self) -> None:
        """Close for good; the last connection of all checkpoints, so it closes under the lock."""
        with self._mutex, deferral.held():
            self._drop()
            self._closed = True
            if self._lock is not None:
                self._lock.close()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        with contextlib.suppress(QueueError):  # closing without it is correct too, if less polite
            self._take_lock(time.monotonic() + self.lock_timeout_seconds)
        try:
            self._log.drop(connection.close)
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
            _kept.append(self._connection)
            _inherited.add(self._identity)
            self._connection = None
        self._log.abandon()
        if self._lock is not None:
            self._lock.abandon()
        self._abandon()
        self._mutex = threading.RLock()
        self.times = LockTimes()  # what is in the old ones is the parent's
        self.user_transaction = False


class _Session:
    """One user's time with a file. A class, since a generator costs every put more than it does.

    Handlers run only where `heed` or `rest` lets them: none strikes between the with's steps.
    """

    __slots__ = ("_deadline", "_file", "_held", "_hold", "_mutex")

    def __init__(self, file: SqliteHandle, deadline: float) -> None:
        self._file, self._deadline = file, deadline
        self._mutex = file._mutex  # a child forked inside has another one
        self._hold = deferral.hold()
        self._held = False

    def __enter__(self) -> deferral.Hold | None:
        hold = self._hold
        try:
            if hold is not None:
                hold.begin()
            self._held = self._mutex.acquire(blocking=False) or self._file._wait_for_mutex(
                self._mutex, self._deadline
            )
        except BaseException:
            self.__exit__()
            raise
        return hold

    def __exit__(self, *_: object) -> None:
        try:
            if self._held:
                self._mutex.release()
        finally:
            if self._hold is not None:
                self._hold.end()
