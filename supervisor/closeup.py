"""Look at every process of a tree closely, for commands that name single ones.

Boundary: reads the slot table into plain facts, beside what `processes` reads for metrics;
writes nothing, asks no database.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from supervisor.policy import Cause, cause_of
from supervisor.processes import ProcessFacts, WorkerState, attach_living, read_processes
from supervisor.slots import Kind, Slot, SlotState, SlotTable

_NS = 1e9
_STATES = {
    SlotState.BOOT: WorkerState.STARTING,
    SlotState.RUN: WorkerState.BUSY,
    SlotState.SETTLE: WorkerState.BUSY,
    SlotState.EXIT: WorkerState.DRAINING,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LastDeath:
    """How the last process of a name ended; the record is kept for a while only."""

    cause: Cause | None
    signal: int
    exit_code: int
    age_seconds: float
    note: str

    @property
    def text(self) -> str:
        """The end in a few words: "signal 9", "timeout (signal 6)"."""
        how = f"signal {self.signal}" if self.signal else f"exit code {self.exit_code}"
        if self.cause is None or self.cause in (Cause.SIGNAL, Cause.EXIT):
            return how
        return f"{self.cause} ({how})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """One live process of the tree, worker, keeper or web.

    `since_seconds` counts from the start of the job for a busy worker, else from the moment its
    state was entered. `limit_seconds` is the running job's hard timeout, None without one.
    """

    name: str
    pool: str
    kind: Kind
    slot: int
    epoch: int
    pid: int
    start_ticks: int
    state: WorkerState
    job: int | None
    since_seconds: float
    age_seconds: float
    beat_age_seconds: float
    limit_seconds: float | None
    jobs_done: int
    jobs_failed: int
    resident_bytes: int
    note: str
    asked_to_restart: bool
    last_death: LastDeath | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A whole tree at one moment. `supervisor_pid` was verified by its start time."""

    instance: str
    supervisor_pid: int
    started_ticks: int
    processes: ProcessFacts
    people: tuple[Person, ...]
    deaths: dict[str, LastDeath]

    def of(self, kind: Kind) -> tuple[Person, ...]:
        """Return the live processes of one kind."""
        return tuple(one for one in self.people if one.kind is kind)


def look(database: str, instance: str) -> Tree | None:
    """Return the tree that runs this database under this name; None when none does."""
    table = attach_living(database, instance)
    if table is None:
        return None
    try:
        return read_tree(table, instance)
    finally:
        table.close()


def read_tree(table: SlotTable, instance: str, now_ns: int | None = None) -> Tree:
    """Return what the slots say now; `now_ns` is CLOCK_MONOTONIC, for tests."""
    now_ns = time.monotonic_ns() if now_ns is None else now_ns
    deaths: dict[str, tuple[int, LastDeath]] = {}
    for slot in table.slots:
        died_ns, name = slot.died_ns, slot.name
        if died_ns and name and died_ns > deaths.get(name, (0,))[0]:
            deaths[name] = died_ns, _death(slot, now_ns)
    last = {name: death for name, (_, death) in deaths.items()}
    people = [_person(table, slot, last, now_ns) for slot in table.live()]
    return Tree(
        instance=instance,
        supervisor_pid=table.supervisor_pid,
        started_ticks=table.supervisor_start_time,
        processes=read_processes(table, now_ns),
        people=tuple(people),
        deaths=last,
    )


def _death(slot: Slot, now_ns: int) -> LastDeath:
    return LastDeath(
        cause=cause_of(slot.cause),
        signal=slot.signal,
        exit_code=slot.exit_code,
        age_seconds=_since(slot.died_ns, now_ns),
        note=slot.note,
    )


def _person(table: SlotTable, slot: Slot, deaths: dict[str, LastDeath], now_ns: int) -> Person:
    state = slot.state
    if not slot.ready_ns and state is SlotState.CLAIM:
        state = SlotState.BOOT  # it has not reached the database yet
    running = state is SlotState.RUN and slot.kind is Kind.WORKER
    started_ns, hard_ns = slot.started_ns, slot.hard_deadline_ns
    shown = _STATES.get(state, WorkerState.IDLE)
    if state is not SlotState.BOOT and (slot.retire or table.draining):
        shown = WorkerState.DRAINING
    return Person(
        name=slot.name,
        pool=table.pool_of(slot),
        kind=slot.kind,
        slot=slot.index,
        epoch=slot.epoch,
        pid=slot.pid,
        start_ticks=slot.start_time,
        state=shown,
        job=(slot.job or None) if running else None,
        since_seconds=_since(started_ns if running else slot.entered_ns, now_ns),
        age_seconds=_since(slot.boot_ns, now_ns),
        beat_age_seconds=_since(max(slot.beat_ns, slot.entered_ns), now_ns),
        limit_seconds=(hard_ns - started_ns) / _NS if running and hard_ns else None,
        jobs_done=slot.jobs_done,
        jobs_failed=slot.jobs_failed,
        resident_bytes=slot.rss_bytes,
        note=slot.note,
        asked_to_restart=slot.wish == slot.epoch,
        last_death=deaths.get(slot.name),
    )


def _since(then_ns: int, now_ns: int) -> float:
    return max(0.0, (now_ns - then_ns) / _NS)
