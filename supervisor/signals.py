"""Turn signals into a list that the supervisor's loop reads.

Boundary: a handler only writes down the number; the wake-up descriptor ends the
wait of the loop. What a signal means is decided in `supervise`.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections import deque
from types import FrameType
from typing import Any, Final

HANDLED: Final = (
    signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1,
    signal.SIGUSR2, signal.SIGTTIN, signal.SIGTTOU, signal.SIGCHLD, signal.SIGWINCH,
)  # fmt: skip
IGNORED: Final = (signal.SIGPIPE,)
WAKING: Final = frozenset({signal.SIGCHLD, signal.SIGWINCH})
"""They mean "look": at the pidfds, which say who died, and at the wishes in the shared records."""
_KEPT_MAX: Final = 1000


class Inbox:
    """Signals that arrived and were not read yet."""

    def __init__(self) -> None:
        self._arrived: deque[int] = deque(maxlen=_KEPT_MAX)
        self.wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.fds = {self.wake_read, self._wake_write}
        self._before: dict[signal.Signals, Any] = {}
        self._wake_before = -1

    def install(self) -> None:
        """Take over the process's signals."""
        for signum in HANDLED:
            self._before[signum] = signal.signal(signum, self._note)
        for signum in IGNORED:
            self._before[signum] = signal.signal(signum, signal.SIG_IGN)
        self._wake_before = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if signum not in WAKING:
            self._arrived.append(signum)

    def read(self) -> list[int]:
        """Return the signals since the last call, in order; never waits."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self.wake_read, 4096)) == 4096:
                pass
        found = []
        while self._arrived:
            found.append(self._arrived.popleft())
        return found

    def close(self) -> None:
        """Give the signals back to whoever had them."""
        signal.set_wakeup_fd(self._wake_before)
        for signum, handler in self._before.items():
            signal.signal(signum, handler if handler is not None else signal.SIG_DFL)
        for fd in self.fds:
            os.close(fd)
