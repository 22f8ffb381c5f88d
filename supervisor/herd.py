"""Hold the processes of the tree: start them, signal them, see them end.

Boundary: mechanics only. When to start or end which process is decided in
`supervise` with `policy`; what a process does first is `child`'s.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import structlog

from supervisor import child, judgement, policy
from supervisor.linux import cpu_us, kill_group, resident_bytes
from supervisor.outgrowth import adopted_by_group, started_bytes
from supervisor.policy import Cause, Death, History, PoolState
from supervisor.pool import Pool
from supervisor.reap import OomCounter, count_group
from supervisor.slot import Kind, Slot
from supervisor.slots import SlotTable

log = structlog.get_logger("herdsman.supervise")

WORKER_STARTED: Final = "worker_started"
WORKER_EXITED: Final = "worker_exited"
WORKER_START_FAILED: Final = "worker_start_failed"
WORKER_SIGNALLED: Final = "worker_signalled"
NO_RECORD: Final = "no free slot: the keeper is behind, or too many processes are leaving"


@dataclass(slots=True, kw_only=True)
class Limits:
    """What the processes of a pool may use; None for no limit, or for that of the tree."""

    max_jobs: int | None = None
    max_rss_bytes: int | None = None
    max_age_seconds: float | None = None
    boot_seconds: float | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Squad:
    """A pool at work: what is configured, what it went through, and its seats."""

    name: str
    kind: Kind
    main: Callable[[child.Child], int]
    record: Pool
    state: PoolState
    limits: Limits = field(default_factory=Limits)
    seats: list[Seat] = field(default_factory=list)
    generation: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Seat:
    """One process's place in a pool. `heir` is a replacement that is booting beside it."""

    squad: Squad
    number: int
    history: History = field(default_factory=History)
    process: Process | None = None
    heir: Process | None = None
    start_at_ns: int | None = 0
    died_ns: int = 0
    heirs_failed: int = 0
    heir_at_ns: int = 0
    filled: bool = False

    @property
    def name(self) -> str:
        """Name of the process in this seat."""
        if self.squad.kind is Kind.WORKER:
            return f"{self.squad.name}/{self.number}"
        return self.squad.name.removeprefix("@")


@dataclass(slots=True, kw_only=True, eq=False)
class Process:
    """A process that lives, or has died and is not reaped yet."""

    seat: Seat
    slot: Slot
    forked: child.Forked
    generation: int
    share: float
    ready: bool = False
    asked: Cause | None = None
    why: str = ""
    rung: int = 0
    rung_at_ns: int | None = None
    killed_ns: int | None = None
    aborted: bool = False
    told: bool = False
    sampled_ns: int = 0

    @property
    def pid(self) -> int:
        """Process id."""
        return self.forked.pid


