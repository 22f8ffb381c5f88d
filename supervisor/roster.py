"""Know which processes are wanted, and fill their seats as the restart policy says.

Boundary: decisions of `policy` carried out through `herd`, per pool. The shutdown
is `drain`'s, replacement one by one is `rolling`'s, the loop is `supervise`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import structlog

from supervisor import policy
from supervisor.child import Child
from supervisor.herd import Herd, Limits, Process, Seat, Squad
from supervisor.policy import SECOND_NS, Death, PoolState
from supervisor.slot import Kind
from supervisor.slots import KEEPER_POOL, WEB_POOL

if TYPE_CHECKING:
    from supervisor.supervise import PoolSpec, Tree

log = structlog.get_logger("herdsman.supervise")

POOL_CRASH_LOOP: Final = "pool_crash_loop"
POOL_PARKED: Final = "pool_parked"
POOL_RECOVERED: Final = "pool_recovered"
START_RETRY_NS: Final = SECOND_NS
"""After the kernel refused a fork, or no record was free."""
UPKEEP_BACKOFF_SECONDS: Final = 5.0
"""Longest delay for the keeper: leases of 60 s are renewed every 20 s, so 5 s cost none."""


class Roster:
    """All pools and their seats."""

    def __init__(self, tree: Tree, herd: Herd) -> None:
        self.herd = herd
        self.table = tree.table
        self.random = tree.random
        self.keeper = self._squad(KEEPER_POOL, Kind.KEEPER, tree.keeper, 1)
        self.web: Squad | None = None
        self.set_web(tree.web)
        self.pools = [self.add(spec) for spec in tree.pools]

    def _squad(self, name: str, kind: Kind, main: Callable[[Child], int], processes: int) -> Squad:
        record = self.table.add_pool(name)
        record.processes, record.active = processes, 1
        record.drained, record.granted = 0, record.wish  # a pool of that name may have been here
        squad = Squad(
            name=name, kind=kind, main=main, record=record, state=PoolState(processes=processes)
        )
        squad.seats = [Seat(squad=squad, number=number) for number in range(processes)]
        return squad

    def add(self, spec: PoolSpec) -> Squad:
        """Make the pool that a configuration names; its processes start at the next `fill`."""
        squad = self._squad(spec.name, Kind.WORKER, spec.main, spec.processes)
        self.configure(squad, spec)
        return squad

    def configure(self, squad: Squad, spec: PoolSpec) -> None:
        """Take over everything but the number of processes from a configuration."""
        squad.main = spec.main
        squad.limits = Limits(
            max_jobs=spec.max_jobs,
            max_rss_bytes=spec.max_rss_bytes,
            max_age_seconds=spec.max_age_seconds,
            boot_seconds=spec.boot_seconds,
        )
        squad.state.stay = spec.on_crash_loop == "stay"

    def set_web(self, main: Callable[[Child], int] | None) -> None:
        """Have `web`, another `web` from its next start on, or none."""
        if self.web is not None and main is not None:
            self.web.main = main
        elif self.web is not None:
            self.resize(self.web, 0)
            self.web.record.active = 0
            self.web = None
        elif main is not None:
            self.web = self._squad(WEB_POOL, Kind.WEB, main, 1)

    @property
    def squads(self) -> list[Squad]:
        """Every pool, keeper and web first."""
        first = [self.keeper] if self.web is None else [self.keeper, self.web]
        return first + self.pools

    # ---- ends and starts --------------------------------------------------------------

    def on_death(self, process: Process, death: Death, now_ns: int) -> None:
        """Take note of an end; say when its seat is filled again."""
        seat = process.seat
        squad = seat.squad
        if seat.heir is process:
            seat.heir = None
            if not death.expected:
                seat.heirs_failed += 1
                seat.heir_at_ns = now_ns + policy.backoff_ns(seat.heirs_failed, self.random)
        if seat.process is process:
            seat.process, seat.died_ns = None, now_ns
            if seat.heir is not None:  # the successor is under way
                seat.process, seat.heir = seat.heir, None
            else:
                self._decide(seat, death, now_ns)
        self.publish(squad)

    def _decide(self, seat: Seat, death: Death, now_ns: int) -> None:
        squad = seat.squad
        looping, parked = squad.state.crash_loop_since_ns is not None, squad.state.parked
        step = policy.after_death(
            death,
            seat.history,
            squad.state,
            now_ns=now_ns,
            random=self.random,
            wanted=seat in squad.seats,
            cap_seconds=(
                UPKEEP_BACKOFF_SECONDS if squad.kind is Kind.KEEPER else policy.BACKOFF_CAP_SECONDS
            ),
        )
        seat.start_at_ns = step.at_ns if isinstance(step, policy.Start) else None
        if not looping and squad.state.crash_loop_since_ns is not None:
            log.error(POOL_CRASH_LOOP, pool=squad.name, note=squad.record.note or None)
        if not parked and squad.state.parked:
            log.error(POOL_PARKED, pool=squad.name, note=squad.record.note or None)

    def fill(self, squads: list[Squad], now_ns: int) -> None:
        """Start what is wanted in these pools and due."""
        for squad in squads:
            if squad.record.drained:
                continue
            alive = sum(1 for seat in squad.seats if seat.process is not None)
            seats = squad.seats
            if squad.state.crash_loop_since_ns is not None:
                # The last to die goes on probing: its end alone says how long to wait. If it got
                # its job done it starts at once, whatever back-off the others had come to.
                seats = sorted(seats, key=lambda seat: -seat.died_ns)
            for seat in seats:
                if seat.process is not None or seat.start_at_ns is None:
                    continue
                if squad.state.crash_loop_since_ns is not None and alive:
                    break  # one process probes for the whole pool
                alive += 1
                if now_ns >= seat.start_at_ns:
                    self._start(seat, now_ns)
                if seat.process is None:
                    self.herd.due(seat.start_at_ns)

    def _start(self, seat: Seat, now_ns: int) -> None:
        seat.process = self.herd.start(seat, now_ns)
        if seat.process is None:
            seat.start_at_ns = now_ns + START_RETRY_NS
        else:
            if seat.filled:
                seat.squad.record.restarts += 1
            seat.filled = True
        self.publish(seat.squad)

    def start_heir(self, seat: Seat, now_ns: int) -> bool:
        """Start a successor beside the process of a seat; say whether it could be."""
        seat.heir = self.herd.start(seat, now_ns)
        if seat.heir is None:
            seat.heir_at_ns = now_ns + START_RETRY_NS
            self.herd.due(seat.heir_at_ns)
        return seat.heir is not None

    # ---- news of the living -----------------------------------------------------------

    def on_ready(self, process: Process) -> None:
        """Take note that a process has booted."""
        process.ready = True
        policy.after_ready(process.seat.squad.state)
        self.publish(process.seat.squad)

    def on_alive(self, process: Process, now_ns: int) -> None:
        """Forgive a seat, and end a crash loop, once a process has been well for long enough."""
        seat, squad = process.seat, process.seat.squad
        alive_ns = now_ns - process.slot.ready_ns
        if not seat.history.failures and squad.state.crash_loop_since_ns is None:
            return
        policy.after_healthy(seat.history, alive_ns=alive_ns)
        if policy.leave_crash_loop(squad.state, now_ns=now_ns, alive_ns=alive_ns):
            log.info(POOL_RECOVERED, pool=squad.name)
        self.publish(squad)

    def publish(self, squad: Squad) -> None:
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

    # ---- size -------------------------------------------------------------------------

    def resize(self, squad: Squad, processes: int) -> None:
        """Add seats, or retire those with the highest numbers."""
        for number in range(len(squad.seats), processes):
            squad.seats.append(Seat(squad=squad, number=number))
        for seat in squad.seats[processes:]:
            for process in (seat.process, seat.heir):
                if process is not None:
                    self.herd.retire(process, policy.Cause.SCALE)
        del squad.seats[processes:]
        squad.state.processes = squad.record.processes = processes
        self.publish(squad)

    def remove(self, squad: Squad) -> None:
        """Retire a whole pool that the configuration no longer names."""
        self.resize(squad, 0)
        squad.record.active = 0
        self.pools.remove(squad)
