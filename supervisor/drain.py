"""Walk down the shutdown timeline: workers first, then `web`, the keeper last.

TERM at once, QUIT when the grace is over, ABRT 3 s later, KILL after 2 more. The
keeper goes on renewing leases and settles what the killed left behind, so it
leaves last; `web` shows the drain until the workers are gone.

Boundary: only what a running shutdown does; who begins it is `supervise`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog

from supervisor import policy
from supervisor.herd import Herd, Process
from supervisor.notify import Notifier
from supervisor.policy import SECOND_NS, Cause
from supervisor.slot import Kind, SlotState

if TYPE_CHECKING:
    from supervisor.supervise import Tree

log = structlog.get_logger("herdsman.supervise")

SUPERVISOR_DRAINING: Final = "supervisor_draining"
PROCESS_UNKILLABLE: Final = "process_unkillable"
UNKILLABLE_SECONDS: Final = 10.0
"""After KILL: a process in an uninterruptible system call may never die; we do not wait for it."""
STATUS_SECONDS: Final = 1.0
EXTEND_OVER_SECONDS: Final = 25.0
"""A longer grace does not fit the 40 s that our unit file allows: ask systemd for more."""


class Drain:
    """A shutdown, begun once."""

    def __init__(self, tree: Tree, herd: Herd, notifier: Notifier) -> None:
        self._grace_ns = int(tree.grace_seconds * SECOND_NS)
        self._herd = herd
        self._table = tree.table
        self._notifier = notifier
        self._began_ns: int | None = None
        self._settle_ns: int | None = None
        self._web_ns: int | None = None
        self._keeper_ns: int | None = None
        self._status_ns = 0

    @property
    def active(self) -> bool:
        """Whether the shutdown has begun."""
        return self._began_ns is not None

    @property
    def needs_keeper(self) -> bool:
        """Whether a keeper that dies now has to be replaced."""
        return self._web_ns is None

    def begin(self, now_ns: int) -> None:
        """Stop claims and starts, and tell every worker once; repeats change nothing."""
        if self._began_ns is not None:
            return
        self._began_ns = now_ns
        self._table.draining = True
        fields: dict[str, str | int] = {"STOPPING": 1, "STATUS": "draining"}
        if self._grace_ns > EXTEND_OVER_SECONDS * SECOND_NS:
            fields["EXTEND_TIMEOUT_USEC"] = self._grace_ns // 1000 + 20_000_000
        self._notifier.send(**fields)
        log.info(SUPERVISOR_DRAINING, grace_seconds=self._grace_ns / SECOND_NS)

    def cancel(self, now_ns: int) -> None:
        """Interrupt the running jobs now instead of at the end of the grace."""
        self.begin(now_ns)
        for process in self._herd.of(Kind.WORKER):
            if process.rung == 0:
                self._herd.escalate(process, Cause.DRAIN, now_ns, "cancelled")

    def kill(self, now_ns: int) -> None:
        """Kill every worker and what it started, now."""
        self.begin(now_ns)
        for process in self._herd.of(Kind.WORKER):
            self._herd.retire(process, Cause.DRAIN)
            process.rung = 2
            self._herd.escalate(process, Cause.DRAIN, now_ns, "killed on request")

    def turn(self, now_ns: int) -> bool:
        """Go as far as can be gone now; True when everyone has left."""
        assert self._began_ns is not None
        workers = self._herd.of(Kind.WORKER)
        if workers:
            self._push(workers, now_ns, self._began_ns)
            self._say(workers, now_ns)
            if not self._hopeless(workers, now_ns):
                return False
        if not self._settled(now_ns):
            return False
        self._web_ns = self._web_ns or now_ns
        if self._still(Kind.WEB, self._web_ns, policy.WEB_SECONDS, now_ns):
            return False
        self._keeper_ns = self._keeper_ns or now_ns
        return not self._still(Kind.KEEPER, self._keeper_ns, policy.KEEPER_SECONDS, now_ns)

    def _push(self, workers: list[Process], now_ns: int, began_ns: int) -> None:
        end_ns = began_ns + self._grace_ns
        boot_end_ns = min(end_ns, began_ns + int(policy.QUIT_SECONDS * SECOND_NS))
        for process in workers:
            self._herd.retire(process, Cause.DRAIN)
            if process.rung:
                continue
            booting = process.slot.state is SlotState.BOOT
            limit_ns = boot_end_ns if booting else end_ns
            if now_ns < limit_ns:
                self._herd.due(limit_ns)
                continue
            if booting:
                process.rung = 1  # there is no job to interrupt
            self._herd.escalate(process, Cause.DRAIN, now_ns, "grace is over")

    def _hopeless(self, workers: list[Process], now_ns: int) -> bool:
        """Say whether all that are left were sent KILL long ago."""
        limit_ns = int(UNKILLABLE_SECONDS * SECOND_NS)
        stuck = [
            process
            for process in workers
            if process.killed_ns is not None and now_ns - process.killed_ns > limit_ns
        ]
        if len(stuck) < len(workers):
            return False
        for process in stuck:
            log.error(PROCESS_UNKILLABLE, process=process.seat.name, pid=process.pid)
        return True

    def _settled(self, now_ns: int) -> bool:
        """Give the keeper a moment to settle what the dead left."""
        self._settle_ns = self._settle_ns or now_ns + int(policy.SETTLE_SECONDS * SECOND_NS)
        if self._web_ns is not None or not self._table.dead() or now_ns >= self._settle_ns:
            return True
        self._herd.due(now_ns + SECOND_NS // 50)
        return False

    def _still(self, kind: Kind, since_ns: int, seconds: float, now_ns: int) -> bool:
        """Ask the processes of a kind to leave, kill them when late; say if some are here."""
        limit_ns = since_ns + int(seconds * SECOND_NS)
        here = self._herd.of(kind)
        for process in here:
            self._herd.retire(process, Cause.DRAIN)
            if process.rung == 0 and now_ns >= limit_ns:
                process.rung = 1
                self._herd.escalate(process, Cause.DRAIN, now_ns, "did not leave in time")
            elif process.rung == 0:
                self._herd.due(limit_ns)
        return bool(here) and not self._hopeless(here, now_ns)

    def _say(self, workers: list[Process], now_ns: int) -> None:
        """Tell systemd how many jobs are left, once a second."""
        if now_ns < self._status_ns:
            return
        self._status_ns = now_ns + int(STATUS_SECONDS * SECOND_NS)
        busy = [one.slot.started_ns for one in workers if one.slot.state is SlotState.RUN]
        if busy:
            oldest = max(0, now_ns - min(busy)) // SECOND_NS
            self._notifier.send(STATUS=f"draining: {len(busy)} jobs left, oldest {oldest} s")
