"""What a job takes with it: memory over the limit is charged to it, and its last words are kept."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from queue_core import State
from supervisor import lastlines
from supervisor.slot import Kind, Slot, SlotState
from tests.conftest import wait_until
from tests.process.service import Maker, Service, services

MORE_HANDLERS = '''

import logging
import sys

EAT = "import time; b = bytearray(200 << 20); b[::4096] = b'x' * len(b[::4096]); time.sleep(60)"


def eat():
    """Use 200 MB, and stay."""
    logging.getLogger("meal").warning("sits down to eat")
    block = bytearray(200 << 20)
    block[::4096] = b"x" * len(block[::4096])
    time.sleep(60)


def have_eaten():
    """Have a program use as much, and wait for it."""
    subprocess.run([sys.executable, "-c", EAT])
    time.sleep(60)


def taste(name):
    """Use as much until a test says that it is enough."""
    block = bytearray(200 << 20)
    block[::4096] = b"x" * len(block[::4096])
    wait(name)


def talk(number):
    """Write so many lines, and die."""
    for at in range(int(number)):
        logging.getLogger("talk").warning("line number %d", at)
    os.kill(os.getpid(), signal.SIGKILL)


ACTIONS |= {"eat": eat, "have_eaten": have_eaten, "taste": taste, "talk": talk}
'''


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Maker]:
    """Return a function that prepares a service; it is ended at the end."""
    with services(tmp_path) as make:

        def prepare(pool: str = "", **options: object) -> Service:
            tree = make(**options)
            with (tree.folder / "service_handlers.py").open("a") as file:
                file.write(MORE_HANDLERS)
            with tree.config.open("a") as file:  # its last section is the pool
                file.write(pool)
            return tree

        yield prepare


def test_a_job_over_the_memory_limit_is_charged_until_it_is_poison(service: Maker) -> None:
    """Whether the worker uses it or a program it started; and the interruption is not free."""
    tree = service('max_memory = "70MB"\n', max_attempts=50, processes=2).started()
    queue = tree.queue()
    gluttons = {meal: queue.put(meal) for meal in ("eat", "have_eaten")}
    for meal, glutton in gluttons.items():
        wait_until(lambda at=glutton: tree.state(at) is State.DEAD, timeout_seconds=30)
        job = tree.job(glutton)
        assert (job.reason, job.deaths, tree.outcomes(glutton)) == ("poison", 3, ["crashed"] * 3)
        assert {attempt.cause for attempt in job.ledger} == {"memory"}
        assert job.error is not None
        assert "memory" in job.error
        if meal == "eat":
            assert job.traceback is not None
            assert "sits down to eat" in job.traceback
        assert tree.runs()[glutton] == 3
    assert {event["cause"] for event in tree.events("worker_exited")} == {"memory"}
    good = queue.put("nothing")
    wait_until(lambda: tree.done(good))


def test_the_memory_limit_of_a_handler_is_for_its_jobs_alone(service: Maker) -> None:
    """Another's job that uses as much goes on, whether its worker does or what that started."""
    free = '[handlers.free]\npython = "service_handlers:work"\nmax_memory = "1GB"\n'
    tree = service(extra=f'max_memory = "140MB"\n{free}', processes=3, max_attempts=1).started()
    queue = tree.queue()
    other = tree.queue("free").put("eat")
    wait_until(lambda: any(slot.rss_bytes > 140_000_000 for slot in tree.slots()))
    for glutton in queue.put_many(["eat", "have_eaten"]):
        wait_until(lambda at=glutton: tree.state(at) is State.DEAD)
        assert (tree.job(glutton).deaths, tree.outcomes(glutton)) == (1, ["crashed"])
        assert tree.job(glutton).ledger[0].cause == "memory"
    for signalled in tree.events("worker_signalled"):
        assert (signalled["cause"], signalled["signal"]) == ("memory", "SIGQUIT")
        assert signalled["why"].endswith("bytes of memory, over 140000000")
    assert len(tree.events("worker_signalled")) == 2
    assert tree.running(other), "one without that limit was ended too"
    good = queue.put("nothing")
    wait_until(lambda: tree.done(good))


def test_no_job_is_charged_for_what_another_had_used_before_it(service: Maker) -> None:
    """The last look at the worker's memory may be from before its start."""
    free = '[handlers.free]\npython = "service_handlers:work"\nmax_memory = "1GB"\n'
    tree = service(extra=f'max_memory = "140MB"\n{free}').started()
    queue = tree.queue()
    for number in range(2):
        tree.queue("free").put(f"taste enough{number}")
        wait_until(lambda: any(slot.rss_bytes > 140_000_000 for slot in tree.slots()))
        small = queue.put("sleep 0.9")
        tree.make(f"enough{number}")
        wait_until(lambda at=small: tree.done(at))
    assert tree.events("worker_signalled") == tree.events("worker_exited") == []


def test_the_last_log_lines_of_a_killed_worker_are_with_its_dead_letter(service: Maker) -> None:
    """The newest of them, after a kill that no process sees coming; the older ones made room."""
    tree = service(max_attempts=1).started()
    job_id = tree.queue().put("talk 300")
    wait_until(lambda: tree.state(job_id) is State.DEAD)
    job = tree.job(job_id)
    assert job.traceback is not None
    assert "last log lines:" in job.traceback
    assert "line number 299" in job.traceback
    assert "line number 249" not in job.traceback
    assert job.traceback.count("\n") <= lastlines.LINES_MAX + 1
    wait_until(lambda: tree.workers())
    (slot,) = [one for one in tree.slots() if one.kind is Kind.WORKER]
    assert lastlines.read(slot.lines_path) == "", "the lines of the process before"
    assert stat.S_IMODE(os.stat(slot.lines_path).st_mode) == 0o600


def test_a_worker_that_never_reached_the_database_is_not_ready(service: Maker) -> None:
    """It waits for the database without being killed for it, and is READY once it is there."""
    tree = service().started()
    (pid,) = tree.workers().values()

    def set_version(version: int) -> int:
        with closing(sqlite3.connect(tree.database)) as connection:
            (before,) = connection.execute("PRAGMA user_version").fetchone()
            connection.execute(f"PRAGMA user_version = {version}")
        return int(before)

    def successor() -> Slot | None:
        found = [one for one in tree.slots() if one.kind is Kind.WORKER and one.pid != pid]
        return found[0] if found and found[0].note else None

    version = set_version(99)
    os.kill(pid, signal.SIGKILL)
    slot = wait_until(successor, what="a worker says what is wrong")
    before = slot.progress
    wait_until(lambda: slot.progress > before + 4, what="it has tried again")
    assert (slot.ready_ns, slot.state) == (0, SlotState.CLAIM)
    assert tree.workers() == {}
    set_version(version)
    job_id = tree.queue().put("nothing")
    wait_until(lambda: tree.done(job_id))
    assert set(tree.workers().values()) == {slot.pid}
