"""What signals do to a real service: rotated logs, and storms in the middle of transactions."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.linux import children
from tests.conftest import wait_until
from tests.process.service import Maker, Service, services

STORM_SECONDS = 1.5

ORPHANS = '''
def orphans(number):
    """Leave processes to whoever takes them."""
    note("parent", os.getppid())
    for _ in range(int(number)):
        pid = os.fork()
        if pid == 0:
            os.fork()
            os._exit(0)
        os.waitpid(pid, 0)


ACTIONS["orphans"] = orphans
'''


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Maker]:
    """Return a function that prepares a service; it is ended at the end."""
    with services(tmp_path) as make:
        yield make


def holders(tree: Service, path: Path) -> set[int]:
    """Return the processes of a service that have a file open."""
    found = set()
    for pid in tree.all_processes():
        folder = Path(f"/proc/{pid}/fd")
        if any(os.readlink(folder / name) == str(path) for name in os.listdir(folder)):
            found.add(pid)
    return found


def test_after_usr1_no_process_holds_the_rotated_log(service: Maker) -> None:
    """Supervisor, keeper, web and workers, idle or busy, go on in the new file."""
    tree = service(processes=2, web=True).started()
    wait_until(lambda: tree.get("livez")[0] == 200)
    job_id = tree.queue().put("wait go")
    wait_until(lambda: tree.running(job_id))
    log = tree.folder / "service.log"
    everyone = set(tree.all_processes())
    assert holders(tree, log) == everyone
    rotated = log.rename(tree.folder / "service.log.1")
    tree.send(signal.SIGUSR1)
    wait_until(lambda: holders(tree, log) == everyone, what="all have the new file")
    assert holders(tree, rotated) == set()
    assert tree.running(job_id)
    assert log.stat().st_mode & 0o777 == 0o600
    tree.make("go")
    wait_until(lambda: tree.done(job_id))


def test_a_storm_of_signals_at_workers_breaks_no_transaction(service: Maker) -> None:
    """They leave at a safe point: no job is lost, charged or run beside itself."""
    tree = service(processes=2).started()
    queue = tree.queue()
    chance = random.Random(20)
    harmless = [signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGWINCH]
    jobs: list[int] = []
    stormed: set[int] = set()
    until = time.monotonic() + STORM_SECONDS
    while time.monotonic() < until or len(stormed) < 6:
        jobs += queue.put_many(["nothing"] * 20)
        for pid in tree.workers().values():
            with contextlib.suppress(ProcessLookupError):
                for signum in chance.choices(harmless, k=10):
                    os.kill(pid, signum)
                    time.sleep(0.001)
                os.kill(pid, chance.choice([signal.SIGTERM, signal.SIGQUIT]))
                os.kill(pid, signal.SIGTERM)
                stormed.add(pid)
    wait_until(lambda: tree.done(*jobs))
    outcomes = {job_id: tree.outcomes(job_id) for job_id in jobs}
    assert {one for found in outcomes.values() for one in found} <= {"interrupted", "succeeded"}
    assert all(found.count("succeeded") == 1 for found in outcomes.values())
    assert {tree.job(job_id).deaths for job_id in jobs} == {0}
    assert {event["signal"] for event in tree.events("worker_exited")} == {0}
    assert tree.stop() == 0
    assert tree.rows()["claimed"] == 0
    with contextlib.closing(sqlite3.connect(tree.database)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_as_the_first_process_of_a_container_it_reaps_everyone_and_stops_when_told(
    service: Maker,
) -> None:
    """PID 1 has no default actions for signals, and every orphan is its child."""
    tree = service(processes=2)
    tree.teach(ORPHANS)
    tree.prefix = ("unshare", "-rpf", "--mount-proc", "--kill-child")
    tree.start()
    queue = tree.queue()
    jobs = queue.put_many(["orphans 40"] * 4)
    wait_until(lambda: tree.done(*jobs))
    assert {words[-1] for words in tree.notes("parent")} == {"1"}, "it was not the first process"
    (first,) = children(tree.pid)
    wait_until(lambda: len(children(first)) == 3, what="keeper and two workers are left, no zombie")
    assert tree.outcomes(jobs[0]) == ["succeeded"]
    os.kill(first, signal.SIGCHLD)
    os.kill(first, signal.SIGTERM)
    assert tree.wait() == 0
    assert tree.events("strangers_reaped")
