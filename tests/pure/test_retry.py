"""Show that every result of every job has one settlement, and that delays keep their bounds."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from queue_core.job import (
    ERROR_CHARS_MAX,
    POISON_DEATHS,
    TRACEBACK_CHARS_MAX,
    TRANSITIONS,
    Claimed,
    Outcome,
    Reason,
    Settlement,
    State,
)
from queue_core.retry import (
    DEFAULT_BACKOFF,
    DELAY_US_MAX,
    Backoff,
    BackoffPolicy,
    Crashed,
    Done,
    Interrupted,
    LeaseLost,
    Reject,
    Result,
    Retry,
    Snooze,
    delay_us,
    settle,
)

shares = st.floats(0.0, 1.0)
seconds = st.floats(0.0, 1e300)
attempts = st.integers(1, 10**400)
backoffs = st.builds(
    Backoff,
    kind=st.sampled_from(["fixed", "exponential"]),
    base_seconds=seconds,
    factor=st.floats(1.0, 1e300),
    cap_seconds=seconds,
    jitter=shares,
)
texts = st.text(st.characters(exclude_categories=()), max_size=50)
delays = st.none() | st.floats() | st.integers()
results: st.SearchStrategy[Result] = st.one_of(
    st.just(Done()),
    st.builds(
        Retry,
        error=texts,
        traceback=st.none() | texts,
        after_seconds=delays,
        outcome=st.sampled_from([Outcome.FAILED, Outcome.TIMED_OUT]),
    ),
    st.builds(Reject, error=texts, reason=st.sampled_from(Reason)),
    st.builds(Snooze, after_seconds=st.floats() | st.integers()),
    st.builds(Interrupted, error=texts),
    st.builds(Crashed, cause=st.sampled_from(["exit", "signal", "oom"]), error=texts),
    st.just(LeaseLost()),
)


def claimed(attempts: int = 0, max_attempts: int | None = 5, deaths: int = 0) -> Claimed:
    """Build a claimed row of which only the numbers matter."""
    return Claimed(
        id=7, run=3, queue="emails", task="emails", payload=b"{}", attempts=attempts,
        max_attempts=max_attempts, deaths=deaths, priority=0, key=None, headers=None, group=None,
        enqueued_us=0, ready_us=0, claimed_us=0, expires_us=None,
    )  # fmt: skip


def settled(result: Result, row: Claimed | None = None, **options: Any) -> Settlement:
    """Settle a result under a policy without jitter: 2, 4, 8 seconds."""
    given_options: dict[str, Any] = {
        "policy": Backoff(jitter=0.0),
        "max_attempts_default": 5,
        "random": 0.5,
        "started_us": 1_000,
        "duration_us": 10,
    }
    return settle(row or claimed(), result, **{**given_options, **options})


@given(backoff=backoffs, attempt=attempts, random=shares)
@example(backoff=Backoff(factor=1.0), attempt=10**400, random=0.5)
@example(backoff=Backoff(base_seconds=0.0, factor=1e300), attempt=10**6, random=1.0)
def test_a_delay_stays_in_its_bounds(backoff: Backoff, attempt: int, random: float) -> None:
    """No attempt, however late, waits less than nothing or more than the cap allows."""
    delay = backoff.delay_seconds(attempt, random=random)
    assert 0.0 <= delay <= backoff.cap_seconds * (1 + backoff.jitter)
    assert 0 <= delay_us(backoff, attempt, random) <= DELAY_US_MAX


@given(backoff=backoffs, attempt=attempts, random=shares)
def test_delays_never_shrink(backoff: Backoff, attempt: int, random: float) -> None:
    """A later attempt waits at least as long, until the cap holds both."""
    earlier = backoff.delay_seconds(attempt, random=random)
    assert backoff.delay_seconds(attempt + 1, random=random) >= earlier


@given(backoff=backoffs, attempt=attempts)
def test_the_random_number_spreads_the_delay_evenly(backoff: Backoff, attempt: int) -> None:
    """Half is the delay itself; nought and one are its ends, `jitter` away on either side."""
    low, middle, high = (backoff.delay_seconds(attempt, random=n) for n in (0.0, 0.5, 1.0))
    assert low <= middle <= high
    assert math.isclose(low, middle * (1 - backoff.jitter), abs_tol=1e-300)
    assert math.isclose(high, middle * (1 + backoff.jitter), abs_tol=1e-300)


def test_delays_double_up_to_the_cap() -> None:
    """The documented default: 2 s, 4 s, 8 s, to an hour; `fixed` stays."""
    plain = Backoff(jitter=0.0)
    assert [plain.delay_seconds(n, random=0.9) for n in (1, 2, 3, 11, 12, 13)] == [
        2.0, 4.0, 8.0, 2048.0, 3600.0, 3600.0,
    ]  # fmt: skip
    fixed = Backoff(kind="fixed", base_seconds=7.0, jitter=0.0)
    assert [fixed.delay_seconds(n, random=0.1) for n in (1, 2, 50)] == [7.0, 7.0, 7.0]
    assert Backoff(jitter=0.1).delay_seconds(1, random=1.0) == pytest.approx(2.2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "linear"}, "kind is 'linear'"),
        ({"base_seconds": -1.0}, "base_seconds is -1.0; .* at least 0"),
        ({"base_seconds": math.nan}, "base_seconds is nan"),
        ({"factor": 0.5}, "factor is 0.5; .* at least 1"),
        ({"cap_seconds": math.inf}, "cap_seconds is inf"),
        ({"jitter": 1.5}, "jitter is 1.5; .* from 0 to 1"),
    ],
)
def test_a_senseless_backoff_is_refused(options: dict[str, Any], message: str) -> None:
    """A slip in the configuration is found when it is read, in one sentence."""
    with pytest.raises(ValueError, match=message):
        Backoff(**options)


def raises(_: int) -> float:
    """Fail as a user's own policy may."""
    raise RuntimeError("no")


