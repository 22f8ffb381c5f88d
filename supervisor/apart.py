"""Run one function in a process that is thrown away, and bring its answer back.

Importing handlers and opening the database there cannot hurt the process that
goes on to supervise: no module, thread or descriptor of theirs stays in it.

Boundary: forks once, waits with a deadline, reaps. The answer is text, never an object.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Final

from supervisor.linux import die_with_parent

ANSWER_BYTES_MAX: Final = 64 * 1024

Answer = tuple[int, str]
"""An exit code, and what there is to say about it."""


def run_apart(function: Callable[[], Answer], seconds: float) -> Answer:
    """Return what `function` returned in a forked process; at most `seconds` are waited.

    A function that dies or takes too long answers with code 70 and a sentence.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_be_apart, args=(function, writer, os.getpid()))
    try:
        process.start()
        os.close(writer)
        writer = -1
        data = _read(reader, time.monotonic() + seconds)
        process.join(1.0)
        try:
            code, text = json.loads(data)
            return int(code), str(text)
        except (ValueError, TypeError):
            return 70, _silence(process.exitcode, seconds)
    finally:
        if process.pid is not None and process.is_alive():
            process.kill()
            process.join(5.0)
        process.close()
        os.close(reader)
        if writer >= 0:
            os.close(writer)


def _read(reader: int, deadline: float) -> bytes:
    data = b""
    while len(data) < ANSWER_BYTES_MAX:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reader], [], [], left)[0]:
            break
        part = os.read(reader, 65536)
        if not part:
            break
        data += part
    return data


def _silence(exit_code: int | None, seconds: float) -> str:
    if exit_code is None:
        return f"the check took longer than {seconds:g} s; does a handler's module wait at import?"
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        return f"the check died of {name}; does a handler's module crash at import?"
    return f"the check left with exit code {exit_code} while it imported the handlers"


def _be_apart(function: Callable[[], Answer], writer: int, parent: int) -> None:
    """Be the throwaway process; never returns."""
    with contextlib.suppress(OSError):
        die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    code = 1
    try:
        answer = function()
        code = 0
        data = json.dumps(answer).encode()[:ANSWER_BYTES_MAX]
        os.write(writer, data)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)
