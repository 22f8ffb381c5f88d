"""Try a new configuration in a process that is thrown away.

Boundary: forks, runs one function, reports in a sentence how it ended. Importing
handlers here cannot hurt the supervisor, whatever they do at import.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from supervisor.linux import INSTANCE_VARIABLE, die_with_parent, kill_group

if TYPE_CHECKING:
    from supervisor.herd import Herd


class Trial:
    """One running trial. Raises OSError when the kernel refuses the fork."""

    def __init__(self, validate: Callable[[], int], herd: Herd, limit_ns: int) -> None:
        self._epoll = herd.epoll
        self._limit_ns = limit_ns
        self._late = False
        close = herd.not_for_children()
        parent = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _try(validate, close, parent, herd.table.instance_uuid)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        with contextlib.suppress(OSError):
            os.setpgid(self.pid, self.pid)
        self.pidfd = os.pidfd_open(self.pid)
        herd.own_fds.add(self.pidfd)
        self._herd = herd
        self._epoll.register(self.pidfd, select.EPOLLIN)
        herd.due(limit_ns)

    def late(self, now_ns: int) -> bool:
        """Say whether the trial has taken too long."""
        if now_ns < self._limit_ns:
            self._herd.due(self._limit_ns)
            return False
        self._late = True
        return True

    def kill(self) -> None:
        """End it, and what it started; it is not reaped yet, so its number is its own."""
        kill_group(self.pid)

    def finish(self) -> str | None:
        """Reap the trial; return what was wrong, None when all was well."""
        kill_group(self.pid)
        _, status = os.waitpid(self.pid, 0)
        self._epoll.unregister(self.pidfd)
        self._herd.own_fds.discard(self.pidfd)
        os.close(self.pidfd)
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            return None
        if self._late:
            return "the new configuration did not finish its check in time"
        if code < 0:
            return f"the check of the new configuration died of signal {-code}"
        return f"the check of the new configuration failed with exit code {code}"


def _try(validate: Callable[[], int], close: set[int], parent: int, instance: str) -> None:
    """Be the throwaway process; never returns."""
    code = 1
    try:
        for fd in close:
            with contextlib.suppress(OSError):
                os.close(fd)
        signal.set_wakeup_fd(-1)
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE}:
            with contextlib.suppress(OSError, ValueError):
                signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.environ[INSTANCE_VARIABLE] = instance  # what it executes is found after a crash
        code = int(validate())
    except BaseException:
        with contextlib.suppress(Exception):
            traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code & 0xFF)
