"""What each signal does, and the timeline of a shutdown."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

from tests.conftest import wait_until
from tests.process.conftest import HostMaker
from tests.process.tree import Host, alive

# The shutdown timeline, ten times as fast.
FAST = {"supervisor.judgement.QUIT_SECONDS": 0.3, "supervisor.judgement.ABRT_SECONDS": 0.2}


def running(tree: Host, *lines: str) -> list[int]:
    """Put jobs and wait until all of them run."""
    jobs = tree.put(*lines)
    wait_until(lambda: all(tree.running(job) for job in jobs))
    return jobs


def test_two_terms_are_one_drain(host: HostMaker) -> None:
    """A second TERM changes nothing: each worker got one, and finishes its job."""
    tree = host().started()
    jobs = running(tree, "count_terms 0.6", "sleep 0.6")
    wait_until(lambda: (tree.folder / "counting").exists())
    for _ in range(5):
        tree.send(signal.SIGTERM)
        time.sleep(0.02)  # apart, so that they are not merged by the kernel
    assert tree.wait() == 0
    assert tree.names("done") == jobs
    assert len(tree.events("supervisor_draining")) == 1
    assert (tree.folder / "terms").read_text() == "1"


def test_a_term_to_every_process_completes_each_job_once(host: HostMaker) -> None:
    """Platforms signal the whole group: workers finish, the keeper stays until all is settled."""
    tree = host(web=True).started()
    jobs = running(tree, "sleep 0.4", "sleep 0.4")
    keeper, web = tree.pid_of("keeper"), tree.pid_of("web")
    for pid in (keeper, web, *tree.workers().values(), tree.pid):
        os.kill(pid, signal.SIGTERM)
    assert tree.wait() == 0
    assert tree.names("done") == jobs
    assert [death["cause"] for death in tree.deaths()] == ["drain", "drain"]
    assert tree.table.pools["@keeper"].restarts == 0


def test_term_to_one_worker_replaces_that_worker_only(host: HostMaker) -> None:
    """It finishes its job and leaves; its siblings and the supervisor do not notice."""
    tree = host().started()
    (job,) = running(tree, "sleep 0.3")
    name, pid = tree.running(job).name, tree.running(job).pid
    siblings = {one: p for one, p in tree.workers().items() if one != name}
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: tree.workers().get(name, pid) != pid)
    assert tree.names("done") == [job]
    assert siblings.items() <= tree.workers().items()
    assert not tree.table.draining
    assert tree.stop() == 0


def test_term_during_boot_is_not_lost(host: HostMaker) -> None:
    """A worker that is still booting never claims, and does not hold up the shutdown."""
    tree = host(constants=FAST | {"supervisor.policy.QUIT_SECONDS": 0.3})
    (tree.folder / "boot").write_text("sleep 600")
    tree.put("sleep 0")
    tree.start()
    wait_until(lambda: tree.boots() == 2)
    before = time.monotonic()
    assert tree.stop() == 0
    assert time.monotonic() - before < 4
    assert tree.names("done") == tree.names("claimed") == []


def test_jobs_over_the_grace_are_interrupted_not_killed(host: HostMaker) -> None:
    """QUIT raises in the job, which goes back uncharged; nothing was killed, so exit 0."""
    tree = host(grace_seconds=0.3, constants=FAST).started()
    jobs = running(tree, "sleep 600", "sleep 600")
    assert tree.stop() == 0
    assert tree.names("JobInterrupted") == jobs
    assert [death["signal"] for death in tree.deaths()] == [0, 0]


def test_a_job_deaf_to_interruption_is_killed_and_the_exit_code_is_75(host: HostMaker) -> None:
    """ABRT leaves a stack that names the line; cause drain, so that no attempt is charged."""
    tree = host(grace_seconds=0.2, constants=FAST).started()
    (job,) = running(tree, "deaf 600")
    assert tree.stop() == 75
    death = next(death for death in tree.deaths() if death["job"] == job)
    assert death["cause"] == "drain"
    assert death["signal"] == signal.SIGABRT
    assert "in _deaf" in death["stack"]
    assert tree.all_processes() == []


def test_a_stopped_worker_is_killed_at_the_deadline(host: HostMaker) -> None:
    """SIGSTOP defers QUIT and ABRT for ever; KILL still ends the shutdown."""
    tree = host(grace_seconds=0.2, constants=FAST).started()
    (job,) = running(tree, "kill_self 19")
    assert tree.stop() == 75
    death = next(death for death in tree.deaths() if death["job"] == job)
    assert (death["cause"], death["signal"]) == ("drain", signal.SIGKILL)


def test_a_job_that_leaves_with_code_0_during_the_drain_is_a_crash(host: HostMaker) -> None:
    """The drain was asked for, this end was not: its job is not settled."""
    tree = host(pools=[["a", 1, {}]]).started()
    (job,) = running(tree, "later 0.3 exit_now 0")
    assert tree.stop() == 0
    (death,) = tree.deaths()
    assert (death["job"], death["cause"], death["exit_code"]) == (job, "exit", 0)


def test_quit_cancels_at_once(host: HostMaker) -> None:
    """QUIT does not wait for the grace."""
    tree = host(grace_seconds=600).started()
    jobs = running(tree, "sleep 600", "sleep 600")
    tree.send(signal.SIGQUIT)
    assert tree.wait() == 0
    assert tree.names("JobInterrupted") == jobs


def test_the_second_interrupt_cancels_and_the_third_kills(host: HostMaker) -> None:
    """The first drains; presses within a second of each other count once."""
    tree = host(grace_seconds=600).started()
    running(tree, "deaf 600", "sleep 600")
    tree.send(signal.SIGINT)
    wait_until(lambda: tree.events("supervisor_draining"))
    tree.send(signal.SIGINT)
    wait_until(lambda: len(tree.events("signal_received")) == 2)
    assert tree.names("JobInterrupted") == []
    time.sleep(1.0)  # the rule is about time: a second after the first press
    tree.send(signal.SIGINT)
    wait_until(lambda: tree.names("JobInterrupted"))
    time.sleep(1.0)
    tree.send(signal.SIGINT)
    assert tree.wait(5) == 75


def test_a_worker_ignores_int_and_hup(host: HostMaker) -> None:
    """They are meant for the supervisor; a job goes on, and executed programs get the default."""
    tree = host(pools=[["a", 1, {}]]).started()
    (job,) = running(tree, "sleep 0.5")
    pid = tree.running(job).pid
    for _ in range(3):
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGHUP)
    wait_until(lambda: tree.names("done") == [job])
    assert tree.workers() == {"a/0": pid}
    ignored = int(_status(pid, "SigIgn"), 16) & 0x7FFFFFFF  # the others are the C library's
    # What Python itself ignores, and resets in programs it executes.
    assert ignored == 1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)
    assert int(_status(pid, "SigBlk"), 16) == 0
    assert tree.stop() == 0


def _status(pid: int, field: str) -> str:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return line.split()[1]
    raise AssertionError(field)


def test_alarm_raises_the_soft_timeout_in_the_job(host: HostMaker) -> None:
    """The worker survives its job's soft timeout, and takes the next."""
    tree = host(pools=[["a", 1, {}]], soft_seconds=0.2).started()
    first, second = tree.put("sleep 600", "sleep 0")
    wait_until(lambda: tree.names("done") == [second])
    assert tree.names("SoftTimeout") == [first]
    assert tree.boots() == 1
    assert tree.stop() == 0


