"""The decisions about processes, without a process: ends, restarts, judgement, recycling."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor import judgement, policy
from supervisor.judgement import Facts, Fine, Limits, Overdue, Recycling, judge, ladder
from supervisor.policy import (
    SECOND_NS,
    Cause,
    Death,
    History,
    PoolState,
    Rest,
    Start,
    after_death,
    backoff_ns,
    diagnose,
    give_up,
)
from supervisor.slot import Kind, SlotState

MIDDLE = 0.5  # a random number that adds no jitter


def middle() -> float:
    """Return the middle of all chances."""
    return MIDDLE


def death(cause: Cause = Cause.SIGNAL, *, ready: bool = True, healthy: bool = False,
          unavailable: bool = False) -> Death:  # fmt: skip
    """Return an end."""
    return Death(cause=cause, was_ready=ready, healthy=healthy, unavailable=unavailable)


def delay(step: policy.Step, now_ns: int = 0) -> float:
    """Return the seconds until a start."""
    assert isinstance(step, Start)
    return (step.at_ns - now_ns) / SECOND_NS


# ---- ends -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        ({}, Cause.EXIT),
        ({"exit_code": 3}, Cause.EXIT),
        ({"signal_number": 11}, Cause.SIGNAL),
        ({"signal_number": 9}, Cause.SIGNAL),
        ({"signal_number": 9, "oom": True}, Cause.OOM),
        ({"signal_number": 11, "oom": True}, Cause.SIGNAL),
        ({"was_ready": False, "exit_code": 78}, Cause.BOOT),
        ({"was_ready": False, "signal_number": 9, "oom": True}, Cause.OOM),
        ({"asked": Cause.DRAIN}, Cause.DRAIN),
        ({"asked": Cause.DRAIN, "was_ready": False, "signal_number": 15}, Cause.DRAIN),
        ({"asked": Cause.DRAIN, "signal_number": 11}, Cause.SIGNAL),
        ({"asked": Cause.DRAIN, "signal_number": 9}, Cause.SIGNAL),
        ({"asked": Cause.DRAIN, "signal_number": 9, "forced": True}, Cause.DRAIN),
        ({"asked": Cause.DRAIN, "signal_number": 6, "forced": True}, Cause.DRAIN),
        ({"asked": Cause.DRAIN, "signal_number": 11, "forced": True}, Cause.SIGNAL),
        ({"asked": Cause.DRAIN, "signal_number": 11, "forced": True, "aborted": True},
         Cause.DRAIN),
        ({"asked": Cause.DRAIN, "unsettled": True}, Cause.EXIT),
        ({"asked": Cause.RECYCLE, "exit_code": 1}, Cause.EXIT),
        ({"asked": Cause.TIMEOUT, "signal_number": 6, "forced": True}, Cause.TIMEOUT),
        ({"asked": Cause.HANG, "signal_number": 9, "forced": True, "oom": False}, Cause.HANG),
        ({"asked": Cause.MEMORY}, Cause.MEMORY),
        ({"asked": Cause.BOOT, "was_ready": False, "signal_number": 9, "forced": True},
         Cause.BOOT),
    ],
)  # fmt: skip
def test_an_end_has_one_cause(facts: dict[str, object], cause: Cause) -> None:
    """Who asked, what the kernel said, and whether a job was running decide it."""
    base: dict[str, object] = {
        "exit_code": 0, "signal_number": 0, "asked": None, "was_ready": True, "alive_ns": 0,
        "jobs_done": 0,
    }  # fmt: skip
    assert diagnose(**{**base, **facts}).cause is cause  # type: ignore[arg-type]


def test_codes_of_causes_are_stable_and_reversible() -> None:
    """They are stored in slots, and read by other processes."""
    assert [policy.code_of(cause) for cause in Cause] == list(range(1, 11))
    assert [policy.cause_of(policy.code_of(cause)) for cause in Cause] == list(Cause)
    assert policy.cause_of(0) is None
    assert policy.cause_of(11) is None


def test_healthy_is_ten_seconds_or_one_job() -> None:
    """Never without READY."""

    def is_healthy(*, ready: bool = True, seconds: float = 0, jobs: int = 0) -> bool:
        return diagnose(
            exit_code=1, signal_number=0, asked=None, was_ready=ready,
            alive_ns=int(seconds * SECOND_NS), jobs_done=jobs,
        ).healthy  # fmt: skip

    assert not is_healthy(seconds=9)
    assert is_healthy(seconds=10)
    assert is_healthy(jobs=1)
    assert not is_healthy(ready=False, seconds=100)


# ---- restarts -------------------------------------------------------------------------------


def test_a_healthy_process_is_replaced_at_once() -> None:
    """However often: each death after a job done costs nothing."""
    history, pool = History(), PoolState(processes=100)
    for _ in range(20):
        step = after_death(death(healthy=True), history, pool, now_ns=0, random=middle)
        assert delay(step) == 0


def test_a_failing_boot_is_tried_again_ever_more_slowly() -> None:
    """Half a second, doubled to a minute."""
    history, pool = History(), PoolState(processes=1)
    boot = death(Cause.BOOT, ready=False)
    delays = [delay(after_death(boot, history, pool, now_ns=0, random=middle)) for _ in range(10)]
    assert delays == [0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_the_first_death_of_a_ready_process_costs_no_delay() -> None:
    """It may have been one bad job; the second in a row waits."""
    history, pool = History(), PoolState(processes=4)
    delays = [delay(after_death(death(), history, pool, now_ns=0, random=middle)) for _ in range(4)]
    assert delays == [0, 0.5, 1, 2]


@given(st.integers(0, 10_000), st.floats(0, 1))
def test_a_delay_is_within_its_bounds(failures: int, chance: float) -> None:
    """20 % around at most 60 s, never negative."""
    seconds = backoff_ns(failures, lambda: chance) / SECOND_NS
    assert 0 <= seconds <= 72
    assert (seconds == 0) == (failures == 0)


def test_expected_ends_count_for_nothing() -> None:
    """Scaling and recycling a thousand times starts no crash loop."""
    history, pool = History(), PoolState(processes=1, ever_ready=True)
    for cause in (Cause.SCALE, Cause.RECYCLE, Cause.DRAIN) * 300:
        assert delay(after_death(death(cause), history, pool, now_ns=0, random=middle)) == 0
    assert pool.crash_loop_since_ns is None
    assert history.failures == 0


def test_an_unwanted_seat_stays_empty() -> None:
    """The pool was made smaller while the process died."""
    step = after_death(
        death(), History(), PoolState(processes=1), now_ns=0, random=middle, wanted=False
    )
    assert step == Rest()


def test_too_many_deaths_in_a_minute_are_a_crash_loop() -> None:
    """More than five, or three per process; older ones do not count."""
    pool = PoolState(processes=1, ever_ready=True)
    for second in range(5):
        after_death(death(), History(), pool, now_ns=second * SECOND_NS, random=middle)
    assert pool.crash_loop_since_ns is None
    after_death(death(), History(), pool, now_ns=70 * SECOND_NS, random=middle)
    assert pool.crash_loop_since_ns is None
    for _ in range(5):
        after_death(death(), History(), pool, now_ns=71 * SECOND_NS, random=middle)
    assert pool.crash_loop_since_ns == 71 * SECOND_NS
    big = PoolState(processes=10, ever_ready=True)
    for _ in range(30):
        after_death(death(), History(), big, now_ns=0, random=middle)
    assert big.crash_loop_since_ns is None
    after_death(death(), History(), big, now_ns=0, random=middle)
    assert big.crash_loop_since_ns == 0


def test_deaths_of_workers_that_got_jobs_done_count_a_tenth() -> None:
    """Killing a working pool every five seconds is no crash loop; a storm of forks is."""
    pool = PoolState(processes=2, ever_ready=True)
    for second in range(0, 600, 5):
        after_death(death(healthy=True), History(), pool, now_ns=second * SECOND_NS, random=middle)
    assert pool.crash_loop_since_ns is None
    for _ in range(61):
        after_death(death(healthy=True), History(), pool, now_ns=10**12, random=middle)
    assert pool.crash_loop_since_ns == 10**12


def test_a_crash_loop_ends_only_after_a_quiet_while_of_a_healthy_process() -> None:
    """A sibling that has been alive for long does not end it while others still die."""
    pool = PoolState(processes=1, ever_ready=True, crash_loop_since_ns=0)
    pool.unexpected_ns = [100 * SECOND_NS]
    now = 105 * SECOND_NS
    assert not policy.leave_crash_loop(pool, now_ns=now, alive_ns=1000 * SECOND_NS)
    now = 110 * SECOND_NS
    assert not policy.leave_crash_loop(pool, now_ns=now, alive_ns=9 * SECOND_NS)
    assert policy.leave_crash_loop(pool, now_ns=now, alive_ns=10 * SECOND_NS)
    assert pool.crash_loop_since_ns is None
    assert not policy.leave_crash_loop(pool, now_ns=now, alive_ns=10 * SECOND_NS)


def test_giving_up_needs_every_pool_to_have_failed() -> None:
    """One that works, or is told to stay, keeps the tree."""
    bad = PoolState(processes=1)
    for _ in range(5):
        after_death(death(Cause.BOOT, ready=False), History(), bad, now_ns=0, random=middle)
    assert bad.parked
    assert give_up([bad], now_ns=0) == 78
    assert give_up([bad, PoolState(processes=1, ever_ready=True)], now_ns=0) is None
    bad.stay = True
    assert give_up([bad], now_ns=10**15) is None
    assert give_up([], now_ns=0) is None
    looping = PoolState(processes=1, ever_ready=True, crash_loop_since_ns=0)
    assert give_up([looping], now_ns=599 * SECOND_NS) is None
    assert give_up([looping], now_ns=600 * SECOND_NS) == 70


def test_an_unreachable_database_is_never_a_crash() -> None:
    """Code 69 waits longer each time, and counts towards nothing."""
    history, pool = History(), PoolState(processes=1)
    away = death(Cause.BOOT, ready=False, unavailable=True)
    for _ in range(100):
        step = after_death(away, history, pool, now_ns=0, random=middle)
    assert delay(step) == 60
    assert (pool.crash_loop_since_ns, pool.parked, pool.tries) == (None, False, 0)


def test_the_boot_limit_doubles_with_every_failed_boot() -> None:
    """To five minutes, or to what was configured when that is more."""
    seconds = [policy.boot_limit_ns(60, boots) / SECOND_NS for boots in range(5)]
    assert seconds == [60, 120, 240, 300, 300]
    assert policy.boot_limit_ns(900, 3) == 900 * SECOND_NS


# ---- judgement ------------------------------------------------------------------------------

LIMITS = Limits(boot_ns=60 * SECOND_NS)


def facts(state: SlotState, *, kind: Kind = Kind.WORKER, hard: int = 0, rss: int = 0) -> Facts:
    """Return what a slot says that was last heard of at second 100."""
    at = 100 * SECOND_NS
    return Facts(kind=kind, state=state, boot_ns=at, entered_ns=at, beat_ns=at,
                 hard_deadline_ns=hard, rss_bytes=rss)  # fmt: skip


@pytest.mark.parametrize(
    ("state", "kind", "seconds", "cause"),
    [
        (SlotState.BOOT, Kind.WORKER, 60, Cause.BOOT),
        (SlotState.BOOT, Kind.KEEPER, 60, Cause.BOOT),
        (SlotState.IDLE, Kind.WORKER, 30, Cause.HANG),
        (SlotState.CLAIM, Kind.WORKER, 30, Cause.HANG),
        (SlotState.RUN, Kind.WORKER, 30, Cause.HANG),  # without a deadline: between two jobs
        (SlotState.SETTLE, Kind.WORKER, 30, Cause.HANG),
        (SlotState.EXIT, Kind.WORKER, 30, Cause.HANG),
        (SlotState.IDLE, Kind.KEEPER, 15, Cause.HANG),
        (SlotState.SETTLE, Kind.KEEPER, 15, Cause.HANG),
        (SlotState.IDLE, Kind.WEB, 30, Cause.HANG),
    ],
)
def test_each_state_has_its_limit(state: SlotState, kind: Kind, seconds: int, cause: Cause) -> None:
    """Just before it all is well, and the next look is announced; at it the process must go."""
    limit = (100 + seconds) * SECOND_NS
    assert judge(facts(state, kind=kind), limit - 1, LIMITS) == Fine(next_ns=limit)
    verdict = judge(facts(state, kind=kind), limit, LIMITS)
    assert isinstance(verdict, Overdue)
    assert verdict.cause is cause


def test_a_running_job_is_bounded_by_its_own_deadline_only() -> None:
    """No tick is asked of it: it may hold the interpreter."""
    late = 10**9 * SECOND_NS
    verdict = judge(facts(SlotState.RUN, hard=late), late, LIMITS)
    assert isinstance(verdict, Overdue)
    assert verdict.cause is Cause.TIMEOUT
    assert judge(facts(SlotState.RUN, hard=late), late - 1, LIMITS) == Fine(next_ns=late)


def test_memory_is_judged_in_the_middle_of_a_job_at_twice_the_limit() -> None:
    """Between jobs it is recycling's business."""
    limits = Limits(boot_ns=1, max_rss_bytes=100)
    assert isinstance(judge(facts(SlotState.RUN, rss=200), 0, limits), Fine)
    verdict = judge(facts(SlotState.RUN, rss=201), 0, limits)
    assert isinstance(verdict, Overdue)
    assert verdict.cause is Cause.MEMORY
    assert isinstance(judge(facts(SlotState.IDLE, rss=201), 0, limits), Fine)


