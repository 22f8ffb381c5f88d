"""How processes end, what is recorded of it, and when they are ended against their will."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from supervisor.policy import Cause, code_of
from supervisor.reap import OomCounter
from tests.conftest import wait_until
from tests.process.conftest import HostMaker
from tests.process.tree import Host, note

FAST = {"supervisor.judgement.ABRT_SECONDS": 0.3}


def death_of(tree: Host, job: int) -> dict[str, Any]:
    """Wait for the death of the worker that ran a job."""
    return wait_until(lambda: next((one for one in tree.deaths() if one["job"] == job), None))


def survives(tree: Host) -> None:
    """Check that another job is done afterwards, and that the tree ends cleanly."""
    (job,) = tree.put("sleep 0")
    wait_until(lambda: job in tree.names("done"))
    assert tree.stop() == 0


def test_a_job_that_ends_its_worker_is_named(host: HostMaker) -> None:
    """The slot says which job ran and how it ended; code 0 in the middle of a job is a crash."""
    tree = host(pools=[["a", 1, {}]]).started()
    for line, cause, code, signum in [
        ("kill_self 9", "signal", 0, 9),
        ("exit_now 0", "exit", 0, 0),
        ("exit_now 3", "exit", 3, 0),
        ("exit_now 69", "exit", 69, 0),
        ("segv", "signal", 0, 11),
    ]:
        good, job = tree.put("sleep 0", line)  # the first makes the worker a healthy one
        death = death_of(tree, job)
        assert (death["cause"], death["exit_code"], death["signal"]) == (cause, code, signum), line
        assert death["running"] == 0
        assert good in tree.names("done")
    assert "Segmentation fault" in death["stack"]
    assert "string_at" in death["stack"]
    survives(tree)


def test_a_job_that_raises_anything_does_not_end_its_worker(host: HostMaker) -> None:
    """It failed; the worker lives."""
    tree = host(pools=[["a", 1, {}]]).started()
    errors = ("KeyboardInterrupt", "MemoryError", "RecursionError", "BaseException")
    jobs = tree.put("sys_exit 0", *(f"raise {name}" for name in errors))
    wait_until(lambda: tree.names("failed") == jobs)
    assert tree.boots() == 1
    survives(tree)


def test_a_job_past_its_hard_deadline_is_ended_with_its_stack(host: HostMaker) -> None:
    """Even one that never gives the interpreter back; the stack names the function."""
    tree = host(pools=[["a", 1, {}]], hard_seconds=0.4, constants=FAST).started()
    for line in ("hold_gil 600", "spin 600", "deaf 600"):
        good, job = tree.put("sleep 0", line)
        wait_until(lambda at=good: at in tree.names("done"))
        before = time.monotonic()
        death = death_of(tree, job)
        assert time.monotonic() - before < 2.5
        assert (death["cause"], death["signal"]) == ("timeout", signal.SIGABRT)
        assert f"in _{line.split()[0]}" in death["stack"]
        assert tree.table.pools["a"].note == "ran its job past the hard deadline"
    survives(tree)


def test_a_fault_while_the_stack_is_written_is_no_crash_of_the_job(host: HostMaker) -> None:
    """ABRT brought it about: the end has the cause that ABRT had."""
    tree = host(pools=[["a", 1, {}]], hard_seconds=0.4, constants=FAST).started()
    (job,) = tree.put("fault_on_abort")
    death = death_of(tree, job)
    assert (death["cause"], death["signal"]) == ("timeout", signal.SIGSEGV)
    survives(tree)


def test_a_stopped_worker_past_its_deadline_is_killed(host: HostMaker) -> None:
    """ABRT stays pending in a stopped process; KILL follows."""
    tree = host(pools=[["a", 1, {}]], hard_seconds=0.3, constants=FAST).started()
    (job,) = tree.put("kill_self 19")
    death = death_of(tree, job)
    assert (death["cause"], death["signal"]) == ("timeout", signal.SIGKILL)
    survives(tree)


def test_a_busy_worker_is_judged_by_its_deadline_not_by_replies(host: HostMaker) -> None:
    """A job that holds the interpreter for longer than any tick keeps running."""
    tree = host(pools=[["a", 1, {}]], constants={"supervisor.judgement.IDLE_TICK_SECONDS": 0.2,
                "supervisor.judgement.STUCK_SECONDS": 0.2}).started()  # fmt: skip
    (job,) = tree.put("hold_gil 1")
    wait_until(lambda: tree.names("done") == [job])
    assert tree.boots() == 1
    survives(tree)


def test_an_idle_worker_that_stopped_ticking_is_replaced(host: HostMaker) -> None:
    """SIGSTOP from outside looks like a hang."""
    tree = host(
        pools=[["a", 1, {}]], constants=FAST | {"supervisor.judgement.IDLE_TICK_SECONDS": 1.0}
    ).started()
    pid = tree.workers()["a/0"]
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: tree.workers().get("a/0", pid) != pid)
    assert wait_until(tree.deaths)[0]["cause"] == "hang"
    survives(tree)


@pytest.mark.parametrize("state", ["CLAIM", "SETTLE", "EXIT"])
def test_a_worker_that_hangs_between_jobs_is_replaced(host: HostMaker, state: str) -> None:
    """At a claim, at a settlement, and when it is to leave: each is over by its own limit."""
    limits = {f"supervisor.judgement.{name}_SECONDS": 0.8 for name in ("STUCK", "IDLE_TICK")}
    tree = host(pools=[["a", 1, {}]], constants=FAST | limits).started()
    pid = tree.workers()["a/0"]
    (job,) = tree.put("block_output" if state == "EXIT" else "sleep 0.2")
    (tree.folder / f"stick_{state}").touch()
    if state == "EXIT":
        wait_until(lambda: tree.names("done") == [job])
        os.kill(pid, signal.SIGTERM)
    wait_until(lambda: tree.workers().get("a/0", pid) != pid)
    (death,) = wait_until(tree.deaths)
    assert (death["pid"], death["cause"], death["signal"]) == (pid, "hang", signal.SIGABRT)
    words = "made no progress" if state == "EXIT" else f"was in {state} for more than 0.8 s"
    assert words in tree.events("worker_signalled")[0]["why"]
    survives(tree)


def test_a_keeper_without_progress_is_replaced(host: HostMaker) -> None:
    """After its own limit, and without harm to workers."""
    tree = host(constants=FAST | {"supervisor.judgement.KEEPER_TICK_SECONDS": 0.8}).started()
    keeper, workers = tree.pid_of("keeper"), tree.workers()
    (tree.folder / "keeper_hang").touch()
    wait_until(lambda: tree.pid_of("keeper") not in (0, keeper))
    (tree.folder / "keeper_hang").unlink()
    assert tree.workers() == workers
    wait_until(lambda: tree.table.pools["@keeper"].exits(code_of(Cause.HANG)) >= 1)
    wait_until(lambda: tree.pid_of("keeper"))
    survives(tree)


def test_a_blind_keeper_does_not_hold_up_restarts(host: HostMaker) -> None:
    """Dead records wait for the keeper; the next process takes another."""
    tree = host(pools=[["a", 1, {}]]).started()
    (tree.folder / "keeper_blind").touch()
    pids = set()
    for _ in range(3):
        pid = wait_until(lambda: next(iter(set(tree.workers().values()) - pids), None))
        pids.add(pid)
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: set(tree.workers().values()) - pids)
    assert len(tree.table.dead()) == 3
    (tree.folder / "keeper_blind").unlink()
    wait_until(lambda: len(tree.deaths()) == 3)
    survives(tree)


def test_a_job_over_the_hard_memory_limit_is_interrupted_then_killed(host: HostMaker) -> None:
    """Twice `max_rss` in the middle of a job ends it, labelled memory."""
    limit = 100 * 1024 * 1024
    tree = host(pools=[["a", 1, {"max_rss_bytes": limit}]]).started()
    tree.put(f"allocate {3 * limit}")
    (death,) = wait_until(tree.deaths)
    assert death["cause"] == "memory"
    assert "bytes of memory" in tree.table.pools["a"].note
    assert tree.names("JobInterrupted") == [1]
    survives(tree)


def test_a_tree_that_was_stopped_for_long_judges_nobody_at_once(host: HostMaker) -> None:
    """After suspend (SIGSTOP of everyone) the first round is skipped, and workers go on."""
    tree = host(
        pools=[["a", 1, {}]],
        constants={
            "supervisor.judgement.SUSPEND_SECONDS": 0.3,
            "supervisor.judgement.IDLE_TICK_SECONDS": 1.0,
        },
    ).started()
    everyone = tree.all_processes()
    for pid in everyone:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2.5)  # the fact is the passing of time itself
    for pid in reversed(everyone):
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: tree.events("host_slept"))
    survives(tree)
    assert tree.boots() == 1


def test_a_worker_dies_with_a_supervisor_that_died_before_it_could_ask_for_that(
    host: HostMaker,
) -> None:
    """A fork hook keeps the children back until their parent is gone: none of them begins."""
    tree = host(pools=[["a", 2, {}]], fork_hook_seconds=0.7).start()
    wait_until(lambda: len(tree.events("worker_started")) == 3)
    tree.send(signal.SIGKILL)
    tree.wait()
    assert len(tree.all_processes()) == 3, "too late: the test proves nothing"
    wait_until(lambda: tree.all_processes() == [], timeout_seconds=5)
    assert tree.boots() == 0
    assert not (tree.folder / "keeper_left").exists()


def test_a_death_that_somebody_else_has_reaped_is_a_death(host: HostMaker) -> None:
    """What waits for children beside us takes the cause along, and hides no end."""
    tree = host(pools=[["a", 2, {}], ["b", 1, {}]], foreign_wait=True).started()
    victim, other = tree.workers()["a/1"], tree.workers()["b/0"]
    tree.put("sleep 0")
    wait_until(lambda: tree.names("done") == [1])
    note(tree.folder / "victim", victim)
    os.kill(tree.workers()["a/0"], signal.SIGKILL)  # its successor's fork takes the victim along
    wait_until(lambda: tree.workers().get("a/1", victim) != victim)
    wait_until(lambda: len(tree.workers()) == 3)
    assert tree.workers()["b/0"] == other
    wait_until(lambda: {death["pid"] for death in tree.deaths()} >= {victim})
    survives(tree)


def test_no_pid_is_signalled_by_number_while_it_could_be_anyones() -> None:
    """Signals go through pidfds; numbers only to groups and orphans that are not reaped yet."""
    folder = Path(__file__).resolve().parents[2] / "supervisor"
    keeping = ("child", "drain", "herd", "rolling", "roster", "signals", "supervise", "trial")
    for name in keeping:
        text = (folder / f"{name}.py").read_text()
        assert "os.kill" not in text, name


@pytest.mark.parametrize(
    "before",
    [
        "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n",  # cgroup v2
        "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",  # cgroup v1
        "nr_free_pages 1234\noom_kill 2\ndrop_pagecache 0\n",  # the whole host
    ],
)
def test_each_kill_of_the_kernel_explains_one_death(tmp_path: Path, before: str) -> None:
    """Counters as the kernels write them; two kills explain two deaths, and no third."""
    path = tmp_path / "counter"
    path.write_text(before)
    counter = OomCounter(str(path))
    assert not counter.grew()
    path.write_text(before.replace("oom_kill 2", "oom_kill 4"))
    assert [counter.grew() for _ in range(3)] == [True, True, False]


def test_a_kill_of_some_seconds_ago_explains_no_death_of_now(tmp_path: Path) -> None:
    """The kernel may have killed something of ours that nobody waited for, or of another."""
    path = tmp_path / "counter"
    path.write_text("oom_kill 2\n")
    counter = OomCounter(str(path))
    path.write_text("oom_kill 3\n")
    for second in range(3):
        counter.note(second * 1_000_000_000)
    assert counter.grew(), "a kill of a moment ago"
    path.write_text("oom_kill 4\n")
    for second in range(3, 10):
        counter.note(second * 1_000_000_000)
    assert not counter.grew()
    path.write_text("oom_kill 5\n")
    assert [counter.grew() for _ in range(2)] == [True, False]


def test_there_is_a_counter_of_kills_on_this_host() -> None:
    """Of our control group, or of the whole host."""
    assert not OomCounter().grew()
