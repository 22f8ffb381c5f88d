"""Kill random processes of a running service, then prove that nothing was lost or left behind.

Boundary: kills what the slots name, by pidfd, with its start time compared first; puts only what
it is given; changes nothing else. What is printed is `cli/chaos.py`'s.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from queue_core import stats
from queue_core.engine import Engine
from queue_core.errors import QueueError
from queue_core.job import Outcome, Reason, Record, State
from queue_core.stats import Snapshot
from queue_core.upkeep import Upkeep
from supervisor import closeup
from supervisor.closeup import Tree
from supervisor.linux import start_time, stat_of
from supervisor.processes import WorkerState
from supervisor.settings import Settings
from supervisor.slots import Kind

TARGETS: Final = ("workers", "keeper", "web", "supervisor")
KINDS: Final = {"workers": Kind.WORKER, "keeper": Kind.KEEPER, "web": Kind.WEB}
KILL_SPREAD: Final = 0.5
"""A pause between two kills is off by up to this share, so that no rhythm hides a gap."""
POLL_SECONDS: Final = 0.05
GONE_SECONDS: Final = 5.0
"""Zombies and descriptors of a process that has just died are seen for some milliseconds."""
RETURN_SECONDS: Final = 60.0
_BY_KILLS: Final = frozenset({Outcome.CRASHED, Outcome.LEASE_LOST, Outcome.INTERRUPTED})


class ChaosFailed(Exception):
    """The experiment could not be made; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is killed, how often and for how long; `settle_seconds` bounds the wait after it."""

    kill_every_seconds: float
    for_seconds: float
    seed: int
    targets: tuple[str, ...] = ("workers", "keeper", "web")
    settle_seconds: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One invariant, and what was seen."""

    name: str
    ok: bool
    seen: str


