"""Judge the living: who is overdue, how it is ended, who has had its time.

Boundary: pure. The facts of a slot and the time come in, a verdict comes out;
`herd` reads the one and carries out the other.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Final, assert_never

from supervisor.policy import QUIT_SECONDS, SECOND_NS, Cause
from supervisor.slot import Kind, SlotState

STUCK_SECONDS: Final = 30.0
"""CLAIM and SETTLE end by then: every database call has a shorter deadline. RUN without a
deadline is the moment between two jobs of a batch."""
IDLE_TICK_SECONDS: Final = 30.0
"""An idle worker beats at least every 5 s."""
KEEPER_TICK_SECONDS: Final = 15.0
"""The keeper renews leases of 60 s every 20 s: replaced after 15 s, it still comes in time."""
SUSPEND_SECONDS: Final = 5.0
"""A wait that overran by this much means that the host slept: judge nobody for a while."""
HOLD_OFF_SECONDS: Final = 5.0
"""After a sleep: everyone has to have run again before anyone is judged."""
ABRT_SECONDS: Final = 2.0
"""From ABRT, which makes faulthandler write the stacks, to KILL."""
MEMORY_FACTOR: Final = 2
"""Over this many times `max_rss` a process is ended in the middle of a job."""
RECYCLE_JITTER: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the slot of a process says, read once.

    `job_memory_bytes` is the limit of the running job; 0 when it has none, and as long as
    `rss_bytes` is from before its start.
    """

    kind: Kind
    state: SlotState
    boot_ns: int
    entered_ns: int
    beat_ns: int
    hard_deadline_ns: int = 0
    rss_bytes: int = 0
    job_memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is allowed to a process."""

    boot_ns: int
    max_rss_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fine:
    """Nothing to do; look again at `next_ns` at the latest, None when nothing is due."""

    next_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overdue:
    """The process must go; `cause` and `why` say for what."""

    cause: Cause
    why: str


Judgement = Fine | Overdue


def judge(facts: Facts, now_ns: int, limits: Limits) -> Judgement:
    """Compare a process with its limits."""
    cause, deadline_ns, why = _limit(facts, limits)
    ceiling = _ceiling(facts, limits)
    if facts.state is SlotState.RUN and ceiling is not None and facts.rss_bytes > ceiling:
        return Overdue(
            cause=Cause.MEMORY, why=f"uses {facts.rss_bytes} bytes of memory, over {ceiling}"
        )
    if deadline_ns is None:
        return Fine()
    if now_ns >= deadline_ns:
        return Overdue(cause=cause, why=why)
    return Fine(next_ns=deadline_ns)


def _ceiling(facts: Facts, limits: Limits) -> int | None:
    """Return how much memory a running job may use: its handler's limit, or twice the pool's."""
    ceilings = [MEMORY_FACTOR * limits.max_rss_bytes] if limits.max_rss_bytes else []
    if facts.job_memory_bytes and facts.hard_deadline_ns:  # without a deadline it has ended
        ceilings.append(facts.job_memory_bytes)
    return min(ceilings, default=None)


def _limit(facts: Facts, limits: Limits) -> tuple[Cause, int | None, str]:
    state = facts.state
    match state:
        case SlotState.BOOT:
            # The keeper beats in its first round already, where it may wait for the database.
            at = max(facts.boot_ns, facts.beat_ns) + limits.boot_ns
            return Cause.BOOT, at, "was not ready within its boot limit"
        case SlotState.RUN if facts.kind is Kind.WORKER and facts.hard_deadline_ns:
            return Cause.TIMEOUT, facts.hard_deadline_ns, "ran its job past the hard deadline"
        case SlotState.RUN | SlotState.CLAIM | SlotState.SETTLE if facts.kind is Kind.WORKER:
            at = max(facts.entered_ns, facts.beat_ns) + int(STUCK_SECONDS * SECOND_NS)
            return Cause.HANG, at, f"was in {state.name} for more than {STUCK_SECONDS:g} s"
        case SlotState.IDLE | SlotState.RUN | SlotState.CLAIM | SlotState.SETTLE | SlotState.EXIT:
            keeper = facts.kind is Kind.KEEPER
            seconds = KEEPER_TICK_SECONDS if keeper else IDLE_TICK_SECONDS
            at = max(facts.entered_ns, facts.beat_ns) + int(seconds * SECOND_NS)
            return Cause.HANG, at, f"made no progress for more than {seconds:g} s"
        case SlotState.FREE | SlotState.DEAD:
            return Cause.HANG, None, ""
        case _:
            assert_never(state)


def suspended(*, planned_ns: int, waited_ns: int, asleep_grew_ns: int) -> bool:
    """Say whether the host slept during a wait, so that no deadline means anything yet."""
    limit = int(SUSPEND_SECONDS * SECOND_NS)
    return waited_ns - planned_ns > limit or asleep_grew_ns > limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One step of an escalation: send `signum` (to the whole group, or the process alone)."""

    signum: signal.Signals
    group: bool
    then_ns: int | None


def ladder(cause: Cause, rung: int) -> Rung | None:
    """Return the step number `rung` of ending a process against its will; None past the last."""
    quit_first = (Rung(signum=signal.SIGQUIT, group=False, then_ns=int(QUIT_SECONDS * SECOND_NS)),)
    hard = (
        Rung(signum=signal.SIGABRT, group=False, then_ns=int(ABRT_SECONDS * SECOND_NS)),
        Rung(signum=signal.SIGKILL, group=True, then_ns=None),
    )
    rungs = (*quit_first, *hard) if cause in (Cause.MEMORY, Cause.DRAIN) else hard
    return rungs[rung] if rung < len(rungs) else None


# ---- recycling ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Recycling:
    """When a healthy worker is replaced; None is never."""

    max_jobs: int | None = None
    max_rss_bytes: int | None = None
    max_age_seconds: float | None = None


def recycle_due(
    limits: Recycling, *, jobs: int, rss_bytes: int, age_ns: int, share: float
) -> str | None:
    """Say why a worker has had its time, None when it has not.

    `share` is its own random number between 0 and 1: limits on jobs and age are
    lowered by up to 10 %, so that equal workers do not all leave at once.
    """
    factor = 1 - RECYCLE_JITTER * share
    if limits.max_jobs is not None and jobs >= max(1, int(limits.max_jobs * factor)):
        return f"finished {jobs} jobs"
    if limits.max_rss_bytes is not None and rss_bytes > limits.max_rss_bytes:
        return f"uses {rss_bytes} bytes of memory"
    old_ns = None if limits.max_age_seconds is None else limits.max_age_seconds * factor * SECOND_NS
    if old_ns is not None and age_ns >= old_ns:
        return f"is {age_ns // SECOND_NS} s old"
    return None
