"""Replacement one by one: reloads and recycling."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing

import pytest

from supervisor import asking
from supervisor.slots import SlotTable
from tests.conftest import wait_until
from tests.process.conftest import HostMaker
from tests.process.tree import Host, alive

FAST = {"supervisor.policy.BACKOFF_BASE_SECONDS": 0.02}


def reload(tree: Host, outcome: str = "reload_finished") -> None:
    """Reload, and wait for how it ends."""
    before = len(tree.events(outcome))
    tree.send(signal.SIGHUP)
    wait_until(lambda: len(tree.events(outcome)) > before, what=outcome)


def wish(tree: Host, name: str) -> None:
    """Ask for a worker to be replaced, as `herdsman workers restart` does."""
    with closing(SlotTable.attach(tree.folder / "tree.slots")) as table:
        (slot,) = [one for one in table.live() if one.name == name and not one.retire]
        asking.ask_slot(table, slot)


def test_a_reload_replaces_every_process_and_interrupts_no_job(host: HostMaker) -> None:
    """The old worker finishes its job while the new one works already."""
    tree = host(web=True).started()
    old = {*tree.workers().values(), tree.pid_of("keeper"), tree.pid_of("web")}
    (job,) = tree.put("sleep 1.5")
    wait_until(lambda: tree.running(job))
    tree.configure(version=" new")
    reload(tree)
    (quick,) = tree.put("sleep 0")
    wait_until(lambda: quick in tree.names("done"))
    assert (tree.folder / "done" / f"{quick:06}").read_text().endswith("new")
    wait_until(lambda: job in tree.names("done"))
    wait_until(lambda: not old & set(tree.all_processes()))
    assert len(tree.workers()) == 2
    wait_until(lambda: tree.table.reload_ok)
    wait_until(lambda: {death["cause"] for death in tree.deaths()} == {"recycle"})
    assert tree.stop() == 0


def test_a_reload_keeps_the_old_until_the_new_is_ready(host: HostMaker) -> None:
    """At no moment is a pool smaller than configured."""
    tree = host().started()
    old = set(tree.workers().values())
    (tree.folder / "boot").write_text("sleep 0.5")
    tree.send(signal.SIGHUP)
    wait_until(lambda: tree.boots() == 3)
    seen = []

    def all_new() -> bool:
        pids = {slot.pid for slot in tree.slots() if slot.kind == 0 and slot.ready_ns}
        seen.append(len(pids))
        return not pids & old

    wait_until(all_new)
    assert min(seen) >= 2
    assert tree.stop() == 0


def test_a_bad_configuration_is_refused_in_a_throwaway_child(host: HostMaker) -> None:
    """Whatever its check does, the running tree is not touched."""
    tree = host().started()
    workers = tree.workers()
    for line in ("exit_now 1", "kill_self 9", "raise MemoryError"):
        (tree.folder / "validate").write_text(line)
        reload(tree, "reload_failed")
        assert tree.workers() == workers, line
        wait_until(lambda: not tree.table.reload_ok)
    (tree.folder / "validate").unlink()
    reload(tree)
    wait_until(lambda: tree.table.reload_ok)
    assert tree.stop() == 0


def test_a_check_that_hangs_is_ended(host: HostMaker) -> None:
    """It has the boot limit."""
    tree = host(boot_seconds=0.5).started()
    (tree.folder / "validate").write_text("sleep 600")
    reload(tree, "reload_failed")
    assert "in time" in tree.events("reload_failed")[0]["why"]
    assert tree.stop() == 0


def test_what_a_check_started_is_found_after_a_crash_in_the_middle_of_it(host: HostMaker) -> None:
    """It carries the instance, like what a worker executes; the next start ends it."""
    tree = host(pools=[["a", 1, {}]]).started()
    (tree.folder / "validate").write_text("exec sleep 600")
    tree.send(signal.SIGHUP)
    wait_until(lambda: (tree.folder / "grandchild").exists())
    program = int((tree.folder / "grandchild").read_text())
    tree.send(signal.SIGKILL)
    tree.wait()
    wait_until(lambda: tree.all_processes() == [program])
    tree.started()
    assert not alive(program)
    assert tree.stop() == 0


def test_a_reload_that_cannot_boot_is_called_off(host: HostMaker) -> None:
    """Three successors fail, the old process stays, and the next reload works."""
    tree = host(constants=FAST).started()
    workers = tree.workers()
    (tree.folder / "boot").write_text("raise")
    reload(tree, "reload_failed")
    assert tree.workers() == workers
    assert tree.boots() == 5
    wait_until(lambda: not tree.table.reload_ok)
    (tree.folder / "boot").unlink()
    reload(tree)
    assert not set(workers.values()) & set(tree.workers().values())
    assert tree.stop() == 0


def test_a_reload_adds_removes_and_resizes_pools(host: HostMaker) -> None:
    """Pools follow the configuration."""
    tree = host(pools=[["a", 2, {}], ["b", 1, {}]]).started()
    tree.configure(pools=[["a", 1, {}], ["c", 2, {}]])
    reload(tree)
    wait_until(lambda: set(tree.workers()) == {"a/0", "c/0", "c/1"})
    wait_until(lambda: len(tree.slots()) == 4)
    pools = tree.table.pools
    assert (pools["b"].active, pools["b"].processes) == (0, 0)
    assert pools["c"].processes == 2
    assert tree.stop() == 0


def test_reload_after_reload_leaks_no_descriptor_and_no_thread(host: HostMaker) -> None:
    """As many after as before; a leak of one would be ten by then."""
    tree = host(pools=[["a", 1, {}]]).started()
    reload(tree)
    wait_until(lambda: len(tree.slots()) == 2)
    before = [len(os.listdir(f"/proc/{tree.pid}/{what}")) for what in ("fd", "task")]
    for _ in range(10):
        reload(tree)
    wait_until(lambda: len(tree.slots()) == 2)
    after = [len(os.listdir(f"/proc/{tree.pid}/{what}")) for what in ("fd", "task")]
    assert after == before
    assert tree.stop() == 0


def test_workers_are_recycled_one_at_a_time(host: HostMaker) -> None:
    """Equal jobs, equal limits: the pool never shrinks, and no job is lost."""
    tree = host(pools=[["a", 2, {"max_jobs": 10}]]).started()
    jobs = tree.put(*["sleep 0.005"] * 60)
    wait_until(lambda: tree.names("done") == jobs)
    wait_until(lambda: tree.events("worker_recycled"))
    running = 0
    for event in tree.events():
        running += event["event"] == "worker_started" and event["process"].startswith("a/")
        running -= event["event"] == "worker_exited" and event["process"].startswith("a/")
        assert running <= 3
    wait_until(lambda: {death["cause"] for death in tree.deaths()} == {"recycle"})
    assert tree.table.pools["a"].failures == 0
    assert tree.stop() == 0


@pytest.mark.parametrize("processes", [2, 4])  # with a successor beside it, and without
def test_while_an_old_worker_finishes_its_job_its_pool_alone_waits(
    host: HostMaker, processes: int
) -> None:
    """One process more or less at most, however long the jobs; the rest of the tree goes on."""
    young = {"max_age_seconds": 0.2}
    tree = host(pools=[["a", processes, young], ["b", processes, young]]).started()
    (job,) = tree.put("until gate")
    wait_until(lambda: (slot := tree.running(job)) and slot.retire)
    slot = tree.running(job)
    waiting, other = ("a/", "b/") if slot.name.startswith("a") else ("b/", "a/")

    def recycled(pool: str) -> int:
        names = [event["process"] for event in tree.events("worker_recycled")]
        return sum(name.startswith(pool) for name in names)

    before, others = recycled(waiting), recycled(other)
    wait_until(lambda: recycled(other) >= others + 2 * processes)
    assert recycled(waiting) == before
    reload(tree)
    assert tree.running(job)
    (tree.folder / "gate").touch()
    wait_until(lambda: recycled(waiting) > before)
    assert tree.stop() == 0


def test_a_big_pool_never_lacks_more_than_one_worker(host: HostMaker) -> None:
    """The next has its turn when the successor of the last has booted."""
    tree = host(pools=[["a", 4, {"max_age_seconds": 0.2}]]).started()
    (tree.folder / "boot").write_text("sleep 0.2")
    at_work: list[int] = []

    def look() -> list[tuple[int, int, bool]]:
        slots = [slot for slot in tree.slots() if slot.name.startswith("a/")]
        return [(slot.index, slot.epoch, slot.ready_ns > 0 and not slot.retire) for slot in slots]

    def recycled_often() -> bool:
        seen = look()
        if seen == look():  # else they changed while we looked from one to the next
            at_work.append(sum(working for *_, working in seen))
        return len(tree.events("worker_recycled")) >= 8

    wait_until(recycled_often)
    assert min(at_work) == 3
    assert tree.stop() == 0


def test_a_big_pool_whose_successors_cannot_boot_keeps_the_others(host: HostMaker) -> None:
    """One leaves in vain; from then on a successor is to have booted first."""
    tree = host(pools=[["a", 4, {"max_age_seconds": 0.2}]], constants=FAST).started()
    before = tree.workers()
    (tree.folder / "boot").write_text("exit 3")

    def exited() -> list[str]:
        return [one["cause"] for one in tree.events("worker_exited")]

    wait_until(lambda: exited().count("boot") >= 6)
    assert exited().count("recycle") == 1
    assert len(before.items() & tree.workers().items()) == 3
    (tree.folder / "boot").unlink()
    wait_until(lambda: not before.items() & tree.workers().items() and len(tree.workers()) == 4)
    assert tree.stop() == 0


def test_a_pool_does_not_grow_while_its_old_workers_are_busy(host: HostMaker) -> None:
    """Each new one takes a long job, and is over its memory at once: it waits for the old."""
    tree = host(pools=[["a", 2, {}]]).started()
    used = wait_until(lambda: min(slot.rss_bytes for slot in tree.slots()))
    tree.configure(pools=[["a", 2, {"max_rss_bytes": used * 2 // 3}]])
    tree.put(*["until gate"] * 8)
    wait_until(lambda: len(tree.names("claimed")) == 2)
    tree.send(signal.SIGHUP)
    wait_until(lambda: len(tree.names("claimed")) == 4, what="the reload doubles it")

    def all_are_over() -> bool:
        workers = [slot for slot in tree.slots() if slot.name.startswith("a/")]
        return len(workers) == 4 and all(slot.rss_bytes > used * 2 // 3 for slot in workers)

    wait_until(all_are_over)
    for looks in range(1, 6):  # at each the supervisor takes a turn
        tree.send(signal.SIGUSR2)
        wait_until(lambda looks=looks: keepers_shown(tree) >= looks)
    assert len(tree.names("claimed")) == 4
    assert tree.events("worker_recycled") == []
    (tree.folder / "gate").touch()
    wait_until(lambda: len(tree.names("done")) == 8)
    wait_until(lambda: tree.events("worker_recycled"))
    assert tree.stop() == 0


def keepers_shown(tree: Host) -> int:
    """Return how often the keeper has answered a question."""
    return sum(one["process"] == "keeper" for one in tree.events("process_stacks"))


def test_a_successor_that_cannot_be_started_is_tried_again_later(host: HostMaker) -> None:
    """Once a second, not at each turn; and it is not said that the worker was recycled."""
    retry = {"supervisor.roster.START_RETRY_NS": 200_000_000}
    tree = host(pools=[["a", 1, {"max_age_seconds": 0.1}]], capacity=6, constants=retry).started()
    before = tree.workers()

    def times() -> int:
        return len(tree.events("worker_start_failed"))

    wait_until(times)
    began, first = time.monotonic(), times()
    wait_until(lambda: times() >= first + 5)
    assert time.monotonic() - began > 0.5
    assert tree.events("worker_recycled") == []
    assert tree.workers() == before
    assert tree.stop() == 0


def test_what_an_operator_wishes_does_not_wait_for_a_long_job(host: HostMaker) -> None:
    """In a small pool, whose other worker is leaving."""
    tree = host(pools=[["a", 2, {}]]).started()
    (job,) = tree.put("until gate")
    busy = wait_until(lambda: tree.running(job)).name
    (idle,) = {"a/0", "a/1"} - {busy}
    for name in (busy, idle):
        wish(tree, name)
        wait_until(lambda name=name: len(tree.events("worker_recycled")) == 1 + (name == idle))
    wait_until(lambda: tree.table.pools["a"].ready == 2 and len(tree.slots()) == 4)
    assert tree.running(job)
    (tree.folder / "gate").touch()
    assert tree.stop() == 0


def test_a_worker_over_its_age_is_recycled(host: HostMaker) -> None:
    """Age counts from the fork."""
    tree = host(pools=[["a", 1, {"max_age_seconds": 0.5}]]).started()
    pid = tree.workers()["a/0"]
    wait_until(lambda: tree.workers().get("a/0", pid) != pid)
    assert "s old" in tree.events("worker_recycled")[0]["why"]
    assert tree.stop() == 0