@dataclass(slots=True, kw_only=True)
class Report:
    """What was done, and what holds."""

    kills: Counter[str] = field(default_factory=Counter)
    jobs: Counter[str] = field(default_factory=Counter)
    checks: list[Check] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every invariant holds."""
        return all(check.ok for check in self.checks)


Put = Callable[[int, int], Sequence[int]]
"""Put jobs number `first` to `last` (left out), and return their ids."""


def run(
    settings: Settings,
    engine: Engine,
    plan: Plan,
    *,
    jobs: int = 0,
    put: Put | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Report:
    """Kill for a while, wait until the service is whole again, and check it.

    `put` is called through the whole time, so that jobs meet every kind of death. Raises
    ChaosFailed when no service runs, or it is not whole to begin with.
    """
    return _Experiment(settings, engine, plan, tell).run(jobs, put)


class _Experiment:
    def __init__(
        self, settings: Settings, engine: Engine, plan: Plan, tell: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._plan = plan
        self._tell = tell
        self._random = random.Random(plan.seed)
        self._report = Report()

    def run(self, jobs: int, put: Put | None) -> Report:
        began = time.monotonic()
        first = self._tree()
        if first is None:
            raise ChaosFailed(
                f"no supervisor {self._settings.instance} runs on {self._settings.database}; "
                "start it with `herdsman run`"
            )
        if not _until(self._whole, self._plan.settle_seconds):
            raise ChaosFailed("the service is not whole to begin with; see `herdsman why`")
        descriptors = _descriptors(first.supervisor_pid)
        before = self._engine.snapshot()
        ids = self._kill_for_a_while(jobs, put)
        report = self._report
        whole = _until(self._whole, self._plan.settle_seconds)
        report.checks.append(Check(name="service whole again", ok=whole, seen=self._standing()))
        self._check_jobs(ids)
        self._check_numbers(before)
        self._check_processes(first, descriptors)
        report.seconds = time.monotonic() - began
        return report

    # ---- killing ----------------------------------------------------------------------

    def _kill_for_a_while(self, jobs: int, put: Put | None) -> list[int]:
        ids: list[int] = []
        began = time.monotonic()
        next_kill = began + self._pause()
        while (now := time.monotonic()) < began + self._plan.for_seconds:
            due = min(jobs, int(jobs * (now - began) / self._plan.for_seconds) + 1)
            self._put(put, ids, due)
            if now >= next_kill:
                self._kill()
                next_kill = time.monotonic() + self._pause()
            time.sleep(POLL_SECONDS)
        self._put(put, ids, jobs)
        return ids

    def _put(self, put: Put | None, ids: list[int], due: int) -> None:
        if put is not None and due > len(ids):
            with contextlib.suppress(QueueError):  # tried again with the next ones
                ids.extend(put(len(ids), due))

    def _pause(self) -> float:
        spread = KILL_SPREAD * (2 * self._random.random() - 1)
        return self._plan.kill_every_seconds * (1 + spread)

    def _kill(self) -> None:
        tree = self._tree()
        if tree is None:
            return
        victims = [
            (name, person.pid, person.start_ticks)
            for name, kind in KINDS.items()
            if name in self._plan.targets
            for person in tree.of(kind)
            if person.pid
        ]
        if "supervisor" in self._plan.targets:
            victims.append(("supervisor", tree.supervisor_pid, tree.started_ticks))
        if not victims:
            return
        kind, pid, started = self._random.choice(victims)
        if _kill_verified(pid, started):
            self._report.kills[kind] += 1
            self._tell(f"killed {kind} process {pid}")
        if kind == "supervisor" and not _until(lambda: self._tree() is not None, RETURN_SECONDS):
            raise ChaosFailed(
                f"the supervisor did not come back within {RETURN_SECONDS:g} s: nothing starts it "
                "again; kill it under a service manager only"
            )

    # ---- looking ----------------------------------------------------------------------

    def _tree(self) -> Tree | None:
        return closeup.look(self._settings.database, self._settings.instance)

    def _whole(self) -> bool:
        return self._standing() == "all ready"

    def _standing(self) -> str:
        tree = self._tree()
        if tree is None:
            return "no supervisor"
        for pool in tree.processes.pools:
            ready = sum(
                one.pool == pool.name and one.state in (WorkerState.IDLE, WorkerState.BUSY)
                for one in tree.people
            )
            if pool.active and not pool.drained and ready != pool.processes:
                return f"{ready} of {pool.processes} ready in {pool.name}"
        return "all ready"

    # ---- checks -----------------------------------------------------------------------

    def _add(self, name: str, ok: bool, seen: str) -> None:
        self._report.checks.append(Check(name=name, ok=ok, seen=seen))

    def _check_jobs(self, ids: Sequence[int]) -> None:
        """Wait until each job that was put has come to its end, and see which one."""
        pending = dict.fromkeys(ids)
        kinds = self._report.jobs

        def settled() -> bool:
            for job_id in list(pending):
                record = self._engine.find(job_id)
                end = "lost" if record is None else _end(record)
                if end != "unfinished":
                    kinds[end] += 1
                    del pending[job_id]
            return not pending

        if not ids:
            return
        with contextlib.suppress(QueueError):
            _until(settled, self._plan.settle_seconds, poll_seconds=0.2)
        kinds["unfinished"] += len(pending)
        good = kinds["done"] + kinds["poison"]
        seen = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()) if number)
        self._add("every job accounted for", good == len(ids), f"{seen} of {len(ids)}")

    def _check_numbers(self, before: Snapshot) -> None:
        after = self._engine.snapshot()
        came, live = _came(after) - _came(before), _live(after) - _live(before)
        self._add("what came in is live or ended", came == live, f"{came} came, {live} are live")
        if isinstance(self._engine, Upkeep):
            drifts = self._engine.recount()
            self._add("counters equal a recount", not drifts, f"{len(drifts)} differ")
            problems = self._engine.check(full=True)
            self._add("integrity check", not problems, problems[0] if problems else "ok")

        def stale() -> int:
            return sum(queue.stale_leases for queue in self._engine.snapshot().queues)

        none = _until(lambda: stale() == 0, GONE_SECONDS)
        self._add("no stale lease", none, f"{stale()} are stale")

    def _check_processes(self, first: Tree, descriptors: int) -> None:
        tree = self._tree()
        if tree is None:
            return  # said already: the service is not whole
        pid = tree.supervisor_pid
        none = _until(lambda: not _zombies(pid), GONE_SECONDS)
        self._add("no zombie", none, f"{len(_zombies(pid))} are")
        if (pid, tree.started_ticks) == (first.supervisor_pid, first.started_ticks):
            same = _until(lambda: _descriptors(pid) <= descriptors, GONE_SECONDS)
            now = _descriptors(pid)
            self._add("supervisor's descriptors", same, f"{descriptors} before, {now} after")


def _end(record: Record) -> str:
    """Say how a job ended; "poison" is a job that the kills themselves made dead."""
    if record.state is State.DONE:
        return "done"
    if record.state is not State.DEAD:
        return "cancelled" if record.state is State.CANCELLED else "unfinished"
    killed = bool(record.ledger) and all(one.outcome in _BY_KILLS for one in record.ledger)
    if record.reason is Reason.POISON or (record.reason is Reason.EXHAUSTED and killed):
        return "poison"
    return f"dead ({record.reason})"


def _came(snapshot: Snapshot) -> int:
    """Return jobs that came in, less those that ended, by what was counted."""
    total = 0
    for (name, _, _, label), value in snapshot.counters.items():
        if name in (stats.ENQUEUED, stats.REPLAYED):
            total += value
        elif name == stats.JOBS_FINISHED and label != "discarded":
            total -= value
    return total


def _live(snapshot: Snapshot) -> int:
    states = (State.READY, State.DELAYED, State.CLAIMED)
    return sum(queue.depth.get(state, 0) for queue in snapshot.queues for state in states)


def _kill_verified(pid: int, started: int) -> bool:
    """Kill a process; a number that another process has by now is spared."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not started or start_time(pid) != started:
            return False
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


def _descriptors(pid: int) -> int:
    """Return how many descriptors a process has open; 0 when that cannot be seen."""
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


def _zombies(parent: int) -> list[int]:
    """Return the dead children that a process has not reaped."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        fields = stat_of(name)
        if fields and fields[0] == b"Z" and int(fields[1]) == parent:
            found.append(int(name))
    return found


def _until(fact: Callable[[], bool], seconds: float, *, poll_seconds: float = POLL_SECONDS) -> bool:
    deadline = time.monotonic() + seconds
    while not fact():
        if time.monotonic() >= deadline:
            return False
        time.sleep(poll_seconds)
    return True
