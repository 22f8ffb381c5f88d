"""Keep the stacks that a process leaves, in a file that outlives its death.

Boundary: one file. The process itself writes into it, through `Writer`, and when it dies of a
fatal signal; who reads is whoever tells of the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from types import FrameType
from typing import Final

STACK_BYTES_MAX: Final = 16 * 1024
STACK_FILE_BYTES_MAX: Final = 512 * 1024
ASK: Final = signal.SIGUSR2
"""Has a process write its stacks between two steps of its interpreter, where all are whole."""
FORCE: Final = signal.SIGURG
"""The same at once and in C, for one whose interpreter does not step. Between a call and a return
the stack is not whole: a busy process asked so died of it once in one to eight thousand times
(CPython 3.11.7; github.com/python/cpython/issues/116008 is the same with threads). Of the signals
that a process without a handler ignores, it is the one that nobody sends."""
BEGIN: Final = b"[stacks, as asked for]\n"
END: Final = b"[end of stacks]\n"
"""Around an answer: one that is being written is none yet."""
_ABORTED: Final = b"Fatal Python error: Aborted"
_FATAL: Final = b"Fatal Python error"


class Writer:
    """Writes the stacks of this process: when asked, when forced, and when it dies of a fault."""

    __slots__ = ("_fd", "_file")

    def __init__(self) -> None:
        self._fd, self._file = -1, (0, 0)

    def open(self, path: str) -> None:
        """Point faulthandler at the file; without one the process lives, and shows nothing."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._fd = os.open(path, flags, 0o600)
        except OSError:
            return
        status = os.fstat(self._fd)
        self._file = (status.st_dev, status.st_ino)
        faulthandler.enable(file=self._fd, all_threads=True)
        # This thread's only: others may be running while it is stuck outside the interpreter.
        faulthandler.register(FORCE, file=self._fd, all_threads=False)

    def on_ask(self, signum: int, frame: FrameType | None) -> None:
        """Answer; the handler of ASK."""
        if frame and frame.f_code is Writer.on_ask.__code__:
            return  # asked while answering: a storm of questions would go too deep
        try:
            status = os.fstat(self._fd)
            if (status.st_dev, status.st_ino) != self._file:
                return  # a job closed it, and the number is another file's
            if status.st_size > STACK_FILE_BYTES_MAX:
                os.ftruncate(self._fd, 0)
            os.write(self._fd, BEGIN)
            faulthandler.dump_traceback(self._fd, all_threads=True)
            os.write(self._fd, END)
        except OSError:
            pass  # there was none, or a job closed it


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
    """Return what was written since the last answer, the last fatal error alone if there is one.

    An abort is where it begins: to write the stack of a busy process may itself be fatal.
    """
    data = tail(path, STACK_FILE_BYTES_MAX, since_bytes).rpartition(END)[2]
    fatal = data.rfind(_ABORTED)
    fatal = data.rfind(_FATAL) if fatal < 0 else fatal
    return _shown(data[-STACK_BYTES_MAX:] if fatal < 0 else data[fatal : fatal + STACK_BYTES_MAX])


def answer(path: str, since_bytes: int) -> str | None:
    """Return the last whole answer that was begun since then; None while there is none."""
    before, end, _ = tail(path, STACK_FILE_BYTES_MAX, since_bytes).rpartition(END)
    _, begin, data = before.rpartition(BEGIN)
    return _shown(data[-STACK_BYTES_MAX:]) if end and begin else None


def _shown(data: bytes) -> str:
    """Return it as text; control characters would reach a terminal."""
    text = data.decode("utf-8", "replace")
    return "".join(c for c in text if c == "\n" or c == "\t" or c.isprintable()).strip()
