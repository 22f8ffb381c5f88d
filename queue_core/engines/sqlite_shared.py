"""Share a transaction among the processes that put at the same time: flat combining.

Who finds the lock taken shows what it has on the board and sleeps; who holds the lock stores all
that is shown there together with its own, flushes once, and tells the owners. So eight producers
need one transaction and one wake-up each where they needed eight transactions in a row (Hendler,
Incze, Shavit, Tzafrir: "Flat combining and the synchronization-parallelism tradeoff", 2010).

Whoever waits also tries the lock itself every few milliseconds, so that nobody depends on
another's life. Then it may be marked as taken by one who died: if the database has reached the
number of that transaction it is stored, and if not it is not.

Boundary: when, and by whom; the board is `sqlite_board`'s, what is stored is `sqlite.py`'s.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from queue_core.clock import Clock
from queue_core.engines import deferral, sqlite_faults
from queue_core.engines.sql import SQL
from queue_core.engines.sqlite_board import Answer, Board, Posted
from queue_core.engines.sqlite_file import SqliteFile
from queue_core.errors import DurabilityUnknown, IdempotencyConflict, QueueError, QueueFull

T = TypeVar("T")
_yield: Final[Callable[[], object]] = getattr(os, "sched_yield", lambda: None)  # not on macOS
Work = Callable[[sqlite3.Connection, Sequence[bytes]], tuple[T, list[int]]]
"""Store our own and those bodies; return our own result, and a value to answer each with."""

PAUSE_MS: Final = 1
PAUSE_MS_MAX: Final = 8
"""A call comes sooner; this is for those who hold the lock for something else, and the dead."""
TAKEN_MS: Final = 20
"""What a put that was taken waits for the answer, before it looks whether who took it is dead."""
YIELDS: Final = 2
"""Times that a put lets others run before it tries the lock, while it meets others there."""
COMPANY_PUTS: Final = 16
"""Puts after the last one in company for which others are expected; twice that, a seat is kept."""
_WITHDRAW_SECONDS: Final = 0.005
"""What a leader may need between its mark and its second look, when a put's time is up."""


class _NotTogether(Exception):
    """One request spoils the transaction for all: it was taken back, or cannot be stored."""

    def __init__(self, taken: Sequence[Posted]) -> None:
        super().__init__()
        self.taken = taken


_SPOILING: Final = (
    sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.InterfaceError, QueueFull,
    IdempotencyConflict, ValueError, TypeError, OverflowError, RecursionError, OSError,
)  # fmt: skip


