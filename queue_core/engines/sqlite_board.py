"""Show each other what is waited to be put, so that one who holds the lock can store it for all.

A board is a file in the folder of the bells, with a seat for each process that waits: what it
wants stored, who took that into which transaction, and the answer. A named pipe for each seat
wakes its owner. A seat belongs to whoever has its pipe locked, so that of a dead process is free.

Words of a seat are written by pwrite, each word by one side only: request, stamp and size by the
owner; mark and answer by the leader, who holds the lock of the database. A leader killed at any
moment leaves marks that the database itself tells true or untrue: see `Posted.generation`.

Boundary: what the file's words say; neither SQL nor the lock, and files and pipes are made and
opened by `sqlite_seats`. Whatever fails here only means that nothing is shared. Not for several
threads at once: its database's mutex is held.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import sys
import threading
import zlib
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Final, NamedTuple

from queue_core.clock import Clock
from queue_core.engines import sqlite_seats
from queue_core.engines.sqlite_log import link_of

SEATS: Final = 64
"""Processes that can wait at once; those over that wait for the lock itself."""
BODY_BYTES_MAX: Final = 4096
CHECK_US: Final = 500_000
"""How often one who waits looks whether its board still has its name: nobody reads another."""
STALE_US: Final = 1_000_000
"""A request whose owner has not stamped it for so long is that of a process that died."""
ABSENT_US: Final = 1_000_000
"""How long a board that was not there is not looked for: those who wait do without for so long."""
FULL_US: Final = 1_000_000
"""How long a board without a free seat is not asked for one: that takes a look at each."""
_STAMP_US: Final = STALE_US // 4
_SEAT: Final = struct.Struct("=8Q")
_REQUEST: Final = struct.Struct("=3Q")  # number, stamp in microseconds, checksum and length
_MARK: Final = struct.Struct("=3Q")  # number, generation, value
_ANSWER: Final = struct.Struct("=Q")  # number and kind
_STAMP_AT: Final = 8
_MARK_AT: Final = 24
_ANSWER_AT: Final = 48
_HEAD_BYTES: Final = SEATS * _SEAT.size
_BOARD_BYTES: Final = _HEAD_BYTES + SEATS * BODY_BYTES_MAX
_TOKEN_AT: Final = 56
"""The last word of the first seat."""
_PIPE_BYTES: Final = 64
_REQUESTS: Final = 2**56
_VERSION: Final = 1


class Answer(IntEnum):
    """What a leader did with a request."""

    STORED = 1
    """It is stored, and flushed."""
    UNSURE = 2
    """It is stored, and the flush failed."""
    REFUSED = 3
    """It was not stored in company: its owner tries alone, and learns why."""


_ANSWERS: Final = {int(one): one for one in Answer}


class Posted(NamedTuple):
    """A request found on the board.

    `generation` is 0, or the number of the transaction that somebody took it into: it is stored
    if the database has reached that number, and else its leader died before the commit.
    `fresh` is False where its owner is dead.
    """

    seat: int
    request: int
    body: bytes
    generation: int
    fresh: bool


class Board:
    """One process's view of the board of a database, and its own seat there."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock
        self._path = folder / f"board{_VERSION}-{clock.boot_id()[:8]}"
        self._fd = -1
        self._seat, self._pipe, self._pipe_name = -1, -1, ""
        self._request, self._stamped_us, self._checked_us = 0, 0, -CHECK_US
        self.taken = False
        self._poll = select.poll()
        self._callable: dict[int, int] = {}
        self._guard = threading.RLock()  # a signal's handler may put while its thread is in here
        self.token = ""
        """What numbers of transactions belong to: each board counts its own."""
        self._posted = False
        self._absent_until_us = self._full_until_us = 0

    # ------------------------------------------------------------ who waits

    def post(self, body: bytes) -> bool:
        """Show what is to be stored; False when there is no seat, or no room on the disk."""
        if len(body) > BODY_BYTES_MAX:
            return False
        try:
            now_us = self._clock.monotonic_us()
            if not 0 <= now_us - self._checked_us < CHECK_US:
                if not self._opened(create=True):
                    return False
                self._checked_us = now_us
            if not self._seated(now_us):
                return False
            self._request = (self._request + 1) % _REQUESTS or 1
            self._stamped_us = now_us
            size = zlib.crc32(body) << 32 | len(body)
            os.pwrite(self._fd, body, _HEAD_BYTES + self._seat * BODY_BYTES_MAX)
            words = _REQUEST.pack(self._request, self._stamped_us, size)
            os.pwrite(self._fd, words, self._seat * _SEAT.size)
            self._posted = True
        except OSError:
            self.close()
            return False
        return True

    def wait(self, milliseconds: int) -> tuple[Answer, int] | None:
        """Sleep until called, or for so long; return the answer if there is one.

        `taken` says afterwards whether somebody took the request, and is at it or dead.
        """
        if milliseconds:
            if self._poll.poll(milliseconds):
                self._drain()
            else:
                self._stamp()
        words = self._own()
        if words[6] >> 2 == self._request:
            return _ANSWERS[words[6] & 3], words[5]
        self.taken = words[3] == self._request
        return None

    def _stamp(self) -> None:
        now_us = self._clock.monotonic_us()
        if now_us - self._stamped_us > _STAMP_US:
            self._stamped_us = now_us
            stamp = now_us.to_bytes(8, sys.byteorder)
            os.pwrite(self._fd, stamp, self._seat * _SEAT.size + _STAMP_AT)

    def withdraw(self) -> None:
        """Take the request back; `mark` tells whether somebody was faster. Raises OSError."""
        if self._posted:
            self._posted = False
            os.pwrite(self._fd, bytes(8), self._seat * _SEAT.size)

    def unseat(self) -> None:
        """Leave the seat to others, and close the pipes."""
        with self._guard:
            fds = {self._pipe, *self._callable.values()} - {-1}
            self._seat = self._pipe = -1
            self._checked_us = -CHECK_US
            self._callable = {}
            self._poll = select.poll()
            for fd in fds:
                os.close(fd)

    def mark(self) -> tuple[int, int]:
        """Return the number of the transaction that took our request, 0 for none, and the value.

        Raises OSError.
        """
        words = self._own()
        return (words[4], words[5]) if words[3] == self._request else (0, 0)

    # ------------------------------------------------------------ who leads

    def posted(self) -> list[Posted]:
        """Return what others wait to have stored; the caller holds the database's lock."""
        found: list[Posted] = []
        try:
            if self._fd < 0 and not self._opened(create=False):
                return found
            head = self._head()
            if not (asking := _asking(head)):
                return found
            now_us = self._clock.monotonic_us()
            for seat in asking:
                request, stamp_us, size, marked, generation, _, answered, _ = _SEAT.unpack_from(
                    head, seat * _SEAT.size
                )
                if answered >> 2 == request:
                    continue
                length = min(size & 0xFFFF_FFFF, BODY_BYTES_MAX)
                body = os.pread(self._fd, length, _HEAD_BYTES + seat * BODY_BYTES_MAX)
                fresh = now_us - stamp_us < STALE_US
                taken = generation if marked == request else 0
                if fresh and zlib.crc32(body) != size >> 32:
                    continue  # read half written: its owner is at it
                found.append(Posted(seat, request, body, taken, fresh))
        except OSError:
            self.close()
        return found

    def take(self, posted: Sequence[Posted], values: Sequence[int], generation: int) -> bool:
        """Mark requests as part of the transaction that will bring the database to a number.

        To be called before its commit. False when one was withdrawn meanwhile: undo it all.
        Raises OSError.
        """
        for one, value in zip(posted, values, strict=True):
            words = _MARK.pack(one.request, generation, value)
            os.pwrite(self._fd, words, one.seat * _SEAT.size + _MARK_AT)
        head = memoryview(self._head()).cast("Q")
        return all(head[one.seat * 8] == one.request for one in posted)

    def forget(self, posted: Sequence[Posted]) -> None:
        """Remove requests of the dead, and the marks on them, whose number is given anew.

        Of one that was only stopped as well: it finds out by itself. Raises OSError.
        """
        for one in posted:
            os.pwrite(self._fd, bytes(_MARK.size), one.seat * _SEAT.size + _MARK_AT)
            os.pwrite(self._fd, bytes(8), one.seat * _SEAT.size)

    def refuse(self, posted: Sequence[Posted]) -> None:
        """Tell owners to try alone; marks go first, for their number will be given anew."""
        with contextlib.suppress(OSError):
            for one in posted:
                os.pwrite(self._fd, bytes(_MARK.size), one.seat * _SEAT.size + _MARK_AT)
            self.answer(posted, Answer.REFUSED)

    def answer(self, posted: Sequence[Posted], answer: Answer) -> None:
        """Tell owners what became of their requests, and wake them."""
        if not posted:
            return
        # Not under the database's mutex: another thread may close all this meanwhile.
        with self._guard:
            for one in posted:
                words = _ANSWER.pack(one.request << 2 | answer)
                try:
                    os.pwrite(self._fd, words, one.seat * _SEAT.size + _ANSWER_AT)
                    self._call(one.seat)
                except OSError:
                    continue  # its owner finds out by itself

    def call_next(self, taken: Sequence[Posted]) -> None:
        """Wake one who waits and was not taken: the lock is free."""
        if self._fd < 0:
            return
        with self._guard, contextlib.suppress(OSError):
            head = self._head()
            if not (asking := _asking(head)):
                return
            words = memoryview(head).cast("Q")
            ours = {one.request for one in taken}
            # Those behind our own seat first, so that each has its turn.
            behind = [seat for seat in asking if seat > self._seat]
            for seat in behind + asking:
                request = words[seat * 8]
                if request not in ours and words[seat * 8 + 6] >> 2 != request:
                    self._call(seat)
                    return

    # ------------------------------------------------------------ open and close

    def close(self) -> None:
        """Give the seat up and close everything; it opens when next used."""
        with self._guard:
            with contextlib.suppress(OSError):
                self.withdraw()
            self.unseat()
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def abandon(self) -> None:
        """In a forked child: close what was inherited; the seat stays the parent's."""
        self._guard = threading.RLock()
        self._posted = False
        self.close()

    def _own(self) -> tuple[int, ...]:
        if self._seat < 0:
            raise OSError(0, "the queue was closed meanwhile")
        words = os.pread(self._fd, _SEAT.size, self._seat * _SEAT.size)
        if len(words) < _SEAT.size:
            raise OSError(0, "the board was cut short")
        return _SEAT.unpack(words)

    def _head(self) -> bytes:
        head = os.pread(self._fd, _HEAD_BYTES, 0)
        if len(head) < _HEAD_BYTES:
            raise OSError(0, "the board was cut short")
        return head

    def _opened(self, *, create: bool) -> bool:
        if self._fd >= 0:
            if os.fstat(self._fd).st_nlink:
                return True
            self.close()
        if not create and self._clock.monotonic_us() < self._absent_until_us:
            return False
        opened = sqlite_seats.open_board(self._path, _BOARD_BYTES, _TOKEN_AT, create=create)
        if opened is None:
            self._absent_until_us = self._clock.monotonic_us() + ABSENT_US
            return False
        self._fd, self.token = opened
        return True

    def _seated(self, now_us: int) -> bool:
        """Whether we have a seat; else look for one that nobody has locked."""
        if self._seat >= 0:
            if link_of(self._pipe) == self._pipe_name or os.fstat(self._pipe).st_nlink:
                return True
            raise OSError(0, "its pipe was removed")
        if now_us < self._full_until_us:
            return False
        for seat in range(SEATS):
            pipe = sqlite_seats.open_pipe(self._folder, seat)
            try:
                fcntl.flock(pipe, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(pipe)
                continue
            except BaseException:
                os.close(pipe)
                raise
            self._seat, self._pipe = seat, pipe
            self._pipe_name = sqlite_seats.pipe_name(self._folder, seat)
            # No two owners of a seat count the same numbers, as far as chance can tell.
            self._request = int.from_bytes(os.urandom(7), "little")
            self._poll.register(pipe, select.POLLIN)
            return True
        self._full_until_us = now_us + FULL_US
        return False

    def _call(self, seat: int) -> None:
        pipe = self._callable.get(seat)
        if pipe is None:
            pipe = self._callable[seat] = sqlite_seats.open_pipe(self._folder, seat)
        try:
            os.write(pipe, b"\1")
        except BlockingIOError:
            return  # full: it is awake

    def _drain(self) -> None:
        try:
            os.read(self._pipe, _PIPE_BYTES)
        except BlockingIOError:
            return  # the word came and went


def _asking(head: bytes) -> list[int]:
    """Return the seats with a request."""
    requests = memoryview(head).cast("Q")[::8].tolist()
    return [seat for seat, request in enumerate(requests) if request] if any(requests) else []
