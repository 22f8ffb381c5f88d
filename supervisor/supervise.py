"""Keep the process tree as it was asked for: wait, reap, judge, decide, act.

Boundary: one thread that only forks and signals. No database, no handler code,
no HTTP: what the processes do comes in as functions. The loop decides with
`policy`, acts through `herd`, and ends with an exit code.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import structlog

from supervisor import child, policy
from supervisor.herd import Herd, Limits, Process, Seat, Squad
from supervisor.notify import Notifier
from supervisor.policy import SECOND_NS, Cause, Death, PoolState
from supervisor.reap import kill_strays, reap_strangers, sweep
from supervisor.signals import Inbox
from supervisor.slot import Kind, SlotState
from supervisor.slots import KEEPER_POOL, WEB_POOL, SlotTable

__all__ = ["PoolSpec", "Tree", "run", "sweep"]

log = structlog.get_logger("herdsman.supervise")

SUPERVISOR_STARTED: Final = "supervisor_started"
SUPERVISOR_READY: Final = "supervisor_ready"
SUPERVISOR_DRAINING: Final = "supervisor_draining"
SUPERVISOR_STOPPED: Final = "supervisor_stopped"
SUPERVISOR_GAVE_UP: Final = "supervisor_gave_up"
SIGNAL_RECEIVED: Final = "signal_received"
POOL_CRASH_LOOP: Final = "pool_crash_loop"
POOL_RECOVERED: Final = "pool_recovered"

BUSY_WAIT_SECONDS: Final = 0.25
IDLE_WAIT_SECONDS: Final = 1.0
START_RETRY_NS: Final = SECOND_NS


@dataclass(slots=True, kw_only=True)
class PoolSpec:
    """A pool as configured. `main` runs in each worker and returns its exit code."""

    name: str
    processes: int
    main: Callable[[child.Child], int]
    max_jobs: int | None = None
    max_rss_bytes: int | None = None
    max_age_seconds: float | None = None
    on_crash_loop: str = "exit"


@dataclass(slots=True, kw_only=True)
class Tree:
    """All that `run` needs to know.

    `lock_fd` is the instance lock: held here, closed first thing in every child,
    and closed last. `reload` returns the tree of the new configuration (its table
    and lock are ignored), None to leave all as it is; `validate` is run first, in a
    throwaway child, and returns 0 when the new configuration works.
    `reopen_logs` is called on USR1, in the supervisor.
    """

    pools: list[PoolSpec]
    keeper: Callable[[child.Child], int]
    table: SlotTable
    web: Callable[[child.Child], int] | None = None
    lock_fd: int | None = None
    grace_seconds: float = policy.GRACE_SECONDS
    boot_seconds: float = policy.BOOT_SECONDS
    reload: Callable[[], Tree | None] | None = None
    validate: Callable[[], int] | None = None
    reopen_logs: Callable[[], None] | None = None
    random: Callable[[], float] = field(default=random.random)


def run(tree: Tree) -> int:
    """Run the tree until it is told to stop, or has to give up; return the exit code.

    Call it from the main thread of a process that has no other. Raises RuntimeError
    when there are more: a lock held by one of them at a fork stays held for ever.
    """
    if child.thread_count() != 1:
        raise RuntimeError("the supervisor needs a process with one thread; start it before others")
    return Supervisor(tree).run()


class Supervisor:
    """The loop and what it remembers."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.table = tree.table
        self.inbox = Inbox()
        self.herd = Herd(tree.table, tree.random)
        self.notifier = Notifier()
        self.herd.epoll.register(self.inbox.wake_read, select.EPOLLIN)
        self.herd.own_fds |= self.inbox.fds
        if tree.lock_fd is not None:
            self.herd.own_fds.add(tree.lock_fd)
        self.keeper = self._squad(KEEPER_POOL, Kind.KEEPER, tree.keeper, 1)
        self.web = self._squad(WEB_POOL, Kind.WEB, tree.web, 1) if tree.web else None
        self.pools = [self._pool(spec) for spec in tree.pools]
        self.drain_at_ns: int | None = None
        self.exit_code = policy.EXIT_OK
        self._workers_gone_ns: int | None = None
        self._last_int_ns = 0
        self._ints = 0
        self._deadlines: list[int] = []
        self._watchdog_at_ns = 0

    def _squad(
        self, name: str, kind: Kind, main: Callable[[child.Child], int], processes: int
    ) -> Squad:
        record = self.table.add_pool(name)
        record.processes, record.active = processes, 1
        squad = Squad(
            name=name, kind=kind, main=main, record=record, state=PoolState(processes=processes)
        )
        squad.seats = [Seat(squad=squad, number=number) for number in range(processes)]
        return squad

    def _pool(self, spec: PoolSpec) -> Squad:
        squad = self._squad(spec.name, Kind.WORKER, spec.main, spec.processes)
        squad.limits = Limits(
            max_jobs=spec.max_jobs,
            max_rss_bytes=spec.max_rss_bytes,
            max_age_seconds=spec.max_age_seconds,
        )
        squad.state.stay = spec.on_crash_loop == "stay"
        return squad

    @property
    def squads(self) -> list[Squad]:
        """Every pool, keeper and web first."""
        first = [self.keeper] if self.web is None else [self.keeper, self.web]
        return first + self.pools

    # ---- the loop ---------------------------------------------------------------------

    def run(self) -> int:
        """Turn until the tree is gone."""
        child.become_subreaper()
        self.inbox.install()
        log.info(SUPERVISOR_STARTED, pid=os.getpid(), pools=[pool.name for pool in self.pools])
        try:
            wait_seconds = 0.0
            asleep_ns = asleep()
            while True:
                before_ns = time.monotonic_ns()
                events = self.herd.epoll.poll(wait_seconds, 64)
                now_ns = time.monotonic_ns()
                planned_ns = int(wait_seconds * SECOND_NS)
                slept = policy.suspended(
                    planned_ns=planned_ns,
                    waited_ns=now_ns - before_ns,
                    asleep_grew_ns=asleep() - asleep_ns,
                )
                asleep_ns = asleep()
                self.table.tick(now_ns, max(0, now_ns - before_ns - planned_ns))
                done = self._turn({fd for fd, _ in events}, now_ns, judge=not slept)
                if done is not None:
                    return done
                wait_seconds = self._wait_seconds()
        finally:
            self._close()

    def _turn(self, readable: set[int], now_ns: int, *, judge: bool) -> int | None:
        self._deadlines = []
        self._clear_news(readable)
        for signum in self.inbox.read():
            self._on_signal(signum, now_ns)
        for fd in readable & set(self.herd.processes):
            self._on_death(self.herd.processes[fd], now_ns)
        reap_strangers(self._is_ours, lambda pid: self._on_own_death(pid, now_ns))
        self._look(now_ns, judge=judge)
        if self.drain_at_ns is None:
            code = policy.give_up([pool.state for pool in self.pools], now_ns=now_ns)
            if code is None and self.keeper.state.parked and not self.keeper.state.ever_ready:
                code = policy.EXIT_CONFIG
            if code is not None:
                log.error(SUPERVISOR_GAVE_UP, exit_code=code)
                self.exit_code = code
                self.drain(now_ns)
        if self.drain_at_ns is not None and self._drain_turn(now_ns):
            return self._result()
        self._fill(now_ns)
        self._watchdog(now_ns)
        return None

    def _wait_seconds(self) -> float:
        busy = self.drain_at_ns is not None or any(
            not one.ready or one.slot.state is SlotState.RUN
            for one in self.herd.processes.values()
        )
        limit = BUSY_WAIT_SECONDS if busy else IDLE_WAIT_SECONDS
        if not self._deadlines:
            return limit
        nearest = (min(self._deadlines) - time.monotonic_ns()) / SECOND_NS
        return min(limit, max(0.0, nearest) + 0.001)

    def _clear_news(self, readable: set[int]) -> None:
        if self.herd.news_read in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(self.herd.news_read, 4096)

    def _is_ours(self, pid: int) -> bool:
        return self.herd.owns(pid) is not None

    def _on_own_death(self, pid: int, now_ns: int) -> None:
        process = self.herd.owns(pid)
        if process is not None:
            self._on_death(process, now_ns)

    # ---- signals ----------------------------------------------------------------------

    def _on_signal(self, signum: int, now_ns: int) -> None:
        log.info(SIGNAL_RECEIVED, signal=signal.Signals(signum).name)
        match signum:
            case signal.SIGTERM:
                self.drain(now_ns)
            case signal.SIGINT:
                self._on_interrupt(now_ns)
            case signal.SIGQUIT:
                self.cancel(now_ns)
            case _:
                pass

    def _on_interrupt(self, now_ns: int) -> None:
        if self._ints and now_ns - self._last_int_ns < SECOND_NS:
            return  # one key press can arrive twice
        self._ints += 1
        self._last_int_ns = now_ns
        if self._ints == 1:
            self.drain(now_ns)
        elif self._ints == 2:
            self.cancel(now_ns)
        else:
            for process in self.herd.of(Kind.WORKER):
                process.rung = max(process.rung, 2)
                self.herd.escalate(process, Cause.DRAIN, now_ns, "third interrupt")

    # ---- deaths and starts ------------------------------------------------------------

    def _on_death(self, process: Process, now_ns: int) -> None:
        death = self.herd.bury(process, now_ns)
        seat = process.seat
        if seat.heir is process:
            seat.heir = None
            return
        if seat.process is not process:
            return
        seat.process = None
        self._decide(seat, death, now_ns)

    def _decide(self, seat: Seat, death: Death, now_ns: int) -> None:
        squad = seat.squad
        was_looping = squad.state.crash_loop_since_ns is not None
        step = policy.after_death(
            death,
            seat.history,
            squad.state,
            now_ns=now_ns,
            random=self.tree.random,
            wanted=seat in squad.seats,
        )
        seat.start_at_ns = step.at_ns if isinstance(step, policy.Start) else None
        if not was_looping and squad.state.crash_loop_since_ns is not None:
            log.error(POOL_CRASH_LOOP, pool=squad.name, note=squad.record.note)
        self._publish(squad)

    def _publish(self, squad: Squad) -> None:
        """Write what is known of a pool into its record."""
        state, record = squad.state, squad.record
        record.crash_loop = int(state.crash_loop_since_ns is not None)
        record.parked = int(state.parked)
        record.failures = max((seat.history.failures for seat in squad.seats), default=0)
        waiting = [s.start_at_ns for s in squad.seats if s.process is None and s.start_at_ns]
        record.backoff_until_ns = max(waiting, default=0)
        here = [seat.process for seat in squad.seats if seat.process is not None]
        record.live = len(here)
        record.ready = sum(1 for process in here if process.ready)

    def _fill(self, now_ns: int) -> None:
        """Start what is wanted and due."""
        for squad in self.squads:
            if self.drain_at_ns is not None and not self._needed_in_drain(squad):
                continue
            probes = 0
            for seat in squad.seats:
                if seat.process is not None or seat.start_at_ns is None:
                    probes += seat.process is not None
                    continue
                if squad.state.crash_loop_since_ns is not None and probes:
                    continue  # one probe for the whole pool
                probes += 1
                if seat.start_at_ns > now_ns:
                    self._deadlines.append(seat.start_at_ns)
                    continue
                seat.process = self.herd.start(seat, now_ns)
                if seat.process is None:
                    seat.start_at_ns = now_ns + START_RETRY_NS
                    self._deadlines.append(seat.start_at_ns)
                elif seat.process.slot.epoch and squad.state.ever_ready:
                    squad.record.restarts += 1
                self._publish(squad)

    def _needed_in_drain(self, squad: Squad) -> bool:
        """The keeper goes on until all is settled; nothing else is started any more."""
        busy = bool(self.herd.of(Kind.WORKER)) or bool(self.table.dead())
        return squad is self.keeper and busy and self._workers_gone_ns is None

    # ---- judgement --------------------------------------------------------------------

    def _look(self, now_ns: int, *, judge: bool) -> None:
        """See who became READY, judge everyone, and go on with what was begun."""
        for process in list(self.herd.processes.values()):
            if not process.ready and process.slot.ready_ns:
                self._on_ready(process)
            if process.rung_at_ns is not None:
                if now_ns >= process.rung_at_ns:
                    cause = process.asked or Cause.HANG
                    self.herd.escalate(process, cause, now_ns, process.why)
                if process.rung_at_ns is not None:
                    self._deadlines.append(process.rung_at_ns)
            elif judge and process.rung == 0:
                self._judge(process, now_ns)

    def _on_ready(self, process: Process) -> None:
        process.ready = True
        squad = process.seat.squad
        policy.after_ready(squad.state)
        self._publish(squad)
        if squad.kind is Kind.WORKER and not self.table.ready:
            self.table.ready = True
            self.notifier.send(READY=1, STATUS="running")
            log.info(SUPERVISOR_READY)

    def _judge(self, process: Process, now_ns: int) -> None:
        seat = process.seat
        limits = policy.Limits(
            boot_ns=policy.boot_limit_ns(self.tree.boot_seconds, seat.history.boots),
            max_rss_bytes=seat.squad.limits.max_rss_bytes,
        )
        verdict = policy.judge(self.herd.facts(process), now_ns, limits)
        if isinstance(verdict, policy.Overdue):
            self.herd.escalate(process, verdict.cause, now_ns, verdict.why)
            if process.rung_at_ns is not None:
                self._deadlines.append(process.rung_at_ns)
        elif verdict.next_ns is not None:
            self._deadlines.append(verdict.next_ns)
        alive_ns = now_ns - process.slot.ready_ns
        if process.ready and alive_ns >= policy.HEALTHY_SECONDS * SECOND_NS:
            policy.after_healthy(seat.history, seat.squad.state, alive_ns=alive_ns)
            if policy.leave_crash_loop(seat.squad.state, now_ns=now_ns, healthy=True):
                log.info(POOL_RECOVERED, pool=seat.squad.name)
                self._publish(seat.squad)

    # ---- shutdown ---------------------------------------------------------------------

    def drain(self, now_ns: int) -> None:
        """Begin the shutdown: no more claims, no more starts; repeats change nothing."""
        if self.drain_at_ns is not None:
            return
        self.drain_at_ns = now_ns
        self.table.draining = True
        self.notifier.send(STOPPING=1, STATUS="draining")
        log.info(SUPERVISOR_DRAINING, grace_seconds=self.tree.grace_seconds)
        for process in self.herd.of(Kind.WORKER):
            self.herd.retire(process, Cause.DRAIN)

    def cancel(self, now_ns: int) -> None:
        """Interrupt the running jobs now instead of waiting for the grace to end."""
        self.drain(now_ns)
        for process in self.herd.of(Kind.WORKER):
            if process.rung == 0:
                self.herd.escalate(process, Cause.DRAIN, now_ns, "cancelled")

    def _drain_turn(self, now_ns: int) -> bool:
        """Go one step down the shutdown timeline; True when everyone is gone."""
        assert self.drain_at_ns is not None
        workers = self.herd.of(Kind.WORKER)
        if workers:
            end_ns = self.drain_at_ns + int(self.tree.grace_seconds * SECOND_NS)
            self._deadlines.append(end_ns)
            for process in workers:
                self.herd.retire(process, Cause.DRAIN)
                if now_ns >= end_ns and process.rung == 0:
                    self.herd.escalate(process, Cause.DRAIN, now_ns, "grace is over")
                    if process.rung_at_ns is not None:
                        self._deadlines.append(process.rung_at_ns)
            return False
        if self._workers_gone_ns is None:
            if self.table.dead() and now_ns < self._settled_by(now_ns):
                return False
            self._workers_gone_ns = now_ns
        if self._end(Kind.WEB, policy.WEB_SECONDS, now_ns):
            return False
        return not self._end(Kind.KEEPER, policy.WEB_SECONDS + policy.KEEPER_SECONDS, now_ns)

    _settle_until_ns: int | None = None

    def _settled_by(self, now_ns: int) -> int:
        """Return until when the keeper may settle what the dead left."""
        if self._settle_until_ns is None:
            self._settle_until_ns = now_ns + int(policy.SETTLE_SECONDS * SECOND_NS)
        self._deadlines.append(self._settle_until_ns)
        return self._settle_until_ns

    def _end(self, kind: Kind, seconds: float, now_ns: int) -> list[Process]:
        """Ask the processes of a kind to leave, kill them when late; return those still here."""
        assert self._workers_gone_ns is not None
        limit_ns = self._workers_gone_ns + int(seconds * SECOND_NS)
        here = self.herd.of(kind)
        for process in here:
            self.herd.retire(process, Cause.DRAIN)
            self._deadlines.append(limit_ns)
            if now_ns >= limit_ns and process.rung == 0:
                process.rung = 1  # nothing to interrupt: stacks, then the end
                self.herd.escalate(process, Cause.DRAIN, now_ns, "did not leave in time")
        return here

    def _result(self) -> int:
        if self.exit_code == policy.EXIT_OK and self.herd.killed_jobs:
            return policy.EXIT_KILLED
        return self.exit_code

    def _watchdog(self, now_ns: int) -> None:
        if not self.notifier.watchdog_seconds:
            return
        keeper = self.herd.of(Kind.KEEPER)
        fresh = int(policy.KEEPER_TICK_SECONDS * SECOND_NS)
        answered = any(now_ns - one.slot.beat_ns < fresh for one in keeper)
        if now_ns >= self._watchdog_at_ns and (answered or self.drain_at_ns is not None):
            self.notifier.send(WATCHDOG=1)
            self._watchdog_at_ns = now_ns + int(self.notifier.watchdog_seconds * SECOND_NS)
        self._deadlines.append(self._watchdog_at_ns)

    def _close(self) -> None:
        for process in list(self.herd.processes.values()):
            self.herd.send(process, signal.SIGKILL, group=True)
            self.herd.bury(process, time.monotonic_ns())
        leaked = kill_strays(self._is_ours)
        self.table.leaked += leaked
        self.inbox.close()
        self.herd.close()
        log.info(SUPERVISOR_STOPPED, exit_code=self._result(), leaked=leaked)
        if self.tree.lock_fd is not None:
            os.close(self.tree.lock_fd)


def asleep() -> int:
    """Return for how long the host has been suspended since it booted, in nanoseconds."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    if clock is None:
        return 0
    return time.clock_gettime_ns(clock) - time.clock_gettime_ns(time.CLOCK_MONOTONIC)
