"""Decide what to do about processes: when to start again, whom to judge hung, when to give up.

Boundary: pure. Time comes in as monotonic nanoseconds, chance as a function, and
a decision comes out as a record; nothing is forked, signalled or waited for here.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, assert_never

from supervisor.slot import Kind, SlotState

SECOND_NS: Final = 1_000_000_000

# Restart. The shape is the classic one of process supervisors: at once after a
# healthy life, exponential after a short one, and a limit on how often per pool.
HEALTHY_SECONDS: Final = 10.0
"""READY for this long, or one job settled, makes a process healthy: it is restarted at once."""
BACKOFF_BASE_SECONDS: Final = 0.5
BACKOFF_CAP_SECONDS: Final = 60.0
BACKOFF_JITTER: Final = 0.2
"""Spread of the delay, so that seats that failed together do not return together."""
FORGIVE_SECONDS: Final = 60.0
"""Healthy for this long clears the failures of a seat."""
INTENSITY_WINDOW_SECONDS: Final = 60.0
INTENSITY_MIN: Final = 5
INTENSITY_PER_PROCESS: Final = 3
NEVER_READY_TRIES: Final = 5
"""A pool no process of which was ever READY is given up after so many tries."""
CRASH_LOOP_SECONDS: Final = 600.0
"""A crash loop as long as this is given up: a restart of the whole host may help, we cannot."""
BOOT_SECONDS: Final = 60.0
BOOT_SECONDS_MAX: Final = 300.0

# Judgement.
STUCK_SECONDS: Final = 30.0
"""CLAIM and SETTLE end by then: every database call has a shorter deadline."""
IDLE_TICK_SECONDS: Final = 30.0
"""An idle worker beats at least every 5 s."""
KEEPER_TICK_SECONDS: Final = 15.0
"""The keeper renews leases of 60 s every 20 s: replaced after 15 s, it still comes in time."""
SUSPEND_SECONDS: Final = 5.0
"""A wait that overran by this much means that the host slept: judge nobody this round."""
ABRT_SECONDS: Final = 2.0
"""From ABRT, which makes faulthandler write the stacks, to KILL."""
MEMORY_FACTOR: Final = 2
"""Over this many times `max_rss` a process is ended in the middle of a job."""
RECYCLE_JITTER: Final = 0.1

# Shutdown.
GRACE_SECONDS: Final = 20.0
"""Fits Kubernetes' 30 s; Docker's 10 s must be raised."""
QUIT_SECONDS: Final = 3.0
"""From QUIT, which interrupts the job, to ABRT."""
SETTLE_SECONDS: Final = 2.0
"""For the keeper to settle what the dead left, before its own TERM."""
WEB_SECONDS: Final = 3.0
KEEPER_SECONDS: Final = 10.0

EXIT_OK: Final = 0
EXIT_UNAVAILABLE: Final = 69
EXIT_GAVE_UP: Final = 70
EXIT_KILLED: Final = 75
EXIT_CONFIG: Final = 78


class Cause(StrEnum):
    """Why a process ended; the label of exits in metrics, logs and slots."""

    EXIT = "exit"
    SIGNAL = "signal"
    OOM = "oom"
    MEMORY = "memory"
    TIMEOUT = "timeout"
    HANG = "hang"
    BOOT = "boot"
    RECYCLE = "recycle"
    SCALE = "scale"
    DRAIN = "drain"


CAUSES: Final = tuple(Cause)
"""The code of a cause in a slot is its place here plus one; 0 is none. Append only."""
EXPECTED: Final = frozenset({Cause.RECYCLE, Cause.SCALE, Cause.DRAIN})
CHARGED: Final = frozenset(set(Cause) - EXPECTED)


def code_of(cause: Cause) -> int:
    """Return the code a slot stores for a cause."""
    return CAUSES.index(cause) + 1


def cause_of(code: int) -> Cause | None:
    """Return the cause a slot stored; None for 0."""
    return CAUSES[code - 1] if 0 < code <= len(CAUSES) else None


# ---- deaths ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """What is known of one end.

    `asked` is why the supervisor wanted it (recycle, scale, drain, timeout,
    hang, boot, memory), None when nobody did. `unavailable`: exit code 69, the
    database could not be reached.
    """

    cause: Cause
    was_ready: bool
    healthy: bool
    unavailable: bool = False

    @property
    def expected(self) -> bool:
        """Whether this end counts against nobody."""
        return self.cause in EXPECTED


def diagnose(
    *,
    exit_code: int,
    signal_number: int,
    asked: Cause | None,
    was_ready: bool,
    alive_ns: int,
    jobs_done: int,
    oom: bool = False,
    forced: bool = False,
    unsettled: bool = False,
) -> Death:
    """Name the cause of an end, from what the kernel said and what had been asked for.

    `forced`: the supervisor had sent ABRT or KILL. `unsettled`: a job was running
    (a code of 0 then is a job that called `os._exit(0)`, and no clean end).
    """
    unavailable = not signal_number and exit_code == EXIT_UNAVAILABLE
    clean = not signal_number and exit_code == EXIT_OK and not unsettled
    ours = forced and signal_number in (signal.SIGABRT, signal.SIGKILL)
    if asked is not None and (ours or clean or (not was_ready and asked in EXPECTED)):
        cause = asked
    elif signal_number == signal.SIGKILL and oom:
        cause = Cause.OOM
    elif not was_ready:
        cause = Cause.BOOT
    else:
        cause = Cause.SIGNAL if signal_number else Cause.EXIT
    healthy = was_ready and (alive_ns >= HEALTHY_SECONDS * SECOND_NS or jobs_done > 0)
    return Death(cause=cause, was_ready=was_ready, healthy=healthy, unavailable=unavailable)


# ---- restarts -------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class History:
    """What a seat (one process of a pool, by number) has gone through."""

    failures: int = 0
    boots: int = 0


@dataclass(slots=True, kw_only=True)
class PoolState:
    """What a pool has gone through."""

    processes: int
    stay: bool = False
    ever_ready: bool = False
    tries: int = 0
    unexpected_ns: list[int] = field(default_factory=list)
    crash_loop_since_ns: int | None = None
    parked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start a process in this seat at that monotonic time (now or earlier: at once)."""

    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """Leave the seat empty: another seat probes for the pool, or nothing is wanted."""


