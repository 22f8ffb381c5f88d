"""Show on request what every process does: a status line each, then the stacks of all.

Boundary: reads slots and writes log lines. The stacks themselves are written by each process
into its own file, in C, so that one that holds the interpreter is shown too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from typing import Final

import structlog

from supervisor.herd import Herd
from supervisor.policy import SECOND_NS

log = structlog.get_logger("herdsman.supervise")

PROCESS_STATUS: Final = "process_status"
PROCESS_STACKS: Final = "process_stacks"

STACKS_SECONDS: Final = 0.3
"""From USR2 to the processes until their stacks are read and logged."""
STACK_FILE_BYTES_MAX: Final = 256 * 1024


class Showing:
    """One request at a time; another one while it lasts begins it anew."""

    def __init__(self, herd: Herd) -> None:
        self._herd = herd
        self._stacks_at_ns: int | None = None

    def begin(self, now_ns: int) -> None:
        """Log a line for everyone, and have all write their stacks; our own is at hand."""
        for process in self._herd.processes.values():
            slot = process.slot
            log.info(
                PROCESS_STATUS, process=process.seat.name, pid=process.pid, slot=slot.index,
                state=slot.state.name, state_seconds=(now_ns - slot.entered_ns) / SECOND_NS,
                job=slot.job or None, jobs_done=slot.jobs_done, jobs_failed=slot.jobs_failed,
                rss_bytes=slot.rss_bytes,
            )  # fmt: skip
            with contextlib.suppress(OSError):
                if os.stat(slot.stack_path).st_size > STACK_FILE_BYTES_MAX:
                    slot.clear_stack()
            self._herd.send(process, signal.SIGUSR2)  # masked in a child until it has a handler
        stacks = "".join(traceback.format_stack()).strip()
        log.info(PROCESS_STACKS, process="supervisor", pid=os.getpid(), stacks=stacks)
        self._stacks_at_ns = now_ns + int(STACKS_SECONDS * SECOND_NS)

    def turn(self, now_ns: int) -> None:
        """Log the stacks once all had the time to write them."""
        if self._stacks_at_ns is None:
            return
        if now_ns < self._stacks_at_ns:
            self._herd.due(self._stacks_at_ns)
            return
        self._stacks_at_ns = None
        for process in self._herd.processes.values():
            stacks = process.slot.stack_text()
            log.info(PROCESS_STACKS, process=process.seat.name, pid=process.pid, stacks=stacks)
