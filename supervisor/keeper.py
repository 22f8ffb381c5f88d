"""Keep the database in order: bury the dead workers' jobs, extend, promote, reap, prune, flush.

Boundary: all upkeep in SQL, and none of the process keeping: who lives and who
died it reads from the slots. It starts nothing. Every duty is bounded, and one
that fails is tried again a little later without stopping the others.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog

from queue_core.engine import Engine
from queue_core.errors import QueueError
from queue_core.job import Claimed, Settlement
from queue_core.queue import LEASE_SECONDS_DEFAULT, open_engine
from queue_core.retry import LeaseLost
from supervisor.child import Child, kill_groups
from supervisor.deaths import Judge, cause_of, release
from supervisor.glance import Glance
from supervisor.policy import EXIT_OK
from supervisor.settings import QueueSettings, Settings
from supervisor.slot import Kind, SlotState
from supervisor.slots import DUTIES, SlotsError, SlotTable, previous_slots
from supervisor.telling import fault_of, line_of, tell_death

log = structlog.get_logger("herdsman.keeper")

JOBS_HANDED_BACK: Final = "jobs_handed_back"
JOBS_RECOVERED: Final = "jobs_recovered"
LEASES_REAPED: Final = "leases_reaped"
JOBS_PRUNED: Final = "jobs_pruned"
UPKEEP_FAILED: Final = "upkeep_failed"

TICK_SECONDS: Final = 0.1
REST_TICKS: Final = 5
"""After so many without a commit or a job, the keeper sleeps until a duty's time or a write."""
EXTEND_SECONDS: Final = 20.0
"""A third of the lease: two renewals may fail before one is lost."""
RELIEVE_AFTER_NS: Final = 250_000_000
"""A job running longer than this holds up its batch: the others are settled or handed back."""
REAP_SECONDS: Final = 1.0
PRUNE_SECONDS: Final = 5.0
CONFIGURE_SECONDS: Final = 60.0
"""How often queues that the configuration does not name are looked for."""
LIMIT: Final = 500
ABANDONED_MAX: Final = 100_000
"""More than all slots of the largest tree can hold; what is over is left to the leases."""
PRUNE_LIMIT: Final = 2_000
RETRY_SECONDS: Final = 1.0
OPERATIONS: Final = dict.fromkeys(DUTIES, "finish") | {
    "configure": "other", "extend": "extend", "promote": "promote", "reap": "reap",
    "prune": "prune", "flush": "checkpoint",
}  # fmt: skip
"""What a duty's transactions are for, in the words of `slot.FAULT_OPERATIONS`."""
LOCK_SECONDS: Final = 5.0
"""Shorter than the 15 s after which the supervisor takes a keeper for hung."""


def main(child: Child, settings: Settings) -> int:
    """Be the keeper until told to stop, or until the supervisor is gone."""
    # Made before the tree was: one that is gone comes back, and is not to be replaced by none.
    engine = open_engine(settings.database, create=False, lock_timeout_seconds=LOCK_SECONDS, via="")
    return Keeper(child, engine, settings).run()


@dataclass(slots=True)
class _Duty:
    """Something to do every so often. `at` is the monotonic second of the next time."""

    name: str
    every_seconds: float
    act: Callable[[], object]
    at: float = 0.0
    failing: bool = False


