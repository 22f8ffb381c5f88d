"""The basic ring: start, lose a worker, replace it, stop, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from supervisor.policy import Cause, code_of
from tests.conftest import wait_until
from tests.process.conftest import HostMaker
from tests.process.tree import alive


def test_a_tree_starts_works_and_drains_with_exit_0(host: HostMaker) -> None:
    """Jobs are done by forked workers; TERM ends all of them, `web` before the keeper."""
    tree = host(web=True).started()
    tree.put("sleep 0", "sleep 0")
    wait_until(lambda: tree.names("done") == [1, 2])
    assert tree.stop() == 0
    assert tree.all_processes() == []
    web_left = float((tree.folder / "web_left").read_text())
    keeper_left = float((tree.folder / "keeper_left").read_text().split()[1])
    assert web_left < keeper_left


def test_a_killed_worker_is_replaced_in_well_under_a_second(host: HostMaker) -> None:
    """The death is in its slot with cause and job, the keeper frees it, others go on."""
    tree = host().started()
    (job,) = tree.put("sleep 600")
    slot = wait_until(lambda: tree.running(job))
    name, pid = slot.name, slot.pid
    before = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: tree.workers().get(name, pid) != pid)
    assert time.monotonic() - before < 0.9
    (death,) = wait_until(tree.deaths)
    assert death["cause"] == "signal"
    assert death["signal"] == signal.SIGKILL
    assert death["job"] == job
    assert death["running"] == 0
    assert death["after_seconds"] < 0.4
    wait_until(lambda: not tree.table.dead(), what="the slot is free again")
    assert tree.stop() == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_drain_lets_the_running_job_finish_and_starts_no_other(
    host: HostMaker, signum: signal.Signals
) -> None:
    """What runs is finished, what waits stays; nothing is interrupted."""
    tree = host(pools=[["a", 1, {}]]).started()
    first, second = tree.put("sleep 0.5", "sleep 0")
    wait_until(lambda: tree.running(first))
    tree.send(signum)
    assert tree.wait() == 0
    assert tree.names("done") == [first]
    assert (tree.folder / "jobs" / f"{second:06}").exists()


def test_a_kill_of_the_supervisor_leaves_no_process_of_any_group(host: HostMaker) -> None:
    """Workers and `web` die with it, and the keeper takes their grandchildren along."""
    tree = host(web=True).started()
    tree.put("grandchild stay sleep 600", "sleep 600")
    wait_until(lambda: (tree.folder / "grandchild").exists() and len(tree.names("claimed")) == 2)
    grandchild = int((tree.folder / "grandchild").read_text())
    assert alive(grandchild)
    tree.send(signal.SIGKILL)
    tree.wait()
    wait_until(lambda: tree.all_processes() == [], timeout_seconds=5)
    assert (tree.folder / "keeper_left").read_text().startswith("True")


def test_a_keeper_that_hangs_does_not_outlive_the_supervisor(host: HostMaker) -> None:
    """Grandchildren go at once, from its signal handler; it has a last while itself."""
    tree = host(pools=[["a", 1, {}]], constants={"supervisor.child.ORPHAN_SECONDS": 0.5}).started()
    tree.put("grandchild stay sleep 600")
    wait_until(lambda: (tree.folder / "grandchild").exists())
    (tree.folder / "keeper_hang").touch()
    keeper = tree.pid_of("keeper")
    beats = next(slot for slot in tree.slots() if slot.name == "keeper")
    wait_until(lambda: time.monotonic_ns() - beats.beat_ns > 600_000_000)
    tree.send(signal.SIGKILL)
    tree.wait()
    wait_until(lambda: tree.all_processes() == [keeper], timeout_seconds=5)
    wait_until(lambda: tree.all_processes() == [], timeout_seconds=5)
    assert not (tree.folder / "keeper_left").exists()


def test_the_next_start_sweeps_what_a_crash_of_supervisor_and_keeper_left(
    host: HostMaker,
) -> None:
    """An executed grandchild in a session of its own is found by the instance it carries."""
    tree = host(pools=[["a", 1, {}]]).started()
    tree.put("exec sleep 600")
    wait_until(lambda: (tree.folder / "grandchild").exists())
    grandchild = int((tree.folder / "grandchild").read_text())
    keeper = tree.pid_of("keeper")
    os.kill(tree.pid, signal.SIGSTOP)  # else it would replace the keeper
    os.kill(keeper, signal.SIGKILL)
    tree.send(signal.SIGKILL)
    tree.wait()
    assert alive(grandchild)
    tree.put("sleep 0")
    tree.start()
    wait_until(lambda: (tree.folder / "swept").exists())
    wait_until(lambda: not alive(grandchild))
    wait_until(lambda: tree.names("done") == [2])
    assert tree.stop() == 0


def test_the_sweep_finds_a_fork_whose_worker_is_gone(host: HostMaker) -> None:
    """Its group has no leader any more; the title it inherited names it."""
    tree = host(pools=[["a", 1, {}]]).started()
    tree.put("grandchild stay sleep 600")
    wait_until(lambda: (tree.folder / "grandchild").exists())
    grandchild = int((tree.folder / "grandchild").read_text())
    worker = tree.workers()["a/0"]
    os.kill(tree.pid, signal.SIGSTOP)
    os.kill(tree.pid_of("keeper"), signal.SIGKILL)
    tree.send(signal.SIGKILL)
    tree.wait()
    wait_until(lambda: tree.all_processes() == [grandchild])
    wait_until(lambda: not Path(f"/proc/{worker}").exists(), what="the leader is reaped")
    tree.start()
    wait_until(lambda: not alive(grandchild))
    wait_until(lambda: (tree.folder / "swept").exists())
    assert int((tree.folder / "swept").read_text()) >= 1
    wait_until(tree.workers)
    assert tree.stop() == 0


def test_the_records_of_a_crashed_run_are_kept_for_the_next(host: HostMaker) -> None:
    """After a SIGKILL of everyone one can read which job was running."""
    from supervisor.slots import SlotTable, previous_slots

    tree = host(pools=[["a", 1, {}]]).started()
    (job,) = tree.put("sleep 600")
    wait_until(lambda: tree.running(job))
    tree.send(signal.SIGKILL)
    tree.wait()
    wait_until(lambda: tree.all_processes() == [])
    tree.started()
    (path,) = previous_slots(tree.folder / "tree.slots")
    left = SlotTable.attach(path)
    assert [slot.job for slot in left.slots if slot.batch().running is not None] == [job]
    left.close()
    assert tree.stop() == 0


def test_descriptors_do_not_grow_with_restarts(host: HostMaker) -> None:
    """After 50 deaths the supervisor has as many descriptors as before, and no zombie."""
    tree = host(pools=[["a", 2, {"on_crash_loop": "stay"}]],
                constants={"supervisor.policy.INTENSITY_MIN": 1000,
                           "supervisor.policy.BACKOFF_CAP_SECONDS": 0.001}).started()  # fmt: skip

    def descriptors() -> int:
        return len(os.listdir(f"/proc/{tree.pid}/fd"))

    before = min(descriptors() for _ in range(50))  # some are open for a moment only
    for number in range(50):
        pid = wait_until(lambda: min(tree.workers().values(), default=0))
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda n=number: len(tree.deaths()) > n)
    wait_until(lambda: len(tree.workers()) == 2)
    wait_until(lambda: tree.table.pools["a"].restarts == 50)
    wait_until(lambda: descriptors() == before)
    children = Path(f"/proc/{tree.pid}/task/{tree.pid}/children").read_text().split()
    assert len(children) == 3
    assert tree.stop() == 0


def test_a_child_keeps_no_descriptor_of_the_supervisor(host: HostMaker) -> None:
    """Neither the instance lock nor pidfds, epoll or siblings' pipes are open in a worker."""
    tree = host(pools=[["a", 4, {}]]).started()
    lock = str(tree.folder / "lock")
    for pid in (*tree.workers().values(), tree.pid_of("keeper")):
        links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        assert lock not in links
        assert not [link for link in links if "pidfd" in link or "eventpoll" in link]
        # its own: two of multiprocessing, two to wake it, one for news
        assert sum(link.startswith("pipe:") for link in links) <= 6
    assert os.readlink(f"/proc/{tree.pid}/fd/{_fd_of(tree.pid, lock)}") == lock
    assert tree.stop() == 0


def _fd_of(pid: int, path: str) -> str:
    return next(
        fd for fd in os.listdir(f"/proc/{pid}/fd") if os.readlink(f"/proc/{pid}/fd/{fd}") == path
    )


def test_one_bad_pool_does_not_stop_another(host: HostMaker) -> None:
    """While every process of one pool dies at once, the other keeps working."""
    tree = host(pools=[["good", 1, {}], ["bad", 1, {}]]).started()
    os.kill(tree.workers("bad")["bad/0"], signal.SIGKILL)
    tree.put(*["sleep 0.01"] * 20)
    wait_until(lambda: len(tree.names("done")) == 20)
    wait_until(lambda: tree.workers("bad"))
    assert tree.stop() == 0


def test_the_keeper_is_replaced_within_a_second_and_workers_do_not_notice(
    host: HostMaker,
) -> None:
    """A dead keeper costs no worker; deaths told before are found by the next one."""
    tree = host().started()
    workers, keeper = tree.workers(), tree.pid_of("keeper")
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: tree.pid_of("keeper") not in (0, keeper), timeout_seconds=1)
    assert tree.workers() == workers
    assert tree.table.pools["@keeper"].exits(code_of(Cause.SIGNAL)) == 1
    assert tree.stop() == 0
