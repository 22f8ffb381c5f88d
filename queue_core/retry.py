"""Decide what becomes of a claim: a result goes in, a settlement comes out.

    result         a       state     charged  death  outcome      delay, reason
    Done                   done      yes             succeeded
    Retry                  delayed*  yes             of result    its own, else back-off of a
    Retry          last    dead      yes             of result    exhausted
    Reject                 dead      if started      rejected     reason of result
    Snooze                 delayed   no              interrupted  its own
    Interrupted            ready     no              interrupted
    Crashed        first d ready     yes      yes    of result
    Crashed        later d delayed*  yes      yes    of result    back-off of d
    Crashed        third d dead      yes      yes    of result    poison
    Crashed        last    dead      yes      yes    of result    exhausted
    LeaseLost              delayed*  yes             lease_lost   back-off of a
    LeaseLost      last    dead      yes             lease_lost   exhausted
    Crashed, LeaseLost     ready     no              of result    when it had never started

`a` is the number of this attempt, "last" the one that spends them all; `d` is
the number of this worker death. A delay of 0 turns delayed* into ready.

Boundary: pure; the clock and the random number come in as arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal, assert_never

from queue_core.job import (
    ERROR_CHARS_MAX,
    POISON_DEATHS,
    TRACEBACK_CHARS_MAX,
    Claimed,
    Outcome,
    Reason,
    Settlement,
    State,
)

DELAY_US_MAX: Final = 365 * 24 * 3600 * 1_000_000
"""No delay is longer than a year: more is a slip of units, not a wish."""

_EXPONENT_MAX: Final = 2**53  # the largest run of integers a float counts exactly


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        wanted = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise ValueError(f"back-off {name} is {value!r}; it must be a finite number {wanted}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """How long to wait after the n-th failure.

    `fixed` waits `base_seconds` every time; `exponential` multiplies by
    `factor` after each failure, up to `cap_seconds`. `jitter` (0 to 1) spreads
    the delay evenly over plus or minus that share, so that jobs which failed
    together do not come back together.

    Raises:
        ValueError: a value is out of range; the message says which.
    """

    kind: Literal["fixed", "exponential"] = "exponential"
    base_seconds: float = 2.0
    factor: float = 2.0
    cap_seconds: float = 3600.0
    jitter: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in ("fixed", "exponential"):
            raise ValueError(f"back-off kind is {self.kind!r}; use 'fixed' or 'exponential'")
        _in_range("base_seconds", self.base_seconds, 0.0, math.inf)
        _in_range("factor", self.factor, 1.0, math.inf)
        _in_range("cap_seconds", self.cap_seconds, 0.0, math.inf)
        _in_range("jitter", self.jitter, 0.0, 1.0)

    def delay_seconds(self, attempt: int, *, random: float) -> float:
        """Return the delay after a failure.

        Args:
            attempt: the number of the failed attempt; 1 is the first.
            random: a number from 0 to 1; 0.5 leaves the delay unspread.

        Returns:
            Seconds, at least 0 and at most `cap_seconds * (1 + jitter)`.
        """
        delay = min(self.base_seconds, self.cap_seconds)
        if self.kind == "exponential" and self.base_seconds > 0:
            exponent = min(max(attempt - 1, 0), _EXPONENT_MAX)
            try:
                delay = min(self.base_seconds * self.factor**exponent, self.cap_seconds)
            except OverflowError:  # past every float is past every cap
                delay = self.cap_seconds
        spread = 2.0 * min(max(random, 0.0), 1.0) - 1.0
        return max(0.0, delay * (1.0 + self.jitter * spread))


BackoffPolicy = Backoff | Callable[[int], float]
"""A `Backoff`, or any function from the number of the failed attempt to seconds."""

DEFAULT_BACKOFF: Final = Backoff()


def delay_us(policy: BackoffPolicy, attempt: int, random: float) -> int:
    """Return the delay after the given attempt in microseconds, from 0 to a year.

    A function that raises, or returns no finite number of at least 0, must not
    lose the job whose failure it was asked about: the default back-off is used.
    """
    if isinstance(policy, Backoff):
        seconds: float | None = policy.delay_seconds(attempt, random=random)
    else:
        try:
            seconds = _sane_seconds(policy(attempt))
        except Exception:
            seconds = None
    if seconds is None:
        seconds = DEFAULT_BACKOFF.delay_seconds(attempt, random=random)
    return _clamped_us(seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The handler finished its work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """The attempt failed and another may succeed; `after_seconds` overrules the back-off."""

    error: str
    traceback: str | None = None
    after_seconds: float | None = None
    outcome: Outcome = Outcome.FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """The job can never succeed."""

    error: str
    traceback: str | None = None
    reason: Reason = Reason.REJECTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Snooze:
    """The time has not come: look again after `after_seconds`; no attempt is spent."""

    after_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """The attempt was cut short by no fault of the job; it is given back as it was."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Crashed:
    """The worker died under the job.

    `cause` is why the process ended; `outcome` is `timed_out` when the
    supervisor killed it at the job's own deadline.
    """

    cause: str
    error: str
    traceback: str | None = None
    outcome: Outcome = Outcome.CRASHED


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLost:
    """The lease ran out and nobody knows how the attempt ended."""


