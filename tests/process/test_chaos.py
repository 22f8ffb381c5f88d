"""`herdsman chaos`: what it kills, what it spares, and that each of its checks can fail."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from queue_core import Queue
from supervisor import chaos
from supervisor.linux import start_time
from tests.conftest import wait_until
from tests.process.service import Maker, Service, command, copied, sentence, services

SECONDS = float(os.environ.get("HERDSMAN_SOAK_SECONDS", "4"))
"""How long the long experiment kills; a soak sets 60 and more."""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Maker]:
    """Return a function that prepares a service; it is ended at the end."""
    with services(tmp_path) as make:
        yield make


def run(tree: Service, *args: object, code: int = 0) -> dict[str, Any]:
    """Run the command; return its document."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "supervisor", "chaos", "--yes", "--json", *map(str, args)],
        cwd=tree.folder, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.getcwd()}, timeout=SECONDS + 200,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["ok"] is (code == 0)
    return found


def failed(found: dict[str, Any]) -> dict[str, str]:
    """Return what was seen of the invariants that do not hold."""
    return {check["name"]: check["seen"] for check in found["checks"] if not check["ok"]}


@pytest.mark.timeout(SECONDS + 220)
def test_every_job_is_accounted_for_whatever_is_killed(service: Maker) -> None:
    """Workers, keeper and web die at random; each job is done, or dead as poison, and known."""
    tree = service(processes=2, web=True).started()
    jobs = int(40 * SECONDS)
    found = run(
        tree, "--kill-every", "0.4s", "--for", f"{SECONDS}s", "--jobs", jobs, "--queue", "work",
        "--payload", '"sleep 0.02"', "--seed", 7,
    )  # fmt: skip
    print(json.dumps(found))
    assert failed(found) == {}
    assert sum(found["kills"].values()) >= SECONDS
    assert set(found["kills"]) <= {"workers", "keeper", "web"}
    assert sum(found["jobs"].values()) == jobs
    rows = tree.rows()
    assert rows["done"] + rows["dead"] == jobs, "by the rows themselves, trusting no counter"
    assert tree.process is not None
    assert tree.process.poll() is None, "the supervisor is no target unless it is named"
    assert found["seed"] == 7
    assert tree.stop() == 0


def test_a_supervisor_that_is_a_target_has_to_come_back(service: Maker) -> None:
    """With a service manager it does, and nothing is lost; the command warns before."""
    tree = service(processes=1).started()
    over = threading.Event()

    def manage() -> None:
        while not over.wait(0.05):
            assert tree.process is not None
            if tree.process.poll() is not None:
                tree.start()

    manager = threading.Thread(target=manage)
    manager.start()
    try:
        found = run(
            tree, "--kill-every", "1s", "--for", "2s", "--targets", "supervisor", "--jobs", 20,
            "--queue", "work", "--payload", '"sleep 0.05"',
        )  # fmt: skip
    finally:
        over.set()
        manager.join(10)
    assert failed(found) == {}
    assert found["kills"]["supervisor"] >= 1
    assert found["jobs"]["done"] == 20


def test_counters_that_differ_from_the_rows_are_a_violation(service: Maker) -> None:
    """The experiment believes no counter; exit code 1, with the table."""
    tree = service(processes=1).started()
    job = int(tree.queue().put("nothing"))
    wait_until(lambda: tree.done(job))
    with contextlib.closing(sqlite3.connect(tree.database)) as connection:
        connection.execute("UPDATE stat SET value = value + 1 WHERE label = 'done'")
        connection.commit()
    found = run(tree, "--for", "0.2s", code=1)
    assert failed(found) == {"counters equal a recount": "1 differ"}
    text = command("chaos", "--yes", "--for", "0.1s", cwd=tree.folder)
    assert text.returncode == 1
    assert "counters equal a recount       NO     1 differ" in text.stdout
    assert text.stderr == "herdsman: an invariant does not hold\n"


def test_a_job_that_is_dead_for_another_reason_or_unfinished_is_a_violation(
    service: Maker,
) -> None:
    """Only the kills may cost a job its life."""
    tree = service(processes=1).started()
    found = run(
        tree, "--for", "0.2s", "--jobs", 2, "--queue", "work", "--payload", '"reject"', code=1
    )
    assert failed(found) == {"every job accounted for": "2 dead (rejected) of 2"}
    found = run(
        tree, "--for", "0.2s", "--settle", "0.5s", "--jobs", 1, "--queue", "nobodys", code=1
    )
    assert failed(found) == {"every job accounted for": "1 unfinished of 1"}


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--for", "1s"], 2, "add --yes to do it"),
        (["--yes"], 1, "no supervisor main runs on"),
        (["--yes", "--targets", "workers,cron"], 2, "not 'cron'"),
        (["--yes", "--jobs", "3", "-q", "w", "--payload", "{"], 2, "--payload is not JSON"),
        (["--yes", "--kill-every", "soon"], 2, "--kill-every soon: "),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_killed(
    tmp_path: Path, args: list[str], code: int, words: str
) -> None:
    """One sentence and the documented exit code."""
    with Queue[Any](tmp_path / "jobs.db", "q") as queue:
        queue.put(1)
    done = copied("chaos", *args, "-d", "jobs.db", cwd=tmp_path)
    assert done.returncode == code
    assert words in sentence(done)


def test_a_number_that_another_process_has_by_now_is_spared() -> None:
    """A pid alone kills nobody."""
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        assert not chaos._kill_verified(stranger.pid, start_time(stranger.pid) + 1)
        assert not chaos._kill_verified(stranger.pid, 0)
        assert stranger.poll() is None
        assert chaos._kill_verified(stranger.pid, start_time(stranger.pid))
        wait_until(lambda: chaos._zombies(os.getpid()) == [stranger.pid], what="a zombie is seen")
    finally:
        stranger.kill()
        stranger.wait(10)
    assert chaos._zombies(os.getpid()) == []


def test_descriptors_are_counted() -> None:
    """The check can see a leak of one."""
    before = chaos._descriptors(os.getpid())
    reader, writer = os.pipe()
    assert chaos._descriptors(os.getpid()) == before + 2
    os.close(reader)
    os.close(writer)
