"""A lease lasts as long as its worker lives, and not a moment of a job is given to another."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from queue_core import Queue, State
from supervisor.slot import Kind, SlotState
from tests.conftest import wait_until
from tests.process.service import Maker, Service, services
from tests.process.tree import alive

LEASE_SECONDS = 1.5
WRITERS = 4

FORKS = '''
def leave():
    """Fork a process that outlives this job and its worker, then wait."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        time.sleep(600)
        os._exit(0)
    note("left", pid)
    wait("never")


ACTIONS["leave"] = leave
'''


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Maker]:
    """Return a function that prepares a service; it is ended at the end."""
    with services(tmp_path) as make:
        yield make


def put_until(over: threading.Event, tree: Service) -> None:
    """Be a producer in a hurry."""
    with Queue[str](tree.database, "elsewhere") as queue:
        while not over.is_set():
            queue.put("nothing")


def test_a_lease_outlasts_a_stop_of_everyone_busy_writers_a_held_interpreter_and_a_drain(
    service: Maker,
) -> None:
    """Each of them is longer than a lease; both jobs run once, and their ends count."""
    tree = service(processes=2, grace="60s")
    tree.change(
        keeper__LEASE_SECONDS_DEFAULT=LEASE_SECONDS,
        keeper__EXTEND_SECONDS=LEASE_SECONDS / 3,
        worker__LEASE_SECONDS_DEFAULT=LEASE_SECONDS,
    )
    tree.started()
    waits = tree.queue().put("wait go")
    wait_until(lambda: tree.running(waits))
    everyone = tree.all_processes()
    for pid in everyone:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(1.5 * LEASE_SECONDS)  # the fact is the passing of time itself
    for pid in everyone:
        os.kill(pid, signal.SIGCONT)

    holds = tree.queue().put(f"hold_gil {2.5 * LEASE_SECONDS}")
    wait_until(lambda: tree.running(holds))
    over = threading.Event()
    writers = [threading.Thread(target=put_until, args=(over, tree)) for _ in range(WRITERS)]
    for writer in writers:
        writer.start()
    try:
        tree.send(signal.SIGTERM)
        wait_until(lambda: tree.events("supervisor_draining"))
        wait_until(lambda: tree.runs("end")[holds] == 1)
        assert tree.running(waits)
    finally:
        over.set()
        for writer in writers:
            writer.join(10)
    tree.make("go")
    assert tree.wait() == 0
    for job_id in (waits, holds):
        assert tree.outcomes(job_id) == ["succeeded"]
        assert tree.runs()[job_id] == 1
    assert tree.events("leases_reaped") == tree.events("claim_stale") == []


def test_a_stop_between_claim_and_start_gives_the_job_back(service: Maker) -> None:
    """The claim is made after the stop was heard of: uncharged, and in its place at once."""
    tree = service().started()
    queue = tree.queue()
    worker = tree.worker_in(SlotState.IDLE)
    os.kill(worker, signal.SIGSTOP)
    job_id = queue.put("nothing")
    with tree.write_lock():
        os.kill(worker, signal.SIGCONT)
        assert tree.worker_in(SlotState.CLAIM) == worker
        tree.send(signal.SIGTERM)
        wait_until(lambda: tree.events("supervisor_draining"))
        assert tree.worker_in(SlotState.CLAIM) == worker
    assert tree.wait() == 0
    job = tree.job(job_id)
    assert (job.state, job.run, job.attempt) == (State.READY, 1, 1), "run 0: it was not claimed"
    assert tree.runs()[job_id] == 0
    assert tree.rows()["claimed"] == 0


def test_what_a_handler_forked_holds_nothing_that_others_need(service: Maker) -> None:
    """It outlives worker and supervisor; the queue moves, and the next start ends it."""
    tree = service()
    tree.teach(FORKS)
    tree.started()
    queue = tree.queue()
    job_id = queue.put("once leave")
    left = int(wait_until(lambda: tree.notes("left"))[0][0])
    try:
        wait_until(lambda: os.getsid(left) == left, what="it has left the group")
        tree.kill_running(job_id)
        wait_until(lambda: tree.done(job_id))
        other = queue.put("nothing")
        wait_until(lambda: tree.done(other))
        assert alive(left)

        tree.send(signal.SIGKILL)
        tree.wait()
        wait_until(lambda: tree.all_processes() == [])
        assert alive(left)
        tree.started()  # the lock of the instance is free
        assert not alive(left)
        other = queue.put("nothing")
        wait_until(lambda: tree.done(other))
        assert tree.stop() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(left, signal.SIGKILL)


def test_a_keeper_that_starts_while_the_database_is_locked_waits_for_it(service: Maker) -> None:
    """Its first round lasts longer than a boot may, and it is neither killed nor given up."""
    tree = service()
    tree.change(keeper__LOCK_SECONDS=0.3)
    with tree.config.open("a") as file:  # its last section is the pool
        file.write('boot_timeout = "1s"\n')
    tree.started()
    queue = tree.queue()
    keeper, worker = tree.pid_of(Kind.KEEPER), tree.workers()
    late = queue.put("nothing", delay=1)
    with tree.write_lock():
        os.kill(keeper, signal.SIGKILL)
        began = time.monotonic()
        wait_until(lambda: tree.pid_of(Kind.KEEPER) not in (0, keeper))
        assert time.monotonic() - began > 1.2, "it did not wait: the test proves nothing"
        successor = tree.pid_of(Kind.KEEPER)
    wait_until(lambda: tree.done(late), what="it promotes once it can")
    assert tree.pid_of(Kind.KEEPER) == successor
    assert tree.workers() == worker
    assert [event["process"] for event in tree.events("worker_exited")] == ["keeper"]
    assert tree.stop() == 0