Result = Done | Retry | Reject | Snooze | Interrupted | Crashed | LeaseLost
"""How an attempt ended, as its observer saw it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """The part of a settlement that the table decides."""

    to: State
    outcome: Outcome
    charge: bool = True
    death: bool = False
    delay_us: int = 0
    reason: Reason | None = None
    cause: str | None = None


def settle(
    claimed: Claimed,
    result: Result,
    *,
    policy: BackoffPolicy,
    max_attempts_default: int,
    random: float,
    started_us: int | None,
    duration_us: int,
) -> Settlement:
    """Turn the result of a claim into its settlement, as the table of this module says.

    Args:
        claimed: the row as it was claimed.
        result: how the attempt ended.
        policy: the back-off of the job's handler.
        max_attempts_default: attempts of a job that does not say how many.
        random: a number from 0 to 1, for the jitter.
        started_us: wall time of the start; None when the job never started.
        duration_us: how long it ran, by the monotonic clock; negative counts as 0.
    """
    most = max_attempts_default if claimed.max_attempts is None else claimed.max_attempts

    def pause_us(number: int) -> int:
        return delay_us(policy, number, random)

    step = _decide(claimed, result, pause_us, most, started=started_us is not None)
    error = getattr(result, "error", None)
    if isinstance(result, LeaseLost) and started_us is not None:
        error = "the lease ran out before the job was settled"
    return Settlement(
        claim=claimed.claim,
        to=step.to,
        outcome=step.outcome,
        charge=step.charge,
        death=step.death,
        delay_us=step.delay_us,
        reason=step.reason,
        started_us=started_us,
        duration_us=max(0, duration_us),
        cause=step.cause,
        error=_storable(error, ERROR_CHARS_MAX),
        traceback=_storable(getattr(result, "traceback", None), TRACEBACK_CHARS_MAX, keep_end=True),
    )


def _decide(
    claimed: Claimed,
    result: Result,
    pause_us: Callable[[int], int],
    most: int,
    *,
    started: bool,
) -> _Step:
    """Find the row of the table; `pause_us` is the back-off, `most` the attempts allowed."""
    attempt = claimed.attempts + 1
    last = attempt >= most
    match result:
        case Done():
            return _Step(to=State.DONE, outcome=Outcome.SUCCEEDED)
        case Retry():
            own_us = _own_delay_us(result.after_seconds)
            return _again(result.outcome, pause_us(attempt) if own_us is None else own_us, last)
        case Reject():
            return _Step(
                to=State.DEAD, outcome=Outcome.REJECTED, charge=started, reason=result.reason
            )
        case Snooze():
            own_us = _own_delay_us(result.after_seconds)
            # Always delayed, by 0 too: ready at once would spin without spending an attempt.
            return _Step(
                to=State.DELAYED,
                outcome=Outcome.INTERRUPTED,
                charge=False,
                delay_us=pause_us(1) if own_us is None else own_us,
                cause="snooze",
            )
        case Interrupted():
            return _Step(to=State.READY, outcome=Outcome.INTERRUPTED, charge=False)
        case Crashed() if started:
            return _after_death(claimed.deaths + 1, result, pause_us, last)
        case Crashed():
            return _Step(to=State.READY, outcome=result.outcome, charge=False, cause=result.cause)
        case LeaseLost() if started:
            return _again(Outcome.LEASE_LOST, pause_us(attempt), last)
        case LeaseLost():
            return _Step(to=State.READY, outcome=Outcome.LEASE_LOST, charge=False)
        case _:
            assert_never(result)


def _again(outcome: Outcome, after_us: int, last: bool) -> _Step:
    """Try again after a delay, unless that was the last attempt."""
    if last:
        return _Step(to=State.DEAD, outcome=outcome, reason=Reason.EXHAUSTED)
    if after_us == 0:
        return _Step(to=State.READY, outcome=outcome)
    return _Step(to=State.DELAYED, outcome=outcome, delay_us=after_us)


def _after_death(death: int, crash: Crashed, pause_us: Callable[[int], int], last: bool) -> _Step:
    """Judge a job whose worker died; the first death may well be the worker's own fault."""
    if death >= POISON_DEATHS:
        step = _Step(to=State.DEAD, outcome=crash.outcome, reason=Reason.POISON)
    else:
        step = _again(crash.outcome, 0 if death == 1 else pause_us(death), last)
    return replace(step, death=True, cause=crash.cause)


def _own_delay_us(seconds: float | None) -> int | None:
    """Return a result's own delay, or None when it has none, or one that makes no sense."""
    sane = _sane_seconds(seconds)
    return None if sane is None else _clamped_us(sane)


def _sane_seconds(value: object) -> float | None:
    """Return a finite number of at least 0 as it is, anything else as None."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    # Comparing, not float(): an int past the largest float is a long delay, not a fault.
    return min(value, DELAY_US_MAX) if 0 <= value < math.inf else None


def _clamped_us(seconds: float) -> int:
    return min(max(round(min(seconds, DELAY_US_MAX) * 1_000_000), 0), DELAY_US_MAX)


def _storable(text: str | None, chars_max: int, *, keep_end: bool = False) -> str | None:
    """Cut a text, and replace what no database takes: NUL and lone surrogates."""
    if text is None:
        return None
    if len(text) > chars_max:
        text = "…" + text[1 - chars_max :] if keep_end else text[: chars_max - 1] + "…"
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")