class Keeper:
    """The loop of the keeper, and what it remembers between ticks."""

    def __init__(self, child: Child, engine: Engine, settings: Settings) -> None:
        self._child = child
        self._table: SlotTable = child.table
        self._engine = engine
        self._settings = settings
        self._version_now: int | None = None
        self._flushed_version = -1
        self._due_at = 0.0
        self._due_version = -1
        self._recovered = False
        self._extended_at = 0.0
        self._configured: set[str] = set()
        self._again: set[str] = set()
        self._tell = line_of(settings.logs)
        self._deaths = Judge(settings=settings, now_us=engine.now_us)
        local = "://" not in settings.database
        self._log = Glance(f"{settings.database}-wal" if local else "")
        self._still = 0
        self._relieved: dict[int, tuple[int, int]] = {}  # slot: the long job it was relieved of
        # In this order: a live worker's lease is renewed before any lease is judged.
        self._duties = [
            _Duty("configure", CONFIGURE_SECONDS, self._configure),
            _Duty("bury", 0.0, self._bury),
            _Duty("recover", 3600.0, self._recover),
            _Duty("extend", EXTEND_SECONDS, self._extend),
            _Duty("relieve", 0.0, self._relieve),
            _Duty("promote", 0.0, self._promote),
            _Duty("reap", REAP_SECONDS, self._reap),
            _Duty("prune", PRUNE_SECONDS, self._prune),
            _Duty("flush", TICK_SECONDS, self._flush),
        ]

    def run(self) -> int:
        """Tick until told to stop."""
        self._tick()
        self._child.ready()
        while not self._child.stopping:
            self._turn()
        if self._child.orphaned:
            kill_groups(self._table)
            return EXIT_OK
        self._last()
        return EXIT_OK

    def _turn(self) -> None:
        """Sleep for a tick, or longer at rest; then tick if there is anything to do.

        There is when we are woken (a worker died), when somebody committed or runs a job, and
        when a duty's time has come: `reap` every second, and everything with it.
        """
        wake, seconds = [self._child.wake_fd], TICK_SECONDS
        resting = self._still >= REST_TICKS and self._log.arm() and not self._stirs()
        if resting:
            wake.append(self._log.fd)
            seconds = max(0.0, self._next() - time.monotonic())
        readable, _, _ = select.select(wake, [], [], seconds)
        woken = self._child.wake_fd in readable
        if woken:
            self._child.clear_wake()
        stirs = self._stirs()
        if resting:
            stirs = self._log.told(stirs) or stirs
        self._still = 0 if stirs else self._still + 1
        if woken or stirs or time.monotonic() >= self._next():
            self._tick()

    def _stirs(self) -> bool:
        """Whether somebody may have committed, or runs jobs."""
        moved = self._log.stirred(time.monotonic())
        return moved or any(slot.batch_size for slot in self._table.slots)

    def _next(self) -> float:
        """Return when the next duty is due that is not done in every tick anyway."""
        timed = (d.at for d in self._duties if d.every_seconds > TICK_SECONDS or d.failing)
        return min(self._due_at, *timed)

    def _tick(self) -> None:
        self._version_now = None
        for duty in self._duties:
            if self._child.orphaned:
                return
            now = time.monotonic()
            if now < duty.at:
                continue
            self._child.slot.beat()
            try:
                duty.act()
            except QueueError as error:
                self._child.slot.count_fault(OPERATIONS[duty.name], fault_of(error))
                if not duty.failing:
                    log.warning(UPKEEP_FAILED, duty=duty.name, error=str(error))
                duty.failing = True
                duty.at = now + RETRY_SECONDS
                self._child.slot.note = f"{duty.name}: {error}"
            else:
                if duty.failing and sum(one.failing for one in self._duties) == 1:
                    self._child.slot.note = ""  # what it said is over
                duty.failing = False
                # What met its limit has more to do: at the next tick, after the others.
                again = duty.name in self._again
                self._again.discard(duty.name)
                duty.at = now + (0.0 if again else duty.every_seconds)
                began_ns = int(now * 1_000_000_000)
                self._table.record_duty(duty.name, began_ns, time.monotonic_ns())

    def _last(self) -> None:
        """The final round, when the workers are gone."""
        for act in (self._bury, self._engine.flush, self._engine.checkpoint, self._engine.close):
            try:
                act()
            except QueueError as error:
                log.warning(UPKEEP_FAILED, duty="last", error=str(error))

    # ------------------------------------------------------------ the dead

    def _bury(self) -> None:
        """Settle what dead workers held, and free their slots."""
        for slot in self._table.dead():
            if slot.kind is Kind.WORKER and slot.holder:
                held = self._engine.held(slot.holder)
                settled = [(row, self._deaths.of_worker(slot, row)) for row in held]
                self._finish(settled)
                if held:
                    log.warning(
                        JOBS_HANDED_BACK,
                        worker=slot.name,
                        cause=cause_of(slot),
                        jobs=len(held),
                        charged=sum(settlement.charge for _, settlement in settled),
                    )
            slot.free()

    def _finish(self, settled: Sequence[tuple[Claimed, Settlement]]) -> None:
        self._engine.finish([settlement for _, settlement in settled])
        for row, settlement in settled:
            tell_death(self._tell, row, settlement)

    def _recover(self) -> None:
        """Hand back what an earlier run of this instance left claimed; we hold its lock now.

        Its slots, if they are still there, tell what was finished and what ran.
        """
        if self._recovered:
            return
        tables = []
        for path in previous_slots(self._table.path):
            try:
                tables.append(SlotTable.attach(path))
            except SlotsError as error:
                log.warning(UPKEEP_FAILED, duty="recover", error=str(error))
        slots = {
            slot.holder: slot
            for table in tables
            if table.same_boot
            for slot in table.slots
            if slot.holder and slot.state is not SlotState.FREE
        }
        left = self._engine.abandoned(self._settings.instance, self._living(), ABANDONED_MAX)
        # Read again: a worker that came meanwhile shows its holder before it claims anything.
        living = set(self._living())
        settled = self._deaths.of_tree([one for one in left if one.holder not in living], slots)
        for start in range(0, len(settled), LIMIT):
            self._finish(settled[start : start + LIMIT])
            self._child.slot.beat()
        for table in tables:
            table.unlink()
            table.close()
        self._recovered = True
        if settled:
            log.warning(JOBS_RECOVERED, jobs=len(settled))

    def _living(self) -> list[int]:
        return [slot.holder for slot in self._table.slots if slot.holder]

    # ------------------------------------------------------------ the living

    def _extend(self) -> None:
        holders = [slot.holder for slot in self._table.live() if slot.holder]
        busy = [slot for slot in self._table.live() if slot.holder and slot.batch_size]
        began = time.monotonic()
        if not busy:
            self._extended_at = began
            return
        try:
            self._engine.extend_holders(holders, int(LEASE_SECONDS_DEFAULT * 1_000_000))
        except QueueError:
            pools = self._table.pools
            for name in {self._table.pool_of(slot) for slot in busy} & pools.keys():
                pools[name].lease_failures += 1
            raise
        self._extended_at = began

    def _relieve(self) -> None:
        """Settle what was finished before a job that runs long, and free what waits behind it."""
        for slot in self._table.live():
            job = (slot.job, slot.run)
            if slot.state is not SlotState.RUN or slot.batch_size < 2:
                continue
            if time.monotonic_ns() - slot.started_ns < RELIEVE_AFTER_NS:
                continue
            if self._relieved.get(slot.index) == job:
                continue
            slot.revoke()
            batch = slot.batch()
            if batch is None:
                continue
            rest = set(batch.rest)
            ended = {batch.claims[at]: took_us for at, took_us in batch.finished.items()}
            held = [(row, (row.id, row.run)) for row in self._engine.held(slot.holder)]
            self._engine.finish(
                [self._deaths.done(row, ended[at]) for row, at in held if at in ended]
                + [release(row) for row, at in held if at in rest]
            )
            self._relieved[slot.index] = job

    def _promote(self) -> None:
        """Promote when something is due; look anew only when something may have changed."""
        version = self._version()
        if version == self._due_version and time.monotonic() < self._due_at:
            return
        self._engine.promote(LIMIT)
        due_us = self._engine.next_due_us()
        self._due_at = time.monotonic() + (3600.0 if due_us is None else due_us / 1_000_000)
        self._due_version = version

    def _reap(self) -> None:
        """Settle lost leases, unless those of the living could not be renewed just before."""
        if any(duty.failing for duty in self._duties if duty.name == "extend"):
            return
        if time.monotonic() - self._extended_at > LEASE_SECONDS_DEFAULT / 2:
            self._extend()  # all of us were stopped (SIGSTOP) since
        reaped = self._engine.reap(self._judge, LIMIT)
        if reaped:
            log.warning(LEASES_REAPED, jobs=len(reaped))
        if len(reaped) == LIMIT:
            self._again.add("reap")

    def _judge(self, row: Claimed, started: bool) -> Settlement:
        settled = self._deaths.settle(row, LeaseLost(), row.claimed_us if started else None, 0)
        tell_death(self._tell, row, settled)
        return settled

    def _prune(self) -> None:
        removed = self._engine.prune(PRUNE_LIMIT)
        if removed:
            log.info(JOBS_PRUNED, jobs=removed)
        if removed >= PRUNE_LIMIT:
            self._again.add("prune")

    def _flush(self) -> None:
        """Flush acks that nobody waited for, and keep the log short."""
        version = self._version()
        if version == self._flushed_version:
            return
        self._engine.flush()
        self._flushed_version = version
        if self._engine.checkpoint_due():
            self._engine.checkpoint()

    def _version(self) -> int:
        """Return the engine's version, read once a tick: a later commit is the next tick's."""
        if self._version_now is None:
            self._version_now = self._engine.version()
        return self._version_now

    def _configure(self) -> None:
        """Store the options of each queue, so that every producer obeys them.

        A queue that the configuration does not name gets the default retention.
        Options that a section does not set stay as whoever stored them left them.
        """
        named = set(self._settings.queue_names)
        found = {facts.name for facts in self._engine.snapshot().queues}
        for name in sorted((named | found) - self._configured):
            options = self._settings.queues.get(name, QueueSettings())
            stored: dict[str, Any] = {"keep_done_us": _microseconds(options.keep_done_seconds)}
            for field, column in (
                ("max_depth", "max_depth"),
                ("keep_dead_seconds", "keep_dead_us"),
                ("key_ttl_seconds", "key_ttl_us"),
                ("paused", "paused"),
            ):
                if field in options.model_fields_set:
                    value = getattr(options, field)
                    stored[column] = _microseconds(value) if column.endswith("_us") else value
            self._engine.configure(name, **stored)
            self._configured.add(name)


def _microseconds(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * 1_000_000)
