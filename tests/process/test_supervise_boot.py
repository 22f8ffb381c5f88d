"""Processes that do not boot: back-off, crash loops, giving up, and databases out of reach."""

from __future__ import annotations

import os
import signal
import time

from supervisor.policy import Cause, code_of
from tests.conftest import wait_until
from tests.process.conftest import HostMaker

FAST = {
    "supervisor.policy.BACKOFF_BASE_SECONDS": 0.02,
    "supervisor.policy.SETTLE_SECONDS": 0.2,
    "supervisor.judgement.ABRT_SECONDS": 0.2,
}


def test_a_failing_boot_backs_off(host: HostMaker) -> None:
    """The delays grow; nothing like a loop of forks."""
    tree = host(pools=[["a", 1, {}]], constants={"supervisor.policy.NEVER_READY_TRIES": 100})
    (tree.folder / "boot").write_text("raise")
    tree.start()
    wait_until(lambda: tree.boots() == 3)
    times = [float(line.split()[1]) for line in (tree.folder / "boots").read_text().splitlines()]
    first, second = times[1] - times[0], times[2] - times[1]
    assert first > 0.35
    assert second > 0.75
    pool = tree.table.pools["a"]
    wait_until(lambda: pool.failures == 3)
    assert pool.note == "ImportError: no module named handlers"
    assert pool.backoff_until_ns > time.monotonic_ns()
    assert tree.stop() == 0


def test_a_tree_that_was_never_ready_gives_up_with_78(host: HostMaker) -> None:
    """Five tries, then the reason in the log and in the exit code."""
    tree = host(constants=FAST)
    (tree.folder / "boot").write_text("exit 78")
    tree.start()
    assert tree.wait() == 78
    assert 5 <= tree.boots() <= 6
    (event,) = tree.events("supervisor_gave_up")
    assert event["notes"]["a"] == "left at boot with code 78"
    # A sixth may have been forked before it gave up; the drain ends that one.
    assert [death["cause"] for death in tree.deaths()].count("boot") >= 5
    assert {death["cause"] for death in tree.deaths()} <= {"boot", "drain"}


def test_a_pool_that_never_boots_does_not_stop_a_healthy_one(host: HostMaker) -> None:
    """It is parked and shown as such; the other pool works on."""
    tree = host(pools=[["a", 1, {}], ["b", 1, {}]], constants=FAST).started()
    (tree.folder / "boot").write_text("raise")
    os.kill(tree.workers()["a/0"], signal.SIGKILL)
    pool = tree.table.pools["a"]
    wait_until(lambda: pool.crash_loop == 1)
    tree.put("sleep 0")
    wait_until(lambda: tree.names("done") == [1])
    (tree.folder / "boot").unlink()
    wait_until(lambda: tree.workers("a"), what="the probe heals the pool")
    assert tree.table.pools["b"].crash_loop == 0
    assert tree.stop() == 0


def test_a_crash_loop_leaves_one_probe_and_ends_by_health(host: HostMaker) -> None:
    """While it lasts one process tries for all; after a healthy while all are back."""
    fast = FAST | {"supervisor.policy.HEALTHY_SECONDS": 0.5}
    tree = host(pools=[["a", 3, {}]], constants=fast).started()
    pool = tree.table.pools["a"]
    (tree.folder / "boot").write_text("raise")
    for pid in tree.workers().values():
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pool.crash_loop == 1)
    (tree.folder / "boot").unlink()
    wait_until(lambda: len(tree.workers()) == 1)
    assert pool.crash_loop == 1
    wait_until(lambda: len(tree.workers()) == 3)
    assert pool.crash_loop == 0
    assert tree.events("pool_recovered")
    assert tree.stop() == 0


