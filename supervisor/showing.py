"""Show on request what every process does: a status line each, then the stacks of all.

Boundary: reads slots and writes log lines. The stacks themselves are written by each process
into its own file: by its interpreter, or in C where that does not answer.
"""

from __future__ import annotations

import os
import traceback
from typing import Final

import structlog

from supervisor import stacks
from supervisor.herd import Herd, Process
from supervisor.policy import SECOND_NS

log = structlog.get_logger("herdsman.supervise")

PROCESS_STATUS: Final = "process_status"
PROCESS_STACKS: Final = "process_stacks"

ASKED_SECONDS: Final = 1.0
"""So long the interpreter of a process has time to answer; one that is stuck never does."""
FORCED_SECONDS: Final = 0.3
"""So long, after it, one has to write them in C."""
POLL_SECONDS: Final = 0.05


class Showing:
    """One request at a time; another one while it lasts begins it anew."""

    def __init__(self, herd: Herd) -> None:
        self._herd = herd
        self._until_ns: int | None = None
        self._forced = False
        self._before: dict[Process, int] = {}
        self._seen: dict[Process, int] = {}
        """How many bytes of stacks each had at the beginning, and at the last look."""

    def begin(self, now_ns: int) -> None:
        """Log a line for everyone, and have all write their stacks; our own is at hand."""
        self._before, self._seen, self._forced = {}, {}, False
        for process in self._herd.processes.values():
            slot = process.slot
            log.info(
                PROCESS_STATUS, process=process.seat.name, pid=process.pid, slot=slot.index,
                state=slot.state.name, state_seconds=(now_ns - slot.entered_ns) / SECOND_NS,
                job=slot.job or None, jobs_done=slot.jobs_done, jobs_failed=slot.jobs_failed,
                rss_bytes=slot.rss_bytes,
            )  # fmt: skip
            if stacks.size(slot.stack_path) > stacks.STACK_FILE_BYTES_MAX // 2:
                slot.clear_stack()
            self._before[process] = stacks.size(slot.stack_path)
            self._herd.send(process, stacks.ASK)  # masked in a child until it has a handler
        own = "".join(traceback.format_stack()).strip()
        log.info(PROCESS_STACKS, process="supervisor", pid=os.getpid(), stacks=own)
        self._wait(now_ns, ASKED_SECONDS)

    def _wait(self, now_ns: int, seconds: float) -> None:
        self._until_ns = now_ns + int(seconds * SECOND_NS)
        self._herd.due(now_ns + int(POLL_SECONDS * SECOND_NS))

    def turn(self, now_ns: int) -> None:
        """Log the stacks once all have written them; have them written in C by who does not."""
        if self._until_ns is None:
            return
        living = [one for one in self._herd.processes.values() if one in self._before]
        sizes = {one: stacks.size(one.slot.stack_path) for one in living}
        silent = [one for one in living if sizes[one] <= self._before[one]]
        # Of two looks that show the same, the second finds no process in the middle of its own.
        if (silent or sizes != self._seen) and now_ns < self._until_ns:
            self._seen = sizes
            for process in silent:
                self._herd.send(process, stacks.ASK)  # it may have been answering another
            self._herd.due(min(self._until_ns, now_ns + int(POLL_SECONDS * SECOND_NS)))
            return
        if silent and not self._forced:
            self._forced = True
            for process in silent:
                self._herd.send(process, stacks.FORCE)
            self._wait(now_ns, FORCED_SECONDS)
            return
        self._until_ns = None
        for process in living:
            text = process.slot.stack_text(self._before[process])
            log.info(
                PROCESS_STACKS, process=process.seat.name, pid=process.pid,
                stacks=text or "it wrote none: it is stopped, or has only just begun",
            )  # fmt: skip
