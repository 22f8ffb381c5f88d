"""Stop a process where SQLite has others wait for it: they are told so, and go on after it."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from queue_core import Queue, QueueBusy
from tests.fault.conftest import Fork, exit_codes

READ_LOCKS, READ_LOCKS_AT = 5, 123
"""How many, and the first one's place in the file: sqlite.org/walformat.html#wal_locks."""


def _stop_in_the_middle(database: Path) -> None:
    """Stop as a process does that was about to say from where on it reads or copies the log."""
    queue: Queue[Any] = Queue(database, "work")
    queue.put(1)
    shared = os.open(f"{database}-shm", os.O_RDWR)
    fcntl.lockf(shared, fcntl.LOCK_EX, READ_LOCKS, READ_LOCKS_AT)
    os.kill(os.getpid(), signal.SIGSTOP)


def test_whom_a_stopped_process_holds_up_is_told_so(database: Path, fork: Fork) -> None:
    """SQLite's word for it is "locking protocol", as of a damaged file or a fault of its own."""
    pid = fork(lambda: _stop_in_the_middle(database))
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    queue: Queue[Any] = Queue(database, "work", lock_timeout_seconds=0.2)
    with pytest.raises(QueueBusy, match="is stopped"):
        queue.counts()
    os.kill(pid, signal.SIGCONT)
    assert exit_codes([pid]) == [0]
    assert queue.counts().ready == 1
