"""Wake an idle worker, in any process on this host, when a job is ready.

The bells are named pipes in a folder beside the database, each queue has
one of them. A byte in a pipe means "look"; it stays there until somebody looks,
so a ring between a look and a sleep is not lost. A bell is a hint: whoever is
rung looks, and whoever waits looks again after a while by itself.

Boundary: knows queues by name only, and neither jobs nor the database.
"""

from __future__ import annotations

import os
import select
import stat
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

BELLS: Final = 64
"""Few enough to open all of them, enough for most databases' queues to have one each."""
WAIT_SECONDS_MAX: Final = 60.0
"""A longer wait returns early; callers look again anyway."""

_DRAIN_BYTES: Final = 65_536  # what a pipe holds
_CHECK_SECONDS: Final = 1.0
_TICK_SECONDS: Final = 0.05  # what happens so shortly after each other can have the same time
_OPEN_FLAGS: Final = os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(slots=True, kw_only=True, eq=False)
class _Bell:
    """An open pipe, which file it was, and when its name was last seen to be that file."""

    fd: int
    file: tuple[int, int]
    checked: float


@dataclass(slots=True, kw_only=True, eq=False)
class _Poller:
    """An epoll that hears some bells, kept from one wait to the next.

    To register 64 pipes takes 100 µs, and to close that epoll 200 µs, while a job waits. It
    goes by the bells themselves: a pipe that was opened anew can have an old one's number.
    """

    epoll: select.epoll
    bells: list[_Bell]
    heard: dict[int, int]