def test_who_shows_signs_of_life_while_it_boots_is_not_hung() -> None:
    """The keeper's first round waits for the database as often as it has duties."""
    booting = replace(facts(SlotState.BOOT, kind=Kind.KEEPER), beat_ns=130 * SECOND_NS)
    limits = Limits(boot_ns=60 * SECOND_NS)
    assert isinstance(judge(booting, 189 * SECOND_NS, limits), Fine)
    assert isinstance(judge(booting, 190 * SECOND_NS, limits), Overdue)


def test_the_memory_limit_of_a_job_ends_with_the_job() -> None:
    """It holds while there is a deadline; of two limits the lower one counts."""

    def over(rss: int, *, hard: int = 10, limit: int = 100, pool: int | None = None) -> bool:
        one = Facts(
            kind=Kind.WORKER, state=SlotState.RUN, boot_ns=0, entered_ns=0, beat_ns=0,
            hard_deadline_ns=hard, rss_bytes=rss, job_memory_bytes=limit,
        )  # fmt: skip
        verdict = judge(one, 1, Limits(boot_ns=1, max_rss_bytes=pool))
        return isinstance(verdict, Overdue) and verdict.cause is Cause.MEMORY

    assert over(101)
    assert not over(100)
    assert not over(101, hard=0), "its job has ended"
    assert not over(10_000, limit=0)
    assert over(101, pool=1000)
    assert over(201, limit=1000, pool=100)


