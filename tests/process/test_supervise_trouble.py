"""A host that refuses things for a while, and signals that meet each other."""

from __future__ import annotations

import os
import resource
import signal
import socket
from contextlib import suppress
from pathlib import Path

from supervisor.slot import Kind
from tests.conftest import wait_until
from tests.process.conftest import HostMaker

FAST = {"supervisor.policy.BACKOFF_BASE_SECONDS": 0.02, "supervisor.judgement.ABRT_SECONDS": 0.2}


def take_descriptors(pid: int) -> int:
    """Let a process open no descriptor until it closes one; return the limit before."""

    def asleep() -> str:
        """Say how often it has gone to sleep, while it sleeps; some are open for a moment only."""
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        told = dict(line.split(":\t", 1) for line in lines)
        return told["voluntary_ctxt_switches"] if told["State"].startswith("S") else ""

    def taken() -> set[int] | None:
        before = asleep()
        found = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
        return found if before and asleep() == before else None

    open_now = wait_until(taken, poll_seconds=0.001)
    free = next(number for number in range(len(open_now) + 1) if number not in open_now)
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, hard))
    return soft


def test_a_supervisor_out_of_descriptors_goes_on_once_there_are_some(host: HostMaker) -> None:
    """It says so once, keeps who lives, and replaces who died when it can."""
    tree = host().started()
    victim = tree.workers()["a/0"]
    sibling = tree.workers()["a/1"]
    before = take_descriptors(tree.pid)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: tree.events("supervisor_trouble"))
    (job,) = tree.put("sleep 0.6")
    wait_until(lambda: tree.names("done") == [job], what="the sibling works on")
    resource.prlimit(tree.pid, resource.RLIMIT_NOFILE, (before, before))
    wait_until(lambda: tree.workers().get("a/0", victim) != victim)
    assert tree.workers()["a/1"] == sibling
    assert len(tree.events("supervisor_trouble")) == 1
    assert tree.stop() == 0


def test_a_supervisor_that_can_do_nothing_for_long_gives_up_and_leaves_nobody(
    host: HostMaker,
) -> None:
    """70, which its last line says too."""
    tree = host(constants={"supervisor.supervise.TROUBLE_SECONDS_MAX": 0.5}).started()
    take_descriptors(tree.pid)
    os.kill(tree.workers()["a/0"], signal.SIGKILL)
    assert tree.wait() == 70
    assert [event["exit_code"] for event in tree.events("supervisor_stopped")] == [70]
    assert [event["exit_code"] for event in tree.events("supervisor_gave_up")] == [70]
    wait_until(lambda: tree.all_processes() == [])


def test_workers_that_die_without_a_keeper_leave_room_for_one(host: HostMaker) -> None:
    """It alone frees the records of the dead, so it must come back when all the others are full."""
    quick = {
        "supervisor.roster.START_RETRY_NS": 50_000_000,
        "supervisor.policy.BACKOFF_CAP_SECONDS": 0.5,
        **FAST,
    }
    tree = host(pools=[["a", 1, {}]], capacity=6, constants=quick).started()
    os.kill(tree.pid_of("keeper"), signal.SIGSTOP)

    def kill(kind: Kind) -> None:
        for pid in [slot.pid for slot in tree.slots() if slot.kind is kind]:
            if pid:  # else it is being started
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def refused() -> bool:
        kill(Kind.WORKER)
        return "no free slot" in str(tree.events("worker_start_failed"))

    def keeper_died_often() -> bool:
        kill(Kind.KEEPER)
        kill(Kind.WORKER)
        return sum(event["process"] == "keeper" for event in tree.events("worker_exited")) >= 6

    wait_until(refused)
    wait_until(keeper_died_often)
    wait_until(lambda: tree.pid_of("keeper") and tree.workers())
    assert tree.stop() == 0


def test_a_term_while_a_reload_is_tried_ends_the_reload_too(
    host: HostMaker, tmp_path: Path
) -> None:
    """Nothing is started for it, and READY is not said after STOPPING."""
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(address))
        server.settimeout(10)
        tree = host(constants=FAST)
        (tree.folder / "validate").write_text("later 0.5 exit_now 3")  # it fails, meanwhile
        tree.start(NOTIFY_SOCKET=str(address))
        wait_until(lambda: len(tree.workers()) == 2)
        boots = tree.boots()
        tree.put("sleep 1.5")
        wait_until(lambda: tree.running(1))
        tree.send(signal.SIGHUP)
        wait_until(lambda: tree.events("reload_started"))
        tree.send(signal.SIGTERM)
        assert tree.wait() == 0
        server.setblocking(False)
        heard = []
        while True:
            try:
                heard.append(server.recv(4096).decode())
            except BlockingIOError:
                break
    stopping = next(at for at, one in enumerate(heard) if one.startswith("STOPPING=1"))
    assert [one for one in heard[stopping:] if "READY=1" in one] == []
    assert tree.events("reload_finished") == tree.events("reload_failed") == []
    assert tree.boots() == boots
    assert tree.names("done") == [1]


def test_each_pool_has_its_own_boot_limit(host: HostMaker) -> None:
    """The short one of a pool is not stretched by the long one of another."""
    pools = [["a", 1, {"boot_seconds": 0.3}], ["b", 1, {"boot_seconds": 60}]]
    tree = host(pools=pools, constants=FAST)
    (tree.folder / "boot").write_text("sleep 600")
    tree.start()
    death = wait_until(lambda: tree.deaths())[0]
    assert (death["name"], death["cause"]) == ("a/0", "boot")
    assert {one["name"] for one in tree.deaths()} == {"a/0"}
    assert [slot.name for slot in tree.slots() if slot.name == "b/0"] == ["b/0"]


def test_what_cannot_be_buried_yet_holds_up_no_judgement(host: HostMaker) -> None:
    """A job past its deadline is ended on time while another death waits for descriptors."""
    tree = host(hard_seconds=0.3, constants=FAST).started()
    before = take_descriptors(tree.pid)
    os.kill(tree.workers()["a/0"], signal.SIGKILL)
    wait_until(lambda: tree.events("supervisor_trouble"))
    tree.put("deaf 600")
    wait_until(lambda: [one["signal"] for one in tree.events("worker_signalled")] == ["SIGABRT"])
    resource.prlimit(tree.pid, resource.RLIMIT_NOFILE, (before, before))
    wait_until(lambda: sorted(one["cause"] for one in tree.deaths()) == ["signal", "timeout"])
    assert tree.stop() == 0