class Doorbell:
    """The bells of one database; any number of threads may wait and ring.

    Nothing here raises for what is found in the folder: a bell that cannot be
    used is silent, waiting for it lasts until the timeout, and `broken` says why.
    """

    def __init__(self, folder: Path, number_of: Callable[[str], int] | None = None) -> None:
        """Name the folder; `number_of` tells a queue's bell, by default a hash of its name."""
        self.folder = folder
        self._number_of = number_of or _number
        self._prefix = f"{folder}/"  # to join paths for every ring takes longer than the ring
        # A ring from a signal handler may interrupt a ring: the lock must let it in again.
        self._mutex = threading.RLock()
        self._bells: dict[int, _Bell] = {}
        self._broken: dict[int, str] = {}
        self._folder_seen: tuple[int, int, int] | None = None
        self._folder_since = self._folder_looked = 0.0
        self._kept: _Poller | None = None

    @property
    def broken(self) -> str | None:
        """Why a bell cannot be used, None while all that were tried can."""
        return next(iter(list(self._broken.values())), None)

    def ring(self, queue: str) -> None:
        """Wake one of those who wait for this queue; never waits and never fails.

        Creates nothing: where there is no pipe nobody has ever waited. A full
        pipe rings already.
        """
        try:
            with self._mutex:
                bell = self._bell(self._number_of(queue), create=False)
                if bell is not None:
                    os.write(bell.fd, b"\1")
        except OSError:
            return

    def listen(self, queues: Sequence[str] | None) -> None:
        """Open the bells of these queues (None: all), so that a ring from now on is kept.

        Call it before the look that precedes a `wait`.
        """
        with self._mutex:
            self._open(self._numbers(queues))

    def wait(
        self,
        queues: Sequence[str] | None,
        timeout_seconds: float,
        wake_fd: int | None = None,
    ) -> bool:
        """Sleep until a bell of these queues (None: all) rings; empty it and return True.

        Returns False when `wake_fd` became readable, or after `timeout_seconds`,
        at most `WAIT_SECONDS_MAX`. One ring wakes one of several waiters. A
        signal does not end the wait unless its handler raises. Raises OSError
        when `wake_fd` cannot be waited for.
        """
        timeout = min(max(0.0, timeout_seconds), WAIT_SECONDS_MAX)
        numbers = self._numbers(queues)
        if sys.platform == "linux":
            poller = None
            with suppress(OSError):  # out of descriptors: wait the other way, which needs none
                poller = self._poller(numbers)
            if poller is not None:
                return self._wait_epoll(poller, timeout, wake_fd)
        return self._wait_poll(numbers, timeout, wake_fd)

    def close(self) -> None:
        """Close the pipes; they are opened again when next used."""
        with self._mutex:
            bells, self._bells = self._bells, {}
            kept, self._kept = self._kept, None
            for bell in bells.values():
                os.close(bell.fd)
            if kept is not None:
                kept.epoll.close()

    def abandon(self) -> None:
        """In a forked child: close this process's copies, whatever other threads were doing."""
        self._mutex = threading.RLock()
        self.close()

    if sys.platform == "linux":

        def _poller(self, numbers: Iterable[int]) -> _Poller:
            """Take the kept poller if it hears these very bells, or make one."""
            with self._mutex:  # so that no descriptor is closed, and its number reused, meanwhile
                heard = self._open(numbers)
                bells = [self._bells[number] for number in heard.values()]
                kept, self._kept = self._kept, None
                if kept is not None:
                    if kept.bells == bells:
                        return kept
                    kept.epoll.close()
                epoll = select.epoll(select.EPOLL_CLOEXEC)
                whole = True
                for fd in heard:
                    try:
                        epoll.register(fd, select.EPOLLIN | select.EPOLLEXCLUSIVE)
                    except OSError:  # the user's limit of epoll watches: try anew next time
                        whole = False
                return _Poller(epoll=epoll, bells=bells if whole else [], heard=heard)

        def _wait_epoll(self, poller: _Poller, timeout: float, wake_fd: int | None) -> bool:
            epoll, heard, whole = poller.epoll, poller.heard, False
            try:
                if wake_fd is not None:
                    epoll.register(wake_fd, select.EPOLLIN)
                ready = [fd for fd, _ in epoll.poll(timeout)]
                if wake_fd is not None:
                    epoll.unregister(wake_fd)  # it is the caller's, who may close it
                whole = True
            finally:
                with self._mutex:
                    if whole and self._kept is None:
                        self._kept = poller
                    else:  # another thread's is kept, or a signal's handler struck here
                        epoll.close()
            return self._drain(heard[fd] for fd in ready if fd in heard)

    def _wait_poll(self, numbers: Iterable[int], timeout: float, wake_fd: int | None) -> bool:
        poller = select.poll()
        if wake_fd is not None:
            poller.register(wake_fd, select.POLLIN)
        with self._mutex:
            heard = self._open(numbers)
        for fd in heard:
            poller.register(fd, select.POLLIN)
        ready = [fd for fd, _ in poller.poll(timeout * 1000)]
        return self._drain(heard[fd] for fd in ready if fd in heard)

    def _drain(self, numbers: Iterable[int]) -> bool:
        """Empty these bells; say whether there were any."""
        rang = False
        for number in numbers:
            # True although another may have emptied it first: a look costs little, and if the
            # other dies before it looks, this look is the one that finds the job.
            rang = True
            with suppress(OSError), self._mutex:
                if bell := self._bells.get(number):
                    os.read(bell.fd, _DRAIN_BYTES)
        return rang

    def _numbers(self, queues: Sequence[str] | None) -> Iterable[int]:
        return range(BELLS) if queues is None else {self._number_of(queue) for queue in queues}

    def _open(self, numbers: Iterable[int]) -> dict[int, int]:
        """Return descriptor to number of those bells that can be heard."""
        self._vouch()
        bells = ((number, self._bell(number, create=True)) for number in numbers)
        return {bell.fd: number for number, bell in bells if bell is not None}

    def _vouch(self) -> None:
        """Spare the look at each name where the folder tells that none was removed or replaced.

        Any such change moves the folder's own time, and another folder is another file. One
        look instead of 64 a second, which were half of what an idle worker did. A name counts
        as looked at only if that was well after the folder got the time it has.
        """
        now = time.monotonic()
        if now - self._folder_looked < _CHECK_SECONDS:
            return
        try:
            status = os.stat(self.folder)
        except OSError:
            self._folder_seen = None
            return
        self._folder_looked = now
        seen = (status.st_dev, status.st_ino, status.st_mtime_ns)
        if seen != self._folder_seen:
            self._folder_seen, self._folder_since = seen, now
            return
        for bell in self._bells.values():
            if bell.checked >= self._folder_since + _TICK_SECONDS:
                bell.checked = now

    def _bell(self, number: int, *, create: bool) -> _Bell | None:
        """Return an open bell, None where there is none or it cannot be used.

        Once a second its name is looked up again: the folder may have been
        removed, or restored from a copy, and then old and new processes would
        sit at different pipes. Looking at every ring would cost as much as the
        ring, to mend sooner what the waiter's own look mends in a second.
        """
        now = time.monotonic()
        bell = self._bells.get(number)
        if bell is not None and now - bell.checked < _CHECK_SECONDS:
            return bell
        path = f"{self._prefix}{number:02d}"
        try:
            if bell is not None:
                bell.checked = now
                if _names(path, bell.file):
                    return bell
                del self._bells[number]
                os.close(bell.fd)
            opened = self._open_pipe(path, create=create)
        except OSError as error:
            self._broken[number] = f"{path}: {error.strerror or error}"
            return None
        self._broken.pop(number, None)
        if opened is None:
            return None
        fd, file = opened
        self._bells[number] = bell = _Bell(fd=fd, file=file, checked=now)
        return bell

    def _open_pipe(self, path: str, *, create: bool) -> tuple[int, tuple[int, int]] | None:
        """Open a named pipe and return descriptor and identity; None where there is no file."""
        try:
            fd = os.open(path, _OPEN_FLAGS)
        except FileNotFoundError:
            if not create:
                return None
            with suppress(FileExistsError):
                self.folder.mkdir(mode=0o700)
            with suppress(FileExistsError):
                os.mkfifo(path, 0o600)
            fd = os.open(path, _OPEN_FLAGS)
        try:
            status = os.fstat(fd)
            if not stat.S_ISFIFO(status.st_mode):
                raise OSError(0, "is not a pipe; remove it, and the bell works again")
        except BaseException:
            os.close(fd)
            raise
        return fd, (status.st_dev, status.st_ino)


def _number(queue: str) -> int:
    """Return a queue's bell, the same in every process and version."""
    return zlib.crc32(queue.encode("utf-8", "surrogatepass")) % BELLS


def _names(path: str, file: tuple[int, int]) -> bool:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    return (status.st_dev, status.st_ino) == file