def test_in_a_crash_loop_a_worker_that_got_a_job_done_is_replaced_at_once(host: HostMaker) -> None:
    """The back-off that another of its pool had come to is not its own."""
    constants = {
        "supervisor.policy.BACKOFF_BASE_SECONDS": 30.0,
        "supervisor.policy.INTENSITY_MIN": 1,
        "supervisor.policy.INTENSITY_PER_PROCESS": 0,
    }
    tree = host(pools=[["a", 2, {}]], constants=constants).started()
    pool = tree.table.pools["a"]
    for restarts in (1, 2):
        pid = wait_until(lambda: tree.pid_of("a/0"))
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda n=restarts: len(tree.deaths()) == n)
    wait_until(lambda: pool.crash_loop == 1)
    for _ in range(2):
        pid = wait_until(lambda: tree.pid_of("a/1"))
        (job,) = tree.put("sleep 0")
        wait_until(lambda job=job: job in tree.names("done"))
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: tree.pid_of("a/1") not in (0, pid), timeout_seconds=3)
        assert tree.pid_of("a/0") == 0
    assert pool.backoff_until_ns > time.monotonic_ns()
    assert tree.stop() == 0


def test_a_long_crash_loop_of_every_pool_gives_up_with_70(host: HostMaker) -> None:
    """Once healthy and now never again: the host may be helped by a restart from outside."""
    constants = FAST | {"supervisor.policy.CRASH_LOOP_SECONDS": 0.3}
    tree = host(pools=[["a", 1, {}]], constants=constants).started()
    (tree.folder / "boot").write_text("raise")
    os.kill(tree.workers()["a/0"], signal.SIGKILL)
    assert tree.wait() == 70


def test_a_pool_told_to_stay_never_gives_up(host: HostMaker) -> None:
    """`on_crash_loop = stay` goes on probing."""
    tree = host(pools=[["a", 1, {"on_crash_loop": "stay"}]],
                constants=FAST | {"supervisor.policy.CRASH_LOOP_SECONDS": 0.1,
                                  "supervisor.policy.BACKOFF_CAP_SECONDS": 0.1})  # fmt: skip
    (tree.folder / "boot").write_text("raise")
    tree.start()
    wait_until(lambda: tree.boots() >= 9)
    (tree.folder / "boot").unlink()
    wait_until(tree.workers)
    assert tree.stop() == 0


def test_an_unreachable_database_is_no_crash(host: HostMaker) -> None:
    """Code 69 backs off for as long as it takes, and starts no crash loop."""
    tree = host(pools=[["a", 1, {}]],
                constants=FAST | {"supervisor.policy.BACKOFF_CAP_SECONDS": 0.05})  # fmt: skip
    (tree.folder / "boot").write_text("exit 69")
    tree.start()
    wait_until(lambda: tree.boots() >= 12)
    assert tree.table.pools["a"].crash_loop == 0
    (tree.folder / "boot").unlink()
    wait_until(tree.workers)
    assert tree.stop() == 0


def test_a_keeper_that_never_boots_gives_up_with_78(host: HostMaker) -> None:
    """Without upkeep there is nothing to supervise."""
    tree = host(constants=FAST)
    (tree.folder / "keeper_boot").write_text("78")
    tree.start()
    assert tree.wait() == 78
    (event,) = tree.events("supervisor_gave_up")
    assert event["notes"]["@keeper"] == "the database is broken"


def test_a_process_that_hangs_in_boot_is_ended(host: HostMaker) -> None:
    """Stopped right after the fork: the boot limit finds it, KILL ends it, another is tried."""
    tree = host(pools=[["a", 1, {}]], boot_seconds=0.4, constants=FAST)
    (tree.folder / "boot").write_text("stop")
    tree.start()
    wait_until(lambda: tree.boots() == 1)
    (tree.folder / "boot").unlink()
    wait_until(tree.workers)
    (death,) = wait_until(tree.deaths)
    assert (death["cause"], death["signal"]) == ("boot", signal.SIGKILL)
    assert tree.table.pools["a"].exits(code_of(Cause.BOOT)) == 1
    assert tree.stop() == 0
