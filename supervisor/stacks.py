"""Keep the stacks that a process leaves, in a file that outlives its death.

Boundary: one file; who writes is faulthandler in the process itself, who reads is whoever
tells of the process.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

STACK_BYTES_MAX: Final = 16 * 1024


def clear(path: str) -> None:
    """Empty the file; it is opened for appending, so writers go on at 0.

    A process without one still works: a full or swept tmpfs must not stop supervision.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        os.close(os.open(path, flags, 0o600))


def tail(path: str, bytes_max: int) -> bytes:
    """Return the end of a file that a process left; b"" when there is none, or none to be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return b""
    try:
        return os.pread(fd, bytes_max, max(0, os.fstat(fd).st_size - bytes_max))
    except OSError:
        return b""
    finally:
        os.close(fd)


def read(path: str) -> str:
    """Return at most STACK_BYTES_MAX of it; control characters would reach a terminal."""
    data = tail(path, 4 * STACK_BYTES_MAX)
    # The last fatal error if there is one (what was asked for with USR2 came before it).
    fatal = data.rfind(b"Fatal Python error")
    data = data[-STACK_BYTES_MAX:] if fatal < 0 else data[fatal : fatal + STACK_BYTES_MAX]
    text = data.decode("utf-8", "replace")
    return "".join(c for c in text if c == "\n" or c == "\t" or c.isprintable()).strip()
