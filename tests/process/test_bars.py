"""The supervisor under a storm: of kills, of signals, of recycles, and at its own death."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from supervisor.logs import MESSAGE
from supervisor.policy import Cause, code_of
from supervisor.signals import WAKING
from supervisor.slot import Kind, SlotState
from tests.conftest import wait_until
from tests.process.conftest import HostMaker
from tests.process.service import Maker, Service, services
from tests.process.tree import Host

KILLS = 200
SIGNALS = 1_000
LINES = 20
"""Each job's, in the storm of signals."""
RECYCLES = 1_000
GROWTH_KILOBYTES_MAX = 300
"""Of the supervisor, by whatever number of recycles."""

DIES = """
def die():
    note("died", os.getpid(), time.time_ns() // 1000)
    os.kill(os.getpid(), signal.SIGKILL)


ACTIONS["die"] = die
"""
"""The last thing a handler writes down is the instant of its death."""

FAMILY = """
import sys

if "HERDSMAN_INSTANCE_UUID" in os.environ:  # not in the child that only tries the import
    note("child", os.getpid(), subprocess.Popen(["sleep", "600"]).pid)
    while (FOLDER / "slow_boot").exists():
        time.sleep(0.01)


class Blocked:
    def flush(self):
        time.sleep(600)


ACTIONS["block_output"] = lambda: setattr(sys, "stdout", Blocked())
"""
"""Each worker has a child in its group from its boot on."""

TALKS = '''
import logging


def talk(number):
    """Say much, and that with a stack each time."""
    for _ in range(int(number)):
        try:
            raise ValueError("for the stack")
        except ValueError:
            logging.getLogger("talker").warning("talked", exc_info=True)


ACTIONS["talk"] = talk
'''


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Maker]:
    """Return a function that prepares a service; it is ended at the end."""
    with services(tmp_path) as make:
        yield make


@pytest.mark.long
def test_each_of_200_killed_jobs_runs_again_in_under_a_second(service: Maker) -> None:
    """From the instant of the kill to the next start, however often workers have died before.

    So many deaths put the pool into a crash loop, where one process probes for all: it is still
    started at once, because it settles the job of the one before it.
    """
    tree = service(processes=4)
    tree.teach(DIES)
    tree.started()
    queue = tree.queue()
    tree.warm(queue)
    jobs = []
    for _ in range(KILLS):
        job_id = queue.put("once die")
        jobs.append(job_id)
        wait_until(partial(tree.done, job_id), what=f"job {job_id} is done")

    died_us = {int(pid): int(at_us) for pid, at_us in tree.notes("died")}
    assert len(died_us) == KILLS
    killed = {int(job): int(pid) for job, _, pid in reversed(tree.notes("begin"))}
    waits_us = []
    for job_id in jobs:
        assert tree.outcomes(job_id) == ["crashed", "succeeded"]
        waits_us.append(tree.job(job_id).ledger[1].started_us - died_us[killed[job_id]])
    median_ms, worst_ms = statistics.median(waits_us) / 1000, max(waits_us) / 1000
    told = f"{KILLS} kills: median {median_ms:.0f} ms, worst {worst_ms:.0f} ms"
    print(told, file=sys.stderr)
    assert worst_ms < 1000, f"{told}: {waits_us}"
    assert tree.stop() == 0


# ---- the death of the supervisor ----------------------------------------------------------


