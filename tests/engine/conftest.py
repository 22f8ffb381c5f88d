"""Give engine tests a store, a clock they move, and jobs in any state.

The `engine` fixture runs each test once per engine; what only one kind of file
can show (plans, durability, opening) asks for that engine by name.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from queue_core import Outcome, Queue, Reason, State
from queue_core.clock import FakeClock
from queue_core.codec import digest
from queue_core.engine import ClaimRequest, Engine, Holder
from queue_core.engines.sqlite import SqliteEngine
from queue_core.job import Claim, Claimed, NewJob, Settlement
from tests.conftest import wait_until
from tests.engine.stage import QUEUE as QUEUE
from tests.engine.stage import Fork as Fork
from tests.engine.stage import Stage

SECOND_US = 1_000_000
LEASE_US = 60 * SECOND_US

OpenEngine = Callable[..., Engine]
MakeJob = Callable[..., Claim]
Recount = Callable[[], dict[str, dict[str, int]]]


# --- records ------------------------------------------------------------------------------------


def new_job(payload: bytes = b"{}", *, task: str = QUEUE, **options: Any) -> NewJob:
    """Return a job on its way in; one with a key gets the digest of its data."""
    if options.get("key") is not None:
        options.setdefault("digest", digest(task, payload))
    return NewJob(payload=payload, task=task, **options)


def request(*queues: str, limit: int = 1, lease_us: int = LEASE_US, **options: Any) -> ClaimRequest:
    """Return a wish for jobs of these queues, all queues if none is named."""
    return ClaimRequest(queues=queues or None, limit=limit, lease_us=lease_us, **options)


def settlement(claim: Claim | Claimed, to: State = State.DONE, **options: Any) -> Settlement:
    """Return how a claim ends, with what usually goes with the state it ends in."""
    outcome, reason, delay_us = {
        State.DONE: (Outcome.SUCCEEDED, None, 0),
        State.READY: (Outcome.INTERRUPTED, None, 0),
        State.DELAYED: (Outcome.FAILED, None, 10 * SECOND_US),
        State.DEAD: (Outcome.REJECTED, Reason.REJECTED, 0),
    }[to]
    fence = claim.claim if isinstance(claim, Claimed) else claim
    given: dict[str, Any] = {
        "outcome": outcome, "reason": reason, "delay_us": delay_us, "charge": to is not State.READY,
    }  # fmt: skip
    return Settlement(claim=fence, to=to, **(given | options))


def put(engine: Engine, *jobs: NewJob, queue: str = QUEUE) -> list[int]:
    """Store jobs, one plain job if none is given, and return their ids."""
    return [stored.id for stored in engine.enqueue(queue, jobs or (new_job(),))]


def take(engine: Engine, limit: int = 1, queue: str = QUEUE, **options: Any) -> list[Claimed]:
    """Claim for a holder of its own."""
    wanted = request(queue, limit=limit, **options)
    return engine.claim(wanted, holder=engine.hold(Holder(worker="test/0")))


def state_of(engine: Engine, job_id: int) -> State | None:
    """Return where a job stands, None when there is no such job."""
    record = engine.find(job_id)
    return record.state if record else None


# --- engines ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """How to open an engine of one kind, and how to read its rows behind its back."""

    open: Callable[..., Engine]
    recount: Callable[[Path], dict[str, dict[str, int]]]
    keys: Callable[[Path], dict[tuple[str, str], tuple[int, int | None]]]


def recount_sqlite(path: Path) -> dict[str, dict[str, int]]:
    """Count rows per queue and state over a connection of our own, trusting no counter."""
    with closing(sqlite3.connect(path)) as connection:
        if not connection.execute("SELECT 1 FROM sqlite_master").fetchone():
            return {}  # never used, so never made
        rows = connection.execute(
            """
            SELECT queue.name, found.state, count(*) FROM queue JOIN (
                SELECT queue, state FROM job
                UNION ALL
                SELECT queue, CASE outcome WHEN 'succeeded' THEN 'done' ELSE outcome END FROM done
                UNION ALL
                SELECT queue, 'dead' FROM dead) AS found ON found.queue = queue.id
            GROUP BY queue.name, found.state
            """
        ).fetchall()
        names = [name for (name,) in connection.execute("SELECT name FROM queue")]
    counted = {name: {state.value: 0 for state in State} for name in names}
    for name, state, number in rows:
        counted[name][state] = number
    return counted


def keys_sqlite(path: Path) -> dict[tuple[str, str], tuple[int, int | None]]:
    """Return by queue and key the job that holds it, and until when."""
    with closing(sqlite3.connect(path)) as connection:
        return {
            (queue, key): (job, expires_us)
            for queue, key, job, expires_us in connection.execute(
                "SELECT name, job_key, job, expires_us FROM idempotency"
                " JOIN queue ON queue.id = idempotency.queue"
            )
        }


KINDS = {"sqlite": Kind(open=SqliteEngine, recount=recount_sqlite, keys=keys_sqlite)}


@pytest.fixture
def clock() -> FakeClock:
    """Give a clock that moves only when the test moves it."""
    return FakeClock()


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    """Name the engine under test; a test that asks for it runs once per engine."""
    return KINDS[request.param]


@pytest.fixture
def open_engine(kind: Kind, database: Path, clock: FakeClock) -> Iterator[OpenEngine]:
    """Return a function that opens an engine on the test's store, as another process would."""
    opened: list[Engine] = []

    def start(**options: Any) -> Engine:
        given: dict[str, Any] = {"clock": clock, "durability": "normal"}
        opened.append(kind.open(database, **(given | options)))
        return opened[-1]

    yield start
    for engine in opened:
        engine.close()