class SharedFile(SqliteFile):
    """A database file whose durable puts are stored together."""

    def __init__(self, path: Path, *, bells: Path, clock: Clock, **options: Any) -> None:
        super().__init__(path, **options)
        self._board = Board(bells, clock)
        self._company = 0
        self._waiting = False  # a signal's handler may put while its own thread waits

    @property
    def shares(self) -> bool:
        """Whether puts are stored together: they are where a flush is what they wait for."""
        return self.durability == "full" and self._lock is not None

    def put(
        self, body: Callable[[], bytes], work: Work[T], *, ring: Callable[[T | None], None]
    ) -> T | int:
        """Store one put, or have it stored; return the work's own result, or the answer's value.

        Durable on return. `body` makes all that another process needs to store it. `ring` gets the
        result, None where somebody dead had stored it. Raises what `write` raises, and
        DurabilityUnknown when whoever took it cannot be asked any more.
        """
        deadline = time.monotonic() + self.lock_timeout_seconds
        with self._session(deadline):
            connection = self._opened(deadline)
            answered = self._lock_or_answer(connection, body, deadline)
            if answered is not None:
                if answered[0] is None:  # who stored it died, perhaps before it rang
                    ring(None)
                return self._sure(*answered)
            taken: Sequence[Posted] = ()
            try:
                result, taken = self._lead(connection, work, deadline)
            finally:
                self._release_lock()
                self._board.call_next(taken)
            self._alone_again(taken)
            ticket = self._commits
        try:
            ring(result)
        finally:  # a signal's handler may raise in it
            try:
                self.flush(ticket)
            except DurabilityUnknown:
                self._board.answer(taken, Answer.UNSURE)
                raise
            self._board.answer(taken, Answer.STORED)
        self._relieve(ticket)
        return result

    def _alone_again(self, taken: Sequence[Posted]) -> None:
        """Expect company, or after a while none any more; the seats are few."""
        self._company = COMPANY_PUTS if taken else self._company - 1
        if self._company <= -COMPANY_PUTS and not self._waiting:
            self._company = 0
            self._board.unseat()

    def _sure(self, answer: Answer | None, value: int) -> int:
        if answer is Answer.UNSURE:
            self._log.unsure = True
            raise DurabilityUnknown(
                f"{self.path}: the log could not be flushed: the change is stored but may not "
                "survive a power cut; check the disk"
            )
        if answer is None:  # who committed it died before it flushed
            self.flush()
        return value

    # ------------------------------------------------------------ wait

    def _lock_or_answer(
        self, connection: sqlite3.Connection, body: Callable[[], bytes], deadline: float
    ) -> tuple[Answer | None, int] | None:
        """Take the lock and return None, or be answered: how, None for "committed", and what.

        The lock is on the file that has its name now; it is free when anything is raised.
        """
        began_ns = time.monotonic_ns()
        alone = self._waiting or (self._company <= 0 and self._try_lock())
        if alone or not self._board.post(body()):
            self._lock_file(connection, deadline, "enqueue", began_ns)
            return None
        self._waiting = True
        try:
            try:
                if (found := self._await(deadline)) is not None:
                    self.times.waited("enqueue", time.monotonic_ns() - began_ns)
                    return found
                # A mark on our request is of a transaction in whatever file has the name now.
                self._lock_file(connection, deadline, "enqueue", began_ns)
                # Nobody can take it from here on, or give the number of its mark anew.
                return self._told(lambda: self._taken_before(connection), deadline)
            except QueueError:
                self._board.withdraw()
                time.sleep(_WITHDRAW_SECONDS)
                if self._board.mark()[0]:
                    raise self._unknown("another process had begun to store it") from None
                raise
            finally:
                self._waiting = False
                self._board.withdraw()
        except BaseException as error:
            self._release_lock()
            if isinstance(error, OSError):
                raise self._unknown(str(error)) from error
            raise

    def _try_lock(self) -> bool:
        try:
            return self._lock is not None and self._lock.acquire(0.0)
        except OSError as error:
            raise sqlite_faults.of_os(self.path, error) from error

    def _await(self, deadline: float) -> tuple[Answer, int] | None:
        """Sleep until answered; None when the lock is ours, or is what to wait for now.

        In company others are let run first: where they outnumber the processors each of them
        would lead a transaction of its own, and flush it; so they come to what is led next.
        """
        for _ in range(YIELDS if self._company > 0 else 0):
            _yield()
        pause_ms, patience = 0, True
        while True:
            answer = self._board.wait(pause_ms)
            if answer is not None:
                self._company = COMPANY_PUTS
                return None if answer[0] is Answer.REFUSED else answer
            if deferral.state.noted:
                deferral.heed()
            if self._board.taken and patience:
                pause_ms, patience = TAKEN_MS, False  # its flush is under way
                continue
            if self._try_lock() or time.monotonic() >= deadline:
                return None
            pause_ms = min(pause_ms * 2, PAUSE_MS_MAX) or PAUSE_MS

    def _taken_before(self, connection: sqlite3.Connection) -> tuple[None, int] | None:
        """Return the value of our request if one who is dead now has committed it."""
        generation, value = self._board.mark()
        if not generation:
            return None
        reached = connection.execute(SQL["put_batch"], {"board": self._board.token}).fetchone()
        if reached is None or reached[0] < generation:
            return None
        self._release_lock()
        return None, value

    def _unknown(self, why: str) -> DurabilityUnknown:
        return DurabilityUnknown(
            f"{self.path}: it is not known whether this put was stored ({why}); look for it, "
            "or put it again with a key"
        )

    # ------------------------------------------------------------ lead

    def _lead(
        self, connection: sqlite3.Connection, work: Work[T], deadline: float
    ) -> tuple[T, Sequence[Posted]]:
        """Store our own and what others show, or our own alone where that cannot be."""
        if posted := self._board.posted():
            try:
                return self._told(
                    lambda: self._transact(
                        connection, lambda inner: self._together(inner, work, posted)
                    ),
                    deadline,
                )
            except _NotTogether as error:
                self._board.refuse(error.taken)
        own, _ = self._told(
            lambda: self._transact(connection, lambda inner: work(inner, ())), deadline
        )
        return own, ()

    def _together(
        self, connection: sqlite3.Connection, work: Work[T], posted: Sequence[Posted]
    ) -> tuple[T, Sequence[Posted]]:
        generation = connection.execute(
            SQL["put_batch_next"], {"board": self._board.token}
        ).fetchone()[0]
        # Marks below it are of transactions that stand: theirs are stored, and only not told.
        open_ = [one for one in posted if not 0 < one.generation < generation]
        taken = [one for one in open_ if one.fresh]
        try:
            if len(taken) < len(open_):
                self._board.forget([one for one in open_ if not one.fresh])
            own, values = work(connection, [one.body for one in taken])
            whole = self._board.take(taken, values, generation)
        except _SPOILING as error:  # before the commit: nothing of it stands
            raise _NotTogether(taken) from error
        if not whole:
            raise _NotTogether(taken)
        return own, taken

    # ------------------------------------------------------------ close

    def _drop(self) -> None:
        self._board.close()
        super()._drop()

    def after_fork_in_child(self) -> None:
        """Start afresh; the seat at the board is the parent's."""
        self._board.abandon()
        super().after_fork_in_child()
