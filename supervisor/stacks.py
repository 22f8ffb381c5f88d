"""Keep the stacks that a process leaves, in a file that outlives its death.

Boundary: one file; who writes is faulthandler in the process itself, who reads is whoever
tells of the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Final

STACK_BYTES_MAX: Final = 16 * 1024
STACK_FILE_BYTES_MAX: Final = 512 * 1024
ASK: Final = signal.SIGUSR2
"""Has a process write its stacks between two steps of its interpreter, where all are whole."""
FORCE: Final = signal.SIGRTMAX
"""The same at once and in C, for one whose interpreter does not step. Between a call and a return
the stack is not whole: a busy process asked so died of it once in one to eight thousand times
(CPython 3.11.7; github.com/python/cpython/issues/116008 is the same with threads)."""


def clear(path: str) -> None:
    """Empty the file; it is opened for appending, so writers go on at 0.

    A process without one still works: a full or swept tmpfs must not stop supervision.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        os.close(os.open(path, flags, 0o600))


def size(path: str) -> int:
    """Return how many bytes were written; 0 when there is no file."""
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except OSError:
        return 0


def tail(path: str, bytes_max: int, since_bytes: int = 0) -> bytes:
    """Return the end of a file that a process left; b"" when there is none, or none to be read.

    `since_bytes` is how much of its beginning is left out.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return b""
    try:
        return os.pread(fd, bytes_max, max(since_bytes, os.fstat(fd).st_size - bytes_max))
    except OSError:
        return b""
    finally:
        os.close(fd)


def read(path: str, since_bytes: int = 0) -> str:
    """Return at most STACK_BYTES_MAX of it; control characters would reach a terminal."""
    data = tail(path, 4 * STACK_BYTES_MAX, since_bytes)
    # The last fatal error if there is one (what was asked for came before it).
    fatal = data.rfind(b"Fatal Python error")
    data = data[-STACK_BYTES_MAX:] if fatal < 0 else data[fatal : fatal + STACK_BYTES_MAX]
    text = data.decode("utf-8", "replace")
    return "".join(c for c in text if c == "\n" or c == "\t" or c.isprintable()).strip()