def test_a_job_that_takes_our_signals_gives_them_back(host: HostMaker) -> None:
    """Handlers, mask and wake-up descriptor are restored after each job, and counted."""
    tree = host(pools=[["a", 1, {}]]).started()
    tree.put("steal_signals")
    wait_until(lambda: tree.names("done") == [1])
    slot = next(slot for slot in tree.slots() if slot.name == "a/0")
    wait_until(lambda: slot.rearmed == 3)
    before = time.monotonic()
    assert tree.stop() == 0
    assert time.monotonic() - before < 3


def test_usr1_reopens_the_logs_of_everyone(host: HostMaker) -> None:
    """The supervisor reopens its own and relays."""
    tree = host().started()
    tree.send(signal.SIGUSR1)
    reopened = {"a-0", "a-1", "supervisor"}
    wait_until(lambda: {path.name for path in (tree.folder / "reopened").iterdir()} == reopened)
    assert tree.stop() == 0


def test_ttin_and_ttou_change_the_size_of_the_pool(host: HostMaker) -> None:
    """One more, one less, never none; leaving by scale is no crash, however often."""
    tree = host(pools=[["a", 1, {}]]).started()
    for _ in range(7):  # more than the crashes that a pool is allowed in a minute
        tree.send(signal.SIGTTIN)
        wait_until(lambda: set(tree.workers()) == {"a/0", "a/1"})
        tree.send(signal.SIGTTOU)
        wait_until(lambda: len(tree.slots()) == 2)
    tree.send(signal.SIGTTOU)
    wait_until(lambda: len(tree.events("signal_received")) == 15)
    assert set(tree.workers()) == {"a/0"}
    wait_until(lambda: [death["cause"] for death in tree.deaths()] == ["scale"] * 7)
    pool = tree.table.pools["a"]
    assert (pool.processes, pool.failures, pool.crash_loop) == (1, 0, 0)
    assert tree.stop() == 0


