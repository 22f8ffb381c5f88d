"""Give fault tests a store with a job in every state, and children that cannot outlive them."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from queue_core.clock import FakeClock
from queue_core.codec import digest
from queue_core.engine import ClaimRequest, Holder
from queue_core.engines.sqlite import SqliteEngine
from queue_core.job import Claim, Claimed, NewJob, Outcome, Reason, Settlement, State

QUEUE = "jobs"
ASIDE = "aside"
"""A queue, and the task of its jobs, whose handler nobody has."""
SECOND_US = 1_000_000
LARGE = b'"' + b"x" * 4000 + b'"'
CHILD_SECONDS_MAX = 60

Fork = Callable[[Callable[[], object]], int]


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """Name a folder of this test's own in memory, where a thousand small files cost little."""
    if not os.path.isdir("/dev/shm"):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="herdsman-test-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def fork() -> Iterator[Fork]:
    """Return a function that runs another in a forked process; all are ended and reaped."""
    pids: list[int] = []

    def start(work: Callable[[], object]) -> int:
        if (pid := os.fork()) == 0:
            code = 1
            try:
                signal.alarm(CHILD_SECONDS_MAX)
                work()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
        return pid

    yield start
    for pid in pids:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def exit_codes(pids: Sequence[int], *, seconds: float = 30.0) -> list[int]:
    """Wait for children until a deadline, and return their exit codes; a late one is -9."""
    deadline = time.monotonic() + seconds
    codes: list[int] = []
    for pid in pids:
        while True:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes.append(os.waitstatus_to_exitcode(status))
                break
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
    return codes


@dataclass
class Stock:
    """A store with jobs in every state, at rest in one file, to be copied for each case."""

    path: Path
    clock: FakeClock
    ids: dict[str, list[int]] = field(default_factory=dict)
    rows: dict[str, list[Claimed]] = field(default_factory=dict)
    holder: int = 0
    begun_us: int = 0

    def copy(self, to: Path) -> Path:
        """Copy the store, and return the copy's path."""
        for suffix in ("-wal", "-shm"):
            Path(f"{to}{suffix}").unlink(missing_ok=True)
        shutil.copy(self.path, to)
        return to

    def open(self, path: Path, **options: object) -> SqliteEngine:
        """Open a copy by a clock that stands where it stood."""
        given: dict[str, object] = {"durability": "normal", "lock_timeout_seconds": 5.0}
        return SqliteEngine(path, clock=self.clock, **(given | options))  # type: ignore[arg-type]

    def claims(self, name: str) -> list[Claim]:
        """Return the claims of a group of claimed jobs: the first run of each."""
        return [Claim(id=id_, run=1) for id_ in self.ids[name]]


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    """Make the store: ready, due, later, running, lost, dead and old done jobs, each several.

    Beside them two that nobody has a handler for, two suspects that wait for their turn, and
    one whose key has a shorter life than its row.
    """
    made = Stock(tmp_path_factory.mktemp("stock") / "stock.db", FakeClock())
    made.begun_us = made.clock.wall_us()
    engine = made.open(made.path)
    engine.configure(
        QUEUE,
        keep_done_us=SECOND_US,
        keep_dead_us=500 * SECOND_US,
        key_ttl_us=2 * SECOND_US,
        max_depth=100,
    )
    holder = made.holder = engine.hold(Holder(worker="stock/0", instance="gone"))

    def put(group: str, number: int, queue: str = QUEUE, **options: object) -> None:
        jobs = []
        for position in range(number):
            payload = LARGE if position == 1 else b"1"
            key = f"{group}-{position}" if position == 0 else None
            given = {"task": QUEUE, "key": key, "digest": key and digest(QUEUE, payload)}
            jobs.append(NewJob(payload=payload, **(given | options)))  # type: ignore[arg-type]
        made.ids[group] = [stored.id for stored in engine.enqueue(queue, jobs)]

    def claim(group: str, lease_seconds: int, queue: str = QUEUE) -> None:
        wanted = ClaimRequest(queues=[queue], limit=100, lease_us=lease_seconds * SECOND_US)
        made.rows[group] = engine.claim(wanted, holder=holder)
        assert [row.id for row in made.rows[group]] == made.ids[group]

    engine.configure("brief", key_ttl_us=1)
    put("brief", 1, queue="brief")
    claim("brief", 60, queue="brief")
    engine.finish([settled(claim_, State.DONE) for claim_ in made.claims("brief")])
    put("aside", 2, queue=ASIDE, task=ASIDE)
    wanted = ClaimRequest(queues=[ASIDE], limit=9, lease_us=1, tasks=frozenset({"another"}))
    assert engine.claim(wanted, holder=holder) == []
    put("suspect", 2, queue="suspect")
    claim("suspect", 60, queue="suspect")
    engine.finish([
        settled(claim_, State.READY)._replace(tree_death=True, suspect=True)
        for claim_ in made.claims("suspect")
    ])  # fmt: skip
    put("done", 3)
    claim("done", 60)
    engine.finish([settled(claim_, State.DONE) for claim_ in made.claims("done")])
    put("dead", 3)
    claim("dead", 60)
    engine.finish([settled(claim_, State.DEAD) for claim_ in made.claims("dead")])
    put("lost", 3)
    claim("lost", 1)
    put("due", 3, delay_us=SECOND_US)
    put("running", 4)
    claim("running", 3600)
    made.clock.advance(10)
    put("later", 2, delay_us=3600 * SECOND_US)
    put("ready", 3)
    put("expired", 1, expires_us=0, priority=5)
    made.clock.advance(1)
    assert engine.checkpoint()
    engine.close()
    return made


def settled(claim: Claim, to: State) -> Settlement:
    """Return a settlement that brings a claim to a state, by a started attempt."""
    outcome = {
        State.DONE: Outcome.SUCCEEDED,
        State.DEAD: Outcome.REJECTED,
        State.READY: Outcome.INTERRUPTED,
        State.DELAYED: Outcome.FAILED,
    }[to]
    return Settlement(
        claim=claim,
        to=to,
        outcome=outcome,
        charge=to is not State.READY,
        reason=Reason.REJECTED if to is State.DEAD else None,
        delay_us=SECOND_US if to is State.DELAYED else 0,
        started_us=1_700_000_000_000_000,
        duration_us=5,
        error=None if to is State.DONE else "as told",
    )