@pytest.fixture
def recount(kind: Kind, database: Path) -> Recount:
    """Return a function that counts the stored rows per queue and state."""
    return lambda: kind.recount(database)


@pytest.fixture
def engine(open_engine: OpenEngine, recount: Recount) -> Iterator[Engine]:
    """Give an open engine; afterwards its counters must equal a recount, whatever was done."""
    yield open_engine()
    afterwards = open_engine()  # the test may have closed its own
    for name, expected in recount().items():
        counted = afterwards.counts(name)
        assert {state: counted[state] for state in expected} == expected, f"counters of {name}"


@pytest.fixture
def queue(engine: Engine) -> Queue[Any]:
    """Give the façade over the engine under test."""
    return Queue("unused", QUEUE, engine=engine)


@pytest.fixture
def make_job(engine: Engine) -> MakeJob:
    """Return a function that brings a job into a state and returns its newest claim `(id, run)`."""
    # Each before all others, so that the claim below takes the one just made.
    priorities = itertools.count(1_000_000)

    def make(state: State, *, queue: str = QUEUE, **options: Any) -> Claim:
        wait_us = 3600 * SECOND_US if state is State.DELAYED else 0
        job = new_job(delay_us=wait_us, **({"priority": next(priorities)} | options))
        (job_id,) = put(engine, job, queue=queue)
        if state in {State.CLAIMED, State.DONE, State.DEAD}:
            (row,) = take(engine, queue=queue)
            assert row.id == job_id
            if state is not State.CLAIMED:
                engine.finish([settlement(row, state, started_us=row.claimed_us)])
        elif state is State.CANCELLED:
            assert engine.cancel(queue, [job_id]) == 1
        record = engine.find(job_id)
        assert record is not None
        assert record.state is state
        return Claim(id=job_id, run=record.run)

    return make


# --- processes ----------------------------------------------------------------------------------


@pytest.fixture
def fork() -> Iterator[Fork]:
    """Return a function that runs another in a forked process; all are ended and reaped."""
    pids: list[int] = []

    def start(work: Callable[[], object]) -> int:
        if (pid := os.fork()) == 0:
            code = 1
            try:
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
            os.kill(pid, 9)
            os.waitpid(pid, 0)


def exit_codes(pids: Sequence[int]) -> list[int]:
    """Wait for children, and return their exit codes."""

    def ended(pid: int) -> tuple[int, int] | None:
        found = os.waitpid(pid, os.WNOHANG)
        return found if found[0] else None

    statuses = [wait_until(lambda pid=pid: ended(pid), what=f"child {pid} ended") for pid in pids]
    return [os.waitstatus_to_exitcode(status) for _, status in statuses]


@pytest.fixture
def stage(database: Path, fork: Fork) -> Iterator[Stage]:
    """Give a database with one job, and children that put together."""
    made = Stage(database, fork)
    yield made
    made.board.close()
