"""Show on request what every process does: a status line each, then the stacks of all.

Boundary: reads slots and writes log lines. The stacks themselves are written by each process
into its own file: by its interpreter, or in C where that does not answer.
"""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass
from typing import Final

import structlog

from supervisor import stacks
from supervisor.herd import Herd, Process
from supervisor.linux import catches, cpu_us, has_open, state_of
from supervisor.policy import SECOND_NS

log = structlog.get_logger("herdsman.supervise")

PROCESS_STATUS: Final = "process_status"
PROCESS_STACKS: Final = "process_stacks"

POLL_NS: Final = SECOND_NS // 20
ASKED_NS: Final = SECOND_NS
ASKED_LOOKS: Final = 10
"""So long, and so often looked at, a process has time to answer before it counts as stuck; it
may be we who slept."""
STUCK_CPU_US: Final = 100_000
"""So much processor time without an answer is spent in C: a Python step would have given one,
unless a job has taken the signal for itself."""
ANSWER_NS: Final = 5 * SECOND_NS
ANSWER_LOOKS: Final = 50
"""So long, and so often looked at, it has to write anything at all."""
NOTHING: Final = "it wrote none: it is stopped, has no processor time, or cannot write its file"


@dataclass(slots=True, kw_only=True)
class _Question:
    """What a process was asked, and how much of its file was there before."""

    before_bytes: int
    asked_ns: int
    cpu_us: int
    looks: int = 0
    forced: bool = False
    seen_bytes: int = 0


class Showing:
    """Who has yet to answer; asked by two requests, it answers both at once."""

    def __init__(self, herd: Herd) -> None:
        self._herd = herd
        self._open: dict[Process, _Question] = {}
        self._look_at_ns = 0

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
            if process in self._open:
                continue
            if stacks.size(slot.stack_path) > stacks.STACK_FILE_BYTES_MAX // 2:
                slot.clear_stack()
            self._open[process] = _Question(
                before_bytes=stacks.size(slot.stack_path),
                asked_ns=now_ns,
                cpu_us=cpu_us(process.pid),
            )
            _ask(self._herd, process)
        own = "".join(traceback.format_stack()).strip()
        log.info(PROCESS_STACKS, process="supervisor", pid=os.getpid(), stacks=own)

    def turn(self, now_ns: int) -> None:
        """Log the stacks of who has written them; ask the others again."""
        if not self._open:
            return
        if now_ns >= self._look_at_ns:
            self._look_at_ns = now_ns + POLL_NS
            for process in list(self._open):
                if self._herd.processes.get(process.forked.pidfd) is not process:
                    del self._open[process]  # dead: what it left is told with its end
                elif (text := self._look(process, self._open[process], now_ns)) is not None:
                    del self._open[process]
                    log.info(
                        PROCESS_STACKS, process=process.seat.name, pid=process.pid, stacks=text
                    )
        if self._open:
            self._herd.due(self._look_at_ns)

    def _look(self, process: Process, question: _Question, now_ns: int) -> str | None:
        """Return what to show; None: ask again, or at last make it answer, and look later."""
        path, before_bytes = process.slot.stack_path, question.before_bytes
        answer = stacks.answer(path, before_bytes)
        if answer is not None:
            return answer
        question.looks += 1
        since_ns, size = now_ns - question.asked_ns, stacks.size(path)
        over = since_ns >= ANSWER_NS and question.looks >= ANSWER_LOOKS
        if question.forced and size > before_bytes and (size == question.seen_bytes or over):
            return stacks.read(path, before_bytes) or NOTHING
        question.seen_bytes = size
        if over:
            return NOTHING
        if question.forced:
            return None
        if since_ns >= ASKED_NS and question.looks >= ASKED_LOOKS and _stuck(process, question):
            question.forced = True
            self._herd.send(process, stacks.FORCE)
        elif question.looks & (question.looks - 1) == 0:  # ever more seldom
            _ask(self._herd, process)  # it may have been answering another
        return None


def _ask(herd: Herd, process: Process) -> None:
    """Send the question, unless it would be fatal: a job may have taken the handler away."""
    if catches(process.pid, stacks.ASK):
        herd.send(process, stacks.ASK)


def _stuck(process: Process, question: _Question) -> bool:
    """Whether a process is in C, where its stack does not change, stays there, and can write.

    A job may have closed the file, and what has its number now is not for stacks.
    """
    state = state_of(process.pid)
    still = state in "SD" or (
        state == "R" and cpu_us(process.pid) - question.cpu_us >= STUCK_CPU_US
    )
    return still and has_open(process.pid, process.slot.stack_path)