Step = Start | Rest


def backoff_ns(failures: int, random: Callable[[], float]) -> int:
    """Return the delay before the next start after so many failures in a row; 0 for none."""
    if failures <= 0:
        return 0
    seconds = min(BACKOFF_CAP_SECONDS, BACKOFF_BASE_SECONDS * 2.0 ** min(failures - 1, 16))
    return int(seconds * (1 + BACKOFF_JITTER * (2 * random() - 1)) * SECOND_NS)


def after_death(
    death: Death,
    history: History,
    pool: PoolState,
    *,
    now_ns: int,
    random: Callable[[], float],
    wanted: bool = True,
) -> Step:
    """Take note of an end in `history` and `pool`, and say when the seat is filled again."""
    if not wanted:
        return Rest()
    if death.expected:
        return Start(at_ns=now_ns)
    if death.unavailable:
        history.failures += 1
        return Start(at_ns=now_ns + backoff_ns(history.failures, random))
    note_unexpected(pool, death, now_ns)
    if death.healthy:
        history.failures = history.boots = 0
        if pool.crash_loop_since_ns is None:
            return Start(at_ns=now_ns)
    history.failures += 1
    if not death.was_ready:
        history.boots += 1
    return Start(at_ns=now_ns + backoff_ns(history.failures, random))


