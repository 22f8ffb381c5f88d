"""Decide what an end of a process means: why it ended, when to start again, when to give up.

Boundary: pure. Time comes in as monotonic nanoseconds, chance as a function, and
a decision comes out as a record; nothing is forked, signalled or waited for here.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

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
INTENSITY_HEALTHY_FACTOR: Final = 10
"""Deaths of healthy processes allowed for one of another: jobs get done, so the pool goes on,
but a storm of forks is no way to run."""
NEVER_READY_TRIES: Final = 5
"""A pool no process of which was ever READY is given up after so many tries."""
CRASH_LOOP_SECONDS: Final = 600.0
"""A crash loop as long as this is given up: a restart of the whole host may help, we cannot."""
BOOT_SECONDS: Final = 60.0
BOOT_SECONDS_MAX: Final = 300.0

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
    aborted: bool = False,
    unsettled: bool = False,
) -> Death:
    """Name the cause of an end, from what the kernel said and what had been asked for.

    `forced`: the supervisor had begun to end it against its will. `aborted`: it had
    sent ABRT, whose stack, written in the middle of a Python step, may itself be fatal.
    `unsettled`: a job was running (a code of 0 then is a job that called
    `os._exit(0)`, and no clean end).
    """
    unavailable = not signal_number and exit_code == EXIT_UNAVAILABLE
    clean = not signal_number and exit_code == EXIT_OK and not unsettled
    ours = (forced and signal_number in (signal.SIGABRT, signal.SIGKILL)) or (
        aborted and signal_number in (signal.SIGSEGV, signal.SIGBUS)
    )
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
    healthy_ns: list[int] = field(default_factory=list)
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


def backoff_ns(
    failures: int, random: Callable[[], float], cap_seconds: float = BACKOFF_CAP_SECONDS
) -> int:
    """Return the delay before the next start after so many failures in a row; 0 for none."""
    if failures <= 0:
        return 0
    seconds = min(cap_seconds, BACKOFF_BASE_SECONDS * 2.0 ** min(failures - 1, 16))
    return int(seconds * (1 + BACKOFF_JITTER * (2 * random() - 1)) * SECOND_NS)


def after_death(
    death: Death,
    history: History,
    pool: PoolState,
    *,
    now_ns: int,
    random: Callable[[], float],
    wanted: bool = True,
    cap_seconds: float = BACKOFF_CAP_SECONDS,
) -> Step:
    """Take note of an end in `history` and `pool`, and say when the seat is filled again.

    The first death of a process that had been READY costs no delay: it may be one bad job.
    """
    if not wanted:
        return Rest()
    if death.expected:
        return Start(at_ns=now_ns)
    if death.unavailable:
        history.failures += 1
        return Start(at_ns=now_ns + backoff_ns(history.failures, random, cap_seconds))
    note_unexpected(pool, death, now_ns)
    if death.healthy:
        history.failures = history.boots = 0
        if pool.crash_loop_since_ns is None:
            return Start(at_ns=now_ns)
    history.failures += 1
    if not death.was_ready:
        history.boots += 1
    short = history.failures - 1 if death.was_ready else history.failures
    return Start(at_ns=now_ns + backoff_ns(short, random, cap_seconds))


def note_unexpected(pool: PoolState, death: Death, now_ns: int) -> None:
    """Count an unexpected end, and see whether the pool is in a crash loop now."""
    since = now_ns - int(INTENSITY_WINDOW_SECONDS * SECOND_NS)
    pool.unexpected_ns = [at for at in pool.unexpected_ns if at > since][-10_000:]
    pool.healthy_ns = [at for at in pool.healthy_ns if at > since][-10_000:]
    (pool.healthy_ns if death.healthy else pool.unexpected_ns).append(now_ns)
    if not pool.ever_ready:
        pool.tries += 1
    limit = max(INTENSITY_MIN, INTENSITY_PER_PROCESS * pool.processes)
    over = len(pool.unexpected_ns) > limit
    over = over or len(pool.healthy_ns) > limit * INTENSITY_HEALTHY_FACTOR
    hopeless = not pool.ever_ready and pool.tries >= NEVER_READY_TRIES
    if (over or hopeless) and pool.crash_loop_since_ns is None:
        pool.crash_loop_since_ns = now_ns
    if hopeless:
        pool.parked = True


def after_healthy(history: History, *, alive_ns: int) -> None:
    """Clear the failures of a seat once its process has been READY for long enough."""
    if alive_ns >= FORGIVE_SECONDS * SECOND_NS:
        history.failures = history.boots = 0


def after_ready(pool: PoolState) -> None:
    """Take note that a process of the pool is READY."""
    pool.ever_ready = True
    pool.tries = 0


def leave_crash_loop(pool: PoolState, *, now_ns: int, alive_ns: int) -> bool:
    """End the crash loop when a process is healthy, and nothing died as long; say if it ended."""
    quiet_ns = now_ns - max(pool.unexpected_ns + pool.healthy_ns, default=0)
    healthy_ns = int(HEALTHY_SECONDS * SECOND_NS)
    if pool.crash_loop_since_ns is None or min(alive_ns, quiet_ns) < healthy_ns:
        return False
    pool.crash_loop_since_ns = None
    pool.parked = False
    pool.unexpected_ns.clear()
    pool.healthy_ns.clear()
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
