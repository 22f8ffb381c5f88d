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

from supervisor import child, judgement, policy
from supervisor.drain import Drain
from supervisor.herd import Herd, Process
from supervisor.linux import become_subreaper, children, has_terminal, thread_count
from supervisor.notify import Notifier
from supervisor.policy import SECOND_NS
from supervisor.reap import kill_strays, reap_strangers, sweep
from supervisor.rolling import Rolling
from supervisor.roster import Roster
from supervisor.showing import Showing
from supervisor.signals import Inbox
from supervisor.slot import Kind, SlotState
from supervisor.slots import SlotsError, SlotTable

__all__ = ["PoolSpec", "Tree", "run", "sweep"]

log = structlog.get_logger("herdsman.supervise")

SUPERVISOR_STARTED: Final = "supervisor_started"
SUPERVISOR_READY: Final = "supervisor_ready"
SUPERVISOR_STOPPED: Final = "supervisor_stopped"
SUPERVISOR_GAVE_UP: Final = "supervisor_gave_up"
SUPERVISOR_TROUBLE: Final = "supervisor_trouble"
SIGNAL_RECEIVED: Final = "signal_received"
SIGNAL_REFUSED: Final = "signal_refused"
HOST_SLEPT: Final = "host_slept"
STRANGERS_REAPED: Final = "strangers_reaped"

BUSY_WAIT_SECONDS: Final = 0.25
IDLE_WAIT_SECONDS: Final = 1.0
TROUBLE_WAIT_SECONDS: Final = 0.25
TROUBLE_SECONDS_MAX: Final = 60.0
"""For so long the loop goes on without one whole turn, as when there are no descriptors left."""
BURY_SECONDS: Final = 5.0


