"""The supervisor under a storm: of kills, of signals, of recycles, and at its own death."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from supervisor.policy import Cause, code_of
from supervisor.pool import Pool
from supervisor.slot import Kind, SlotState
from supervisor.slots import SlotTable, find_slots
from tests.conftest import wait_until
from tests.process.conftest import HostMaker
from tests.process.service import Maker, Service, services
from tests.process.tree import Host, alive

KILLS = 200
SIGNALS = 1_000
RECYCLES = 1_000

DIES = """
def die():
    note("died", os.getpid(), time.time_ns() // 1000)
    os.kill(os.getpid(), signal.SIGKILL)


ACTIONS["die"] = die
"""
"""The last thing a handler writes down is the instant of its death."""

FAMILY = """
import sys

note("child", os.getpid(), subprocess.Popen(["sleep", "600"]).pid)


class Blocked:
    def flush(self):
        time.sleep(600)


ACTIONS["block_output"] = lambda: setattr(sys, "stdout", Blocked())
while (FOLDER / "slow_boot").exists():
    time.sleep(0.01)
"""
"""Each worker has a child in its group from its boot on."""

TALKS = '''
import logging


def talk(number):
    """Say much, and that with a stack each time."""
    for line in range(int(number)):
        try:
            raise ValueError("for the stack")
        except ValueError:
            logging.getLogger("talker").warning("talked %d", line, exc_info=True)


ACTIONS["talk"] = talk
'''

SHORT_LEASES = f"""
import sys

import queue_core.queue
import supervisor.keeper
import supervisor.worker

for module in (queue_core.queue, supervisor.keeper, supervisor.worker):
    assert module.LEASE_SECONDS_DEFAULT == 60
    module.LEASE_SECONDS_DEFAULT = {(LEASE_SECONDS := 1.5)}
assert supervisor.keeper.EXTEND_SECONDS == 20
supervisor.keeper.EXTEND_SECONDS = {LEASE_SECONDS / 3}
sys.argv = ["herdsman", *sys.argv[sys.argv.index("supervisor") + 1 :]]
from supervisor.cli import main

main()
"""
"""The real service with leases and renewals forty times as short, in proportion."""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Maker]:
    """Return a function that prepares a service; it is ended at the end."""
    with services(tmp_path) as make:
        yield make


def teach(tree: Service, source: str) -> None:
    """Add to the handlers of a service that is not started yet."""
    with (tree.folder / "service_handlers.py").open("a") as file:
        file.write(source)


def pool(tree: Service) -> Pool:
    """Return what the supervisor says of its pool."""
    path = find_slots(tree.database, "main")
    assert path is not None
    return SlotTable.attach(path, writable=False).pools["default"]


def test_each_of_200_killed_jobs_runs_again_in_under_a_second(service: Maker) -> None:
    """From the instant of the kill to the next start, however often workers have died before."""
    tree = service(processes=4)
    teach(tree, DIES)
    tree.started()
    queue = tree.queue()
    tree.warm(queue)
    jobs = []
    for _ in range(KILLS):
        job_id = queue.put("once die")
        jobs.append(job_id)
        wait_until(lambda job_id=job_id: tree.done(job_id))

    died_us = {int(pid): int(at_us) for pid, at_us in tree.notes("died")}
    assert len(died_us) == KILLS
    killed = {int(job): int(pid) for job, _, pid in reversed(tree.notes("begin"))}
    waits_us = []
    for job_id in jobs:
        assert tree.outcomes(job_id) == ["crashed", "succeeded"]
        waits_us.append(tree.job(job_id).ledger[1].started_us - died_us[killed[job_id]])
    median_ms, worst_ms = statistics.median(waits_us) / 1000, max(waits_us) / 1000
    told = f"{KILLS} kills: median {median_ms:.0f} ms, worst {worst_ms:.0f} ms"
    print(told, f"crash loop {pool(tree).crash_loop}", file=sys.stderr)
    assert worst_ms < 1000, f"{told}: {waits_us}"
    assert tree.stop() == 0