def test_nobody_is_judged_after_the_host_slept() -> None:
    """A wait that overran, or a clock that stood still."""

    def slept(planned: float, waited: float, grew: float = 0) -> bool:
        return judgement.suspended(
            planned_ns=int(planned * SECOND_NS), waited_ns=int(waited * SECOND_NS),
            asleep_grew_ns=int(grew * SECOND_NS),
        )  # fmt: skip

    assert not slept(1, 5.9)
    assert slept(1, 6.1)
    assert slept(1, 1, 60)


@pytest.mark.parametrize("cause", list(Cause))
def test_every_escalation_ends_with_kill_of_the_group(cause: Cause) -> None:
    """Stacks first, and time between; jobs that may live are interrupted before."""
    rungs = [rung for number in range(5) if (rung := ladder(cause, number)) is not None]
    assert [rung.signum for rung in rungs[-2:]] == [signal.SIGABRT, signal.SIGKILL]
    assert rungs[-1].group
    assert rungs[-1].then_ns is None
    assert all(rung.then_ns for rung in rungs[:-1])
    gentle = cause in (Cause.MEMORY, Cause.DRAIN)
    assert (rungs[0].signum == signal.SIGQUIT) == gentle


# ---- recycling ------------------------------------------------------------------------------


def due(
    limits: Recycling, *, jobs: int = 0, rss: int = 0, age: float = 0, share: float = 0
) -> bool:
    """Say whether a worker has had its time."""
    why = judgement.recycle_due(
        limits, jobs=jobs, rss_bytes=rss, age_ns=int(age * SECOND_NS), share=share
    )
    return why is not None


def test_recycling_is_off_unless_asked_for() -> None:
    """No limit, no end."""
    assert not due(Recycling(), jobs=10**9, rss=10**12, age=10**9)


def test_limits_on_jobs_and_age_are_spread_by_ten_percent() -> None:
    """Below, never above: a limit is a limit."""
    jobs = Recycling(max_jobs=1000)
    assert not due(jobs, jobs=999)
    assert due(jobs, jobs=1000)
    assert due(jobs, jobs=900, share=1)
    assert not due(jobs, jobs=899, share=1)
    age = Recycling(max_age_seconds=100)
    assert not due(age, age=99)
    assert due(age, age=100)
    assert due(age, age=90, share=1)
    assert due(Recycling(max_rss_bytes=5), rss=6, share=0)
    assert not due(Recycling(max_rss_bytes=5), rss=5, share=1)
    assert due(Recycling(max_jobs=1), jobs=1, share=0.99)
    assert not due(Recycling(max_jobs=1), jobs=0, share=1)
