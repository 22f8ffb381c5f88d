"""A stop lets running jobs finish, gives the rest back, and burns no attempt."""

from __future__ import annotations

import contextlib
import os
import signal
import time
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


def draining(tree: Service) -> None:
    """Wait until the supervisor has begun to drain."""
    wait_until(lambda: tree.events("supervisor_draining"))


def clean(tree: Service) -> None:
    """Check that nothing is claimed and nobody is left."""
    assert tree.rows()["claimed"] == 0
    assert tree.all_processes() == []


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_lets_the_running_job_finish_and_starts_no_other(
    service: Maker, signum: signal.Signals
) -> None:
    """Exit code 0; what had not started is ready, uncharged, and done after the next start."""
    tree = service().started()
    queue = tree.queue()
    tree.warm(queue)
    running, *rest = queue.put_many(["wait go", *["nothing"] * 20])
    wait_until(lambda: tree.running(running))
    tree.send(signum)
    draining(tree)
    late = queue.put("nothing")
    tree.make("go")
    assert tree.wait() == 0
    assert tree.outcomes(running) == ["succeeded"]
    assert {tree.state(job_id) for job_id in [*rest, late]} == {State.READY}
    assert not any(tree.runs()[job_id] for job_id in [*rest, late])
    clean(tree)

    tree.started()
    wait_until(lambda: tree.done(*rest, late))
    assert {(tree.runs()[job_id], *tree.outcomes(job_id)) for job_id in [*rest, late]} == {
        (1, "succeeded")
    }
    assert tree.stop() == 0


def test_a_second_stop_changes_nothing(service: Maker) -> None:
    """Platforms send TERM twice, and to every process of the group: the job still finishes."""
    tree = service(processes=2).started()
    queue = tree.queue()
    running = queue.put("wait go")
    wait_until(lambda: tree.running(running))
    for pid in tree.all_processes():
        with contextlib.suppress(ProcessLookupError):  # the idle ones leave at once
            os.kill(pid, signal.SIGTERM)
    draining(tree)
    tree.send(signal.SIGTERM)
    wait_until(lambda: len(tree.events("signal_received")) == 2)
    assert tree.running(running)
    tree.make("go")
    assert tree.wait() == 0
    assert tree.runs("end")[running] == 1
    assert tree.outcomes(running) == ["succeeded"]
    clean(tree)


def test_a_job_longer_than_the_grace_is_given_back_uncharged(service: Maker) -> None:
    """QUIT interrupts it: the ledger says so, the exit code is 0, and it runs again later."""
    tree = service(grace="300ms").started()
    queue = tree.queue()
    running = queue.put("once wait never")
    wait_until(lambda: tree.running(running))
    began = time.monotonic()
    assert tree.stop() == 0
    assert 0.3 <= time.monotonic() - began < 3
    assert tree.state(running) is State.READY
    assert tree.outcomes(running) == ["interrupted"]
    assert tree.job(running).attempt == 1
    assert tree.job(running).deaths == 0
    clean(tree)
    tree.started()
    wait_until(lambda: tree.done(running))
    assert tree.stop() == 0


def test_a_job_that_cannot_be_interrupted_is_killed_and_the_exit_code_says_so(
    service: Maker,
) -> None:
    """One that swallows QUIT is killed after it, still uncharged; exit code 75."""
    tree = service(grace="200ms")
    tree.change(judgement__QUIT_SECONDS=0.5, judgement__ABRT_SECONDS=0.5)
    tree.started()
    queue = tree.queue()
    running = queue.put("once deaf 60")
    wait_until(lambda: tree.running(running))
    assert tree.stop() == 75
    assert tree.state(running) is State.READY
    assert tree.outcomes(running) == ["interrupted"]
    assert tree.job(running).attempt == 1
    assert tree.job(running).deaths == 0
    clean(tree)
    tree.started()
    wait_until(lambda: tree.done(running))


def test_a_drain_is_seen_from_outside_until_its_end(service: Maker) -> None:
    """Not ready, but alive, with every number: until the last job is settled."""
    tree = service(web=True).started()
    wait_until(lambda: tree.get("readyz")[0] == 200)
    running = tree.queue().put("wait go")
    wait_until(lambda: tree.running(running))
    tree.send(signal.SIGTERM)
    code, text = wait_until(lambda: (page := tree.get("readyz"))[0] == 503 and page)
    assert "drain" in text, code
    assert tree.get("livez")[0] == 200
    claimed = 'herdsman_queue_jobs{queue="work",state="claimed"} 1.0\n'
    wait_until(lambda: claimed in tree.get("metrics")[1])
    assert tree.running(running)
    tree.make("go")
    assert tree.wait() == 0
    assert tree.outcomes(running) == ["succeeded"]


def test_an_idle_service_stops_at_once(service: Maker) -> None:
    """Without web and jobs there is nothing to wait for."""
    tree = service(processes=2, web=True).started()
    wait_until(lambda: tree.get("livez")[0] == 200)
    began = time.monotonic()
    assert tree.stop() == 0
    assert time.monotonic() - began < 3
    clean(tree)
    assert tree.output() == ""


def test_a_worker_killed_in_a_drain_loses_nothing(service: Maker) -> None:
    """Its job is given back before the keeper leaves."""
    tree = service().started()
    queue = tree.queue()
    running = queue.put("once wait never")
    wait_until(lambda: tree.running(running))
    tree.send(signal.SIGTERM)
    draining(tree)
    tree.kill_running(running)
    tree.wait()
    assert tree.state(running) is State.READY
    assert tree.outcomes(running) == ["crashed"]
    clean(tree)
