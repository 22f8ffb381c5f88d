"""Jobs that ran when a whole tree died run again alone, and are charged only when blame is sure."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from queue_core import State
from tests.conftest import wait_until
from tests.process.service import Maker, Service, services


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Maker]:
    """Return a function that prepares a service; it is ended at the end."""
    with services(tmp_path) as make:
        yield make


def die_with(tree: Service, *jobs: int) -> None:
    """Kill the whole tree while these jobs run, and start it again."""
    wait_until(lambda: all(tree.running(job) for job in jobs), what=f"{jobs} run")
    os.kill(tree.pid, signal.SIGKILL)
    tree.wait()
    wait_until(lambda: not tree.all_processes(), what="the tree is gone")
    tree.started()


def test_a_job_that_brings_the_tree_down_each_time_is_dead_as_poison(service: Maker) -> None:
    """The first death charges nobody; each one while the suspect runs alone is one of three."""
    tree = service(processes=2).started()
    queue = tree.queue()
    bad = queue.put("sleep 600")
    innocent = queue.put("once sleep 600")
    die_with(tree, bad, innocent)
    wait_until(lambda: tree.outcomes(bad)[:1] == ["interrupted"])
    assert tree.job(bad).attempt == 1, "the first death of the tree charged it"

    for deaths in (1, 2, 3):
        wait_until(lambda: tree.done(innocent) or tree.running(innocent) is None)
        die_with(tree, bad)
        wait_until(lambda deaths=deaths: tree.job(bad).deaths == deaths)

    assert tree.state(bad) is State.DEAD
    assert tree.job(bad).reason == "poison"
    assert tree.outcomes(bad) == ["interrupted", "crashed", "crashed", "crashed"]
    wait_until(lambda: tree.done(innocent))
    assert tree.job(innocent).deaths == 0
    assert tree.stop() == 0


def test_suspects_run_one_at_a_time_beside_other_jobs(service: Maker) -> None:
    """While one suspect runs the other waits, and a job that is none is not held up."""
    tree = service(processes=2).started()
    queue = tree.queue()
    first, second = queue.put("wait go"), queue.put("wait go")
    die_with(tree, first, second)
    wait_until(lambda: tree.running(first) or tree.running(second))
    other = queue.put("nothing")
    wait_until(lambda: tree.done(other))
    claimed = [job for job in (first, second) if tree.state(job) is State.CLAIMED]
    assert len(claimed) == 1, "two suspects ran at once: blame could not be told"
    tree.make("go")
    wait_until(lambda: tree.done(first, second))
    assert [tree.job(job).attempt for job in (first, second)] == [1, 1]
    assert tree.stop() == 0
