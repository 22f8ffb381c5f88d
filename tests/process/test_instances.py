"""Several supervisors on one host and one database: each minds its own, together they lose nothing.

Both use the same file; locks, slots and process facts are apart by the instance's name.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisor.slots import find_slots
from tests.conftest import wait_until
from tests.process.service import Service, command


class Instance(Service):
    """A service with a name of its own."""

    def __init__(self, folder: Path, name: str, **options: Any) -> None:
        folder.mkdir(mode=0o700)
        super().__init__(folder, **options)
        self.name = self.instance = name
        self.config.write_text(f'instance = "{name}"\n{self.config.read_text()}')


@pytest.fixture
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Instance, Instance]]:
    """Two supervisors, `a` with one worker and `b` with two, on one database; both READY."""
    database = tmp_path / "shared" / "herdsman.db"
    web = bool(getattr(request, "param", False))
    first = Instance(tmp_path / "a", "a", processes=1, web=web, database=database)
    second = Instance(tmp_path / "b", "b", processes=2, web=web, database=database)
    try:
        for tree in (first, second):
            tree.start()
        for tree in (first, second):
            tree.ready()
        yield first, second
    finally:
        first.clean()
        second.clean()


def kill(tree: Instance) -> None:
    """Kill the supervisor, and wait until its processes are gone."""
    tree.send(signal.SIGKILL)
    tree.wait()
    wait_until(lambda: not tree.all_processes(), what="nothing of it is left")


def begun(pair: tuple[Instance, Instance], job: int) -> list[str]:
    """Return which supervisors began a job, in order of their folders."""
    return [tree.name for tree in pair for words in tree.notes("begin") if words[0] == str(job)]


def held(pair: tuple[Instance, Instance], payload: str) -> dict[str, int]:
    """Put jobs until each supervisor runs one that waits; return the job of each."""
    a, b = pair
    queue = a.queue()
    found: dict[str, int] = {}
    ids = [int(queue.put(payload)) for _ in range(3)]  # as many as there are workers
    wait_until(lambda: all(begun(pair, job) for job in ids), what="every worker is busy")
    for job in ids:
        found[begun(pair, job)[0]] = job
    assert set(found) == {"a", "b"}
    assert b.name == "b"
    return found


def test_the_death_of_one_leaves_the_others_leases_alone(pair: tuple[Instance, Instance]) -> None:
    """300 jobs, one supervisor killed in the middle and started again: all done, b's untouched."""
    a, b = pair
    mine = held(pair, "wait go")
    queue = a.queue()
    rest = [int(job) for job in queue.put_many(["sleep 0.005"] * 297)]
    kill(a)
    assert b.running(mine["b"]), "the other went on"
    assert a.state(mine["a"]) == "claimed", "nobody but its own instance takes it before its time"
    a.started()
    a.make("go")
    b.make("go")
    jobs = [*mine.values(), *rest]
    wait_until(lambda: a.done(*jobs), what="all are done")
    wait_until(lambda: a.rows()["done"] == 300)
    assert b.outcomes(mine["b"]) == ["succeeded"]
    assert (b.job(mine["b"]).run, b.job(mine["b"]).deaths) == (1, 0)
    assert a.job(mine["a"]).run == 2
    assert a.job(mine["a"]).deaths == 0, "the death of a whole tree charges nobody"
    ended = a.runs("end") + b.runs("end")
    assert set(ended.values()) == {1}, "a job ended twice"
    assert (a.stop(), b.stop()) == (0, 0)
    assert a.rows()["claimed"] == 0


def test_what_a_dead_supervisor_held_comes_back_when_its_lease_ends(
    pair: tuple[Instance, Instance],
) -> None:
    """It may never be started again: the other's keeper reaps it, once, and its workers run it."""
    a, b = pair
    mine = held(pair, "wait go")
    kill(a)
    with contextlib.closing(sqlite3.connect(a.database, timeout=10)) as connection:
        connection.execute(  # instead of waiting for a minute
            "UPDATE job SET lease_us = 1 WHERE state = 'claimed' AND holder IN"
            " (SELECT id FROM holder WHERE instance = 'a')"
        )
        connection.commit()
    b.make("go")
    wait_until(lambda: b.done(*mine.values()))
    assert b.outcomes(mine["a"]) == ["lease_lost", "succeeded"]
    assert b.outcomes(mine["b"]) == ["succeeded"]
    assert sum(event["jobs"] for event in b.events("leases_reaped")) == 1


@pytest.mark.parametrize("pair", [True], indirect=True, ids=["web"])
def test_each_has_its_own_lock_records_and_process_facts(pair: tuple[Instance, Instance]) -> None:
    """Nothing is shared but the jobs, and operators see both."""
    a, b = pair
    again = command("run", "-c", a.config, cwd=a.folder)
    assert again.returncode == 73
    assert find_slots(a.database, "a") != find_slots(b.database, "b")
    assert {s.pid for s in a.slots()}.isdisjoint(s.pid for s in b.slots())
    for tree, processes in ((a, 1), (b, 2)):
        wait_until(lambda tree=tree: tree.get("readyz")[0] == 200)
        told = re.findall(
            r'herdsman_workers_configured\{pool="default"\} (\d+)', tree.get("metrics")[1]
        )
        assert told == [f"{processes}.0"] or told == [str(processes)]
    why = command("why", "-c", a.config, cwd=a.folder)
    assert "supervisor a turned" in why.stdout
    assert "supervisor b turned" in why.stdout
    assert why.returncode == 0
    listed = command("workers", "list", "--instance", "b", "-c", a.config, cwd=a.folder)
    assert "default/1" in listed.stdout
    drained = command("workers", "drain", "--wait", "10s", "-c", a.config, cwd=a.folder)
    assert drained.returncode == 0, drained.stderr
    assert (len(a.workers()), len(b.workers())) == (0, 2), "the other's workers are not meant"
    job = int(a.queue().put("nothing"))
    wait_until(lambda: a.done(job), what="the other does the work meanwhile")
    assert begun(pair, job) == ["b"]
    assert os.path.exists(f"{a.database}.b.lock")