@pytest.mark.parametrize(
    "policy",
    [
        raises,
        *(lambda _, value=value: value for value in (math.nan, math.inf, -1, None, "5", True)),
    ],
)
def test_a_senseless_policy_does_not_lose_the_job(policy: BackoffPolicy) -> None:
    """The default back-off stands in for a function that fails or talks nonsense."""
    assert delay_us(policy, 3, 0.5) == delay_us(DEFAULT_BACKOFF, 3, 0.5) == 8_000_000


def test_a_policy_of_ones_own_is_used() -> None:
    """A function sees the attempt's number and says seconds; a year is the most."""
    assert delay_us(lambda attempt: attempt * 1.5, 4, 0.0) == 6_000_000
    assert delay_us(lambda attempt: 10**400, 1, 0.0) == DELAY_US_MAX
    assert delay_us(lambda attempt: 0, 1, 0.0) == 0


def ending(result: Result, row: Claimed, started: bool) -> tuple[Any, ...]:
    """Return what the table decides, for comparison with a line of it."""
    end = settled(result, row, started_us=1_000 if started else None)
    return end.to, end.charge, end.death, end.outcome, end.delay_us, end.reason


FRESH, LAST, NO_LIMIT = claimed(), claimed(attempts=4), claimed(attempts=4, max_attempts=None)
READY, DELAYED, DONE, DEAD = State.READY, State.DELAYED, State.DONE, State.DEAD
FAILED, CRASHED, LOST = Outcome.FAILED, Outcome.CRASHED, Outcome.LEASE_LOST
INTERRUPTED, REJECTED = Outcome.INTERRUPTED, Outcome.REJECTED
CRASH = Crashed(cause="signal", error="killed by SIGKILL")


@pytest.mark.parametrize(
    ("result", "row", "started", "expected"),
    [
        (Done(), FRESH, True, (DONE, True, False, Outcome.SUCCEEDED, 0, None)),
        (Done(), LAST, True, (DONE, True, False, Outcome.SUCCEEDED, 0, None)),
        (Retry(error="e"), FRESH, True, (DELAYED, True, False, FAILED, 2_000_000, None)),
        (Retry(error="e"), claimed(2), True, (DELAYED, True, False, FAILED, 8_000_000, None)),
        (Retry(error="e"), LAST, True, (DEAD, True, False, FAILED, 0, Reason.EXHAUSTED)),
        (Retry(error="e"), NO_LIMIT, True, (DEAD, True, False, FAILED, 0, Reason.EXHAUSTED)),
        (Retry(error="e", after_seconds=0), FRESH, True, (READY, True, False, FAILED, 0, None)),
        (
            Retry(error="e", after_seconds=1.5, outcome=Outcome.TIMED_OUT),
            FRESH,
            True,
            (DELAYED, True, False, Outcome.TIMED_OUT, 1_500_000, None),
        ),
        (
            Retry(error="e", after_seconds=math.nan),
            FRESH,
            True,
            (DELAYED, True, False, FAILED, 2_000_000, None),
        ),
        (Reject(error="e"), FRESH, True, (DEAD, True, False, REJECTED, 0, Reason.REJECTED)),
        (
            Reject(error="e", reason=Reason.UNDECODABLE),
            FRESH,
            False,
            (DEAD, False, False, REJECTED, 0, Reason.UNDECODABLE),
        ),
        (
            Snooze(after_seconds=9),
            LAST,
            True,
            (DELAYED, False, False, INTERRUPTED, 9_000_000, None),
        ),
        (Snooze(after_seconds=0), FRESH, True, (DELAYED, False, False, INTERRUPTED, 0, None)),
        (Interrupted(error="e"), LAST, True, (READY, False, False, INTERRUPTED, 0, None)),
        (CRASH, FRESH, True, (READY, True, True, CRASHED, 0, None)),
        (CRASH, claimed(1, deaths=1), True, (DELAYED, True, True, CRASHED, 4_000_000, None)),
        (CRASH, claimed(2, deaths=2), True, (DEAD, True, True, CRASHED, 0, Reason.POISON)),
        (CRASH, claimed(2, 99, deaths=2), True, (DEAD, True, True, CRASHED, 0, Reason.POISON)),
        (CRASH, LAST, True, (DEAD, True, True, CRASHED, 0, Reason.EXHAUSTED)),
        (CRASH, FRESH, False, (READY, False, False, CRASHED, 0, None)),
        (LeaseLost(), FRESH, True, (DELAYED, True, False, LOST, 2_000_000, None)),
        (LeaseLost(), LAST, True, (DEAD, True, False, LOST, 0, Reason.EXHAUSTED)),
        (LeaseLost(), LAST, False, (READY, False, False, LOST, 0, None)),
    ],
)
def test_the_table_is_carried_out(
    result: Result, row: Claimed, started: bool, expected: tuple[Any, ...]
) -> None:
    """Each line of the module's table, with the numbers that choose it."""
    assert ending(result, row, started) == expected


