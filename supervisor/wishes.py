"""Carry out what operators ask for through the shared records: drain, resume, restart.

How a request travels: the command writes one word into the record of a pool (`Pool.wish`, a
number that grows with a `Wish` in its low byte) or of a process (`Slot.wish`, the epoch to be
replaced), then sends SIGWINCH to the supervisor, which means no more than "look". The file is
0600, so whoever may write it may ask; the signal says nothing that could be forged, a lost one
costs a second (the loop turns by itself), and one that reached a stranger would be ignored. The
supervisor answers in a word of its own, `Pool.granted`: each word has one writer, so no request
is lost between two looks.

Boundary: takes note, and changes what is wanted; the turns are `rolling`'s, the seats `roster`'s.
"""

from __future__ import annotations

from typing import Final

import structlog

from supervisor.herd import Herd, Squad
from supervisor.policy import Cause
from supervisor.pool import Wish
from supervisor.roster import Roster

log = structlog.get_logger("herdsman.supervise")

POOL_DRAINED: Final = "pool_drained"
POOL_RESUMED: Final = "pool_resumed"
POOL_RESTARTED: Final = "pool_restarted"
KIND_MASK: Final = 0xFF


class Wishes:
    """Looks at the requests once a turn."""

    def __init__(self, herd: Herd, roster: Roster) -> None:
        self._herd = herd
        self._roster = roster

    def turn(self, now_ns: int) -> None:
        """Take note of every request not answered yet."""
        for squad in self._roster.pools:
            wish = squad.record.wish
            if wish == squad.record.granted:
                continue
            match wish & KIND_MASK:
                case Wish.DRAIN:
                    self._drain(squad)
                case Wish.RESUME:
                    self._resume(squad, now_ns)
                case Wish.RESTART:
                    self._restart(squad, now_ns)
                case _:
                    pass  # of a newer command: answered, so that it does not wait, and left alone
            squad.record.granted = wish

    def _drain(self, squad: Squad) -> None:
        """Let the pool's jobs finish, and keep its seats empty from then on."""
        log.info(POOL_DRAINED, pool=squad.name)
        squad.record.drained = 1
        for seat in squad.seats:
            for process in (seat.process, seat.heir):
                if process is not None:
                    self._herd.retire(process, Cause.DRAIN)

    def _resume(self, squad: Squad, now_ns: int) -> None:
        log.info(POOL_RESUMED, pool=squad.name)
        squad.record.drained = 0
        self._forgive(squad, now_ns)

    def _restart(self, squad: Squad, now_ns: int) -> None:
        """Have each process replaced in its turn; what waits in back-off is tried at once."""
        log.info(POOL_RESTARTED, pool=squad.name)
        for seat in squad.seats:
            if seat.process is not None:
                seat.process.slot.wish = seat.process.slot.epoch
        self._forgive(squad, now_ns)

    def _forgive(self, squad: Squad, now_ns: int) -> None:
        """Forget the pool's failures: whoever asks believes that they are mended."""
        state = squad.state
        state.parked = False
        state.tries = 0
        state.crash_loop_since_ns = None
        state.unexpected_ns.clear()
        state.healthy_ns.clear()
        for seat in squad.seats:
            seat.history.failures = seat.history.boots = 0
            seat.heirs_failed = seat.heir_at_ns = 0
            if seat.process is None:
                seat.start_at_ns = now_ns
        self._roster.publish(squad)
