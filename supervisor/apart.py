"""Run one function in a process that is thrown away, and bring its answer back.

Importing handlers and opening the database there cannot hurt the process that
goes on to supervise: no module, thread or descriptor of theirs stays in it.

Boundary: forks once, waits with a deadline, and ends and reaps the process, with
what it has started. The answer is text, never an object.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Final

from supervisor.linux import die_with_parent, kill_group

ANSWER_BYTES_MAX: Final = 64 * 1024
LOOK_SECONDS: Final = 0.05
"""How soon a death without an answer is noticed: what it forked may hold the pipe open."""
LEAVE_SECONDS: Final = 1.0
"""For the process to leave once it has answered."""
KILLED_SECONDS: Final = 5.0
"""For it to die of KILL; in an uninterruptible system call it may not, and is left behind."""
ALARM_SECONDS: Final = 5.0
"""So much later than its time the kernel ends a process whose parent does not."""

Answer = tuple[int, str]
"""An exit code, and what there is to say about it."""


def run_apart(function: Callable[[], Answer], seconds: float) -> Answer:
    """Return what `function` returned in a forked process; at most `seconds` are waited.

    A function that dies or takes too long answers with code 70 and a sentence.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    pid = 0
    try:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()  # what is buffered would be written by both sides
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _be_apart(function, writer, parent, seconds)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # on both sides: whoever is first, the group exists
        os.close(writer)
        writer = -1
        data = _read(reader, pid, time.monotonic() + seconds)
        in_time = _leaves(pid, LEAVE_SECONDS)
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)
        # Not reaped yet, so its number, and that of its group, is still its own.
        status = _end(pid) if pid > 0 else 0
    try:
        code, text = json.loads(data)
        return int(code), str(text)
    except (ValueError, TypeError):
        code = os.waitstatus_to_exitcode(status)
        return 70, _silence(code if in_time else None, seconds)


def _read(reader: int, pid: int, deadline: float) -> bytes:
    """Read one line; less when the process died before, or time is up."""
    data = b""
    while len(data) < ANSWER_BYTES_MAX and not data.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        if select.select([reader], [], [], min(left, LOOK_SECONDS))[0]:
            part = os.read(reader, 65536)
            if not part:
                break
            data += part
        elif _leaves(pid, 0.0) and not select.select([reader], [], [], 0.0)[0]:
            break  # it is dead, and has not answered between the two looks
    return data


def _leaves(pid: int, seconds: float) -> bool:
    """Wait until a child is dead, at most so long, without reaping it."""
    deadline = time.monotonic() + seconds
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.002)
    return True


def _end(pid: int) -> int:
    """Kill a child and its group, and reap it; return its status."""
    kill_group(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # should its group not have come about
    _leaves(pid, KILLED_SECONDS)
    return os.waitpid(pid, os.WNOHANG)[1]


def _silence(exit_code: int | None, seconds: float) -> str:
    if exit_code is None:
        return f"the check took longer than {seconds:g} s; does a handler's module wait at import?"
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        return f"the check died of {name}; does a handler's module crash at import?"
    return f"the check left with exit code {exit_code} while it imported the handlers"


def _be_apart(function: Callable[[], Answer], writer: int, parent: int, seconds: float) -> None:
    """Be the throwaway process; never returns."""
    code = 1
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        # TERM and not KILL: without a parent it takes along what it has started.
        signal.signal(signal.SIGTERM, lambda signum, frame: kill_group(os.getpid()))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds + ALARM_SECONDS)
        with contextlib.suppress(OSError):
            die_with_parent(signal.SIGTERM)
        if os.getppid() == parent:
            answer = _answer(function)
            code = 0
            data = json.dumps(answer).encode()[: ANSWER_BYTES_MAX - 1]
            os.write(writer, data + b"\n")
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _answer(function: Callable[[], Answer]) -> Answer:
    try:
        return function()
    except BaseException as error:
        return 70, f"the check failed: {type(error).__name__}: {error}"