def note_unexpected(pool: PoolState, death: Death, now_ns: int) -> None:
    """Count an unexpected end, and see whether the pool is in a crash loop now."""
    since = now_ns - int(INTENSITY_WINDOW_SECONDS * SECOND_NS)
    pool.unexpected_ns = [at for at in pool.unexpected_ns if at > since][-1000:]
    pool.unexpected_ns.append(now_ns)
    if not pool.ever_ready:
        pool.tries += 1
    limit = max(INTENSITY_MIN, INTENSITY_PER_PROCESS * pool.processes)
    over = len(pool.unexpected_ns) > limit
    hopeless = not pool.ever_ready and pool.tries >= NEVER_READY_TRIES
    if (over or hopeless) and pool.crash_loop_since_ns is None:
        pool.crash_loop_since_ns = now_ns
    if hopeless:
        pool.parked = True


def after_healthy(history: History, pool: PoolState, *, alive_ns: int) -> None:
    """Clear failures once a process has been well for long enough."""
    pool.ever_ready = True
    if alive_ns >= FORGIVE_SECONDS * SECOND_NS:
        history.failures = history.boots = 0


def after_ready(pool: PoolState) -> None:
    """Take note that a process of the pool is READY."""
    pool.ever_ready = True
    pool.tries = 0


def leave_crash_loop(pool: PoolState, *, now_ns: int, healthy: bool) -> bool:
    """End the crash loop when a process is healthy and the window has emptied; say if it ended."""
    if pool.crash_loop_since_ns is None or not healthy:
        return False
    pool.crash_loop_since_ns = None
    pool.parked = False
    pool.unexpected_ns.clear()
    return True


def give_up(pools: list[PoolState], *, now_ns: int) -> int | None:
    """Say with which exit code the whole tree ends, None while some pool has hope.

    A failing pool never stops the others: all have to have failed.
    """
    if not pools:
        return None
    long_ns = int(CRASH_LOOP_SECONDS * SECOND_NS)
    for pool in pools:
        since = pool.crash_loop_since_ns
        if since is None or pool.stay:
            return None
        if not pool.parked and now_ns - since < long_ns:
            return None
    return EXIT_GAVE_UP if any(pool.ever_ready for pool in pools) else EXIT_CONFIG


def boot_limit_ns(boot_seconds: float, boots: int) -> int:
    """Return how long a process may boot: doubled after every boot that failed, at most 300 s."""
    cap = max(BOOT_SECONDS_MAX, boot_seconds)
    return int(min(cap, boot_seconds * 2.0 ** min(boots, 16)) * SECOND_NS)


# ---- judgement ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the slot of a process says, read once."""

    kind: Kind
    state: SlotState
    boot_ns: int
    entered_ns: int
    beat_ns: int
    hard_deadline_ns: int = 0
    rss_bytes: int = 0


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
    if facts.state is SlotState.RUN and limits.max_rss_bytes:
        ceiling = MEMORY_FACTOR * limits.max_rss_bytes
        if facts.rss_bytes > ceiling:
            return Overdue(
                cause=Cause.MEMORY,
                why=f"uses {facts.rss_bytes} bytes of memory, over {ceiling}",
            )
    if deadline_ns is None:
        return Fine()
    if now_ns >= deadline_ns:
        return Overdue(cause=cause, why=why)
    return Fine(next_ns=deadline_ns)


def _limit(facts: Facts, limits: Limits) -> tuple[Cause, int | None, str]:
    state = facts.state
    match state:
        case SlotState.BOOT:
            return Cause.BOOT, facts.boot_ns + limits.boot_ns, "was not ready within its boot limit"
        case SlotState.RUN if facts.kind is Kind.WORKER:
            hard_ns = facts.hard_deadline_ns or None
            return Cause.TIMEOUT, hard_ns, "ran its job past the hard deadline"
        case SlotState.CLAIM | SlotState.SETTLE if facts.kind is Kind.WORKER:
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
    """Say whether the host slept during a wait, so that no deadline means anything this round."""
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
    quit_first = (
        Rung(signum=signal.SIGQUIT, group=False, then_ns=int(QUIT_SECONDS * SECOND_NS)),
    )
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
    if limits.max_age_seconds is not None:
        if age_ns >= limits.max_age_seconds * factor * SECOND_NS:
            return f"is {age_ns // SECOND_NS} s old"
    return None