def test_a_kill_and_a_hup_during_the_drain_start_nothing(host: HostMaker) -> None:
    """The stopping flag wins over restart and reload."""
    tree = host().started()
    first, second = running(tree, "sleep 600", "sleep 1")
    victim = tree.running(first).pid
    tree.send(signal.SIGTERM)
    wait_until(lambda: tree.events("supervisor_draining"))
    os.kill(victim, signal.SIGKILL)
    tree.send(signal.SIGHUP)
    assert tree.wait() == 0
    assert tree.boots() == 2
    assert tree.names("done") == [second]
    assert tree.events("reload_started") == []
    death = next(death for death in tree.deaths() if death["pid"] == victim)
    assert death["cause"] == "signal", "killed by a stranger, not by our timeline"


def test_the_keeper_is_replaced_even_while_draining(host: HostMaker) -> None:
    """It renews leases until the last job is settled."""
    tree = host().started()
    jobs = running(tree, "sleep 1", "sleep 1")
    tree.send(signal.SIGTERM)
    wait_until(lambda: tree.events("supervisor_draining"))
    keeper = tree.pid_of("keeper")
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: tree.pid_of("keeper") not in (0, keeper))
    assert tree.wait() == 0
    assert tree.names("done") == jobs
    assert len(tree.deaths()) == 2


def test_hup_of_a_closed_terminal_drains(host: HostMaker) -> None:
    """With a controlling terminal HUP means that the terminal went away, not a reload."""
    tree = host(pools=[["a", 1, {}]])
    ours, theirs = os.openpty()
    tree.start(terminal=theirs)
    os.close(theirs)
    wait_until(tree.workers)
    (job,) = running(tree, "sleep 0.3")
    os.close(ours)
    assert tree.wait() == 0
    assert tree.names("done") == [job]
    assert tree.events("reload_started") == []


def test_systemd_is_told_of_ready_status_reload_and_stop(host: HostMaker, tmp_path: Path) -> None:
    """READY comes with the first worker; RELOADING carries its time in the same datagram."""
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(address))
        server.settimeout(10)
        tree = host(grace_seconds=0.5, constants=FAST)
        tree.start(NOTIFY_SOCKET=str(address), WATCHDOG_USEC="400000")
        heard: list[str] = []

        def hear(wanted: str) -> str:
            while True:
                heard.append(server.recv(4096).decode())
                if heard[-1].startswith(wanted):
                    return heard[-1]

        assert "READY=1" in hear("READY=1")
        assert not [one for one in heard if one.startswith("STOPPING")]
        hear("WATCHDOG=1")
        hear("WATCHDOG=1")
        tree.send(signal.SIGHUP)
        assert "MONOTONIC_USEC=" in hear("RELOADING=1")
        hear("READY=1")
        wait_until(lambda: tree.pid_of("keeper") and len(tree.workers()) == 2)
        (job,) = tree.put("environment")
        wait_until(lambda: tree.names("done") == [job])
        environment = json.loads((tree.folder / "environment").read_text())
        assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC"} & set(environment)
        assert environment["HERDSMAN_INSTANCE_UUID"] == tree.table.instance_uuid
        running(tree, "sleep 600")
        tree.send(signal.SIGTERM)
        hear("STOPPING=1")
        hear("STATUS=draining: 1 jobs left")
        assert tree.wait() == 0