class Herd:
    """All processes, by the pidfd that the epoll watches."""

    def __init__(self, table: SlotTable, random: Callable[[], float]) -> None:
        self.table = table
        self.epoll = select.epoll()
        self.processes: dict[int, Process] = {}
        self.own_fds: set[int] = set()
        self.killed_jobs = 0
        self.deadlines: list[int] = []
        self._random = random
        self._oom = OomCounter()
        self._sample_at_ns = 0
        self.keeper_wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.news_read, self.news_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.epoll.register(self.news_read, select.EPOLLIN)
        self.own_fds |= {self.epoll.fileno(), *self.keeper_wake, self.news_read}

    def due(self, at_ns: int | None) -> None:
        """Have the loop turn at that time at the latest."""
        if at_ns is not None:
            self.deadlines.append(at_ns)

    def of(self, kind: Kind) -> list[Process]:
        """Return the living processes of a kind."""
        return [one for one in self.processes.values() if one.seat.squad.kind is kind]

    def owns(self, pid: int) -> Process | None:
        """Return the process with that pid, if it is ours."""
        return next((one for one in self.processes.values() if one.pid == pid), None)

    def not_for_children(self) -> set[int]:
        """Return the descriptors that are the supervisor's alone."""
        return self.own_fds.union(*(one.forked.owned for one in self.processes.values()))

    def start(self, seat: Seat, now_ns: int) -> Process | None:
        """Fork a process for a seat; None when there is no free record or the kernel refuses."""
        squad = seat.squad
        slot = self.table.take(upkeep=squad.kind is not Kind.WORKER)
        if slot is None:
            log.warning(WORKER_START_FAILED, process=seat.name, why=NO_RECORD)
            return None
        slot.open(name=seat.name, pool_index=squad.record.index, kind=squad.kind, now_ns=now_ns)
        role = child.Role(name=seat.name, pool=squad.name, main=squad.main, kind=squad.kind)
        close = self.not_for_children()
        wake = self.keeper_wake if squad.kind is Kind.KEEPER else None
        if wake is not None:
            close -= set(wake)
        try:
            forked = child.fork(
                role, slot, self.table, close=close, news_fd=self.news_write, wake=wake
            )
        except OSError as error:
            slot.bury(cause=policy.code_of(Cause.BOOT), signal=0, exit_code=0, now_ns=now_ns)
            slot.free()
            log.error(WORKER_START_FAILED, process=seat.name, why=str(error))
            return None
        process = Process(
            seat=seat, slot=slot, forked=forked, generation=squad.generation, share=self._random()
        )
        self.processes[forked.pidfd] = process
        self.epoll.register(forked.pidfd, select.EPOLLIN)
        log.info(WORKER_STARTED, process=seat.name, pid=forked.pid, slot=slot.index)
        return process

    def send(self, process: Process, signum: signal.Signals, *, group: bool = False) -> None:
        """Signal a process through its pidfd, or its whole group while it is unreaped."""
        if group:
            kill_group(process.pid)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process.forked.pidfd, signum)

    def retire(self, process: Process, cause: Cause) -> None:
        """Ask a process to finish what it has begun and leave; once."""
        if process.told:
            return
        process.told = True
        process.asked = process.asked or cause
        process.slot.retire = 1
        self.send(process, signal.SIGTERM)

    def escalate(self, process: Process, cause: Cause | None, now_ns: int, why: str) -> None:
        """Take the next step of ending a process against its will."""
        cause = cause or Cause.HANG
        step = judgement.ladder(cause, process.rung)
        if step is None:
            process.rung_at_ns = None
            return
        if process.rung == 0:
            process.asked = cause
            process.why = why
            # Before the signal: whom it interrupts reads there whether the job is to blame.
            process.slot.cause = policy.code_of(cause)
        process.rung += 1
        process.rung_at_ns = None if step.then_ns is None else now_ns + step.then_ns
        self.due(process.rung_at_ns)
        process.aborted |= step.signum == signal.SIGABRT
        if step.signum == signal.SIGKILL:
            process.killed_ns = now_ns
            self.due(now_ns + policy.SECOND_NS)
        name = process.seat.name
        log.warning(WORKER_SIGNALLED, process=name, signal=step.signum.name, why=why, cause=cause)
        self.send(process, step.signum, group=step.group)

    def bury(self, process: Process, now_ns: int) -> Death:
        """Read how a process ended, kill its group, reap it, and record it in its slot."""
        pid, slot = process.pid, process.slot
        exit_code = signal_number = 0
        try:
            result = os.waitid(os.P_PIDFD, process.forked.pidfd, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            result = None  # multiprocessing looked at its own children while it started one
        # The pid is not reaped, so its number, and that of its group, is still its own.
        slot.leaked = count_group(pid)
        self.table.leaked += slot.leaked
        kill_group(pid)
        handle = process.forked.process
        handle.join()
        if result is None:
            code = handle.exitcode or 0
            exit_code, signal_number = max(0, code), max(0, -code)
        elif result.si_code == os.CLD_EXITED:
            exit_code = result.si_status
        else:
            signal_number = result.si_status
        with contextlib.suppress(ValueError):  # "still running": somebody else has reaped it
            handle.close()
        self.epoll.unregister(process.forked.pidfd)
        del self.processes[process.forked.pidfd]
        os.close(process.forked.pidfd)
        batch = slot.batch()
        running = batch is not None and batch.running is not None
        oom = signal_number == signal.SIGKILL and self._oom.grew()
        death = policy.diagnose(
            exit_code=exit_code,
            signal_number=signal_number,
            asked=process.asked,
            was_ready=slot.ready_ns != 0,
            alive_ns=now_ns - slot.boot_ns,
            jobs_done=slot.jobs_done,
            oom=oom,
            forced=process.rung > 0,
            aborted=process.aborted,
            unsettled=running,
        )
        if death.cause is Cause.DRAIN and running:
            self.killed_jobs += 1
        slot.bury(
            cause=policy.code_of(death.cause), signal=signal_number, exit_code=exit_code,
            now_ns=now_ns,
        )  # fmt: skip
        record = process.seat.squad.record
        record.count_exit(policy.code_of(death.cause))
        note = process.why or slot.note
        if note and not death.expected:
            record.note = note
        level = log.info if death.expected else log.warning
        level(
            WORKER_EXITED, process=process.seat.name, pid=pid, slot=slot.index, cause=death.cause,
            signal=signal_number, exit_code=exit_code, job=slot.job or None, note=note or None,
            leaked=slot.leaked or None,
        )  # fmt: skip
        if process.seat.squad.kind is Kind.WORKER:
            self.wake_keeper()
        else:
            slot.free()  # no jobs to deal with
        return death

    def wait_for_end(self, process: Process, seconds: float) -> bool:
        """Wait until a process is dead, at most so long; say whether it is."""
        poll = select.poll()
        poll.register(process.forked.pidfd, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def clear_news(self, readable: set[int]) -> None:
        """Empty the pipe on which processes say that they are READY."""
        if self.news_read in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(self.news_read, 4096)

    def wake_keeper(self) -> None:
        """Tell the keeper to look at the slots now; a full pipe says so already."""
        self.table.keeper_wake += 1
        with contextlib.suppress(BlockingIOError):
            os.write(self.keeper_wake[1], b"d")

    def facts(self, process: Process) -> judgement.Facts:
        """Read what the slot of a process says."""
        slot = process.slot
        # A worker beats before it takes its deadline away: read the other way round, a deadline
        # that is gone comes with the beat that says when.
        state, hard_ns, job_bytes = slot.state, slot.hard_deadline_ns, slot.job_memory_bytes
        if slot.started_ns > process.sampled_ns:
            job_bytes = 0  # what was seen then may have been another job's
        return judgement.Facts(
            kind=process.seat.squad.kind, state=state, boot_ns=slot.boot_ns,
            entered_ns=slot.entered_ns, beat_ns=slot.beat_ns,
            hard_deadline_ns=hard_ns, rss_bytes=slot.rss_bytes, job_memory_bytes=job_bytes,
        )  # fmt: skip

    def sample(self, now_ns: int) -> None:
        """Write down memory and processor time of everyone, at most once a second.

        What a worker has started counts as its own.
        """
        if now_ns < self._sample_at_ns:
            return
        self._sample_at_ns = now_ns + policy.SECOND_NS
        self._oom.note(now_ns)
        adopted = adopted_by_group()
        for process in self.processes.values():
            pid, process.sampled_ns = process.pid, time.monotonic_ns()
            process.slot.rss_bytes = resident_bytes(pid) + started_bytes(pid, adopted.get(pid, []))
            process.slot.cpu_us = cpu_us(process.pid)

    def close(self) -> None:
        """Close every descriptor that was opened here."""
        self.epoll.close()
        for fd in (*self.keeper_wake, self.news_read, self.news_write):
            os.close(fd)
