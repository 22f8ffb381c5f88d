"""Replace processes one at a time: after a reload, and when they have had their time.

The successor boots beside the old process, which is only then told to leave, so
that a configuration that cannot boot hurts nothing. Only a pool of four and more that is
well has one leave first when it has had its time, and lacks it for as long as a boot takes.

Boundary: whose turn it is. Forking and signalling is `herd`'s, the seats are
`roster`'s; the trial of a new configuration is `trial`'s.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import structlog

from supervisor import judgement
from supervisor.herd import Herd, Seat
from supervisor.notify import Notifier
from supervisor.policy import SECOND_NS, Cause
from supervisor.roster import Roster
from supervisor.slot import Kind
from supervisor.slotpaths import SlotsError
from supervisor.slots import UPKEEP_RECORDS
from supervisor.trial import Trial
from supervisor.wishes import Wishes

if TYPE_CHECKING:
    from supervisor.supervise import Tree

log = structlog.get_logger("herdsman.supervise")

RELOAD_STARTED: Final = "reload_started"
RELOAD_FINISHED: Final = "reload_finished"
RELOAD_FAILED: Final = "reload_failed"
WORKER_RECYCLED: Final = "worker_recycled"
RESTART_FAILED: Final = "restart_failed"
WISHED: Final = "an operator asked for it"
HEIRS_MAX: Final = 3
"""Successors of one seat that may fail to boot before a reload is called off."""
UPKEEP_PROCESSES: Final = 4
"""The keeper, `web`, and a successor beside one of them and beside one worker."""
SPARE_BELOW: Final = 4
"""Pools smaller than this start the successor first: a fifth of a big pool is no loss."""


class Rolling:
    """Grants turns: at most one successor of the whole tree boots beside its process.

    A pool in which one leaves, or has yet to boot, replaces none that has had its time: with
    long jobs it would come to a multiple of its processes, or to none that works. Other pools,
    and a reload, do not wait for those jobs; in a small pool, an operator's wish does not.
    """

    def __init__(self, tree: Tree, herd: Herd, roster: Roster, notifier: Notifier) -> None:
        self._tree = tree
        self._herd = herd
        self._roster = roster
        self._notifier = notifier
        self._turn: Seat | None = None
        self._trial: Trial | None = None
        self._again = False
        self._rolling = False
        self._wishes = Wishes(herd, roster)

    @property
    def trial(self) -> Trial | None:
        """The throwaway process that tries a new configuration, if there is one."""
        return self._trial

    # ---- reload -----------------------------------------------------------------------

    def request(self, now_ns: int) -> None:
        """Begin a reload, or remember to begin another once this one is over."""
        if self._trial is not None or self._rolling:
            self._again = True
            return
        if self._tree.reload is None:
            log.warning(RELOAD_FAILED, why="this supervisor was started without a reload")
            return
        log.info(RELOAD_STARTED)
        usec = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._notifier.send(RELOADING=1, MONOTONIC_USEC=usec, STATUS="reloading")
        if self._tree.validate is None:
            self._apply(now_ns)
            return
        limit_ns = now_ns + int(self._tree.boot_seconds * SECOND_NS)
        try:
            self._trial = Trial(self._tree.validate, self._herd, limit_ns)
        except OSError as error:
            self._fail(f"cannot fork: {error.strerror}", now_ns)

    def on_trial_end(self, now_ns: int) -> None:
        """Read how the trial ended; go on with the reload, or call it off."""
        assert self._trial is not None
        verdict = self._trial.finish()
        self._trial = None
        if self._tree.table.draining:
            return  # nothing is started any more, and READY is not said after STOPPING
        if verdict is None:
            self._apply(now_ns)
        else:
            self._fail(verdict, now_ns)

    def _apply(self, now_ns: int) -> None:
        assert self._tree.reload is not None
        try:
            fresh = self._tree.reload()
            if fresh is not None:
                self._make_room(fresh)
        except (Exception, SystemExit) as error:
            self._fail(f"{type(error).__name__}: {error}", now_ns)
            return
        if fresh is None:
            self._finish(now_ns)
            return
        tree, roster = self._tree, self._roster
        tree.grace_seconds, tree.boot_seconds = fresh.grace_seconds, fresh.boot_seconds
        tree.pools = fresh.pools
        known = {squad.name: squad for squad in roster.pools}
        for spec in fresh.pools:
            squad = known.pop(spec.name, None)
            if squad is None:
                roster.pools.append(roster.add(spec))
                continue
            roster.configure(squad, spec)
            roster.resize(squad, spec.processes)
        for squad in known.values():
            roster.remove(squad)
        roster.keeper.main = fresh.keeper
        roster.set_web(fresh.web)
        for squad in roster.squads:
            squad.generation += 1
            squad.state.parked = False
            squad.state.tries = 0
            squad.state.crash_loop_since_ns = None
            squad.state.unexpected_ns.clear()
            squad.state.healthy_ns.clear()
            for seat in squad.seats:
                seat.heirs_failed = seat.heir_at_ns = 0
                seat.history.failures = seat.history.boots = 0
                if seat.process is None:
                    seat.start_at_ns = now_ns
        self._rolling = True

    def _make_room(self, fresh: Tree) -> None:
        """Raise SlotsError when the shared file, whose size was set at the start, is too small."""
        table = self._tree.table
        processes = sum(spec.processes for spec in fresh.pools)
        if processes + UPKEEP_PROCESSES + UPKEEP_RECORDS > len(table.slots):
            raise SlotsError(f"{processes} workers are too many for a reload; restart instead")
        for spec in fresh.pools:
            table.add_pool(spec.name)

    def _fail(self, why: str, now_ns: int) -> None:
        log.error(RELOAD_FAILED, why=why)
        self._over(False, now_ns)

    def _finish(self, now_ns: int) -> None:
        log.info(RELOAD_FINISHED)
        self._over(True, now_ns)

    def _over(self, ok: bool, now_ns: int) -> None:
        self._rolling = False
        self._tree.table.record_reload(ok, now_ns)
        self._notifier.send(READY=1, STATUS="running" if ok else "running; last reload failed")
        if self._again:
            self._again = False
            self.request(now_ns)

    # ---- turns ------------------------------------------------------------------------

    def turn(self, now_ns: int) -> None:
        """End the turn that is over, and grant the next one."""
        self._wishes.turn(now_ns)
        if self._trial is not None and self._trial.late(now_ns):
            self._trial.kill()
        if self._turn is not None:
            if not self._over_for(self._turn):
                return
            self._turn = None
        # What a pool lacks comes before what it is to get in exchange.
        self._roster.fill(self._roster.squads, now_ns)
        if self._rolling:
            self._roll(now_ns)
        else:
            self._recycle(now_ns)

    def _over_for(self, seat: Seat) -> bool:
        heir = seat.heir
        if heir is None:
            return True  # it failed to boot, or has the seat already: the old one died
        if not heir.ready:
            return False
        old, seat.process, seat.heir = seat.process, heir, None
        seat.heirs_failed = 0
        if old is not None:
            self._herd.retire(old, Cause.RECYCLE)
        self._roster.publish(seat.squad)
        return True

    def _roll(self, now_ns: int) -> None:
        rest = [squad for squad in (self._roster.web, self._roster.keeper) if squad]
        squads = [squad for squad in [*self._roster.pools, *rest] if not squad.record.drained]
        for squad in squads:
            for seat in squad.seats:
                process = seat.process
                if process is None or process.generation == squad.generation:
                    continue
                if seat.heirs_failed >= HEIRS_MAX:
                    self._call_off(now_ns, f"{seat.name}: {squad.record.note or 'does not boot'}")
                    return
                if now_ns < seat.heir_at_ns:
                    self._herd.due(seat.heir_at_ns)
                    return
                self._grant(seat, now_ns, spare=squad.kind is Kind.WORKER)
                return
        if all(self._settled(seat) for squad in squads for seat in squad.seats):
            self._finish(now_ns)

    def _settled(self, seat: Seat) -> bool:
        """Whether a seat has its new process, or is in a back-off that a reload cannot wait for."""
        if seat.process is None:
            return seat.history.failures > 0
        return seat.process.ready

    def _call_off(self, now_ns: int, why: str) -> None:
        """Keep the old processes that are left: better old than none."""
        for squad in self._roster.squads:
            for seat in squad.seats:
                if seat.process is not None:
                    seat.process.generation = squad.generation
        self._fail(why, now_ns)

    def _recycle(self, now_ns: int) -> None:
        leaving = {
            one.seat.squad
            for one in self._herd.of(Kind.WORKER)
            if one.rung or (one.told and one.asked not in (Cause.SCALE, Cause.DRAIN))
        }
        for squad in self._roster.pools:
            small = len(squad.seats) < SPARE_BELOW
            # Where one cannot boot, the next is to have booted before another leaves.
            spare = small or any(seat.history.failures for seat in squad.seats)
            patient = squad in leaving or not all(self._settled(seat) for seat in squad.seats)
            if patient and not small:
                continue
            limits = judgement.Recycling(
                max_jobs=squad.limits.max_jobs,
                max_rss_bytes=squad.limits.max_rss_bytes,
                max_age_seconds=squad.limits.max_age_seconds,
            )
            for seat in squad.seats:
                process = seat.process
                if process is None or not process.ready or process.told or process.rung:
                    continue
                slot = process.slot
                if seat.heirs_failed >= HEIRS_MAX and slot.wish:
                    slot.wish = seat.heirs_failed = 0  # better the old process than none
                    log.error(RESTART_FAILED, process=seat.name, why=squad.record.note or None)
                wished = WISHED if slot.wish == slot.epoch else None
                why = wished or judgement.recycle_due(
                    limits,
                    jobs=slot.jobs_done + slot.jobs_failed,
                    rss_bytes=slot.rss_bytes,
                    age_ns=now_ns - slot.boot_ns,
                    share=process.share,
                )
                if why is None or (patient and not wished) or now_ns < seat.heir_at_ns:
                    continue
                if not self._grant(seat, now_ns, spare=spare):
                    continue  # later; meanwhile others have their turn
                log.info(WORKER_RECYCLED, process=seat.name, why=why)
                return

    def _grant(self, seat: Seat, now_ns: int, *, spare: bool) -> bool:
        """Begin to replace a seat's process; say whether it could be begun."""
        if spare:
            if not self._roster.start_heir(seat, now_ns):
                return False
            self._turn = seat
        elif seat.process is not None:
            self._herd.retire(seat.process, Cause.RECYCLE)
        return True
