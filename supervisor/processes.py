"""Read the process tree from the shared slots into plain facts.

Boundary: reads the slot table, writes nothing; no queue, no HTTP, no metric
families. A slot may change while it is read: each fact is one word of it, so
two facts may be of two moments, but no number is ever torn.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import product
from typing import Final

from supervisor.linux import wall_seconds
from supervisor.policy import Cause, code_of
from supervisor.slot import FAULT_OPERATIONS, FAULTS
from supervisor.slots import (
    DUTIES,
    Kind,
    Pool,
    Slot,
    SlotsError,
    SlotState,
    SlotTable,
    find_slots,
    start_time,
)

LIVE_SECONDS: Final = 10.0
"""The supervisor's loop turns at least once a second; ten silent ones mean that it hangs."""


class WorkerState(StrEnum):
    """What a worker is doing, in the words of `herdsman_workers`."""

    STARTING = "starting"
    IDLE = "idle"
    BUSY = "busy"
    DRAINING = "draining"
    BACKOFF = "backoff"


_STATES: Final[Mapping[SlotState, WorkerState]] = {
    SlotState.BOOT: WorkerState.STARTING,
    SlotState.IDLE: WorkerState.IDLE,
    # A look that finds no work passes through CLAIM too.
    SlotState.CLAIM: WorkerState.IDLE,
    SlotState.RUN: WorkerState.BUSY,
    SlotState.SETTLE: WorkerState.BUSY,
    SlotState.EXIT: WorkerState.DRAINING,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """One live worker. While it runs no job, `job` is None and `running_seconds` is 0.

    `slot` and `epoch` name the process for ever; a pid may come back.
    """

    name: str
    pool: str
    slot: int
    epoch: int
    pid: int
    state: WorkerState
    job: int | None
    running_seconds: float
    age_seconds: float
    jobs_done: int
    jobs_failed: int
    resident_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """One pool: what is configured, what ended and why, and what holds it back.

    `drained` says that an operator took it out of work, `failures` counts the
    unexpected ends in a row.

    Names beginning with `@` are the keeper and `web`. `active` is False for a
    pool that a reload took out of the configuration.
    """

    name: str
    active: bool
    processes: int
    exits: Mapping[Cause, int]
    restarts: int
    backoff_seconds: float
    crash_loop: bool
    parked: bool
    note: str
    drained: bool = False
    failures: int = 0
    lease_failures: int = 0

    @property
    def internal(self) -> bool:
        """Whether this is the keeper or `web`, and not a pool of workers."""
        return self.name.startswith("@")


@dataclass(frozen=True, slots=True, kw_only=True)
class DutyFacts:
    """When a duty of the keeper last succeeded, by whichever keeper, and how long it took."""

    age_seconds: float
    took_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """The tree at one moment.

    `keeper_age_seconds` is None when no keeper lives. `resident_bytes` is the
    memory of the live processes, `cpu_us` the time used by each process still
    in the table, dead ones too: `(pool, slot, epoch)` to microseconds. `duties`
    are those of the keeper that succeeded at least once, `faults` the failed
    transactions by `(operation, kind)`. `supervisor_started_seconds` is wall
    time, None when it cannot be known.
    """

    pools: tuple[PoolFacts, ...]
    workers: tuple[WorkerFacts, ...]
    supervisor_age_seconds: float
    keeper_age_seconds: float | None
    draining: bool
    reload_ok: bool
    resident_bytes: Mapping[str, int]
    cpu_us: Mapping[tuple[str, int, int], int]
    duties: Mapping[str, DutyFacts] = field(default_factory=dict)
    faults: Mapping[tuple[str, str], int] = field(default_factory=dict)
    supervisor_started_seconds: float | None = None

    @property
    def alive(self) -> bool:
        """Whether the supervisor's loop still turns."""
        return self.supervisor_age_seconds <= LIVE_SECONDS

    def of(self, pool: str) -> tuple[WorkerFacts, ...]:
        """Return the live workers of one pool."""
        return tuple(worker for worker in self.workers if worker.pool == pool)

    def states(self, pool: PoolFacts) -> dict[WorkerState, int]:
        """Count the workers of a pool by state; who waits for a restart is in back-off."""
        counts = dict.fromkeys(WorkerState, 0)
        live = self.of(pool.name)
        for worker in live:
            counts[worker.state] += 1
        if pool.backoff_seconds > 0 and not pool.parked:
            counts[WorkerState.BACKOFF] = max(0, pool.processes - len(live))
        return counts


def read_processes(table: SlotTable, now_ns: int | None = None) -> ProcessFacts:
    """Return what the slots say now; `now_ns` is CLOCK_MONOTONIC, for tests."""
    now_ns = time.monotonic_ns() if now_ns is None else now_ns
    draining = table.draining
    workers: list[WorkerFacts] = []
    keeper_beats: list[int] = []
    resident: dict[str, int] = {}
    cpu_us: dict[tuple[str, int, int], int] = {}
    for slot in table.slots:
        state = slot.state
        if state is SlotState.FREE:
            continue
        pool = table.pool_of(slot)
        cpu_us[pool, slot.index, slot.epoch] = slot.cpu_us
        if state is SlotState.DEAD:
            continue
        resident[pool] = resident.get(pool, 0) + slot.rss_bytes
        if slot.kind is Kind.KEEPER:
            keeper_beats.append(slot.beat_ns)
        elif slot.kind is Kind.WORKER:
            workers.append(_worker(slot, pool, state, now_ns, draining))
    workers.sort(key=lambda worker: (worker.pool, _natural(worker.name), worker.slot))
    return ProcessFacts(
        pools=tuple(_pool(pool, now_ns) for pool in table.pools.values()),
        workers=tuple(workers),
        supervisor_age_seconds=_since(table.tick_ns, now_ns),
        keeper_age_seconds=_since(max(keeper_beats), now_ns) if keeper_beats else None,
        draining=draining,
        reload_ok=table.reload_ok,
        resident_bytes=resident,
        cpu_us=cpu_us,
        duties=_duties(table, now_ns),
        faults=dict(
            zip(
                product(FAULT_OPERATIONS, FAULTS),
                map(sum, zip(*(slot.faults() for slot in table.slots), strict=True)),
                strict=True,
            )
        ),
        supervisor_started_seconds=wall_seconds(table.supervisor_start_time),
    )


def _duties(table: SlotTable, now_ns: int) -> dict[str, DutyFacts]:
    found = {}
    for name in DUTIES:
        duty = table.duty(name)
        if duty is not None:
            ended_ns, took_ns = duty
            found[name] = DutyFacts(
                age_seconds=_since(ended_ns, now_ns), took_seconds=took_ns / 1e9
            )
    return found


def attach_living(database: str, instance: str) -> SlotTable | None:
    """Return the slots of the supervisor that runs this database here; None without one.

    Slots outlive a supervisor that was killed: those are not believed.
    """
    path = find_slots(database, instance)
    if path is None:
        return None
    try:
        table = SlotTable.attach(path, writable=False)
    except SlotsError:
        return None
    started = start_time(table.supervisor_pid)
    if started and started == table.supervisor_start_time and table.same_boot:
        return table
    table.close()
    return None


def _worker(slot: Slot, pool: str, state: SlotState, now_ns: int, draining: bool) -> WorkerFacts:
    running = state is SlotState.RUN
    if not slot.ready_ns and state is SlotState.CLAIM:
        state = SlotState.BOOT  # it has not reached the database yet
    leaving = (draining or slot.retire) and state is not SlotState.BOOT
    return WorkerFacts(
        name=slot.name,
        pool=pool,
        slot=slot.index,
        epoch=slot.epoch,
        pid=slot.pid,
        state=WorkerState.DRAINING if leaving else _STATES.get(state, WorkerState.DRAINING),
        job=(slot.job or None) if running else None,
        running_seconds=_since(slot.started_ns, now_ns) if running else 0.0,
        age_seconds=_since(slot.boot_ns, now_ns),
        jobs_done=slot.jobs_done,
        jobs_failed=slot.jobs_failed,
        resident_bytes=slot.rss_bytes,
    )


def _pool(pool: Pool, now_ns: int) -> PoolFacts:
    return PoolFacts(
        name=pool.name,
        active=bool(pool.active),
        processes=pool.processes,
        exits={cause: pool.exits(code_of(cause)) for cause in Cause},
        restarts=pool.restarts,
        backoff_seconds=max(0.0, (pool.backoff_until_ns - now_ns) / 1e9),
        crash_loop=bool(pool.crash_loop),
        parked=bool(pool.parked),
        note=pool.note,
        drained=bool(pool.drained),
        failures=pool.failures,
        lease_failures=pool.lease_failures,
    )


def _since(then_ns: int, now_ns: int) -> float:
    return max(0.0, (now_ns - then_ns) / 1e9)


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Order `emails/10` after `emails/9`."""
    return tuple(
        (int(part), "") if part.isascii() and part.isdigit() else (-1, part)
        for part in re.split(r"(\d+)", name)
    )


class CpuMeter:
    """Add up the CPU time of a pool's processes, so that the sum outlives each of them.

    It counts what it has seen: what a process used after the last look and
    before its record was given away is missed, never counted twice.
    """

    __slots__ = ("_last_us", "_total_us")

    def __init__(self) -> None:
        self._last_us: dict[tuple[str, int, int], int] = {}
        self._total_us: dict[str, int] = {}

    def seconds(self, facts: ProcessFacts) -> dict[str, float]:
        """Take in a look at the table, and return the seconds used per pool."""
        for at, used_us in facts.cpu_us.items():
            grown_us = max(0, used_us - self._last_us.get(at, 0))
            self._total_us[at[0]] = self._total_us.get(at[0], 0) + grown_us
        self._last_us = dict(facts.cpu_us)
        return {pool: total_us / 1e6 for pool, total_us in self._total_us.items()}