def test_a_crash_at_the_deadline_is_a_timeout() -> None:
    """Whoever killed the worker says why, and the ledger tells it apart from a crash."""
    end = settled(Crashed(cause="timeout", error="30 s", outcome=Outcome.TIMED_OUT))
    assert (end.outcome, end.cause, end.death) == (Outcome.TIMED_OUT, "timeout", True)


@given(
    row=st.builds(
        claimed,
        attempts=st.integers(0, 2**63),
        max_attempts=st.none() | st.integers(-5, 2**63),
        deaths=st.integers(0, 10),
    ),
    result=results,
    policy=backoffs | st.just(raises),
    most=st.integers(1, 100),
    random=shares,
    started_us=st.none() | st.integers(0, 2**62),
    duration_us=st.integers(-(2**62), 2**62),
)
def test_every_result_is_settled_by_the_rules(
    row: Claimed,
    result: Result,
    policy: BackoffPolicy,
    most: int,
    random: float,
    started_us: int | None,
    duration_us: int,
) -> None:
    """Nothing that may come in has no settlement, or one the engine could not carry out."""
    end = settle(
        row,
        result,
        policy=policy,
        max_attempts_default=most,
        random=random,
        started_us=started_us,
        duration_us=duration_us,
    )
    assert end.claim == row.claim
    assert end.to in TRANSITIONS["finish"][1]
    assert (end.reason is not None) == (end.to is State.DEAD)
    assert 0 <= end.delay_us <= DELAY_US_MAX
    assert end.delay_us == 0 or end.to is State.DELAYED
    assert end.duration_us >= 0
    assert end.started_us == started_us
    assert (end.outcome is Outcome.SUCCEEDED) == (end.to is State.DONE) == isinstance(result, Done)
    # A death is always charged, and what never started is not, save by a handler's own verdict.
    assert end.charge or not end.death
    if started_us is None and not isinstance(result, Done | Retry):
        assert not end.charge
    # Nothing that is charged goes on for ever.
    allowed = most if row.max_attempts is None else row.max_attempts
    if end.charge and row.attempts + 1 >= allowed:
        assert end.to in {State.DONE, State.DEAD}
    if end.death and row.deaths + 1 >= POISON_DEATHS:
        assert end.reason is Reason.POISON
    for text in (end.error, end.traceback):
        if text is not None:
            assert "\0" not in text
            text.encode()


def test_texts_no_database_takes_are_mended() -> None:
    """NUL and half a surrogate pair, which hostile input puts into errors, do not stop a retry."""
    end = settled(Retry(error="a\0b\ud83dc", traceback="\udcff"))
    assert (end.error, end.traceback) == ("a\ufffdb?c", "?")


def test_long_texts_are_cut_where_they_matter_least() -> None:
    """An error keeps its beginning, a traceback its end, and both say that they were cut."""
    end = settled(Retry(error="start" + "e" * 99_999, traceback="t" * 99_999 + "end"))
    assert end.error is not None
    assert end.traceback is not None
    assert end.error.startswith("start")
    assert end.error.endswith("…")
    assert len(end.error) == ERROR_CHARS_MAX
    assert end.traceback.startswith("…")
    assert end.traceback.endswith("end")
    assert len(end.traceback) == TRACEBACK_CHARS_MAX