def test_what_a_job_leaves_behind_does_not_hold_up_the_end(host: HostMaker) -> None:
    """A thread that sleeps for ever is not joined; a closed output harms no log and no exit."""
    tree = host(pools=[["a", 1, {}]]).started()
    tree.put("leave_thread", "close_output", "sleep 0")
    wait_until(lambda: tree.names("done") == [1, 2, 3])
    before = time.monotonic()
    assert tree.stop() == 0
    assert time.monotonic() - before < 3
    assert tree.boots() == 1


def test_a_grandchild_in_the_group_goes_with_its_worker(host: HostMaker) -> None:
    """What a killed worker forked is killed, counted and reaped."""
    tree = host(pools=[["a", 1, {}]]).started()
    running(tree, "grandchild stay sleep 600")
    wait_until(lambda: (tree.folder / "grandchild").exists())
    grandchild = int((tree.folder / "grandchild").read_text())
    pid = tree.workers()["a/0"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{grandchild}").exists())
    assert wait_until(tree.deaths)[0]["leaked"] == 1
    wait_until(lambda: tree.workers().get("a/0", pid) != pid)
    assert tree.stop() == 0


def test_a_grandchild_that_left_the_group_goes_at_shutdown(host: HostMaker) -> None:
    """We adopt what escaped with setsid, and end it with the tree."""
    tree = host(pools=[["a", 1, {}]]).started()
    tree.put("grandchild setsid sleep 0")
    wait_until(lambda: tree.names("done") == [1])
    grandchild = int((tree.folder / "grandchild").read_text())
    assert alive(grandchild)
    assert tree.stop() == 0
    assert not alive(grandchild)


def test_strangers_are_reaped_and_not_mistaken_for_workers(host: HostMaker) -> None:
    """Hundreds of double forks leave no zombie, and change nothing."""
    tree = host(pools=[["a", 1, {}]]).started()
    workers = tree.workers()
    tree.put("double_fork 200")
    wait_until(lambda: tree.names("done") == [1])

    def children() -> int:
        return len(Path(f"/proc/{tree.pid}/task/{tree.pid}/children").read_text().split())

    wait_until(lambda: children() == 2)
    assert tree.workers() == workers
    assert tree.stop() == 0


def test_a_sigchld_from_outside_is_only_a_wake_up(host: HostMaker) -> None:
    """Nothing is believed dead that is not."""
    tree = host().started()
    workers = tree.workers()
    for _ in range(200):
        tree.send(signal.SIGCHLD)
    (job,) = tree.put("sleep 0")
    wait_until(lambda: tree.names("done") == [job])
    assert tree.workers() == workers
    assert tree.stop() == 0


def test_a_signal_to_a_child_that_has_only_just_forked_wakes_nobody_else(host: HostMaker) -> None:
    """A fork hook sleeps while TERM arrives: the child leaves, the supervisor hears nothing."""
    tree = host(pools=[["a", 1, {}]], fork_hook_seconds=0.5)
    tree.start()
    pid = wait_until(
        lambda: next((e["pid"] for e in tree.events("worker_started") if e["process"] == "a/0"), 0)
    )
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not alive(pid))
    wait_until(lambda: tree.workers().get("a/0", pid) != pid)
    assert tree.events("signal_received") == []
    assert not tree.table.draining
    assert tree.stop() == 0


def test_a_supervisor_with_a_second_thread_refuses_to_fork(host: HostMaker) -> None:
    """A lock that the other thread holds at the fork would be held in the child for ever."""
    tree = host(thread=True)
    tree.start()
    assert tree.wait() == 1
    assert "one thread" in tree.output()
    assert tree.boots() == 0
