"""Make commits durable: flush the write-ahead log, and tell how long it has grown.

Concurrent committers share a flush: threads here, by tickets; processes in the
kernel, since nobody holds the lock meanwhile.

Boundary: the log file alone, through a descriptor of its own. SQLite takes no
locks on that file, so closing the descriptor releases none.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from queue_core.errors import DurabilityUnknown

_FRAME_HEADER_BYTES: Final = 24
_LOG_HEADER_BYTES: Final = 32


class Log:
    """The log of one open database. `unsure` is set by a flush that failed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._name = os.fspath(path)  # a Path turns itself into a text at each call
        self.unsure = False
        # A signal's handler may put while its own thread flushes: the lock must let it in again.
        self._mutex = threading.RLock()
        self._fd = -1
        self._flushed = 0

    def flush(self, ticket: int, commits: int) -> None:
        """Flush unless a flush that began after commit number `ticket` has ended.

        `commits` is the number of the newest commit. Raises DurabilityUnknown.
        """
        with self._mutex:
            if self._flushed >= ticket > 0:
                return
            try:
                if self._fd >= 0 and not self._has_its_name():
                    raise FileNotFoundError(errno.ENOENT, "it was removed while in use")
                descriptor = self._descriptor()
                if descriptor >= 0:
                    sync_data(descriptor)
            except OSError as error:
                self.unsure = True
                raise DurabilityUnknown(
                    f"{self.path} could not be flushed ({error.strerror}): the change is stored "
                    "but may not survive a power cut; check the disk"
                ) from error
            self._flushed = max(self._flushed, commits)  # an inner flush may have covered more

    def used_bytes(self) -> int:
        """Return how much of the log is in use.

        The file keeps its size when SQLite starts it again from the top, so the
        frames are counted: each repeats the salt of the header, and those left
        from the round before have another (SQLite file format, section 4). The
        valid ones stand in front, so a binary search finds the last.
        """
        with self._mutex:
            descriptor = self._descriptor()
            if descriptor < 0:
                return 0
            header = os.pread(descriptor, _LOG_HEADER_BYTES, 0)
            if len(header) < _LOG_HEADER_BYTES:
                return 0
            frame_bytes = int(struct.unpack_from(">I", header, 8)[0]) + _FRAME_HEADER_BYTES
            salt = header[16:24]
            low, high = 0, (os.fstat(descriptor).st_size - _LOG_HEADER_BYTES) // frame_bytes
            while low < high:
                middle = (low + high) // 2
                at = _LOG_HEADER_BYTES + middle * frame_bytes + 8
                if os.pread(descriptor, 8, at) == salt:
                    low = middle + 1
                else:
                    high = middle
            return low * frame_bytes

    def file_bytes(self) -> int:
        """Return the size of the log file, used or not."""
        try:
            return os.stat(self.path).st_size
        except FileNotFoundError:
            return 0

    def drop(self, close: Callable[[], None]) -> None:
        """Close the descriptor with the connection; its number may be another file's soon.

        `close` closes the connection, and may remove the log: nobody flushes meanwhile.
        """
        with self._mutex:
            self._close()
            close()

    def abandon(self) -> None:
        """In a forked child: close the copy, whatever other threads were doing."""
        self._mutex = threading.RLock()
        self._close()

    def _descriptor(self) -> int:
        """Return a descriptor of the log, or -1 when there is none and so nothing to flush."""
        if self._fd < 0:
            try:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                return -1
        return self._fd

    def _has_its_name(self) -> bool:
        return link_of(self._fd) == self._name or file_identity(self._name) == file_identity(
            self._fd
        )

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def link_of(descriptor: int) -> str | None:
    """Return the name an open file has now, None where the kernel does not tell.

    Its status would tell too, but on Linux 6.13 and later a file whose times were asked for gets
    new ones at the next write, and its inode a place in the journal: every put was a third slower
    to flush. A file without a name has one that ends in " (deleted)".
    """
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return None


def file_identity(path: Path | str | int) -> tuple[int, int] | None:
    """Return which file has a name now, or is open; None when there is none."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def make_folder(path: Path) -> None:
    """Make a folder and those above it, private, and make sure that a power cut leaves them.

    SQLite syncs the folder of its files, and leaves the entry of a new folder to chance.
    """
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_data(descriptor: int) -> None:
    """Bring a file's data to the disk itself; macOS needs F_FULLFSYNC for that."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(descriptor)
    else:  # pragma: no cover - macOS
        import fcntl

        fcntl.fcntl(descriptor, getattr(fcntl, "F_FULLFSYNC", 51))
