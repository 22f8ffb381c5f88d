"""Keep the last log lines of a process in a small file that outlives its death.

One `pwrite` a line into a ring of 16 KiB; a zero byte, which no line holds, marks where the
ring goes on. Boundary: one file, one writer; who writes is `logs`, who reads is `deaths`.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

from supervisor.stacks import tail

LINES_MAX: Final = 50
RING_BYTES: Final = 16 * 1024
"""Fits the traceback of an attempt beside a stack of 16 KiB."""
_MARK: Final = b"\0"


class LastLines:
    """The ring, as its process writes it. Raises OSError when the file cannot be made."""

    def __init__(self, path: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        clear(path)  # a process of the record before may still write to the old one
        self._fd = os.open(path, flags, 0o600)
        self._at = 0

    def write(self, line: bytes) -> None:
        """Add a line of less than RING_BYTES; one that cannot be written is left out."""
        if self._fd < 0 or len(line) + 1 >= RING_BYTES:
            return
        at = self._at
        room = RING_BYTES - at
        with contextlib.suppress(OSError):
            if len(line) >= room:
                os.pwrite(self._fd, line[:room], at)
                line, at = line[room:], 0
            os.pwrite(self._fd, line + _MARK, at)  # the mark is where the next line begins
            self._at = at + len(line)

    def close(self) -> None:
        """Write no more; a forked copy does this, so that its lines are not taken for ours."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def clear(path: str) -> None:
    """Forget the lines of the process before."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def read(path: str) -> str:
    """Return the last lines, oldest first, at most LINES_MAX; "" when there are none."""
    data = tail(path, RING_BYTES)
    newer, _, older = data.partition(_MARK)
    if older:
        _, end, older = older.partition(b"\n")  # its first line is overwritten in part
        if not end:  # and that line went on at the start of the ring
            newer = newer.partition(b"\n")[2]
    text = (older + newer).decode("utf-8", "replace")
    lines = ["".join(c for c in line if c.isprintable()) for line in text.split("\n")]
    return "\n".join([line for line in lines if line][-LINES_MAX:])