@dataclass(slots=True, kw_only=True)
class PoolSpec:
    """A pool as configured. `main` runs in each worker and returns its exit code.

    `boot_seconds` is how long a first boot may take; None: as long as the tree says.
    """

    name: str
    processes: int
    main: Callable[[child.Child], int]
    max_jobs: int | None = None
    max_rss_bytes: int | None = None
    max_age_seconds: float | None = None
    on_crash_loop: str = "exit"
    boot_seconds: float | None = None


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
    when there are more (a lock held by one of them at a fork stays held for ever), and
    where the kernel has no pidfds.
    """
    if not hasattr(os, "pidfd_open") or not hasattr(select, "epoll"):
        raise RuntimeError("the supervisor needs Linux 5.3 or later; a library user needs neither")
    if thread_count() != 1:
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
        self.roster = Roster(tree, self.herd)
        self.drain = Drain(tree, self.herd, self.notifier)
        self.rolling = Rolling(tree, self.herd, self.roster, self.notifier)
        self.exit_code = policy.EXIT_OK
        self._terminal = has_terminal()
        self._inherited = set(children())
        self._last_int_ns = 0
        self._ints = 0
        self.showing = Showing(self.herd)
        self._signals: list[int] = []
        self._trouble_since_ns: int | None = None
        self._judge_from_ns = 0

    # ---- the loop ---------------------------------------------------------------------

    def run(self) -> int:
        """Turn until the tree is gone."""
        become_subreaper()
        self.inbox.install()
        pools = {squad.name: len(squad.seats) for squad in self.roster.pools}
        log.info(SUPERVISOR_STARTED, pid=os.getpid(), pools=pools)
        try:
            wait_seconds = 0.0
            asleep_ns = asleep()
            before_ns = time.monotonic_ns()
            while True:
                events = self.herd.epoll.poll(wait_seconds, 64)
                now_ns = time.monotonic_ns()
                planned_ns = int(wait_seconds * SECOND_NS)
                grown_ns = asleep() - asleep_ns
                asleep_ns += grown_ns
                slept = judgement.suspended(
                    planned_ns=planned_ns, waited_ns=now_ns - before_ns, asleep_grew_ns=grown_ns
                )
                if slept:
                    log.warning(HOST_SLEPT, seconds=max(grown_ns, now_ns - before_ns) / SECOND_NS)
                    self.herd.wake_keeper()  # it renews leases before anyone is judged
                    self._judge_from_ns = now_ns + int(judgement.HOLD_OFF_SECONDS * SECOND_NS)
                self.table.tick(now_ns, max(0, now_ns - before_ns - planned_ns))
                if self._take_turn({fd for fd, _ in events}, now_ns):
                    return self._result()
                before_ns = now_ns  # a sleep in the middle of a turn is one too
                wait_seconds = self._wait_seconds()
        except Exception as error:
            # Workers die with us, so the code must say that nobody asked for it.
            self.exit_code = policy.EXIT_GAVE_UP
            log.error(SUPERVISOR_GAVE_UP, exit_code=self.exit_code, error=str(error), exc_info=True)
            return self._result()
        finally:
            self._close()

    def _take_turn(self, readable: set[int], now_ns: int) -> bool:
        """Turn once; a host that refuses us something for a while does not end the tree."""
        try:
            over = self._turn(readable, now_ns)
        except (OSError, SlotsError) as error:
            if self._trouble_since_ns is None:
                self._trouble_since_ns = now_ns
                log.error(SUPERVISOR_TROUBLE, error=str(error), exc_info=True)
            if now_ns - self._trouble_since_ns >= TROUBLE_SECONDS_MAX * SECOND_NS:
                raise
            self.herd.due(now_ns + int(TROUBLE_WAIT_SECONDS * SECOND_NS))
            # What made the epoll readable still does: without a pause this would spin.
            time.sleep(TROUBLE_WAIT_SECONDS)
            return False
        self._trouble_since_ns = None
        return over

    def _turn(self, readable: set[int], now_ns: int) -> bool:
        self.herd.deadlines = []
        self.herd.clear_news(readable)
        self._signals += self.inbox.read()
        while self._signals:  # one by one: those after one that fails are kept for the next turn
            self._on_signal(self._signals.pop(0), now_ns)
        trouble = self._bury(readable, now_ns)
        self.herd.sample(now_ns)
        self._look(now_ns)
        self.showing.turn(now_ns)
        self._watchdog(now_ns)
        if not self.drain.active:
            self._give_up(now_ns)
        if self.drain.active:
            if self.drain.turn(now_ns):
                return True
            if self.drain.needs_keeper:
                self.roster.fill([self.roster.keeper], now_ns)
        else:
            self.rolling.turn(now_ns)
            self.roster.fill(self.roster.squads, now_ns)
        if trouble is not None:
            raise trouble
        return False

    def _wait_seconds(self) -> float:
        busy = self.drain.active or any(
            not one.ready or one.slot.state is SlotState.RUN for one in self.herd.processes.values()
        )
        limit = BUSY_WAIT_SECONDS if busy else IDLE_WAIT_SECONDS
        nearest_ns = min(self.herd.deadlines, default=None)
        if nearest_ns is None:
            return limit
        return min(limit, max(0.0, (nearest_ns - time.monotonic_ns()) / SECOND_NS) + 0.001)

    def _give_up(self, now_ns: int) -> None:
        states = [squad.state for squad in self.roster.pools]
        code = policy.give_up(states, now_ns=now_ns)
        if code is None:
            code = policy.give_up([self.roster.keeper.state], now_ns=now_ns)
        if code is not None:
            notes = {squad.name: squad.record.note for squad in self.roster.squads}
            log.error(SUPERVISOR_GAVE_UP, exit_code=code, notes=notes)
            self.exit_code = code
            self.drain.begin(now_ns)

    # ---- deaths -----------------------------------------------------------------------

    def _bury(self, readable: set[int], now_ns: int) -> OSError | SlotsError | None:
        """Deal with the dead; return what stopped us, which stops nothing else of this turn."""
        trouble: OSError | SlotsError | None = None
        for fd in readable & set(self.herd.processes):
            try:
                self._on_death(self.herd.processes[fd], now_ns)
            except (OSError, SlotsError) as error:
                trouble = error
        try:
            strangers = reap_strangers(self._is_ours, lambda pid: self._on_own_death(pid, now_ns))
        except (OSError, SlotsError) as error:
            return error
        if strangers:
            log.info(STRANGERS_REAPED, number=strangers)
        return trouble

    def _is_ours(self, pid: int) -> bool:
        trial = self.rolling.trial
        return self.herd.owns(pid) is not None or (trial is not None and trial.pid == pid)

    def _on_own_death(self, pid: int, now_ns: int) -> None:
        process = self.herd.owns(pid)
        if process is not None:
            self._on_death(process, now_ns)
        elif self.rolling.trial is not None and self.rolling.trial.pid == pid:
            self.rolling.on_trial_end(now_ns)

    def _on_death(self, process: Process, now_ns: int) -> None:
        death = self.herd.bury(process, now_ns)
        self.roster.on_death(process, death, now_ns)

    # ---- signals ----------------------------------------------------------------------

    def _on_signal(self, signum: int, now_ns: int) -> None:
        log.info(SIGNAL_RECEIVED, signal=signal.Signals(signum).name)
        match signum:
            case signal.SIGTERM:
                self.drain.begin(now_ns)
            case signal.SIGINT:
                self._on_interrupt(now_ns)
            case signal.SIGQUIT:
                self.drain.cancel(now_ns)
            case signal.SIGHUP if self._terminal:
                self.drain.begin(now_ns)  # the terminal went away, nobody asked for a reload
            case signal.SIGHUP | signal.SIGTTIN | signal.SIGTTOU if self.drain.active:
                log.warning(SIGNAL_REFUSED, signal=signal.Signals(signum).name, why="draining")
            case signal.SIGHUP:
                self.rolling.request(now_ns)
            case signal.SIGTTIN | signal.SIGTTOU if self.roster.pools:
                pool = self.roster.pools[0]
                step = 1 if signum == signal.SIGTTIN else -1
                self.roster.resize(pool, max(1, len(pool.seats) + step))
            case signal.SIGUSR1:
                self._reopen_logs()
            case signal.SIGUSR2:
                self.showing.begin(now_ns)
            case _:
                pass

    def _on_interrupt(self, now_ns: int) -> None:
        if self._ints and now_ns - self._last_int_ns < SECOND_NS:
            return  # one press of Ctrl-C can arrive twice
        self._ints += 1
        self._last_int_ns = now_ns
        if self._ints == 1:
            self.drain.begin(now_ns)
        elif self._ints == 2:
            self.drain.cancel(now_ns)
        else:
            self.drain.kill(now_ns)

    def _reopen_logs(self) -> None:
        if self.tree.reopen_logs is not None:
            with contextlib.suppress(OSError):
                self.tree.reopen_logs()
        for process in self.herd.processes.values():
            self.herd.send(process, signal.SIGUSR1)

    # ---- judgement --------------------------------------------------------------------

    def _look(self, now_ns: int) -> None:
        """See who became READY, judge everyone, and go on with what was begun."""
        for process in list(self.herd.processes.values()):
            if not process.ready and process.slot.ready_ns:
                self.roster.on_ready(process)
            if process.ready:
                self.roster.on_alive(process, now_ns)
            if process.rung_at_ns is not None:
                if now_ns >= process.rung_at_ns:
                    self.herd.escalate(process, process.asked, now_ns, process.why)
                else:
                    self.herd.due(process.rung_at_ns)
            elif now_ns >= self._judge_from_ns and process.rung == 0:
                self._judge(process, now_ns)
        if not self.table.ready and not self.drain.active and self._is_up():
            self.table.ready = True
            self.notifier.send(READY=1, STATUS="running")
            log.info(SUPERVISOR_READY)

    def _is_up(self) -> bool:
        """Whether a worker is READY; the keeper's word counts where no worker is configured."""
        wanted = Kind.WORKER if any(s.seats for s in self.roster.pools) else Kind.KEEPER
        return any(process.ready for process in self.herd.of(wanted))

    def _judge(self, process: Process, now_ns: int) -> None:
        seat = process.seat
        limits = judgement.Limits(
            boot_ns=policy.boot_limit_ns(
                seat.squad.limits.boot_seconds or self.tree.boot_seconds, seat.history.boots
            ),
            max_rss_bytes=seat.squad.limits.max_rss_bytes,
        )
        verdict = judgement.judge(self.herd.facts(process), now_ns, limits)
        if isinstance(verdict, judgement.Overdue):
            self.herd.escalate(process, verdict.cause, now_ns, verdict.why)
        else:
            self.herd.due(verdict.next_ns)

    def _watchdog(self, now_ns: int) -> None:
        """Tell systemd that the loop turns, but only while the keeper answers."""
        fresh_ns = int(judgement.KEEPER_TICK_SECONDS * SECOND_NS)
        answered = any(now_ns - k.slot.beat_ns < fresh_ns for k in self.herd.of(Kind.KEEPER))
        self.herd.due(self.notifier.feed(now_ns, well=answered or self.drain.active))

    # ---- the end ----------------------------------------------------------------------

    def _result(self) -> int:
        if self.exit_code == policy.EXIT_OK and self.herd.killed_jobs:
            return policy.EXIT_KILLED
        return self.exit_code

    def _close(self) -> None:
        """Leave nothing behind: no process, no descriptor; the instance lock is given up last."""
        for process in list(self.herd.processes.values()):
            self.herd.send(process, signal.SIGKILL, group=True)
            with contextlib.suppress(OSError):  # it is dead; without descriptors less is recorded
                if self.herd.wait_for_end(process, BURY_SECONDS):
                    self.herd.bury(process, time.monotonic_ns())
        if self.rolling.trial is not None:
            self.rolling.trial.kill()
            self.rolling.trial.finish()
        leaked = 0
        with contextlib.suppress(OSError):
            leaked = kill_strays(lambda pid: self._is_ours(pid) or pid in self._inherited)
        self.table.leaked += leaked
        self.inbox.close()
        self.herd.close()
        code = self._result()
        log.info(SUPERVISOR_STOPPED, exit_code=code, leaked=leaked or None)
        if self.tree.lock_fd is not None:
            os.close(self.tree.lock_fd)


def asleep() -> int:
    """Return for how long the host has been suspended since it booted, in nanoseconds."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    if clock is None:
        return 0
    return time.clock_gettime_ns(clock) - time.clock_gettime_ns(time.CLOCK_MONOTONIC)