def groups(leaders: set[int]) -> set[int]:
    """Return the living processes of these process groups."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) in leaders and fields[0] not in "ZX":
                found.add(int(name))
    return found


@contextlib.contextmanager
def held_in(tree: Service, state: SlotState) -> Iterator[int]:
    """Start a service and hold its worker in a state; yield the pid."""
    with contextlib.ExitStack() as stack:
        if state is SlotState.BOOT:
            (tree.folder / "slow_boot").touch()
            tree.start()
            wait_until(lambda: tree.pid_of(Kind.KEEPER) and tree.notes("child"))
        else:
            tree.started()
        if state is SlotState.CLAIM:
            pid = tree.worker_in(SlotState.IDLE)
            os.kill(pid, signal.SIGSTOP)
            tree.queue().put("nothing")
            stack.enter_context(tree.write_lock())
            os.kill(pid, signal.SIGCONT)
        elif state in (SlotState.RUN, SlotState.SETTLE):
            job_id = tree.queue().put("wait go")
            wait_until(lambda: tree.running(job_id))
            if state is SlotState.SETTLE:
                stack.enter_context(tree.write_lock())
                tree.make("go")
        elif state is SlotState.EXIT:
            job_id = tree.queue().put("block_output")
            wait_until(lambda: tree.done(job_id))
            os.kill(tree.worker_in(SlotState.IDLE), signal.SIGTERM)
        yield tree.worker_in(state)


@pytest.mark.parametrize("state", ["BOOT", "IDLE", "CLAIM", "RUN", "SETTLE", "EXIT"])
def test_a_killed_supervisor_leaves_no_process_of_any_group_whatever_its_worker_does(
    service: Maker, state: str
) -> None:
    """Two seconds later the worker and what it started are gone, even with the database locked."""
    tree = service()
    tree.teach(FAMILY)
    with held_in(tree, SlotState[state]) as pid:
        child = next(int(words[1]) for words in tree.notes("child") if int(words[0]) == pid)
        leaders = {int(words[0]) for words in tree.notes("child")}
        assert {pid, child} <= groups(leaders)
        assert tree.worker_in(SlotState[state]) == pid, "it was not held"
        tree.send(signal.SIGKILL)
        wait_until(lambda: not groups(leaders), timeout_seconds=2, what="the groups are empty")
    assert tree.wait() == -signal.SIGKILL
    wait_until(lambda: tree.all_processes() == [], what="the keeper has left too")


# ---- signals, recycles --------------------------------------------------------------------


@pytest.mark.long
def test_a_thousand_signals_during_heavy_logging_leave_a_healthy_service(service: Maker) -> None:
    """Every job is done once, no line of the log is torn, and a stop is as clean as ever."""
    tree = service(processes=2, web=True)
    tree.teach(TALKS)
    tree.started()
    queue = tree.queue()
    wait_until(lambda: tree.get("readyz")[0] == 200)
    chance = random.Random(4)
    storm = [signal.SIGHUP] * 4
    storm += chance.choices(
        [signal.SIGWINCH, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2], [4, 4, 2, 1], k=936
    )
    chance.shuffle(storm)
    for at in sorted(chance.sample(range(len(storm)), 30), reverse=True):
        storm[at:at] = [signal.SIGTTIN, signal.SIGTTOU]
    assert len(storm) == SIGNALS
    jobs = []
    for number, signum in enumerate(storm):
        if number % 10 == 0:
            jobs += queue.put_many([f"talk {LINES}"] * 4)
        tree.send(signum)
        time.sleep(0.004)  # apart, so that the kernel does not merge them

    wait_until(lambda: tree.done(*jobs), timeout_seconds=60)
    reloads = len(tree.events("reload_finished"))
    tree.send(signal.SIGHUP)  # back to the configured size, should a TTIN have been merged
    wait_until(lambda: len(tree.events("reload_finished")) > reloads)
    wait_until(lambda: len(tree.workers()) == 2 and len(tree.slots()) == 4)
    wait_until(lambda: tree.get("readyz")[0] == 200)
    sent = Counter(one.name for one in [*storm, signal.SIGHUP] if one not in WAKING)
    heard = Counter(str(event["signal"]) for event in tree.events("signal_received"))
    print(f"{heard.total()} of {sent.total()} signals were told apart", file=sys.stderr)
    # The kernel merges what arrives while the same is pending.
    assert all(heard[name] > number / 4 for name, number in sent.items()), (heard, sent)
    talked = [event for event in tree.events(MESSAGE) if event["message"] == "talked"]
    assert len(talked) == LINES * len(jobs)
    assert {tree.runs()[job_id] for job_id in jobs} == {1}
    # A worker told to leave between claim and start gives the job back; no other mark is left.
    ledgers = [[(str(one.outcome), one.error) for one in tree.job(at).ledger] for at in jobs]
    assert {ledger.pop() for ledger in ledgers} == {("succeeded", None)}
    assert {one for ledger in ledgers for one in ledger} <= {("interrupted", None)}
    assert tree.events("pool_crash_loop") == tree.events("reload_failed") == []
    assert tree.stop() == 0
    assert tree.rows()["claimed"] == 0
    assert tree.all_processes() == []


def size(tree: Host) -> tuple[int, int]:
    """Return descriptors and resident kilobytes of a supervisor."""
    status = Path(f"/proc/{tree.pid}/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return len(os.listdir(f"/proc/{tree.pid}/fd")), int(resident.split()[1])


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_thousand_recycles_cost_the_supervisor_no_descriptor_and_no_memory(
    host: HostMaker,
) -> None:
    """It is as large after a thousand of them as before, and has no zombie."""
    processes = 3
    tree = host(pools=[["a", processes, {"max_jobs": 1}]]).started()
    record = tree.table.pools["a"]

    def children() -> int:
        return len(Path(f"/proc/{tree.pid}/task/{tree.pid}/children").read_text().split())

    def recycle(number: int) -> int:
        """Feed the workers until so many have been replaced; wait until all is quiet."""
        wanted = record.exits(code_of(Cause.RECYCLE)) + number

        def enough() -> bool:
            if len(os.listdir(tree.folder / "jobs")) < 20:
                tree.put(*["sleep 0.005"] * 20)
            return bool(record.exits(code_of(Cause.RECYCLE)) >= wanted)

        wait_until(enough, timeout_seconds=250, poll_seconds=0.02)
        wait_until(lambda: not os.listdir(tree.folder / "jobs"))
        wait_until(lambda: children() == processes + 1 and not tree.table.dead())
        wait_until(lambda: all(s.ready_ns and not s.jobs_done for s in tree.slots() if s.kind == 0))
        wait_until(lambda: children() == processes + 1 and len(tree.slots()) == processes + 1)
        return int(record.exits(code_of(Cause.RECYCLE)))

    recycle(50)  # what is imported and grown once is there by now
    descriptors, kilobytes = size(tree)
    began, before = time.monotonic(), record.exits(code_of(Cause.RECYCLE))
    number = recycle(RECYCLES) - before
    descriptors_after, kilobytes_after = size(tree)
    told = (
        f"{number} recycles in {time.monotonic() - began:.1f} s: descriptors {descriptors} before, "
        f"{descriptors_after} after; resident {kilobytes} kB before, {kilobytes_after} kB after"
    )
    print(told, file=sys.stderr)
    assert descriptors_after == descriptors, told
    assert kilobytes_after - kilobytes < GROWTH_KILOBYTES_MAX, told
    assert record.failures == 0
    assert tree.stop() == 0
    assert tree.all_processes() == []
