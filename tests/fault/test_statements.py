"""Break each SQL statement of each transition in turn: nothing is ever half-done.

For every operation, every statement it runs is in its turn the one that fails (busy, disk full,
disk failed, read-only, corrupt), once, or from then on until somebody mends the disk; and the one
after which the process is killed.
"""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from queue_core.codec import digest
from queue_core.engine import ClaimRequest
from queue_core.engines.sqlite import SqliteEngine
from queue_core.errors import (
    DatabaseCorrupt,
    DatabaseFull,
    DatabaseReadOnly,
    DatabaseUnavailable,
    QueueBusy,
    QueueError,
    QueueFull,
)
from queue_core.job import Claimed, NewJob, Settlement, State
from tests.fault.checks import is_whole, lock_is_free, shape
from tests.fault.conftest import LARGE, QUEUE, SECOND_US, Fork, Stock, exit_codes, settled

STATEMENTS_MAX = 200
"""More than any operation runs: a count that reaches it never ends by itself."""

KINDS: dict[str, tuple[type[sqlite3.Error], int, type[QueueError]]] = {
    "busy": (sqlite3.OperationalError, sqlite3.SQLITE_BUSY, QueueBusy),
    "full": (sqlite3.OperationalError, sqlite3.SQLITE_FULL, DatabaseFull),
    "failed": (sqlite3.OperationalError, sqlite3.SQLITE_IOERR_WRITE, DatabaseUnavailable),
    "read-only": (sqlite3.OperationalError, sqlite3.SQLITE_READONLY, DatabaseReadOnly),
    "corrupt": (sqlite3.DatabaseError, sqlite3.SQLITE_CORRUPT, DatabaseCorrupt),
}

UNDO_KINDS = {"full", "failed"}
"""After these SQLite may have rolled back by itself (its documentation of BEGIN says when)."""

WAYS = {
    False: [(False, False), (True, False)],
    True: [(False, False), (False, True), (True, False)],
}
"""Whether a fault lasts, and whether SQLite itself rolls back at it; by whether it ever does."""


@dataclass
class Plan:
    """Which statement goes wrong, counted from 1, and how; `met` counts those that came by."""

    number: int
    kind: str = "none"
    lasting: bool = False
    undoes: bool = False
    met: int = 0
    broken: bool = False

    def strikes(self) -> bool:
        """Count a statement, and say whether it is one that goes wrong."""
        self.met += 1
        return self.met == self.number or (self.lasting and self.met > self.number)


class Faulty(sqlite3.Connection):
    """A real connection whose statements fail as a plan says."""

    plan: ClassVar[Plan | None] = None

    def _run(self, statement: str, run: Callable[[], sqlite3.Cursor]) -> sqlite3.Cursor:
        plan = Faulty.plan
        if plan is None or not plan.strikes():
            return run()
        if plan.kind == "busy" and statement == "ROLLBACK":
            return run()  # nobody can be in its way
        plan.broken = True
        if plan.kind == "killed":
            run()
            os.kill(os.getpid(), signal.SIGKILL)
        kind, code, _ = KINDS[plan.kind]
        if plan.undoes and self.in_transaction:
            super().execute("ROLLBACK")  # as SQLite may do by itself when the disk is full
        error = kind(f"{plan.kind}, by plan")
        error.sqlite_errorcode = code
        raise error

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        """Run a statement, or fail."""
        return self._run(arguments[0], lambda: super(Faulty, self).execute(*arguments))

    def executemany(self, *arguments: Any) -> sqlite3.Cursor:
        """Run a statement many times, or fail."""
        return self._run(arguments[0], lambda: super(Faulty, self).executemany(*arguments))

    def executescript(self, *arguments: Any) -> sqlite3.Cursor:
        """Run several statements, or fail."""
        return self._run(arguments[0], lambda: super(Faulty, self).executescript(*arguments))


@pytest.fixture(autouse=True)
def _faulty_connections(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    real = sqlite3.connect

    def connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
        if options.get("uri"):  # the engine's; our own looks at the file are not to fail
            options["factory"] = Faulty
        return real(*arguments, **options)

    monkeypatch.setattr(sqlite3, "connect", connect)
    yield
    Faulty.plan = None


# --- the operations -----------------------------------------------------------------------------


def _bury(row: Claimed, _started: bool) -> Settlement:
    return settled(row.claim, State.DELAYED if row.id % 2 else State.DEAD)


def _new(position: int, **options: Any) -> NewJob:
    payload = LARGE if position == 1 else b"1"
    key = f"new-{position}"
    return NewJob(payload=payload, task=QUEUE, key=key, digest=digest(QUEUE, payload), **options)


def _put(engine: SqliteEngine, _stock: Stock) -> None:
    engine.enqueue(QUEUE, [_new(0), _new(1), _new(2, delay_us=SECOND_US)])


def _put_new_queue(engine: SqliteEngine, _stock: Stock) -> None:
    engine.enqueue("another", [_new(0)])


def _put_too_many(engine: SqliteEngine, _stock: Stock) -> None:
    with pytest.raises(QueueFull):
        engine.enqueue(QUEUE, [NewJob(payload=b"1", task=QUEUE)] * 99)


def _put_with_mine(engine: SqliteEngine, _stock: Stock) -> None:
    with engine.transaction() as tx:
        plan, Faulty.plan = Faulty.plan, None
        tx.execute("UPDATE queue SET paused = paused")  # whose failing is its writer's affair
        Faulty.plan = plan
        engine.enqueue(QUEUE, [_new(0), _new(1)], tx=tx)


def _claim(engine: SqliteEngine, stock: Stock) -> None:
    wanted = ClaimRequest(queues=[QUEUE], limit=100, lease_us=60 * SECOND_US)
    engine.claim(wanted, holder=stock.holder)


def _claim_for_no_task(engine: SqliteEngine, stock: Stock) -> None:
    wanted = ClaimRequest(
        queues=None, limit=100, lease_us=60 * SECOND_US, tasks=frozenset({"another"})
    )
    assert engine.claim(wanted, holder=stock.holder) == []


def _turn(engine: SqliteEngine, stock: Stock) -> None:
    wanted = ClaimRequest(queues=[QUEUE], limit=100, lease_us=60 * SECOND_US)
    done = [settled(claim, State.DONE) for claim in stock.claims("running")]
    engine.turn(done, wanted, holder=stock.holder)


def _finish(to: State) -> Callable[[SqliteEngine, Stock], None]:
    return lambda engine, stock: (
        engine.finish([settled(claim, to) for claim in stock.claims("running")]) and None
    )


OPERATIONS: dict[str, Callable[[SqliteEngine, Stock], object]] = {
    "enqueue": _put,
    "enqueue in a new queue": _put_new_queue,
    "enqueue beyond the limit": _put_too_many,
    "enqueue in a transaction": _put_with_mine,
    "claim": _claim,
    "claim and set aside": _claim_for_no_task,
    "turn": _turn,
    "extend": lambda engine, stock: engine.extend(stock.claims("running"), 60 * SECOND_US),
    "extend holders": lambda engine, stock: engine.extend_holders([stock.holder], 7200 * SECOND_US),
    "ack": _finish(State.DONE),
    "nack": _finish(State.DELAYED),
    "fail": _finish(State.DEAD),
    "release": _finish(State.READY),
    "promote": lambda engine, _: engine.promote(100),
    "reap": lambda engine, _: engine.reap(_bury, 100),
    "replay": lambda engine, stock: engine.replay(QUEUE, stock.ids["dead"]),
    "discard": lambda engine, stock: engine.discard(None, stock.ids["dead"]),
    "cancel": lambda engine, stock: engine.cancel(QUEUE, stock.ids["ready"] + stock.ids["later"]),
    "prune": lambda engine, _: engine.prune(100),
    "configure": lambda engine, _: engine.configure(QUEUE, paused=True, max_depth=7),
    "checkpoint": lambda engine, _: engine.checkpoint(),
    "counts": lambda engine, _: engine.counts(QUEUE),
    "snapshot": lambda engine, _: engine.snapshot(),
    "find": lambda engine, stock: engine.find(stock.ids["done"][0]),
    "select": lambda engine, _: engine.select(State.DEAD),
    "held": lambda engine, stock: engine.held(stock.holder),
}

LOOKS = {"counts", "snapshot", "find", "select", "held"}
"""Those that write nothing."""


class Case:
    """One operation on fresh copies of the stock, with what it looks like before and after."""

    def __init__(self, folder: Path, stock: Stock, name: str) -> None:
        self.path = folder / "case.db"
        self.stock = stock
        self.name = name
        self.before = shape(stock.path)
        engine = self.opened()
        self.act(engine)
        engine.close()
        self.after = shape(self.path)

    def opened(self) -> SqliteEngine:
        """Return an engine over a fresh copy, opened, so that only the operation can fail."""
        self.stock.copy(self.path)
        engine = self.stock.open(self.path, lock_timeout_seconds=0.005)
        engine.version()
        return engine

    def act(self, engine: SqliteEngine) -> None:
        """Carry out the operation."""
        OPERATIONS[self.name](engine, self.stock)


def _check_sentence(error: QueueError, path: Path) -> None:
    text = str(error)
    assert str(path) in text
    assert "\n" not in text
    assert len(text) > len(str(path)) + 10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_statement_that_fails_leaves_nothing_half_done(
    memory: Path, stock: Stock, name: str, kind: str
) -> None:
    """The error is ours, lock and transaction are gone, all or nothing stands, and it works on."""
    case = Case(memory, stock, name)
    allowed = KINDS[kind][2]
    for number in range(1, STATEMENTS_MAX):
        broken = False
        for lasting, undoes in WAYS[kind in UNDO_KINDS]:
            engine = case.opened()
            Faulty.plan = plan = Plan(number, kind, lasting=lasting, undoes=undoes)
            try:
                case.act(engine)
            except allowed as error:
                _check_sentence(error, case.path)
            else:
                # A writer in the way is waited for; a hint that fails is none.
                assert not (plan.broken and shape(case.path) != case.after), plan
            Faulty.plan = None
            broken = broken or plan.broken
            assert lock_is_free(case.path), plan
            assert shape(case.path) in (case.before, case.after), plan
            case.act(engine)
            engine.close()
            assert shape(case.path) == case.after, plan
        assert is_whole(case.path)
        if not broken:
            return
    raise AssertionError("it never ran without a fault")


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in LOOKS])
def test_a_kill_at_any_statement_leaves_nothing_half_done(
    memory: Path, stock: Stock, name: str, fork: Fork
) -> None:
    """Whoever comes after a killed process finds all or nothing, and goes on."""
    case = Case(memory, stock, name)
    for number in range(1, STATEMENTS_MAX):
        stock.copy(case.path)

        def work(number: int = number) -> None:
            engine = stock.open(case.path)
            engine.version()
            Faulty.plan = Plan(number, "killed")
            case.act(engine)

        (code,) = exit_codes([fork(work)])
        assert code in (0, -signal.SIGKILL)
        assert lock_is_free(case.path)
        assert shape(case.path) in (case.before, case.after)
        engine = stock.open(case.path)
        case.act(engine)
        engine.close()
        assert is_whole(case.path)
        assert shape(case.path) == case.after
        if code == 0:
            return
    raise AssertionError("it never ran without a fault")


# --- opening ------------------------------------------------------------------------------------


def _first_look(stock: Stock, path: Path, place: str) -> None:
    """Open a new file, one at rest, or one that was last open before a reboot."""
    engine = stock.open(path, lock_timeout_seconds=0.005)
    if place == "after a reboot":
        engine.clock = type(stock.clock)(boot_id="boot-1", wall_us=stock.clock.wall_us())
    try:
        engine.counts(QUEUE)
    finally:
        engine.close()


def _fresh(stock: Stock, path: Path, place: str) -> None:
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    if place != "new":
        stock.copy(path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["new", "at rest", "after a reboot"])
def test_a_statement_that_fails_while_opening_leaves_nothing_half_made(
    memory: Path, stock: Stock, place: str, kind: str
) -> None:
    """The next opening makes or opens the store as if nothing had been."""
    path = memory / "case.db"
    allowed = KINDS[kind][2]
    _fresh(stock, path, place)
    _first_look(stock, path, place)
    after = shape(path)
    for number in range(1, STATEMENTS_MAX):
        broken = False
        for lasting, undoes in WAYS[kind in UNDO_KINDS]:
            _fresh(stock, path, place)
            Faulty.plan = plan = Plan(number, kind, lasting=lasting, undoes=undoes)
            try:
                _first_look(stock, path, place)
            except allowed as error:
                _check_sentence(error, path)
            Faulty.plan = None
            broken = broken or plan.broken
            assert lock_is_free(path), plan
            _first_look(stock, path, place)
            assert is_whole(path), plan
            assert shape(path) == after, plan
        if not broken:
            return
    raise AssertionError("it never ran without a fault")


@pytest.mark.parametrize("place", ["new", "at rest", "after a reboot"])
def test_a_kill_while_opening_leaves_nothing_half_made(
    memory: Path, stock: Stock, place: str, fork: Fork
) -> None:
    """Whoever opens after a killed opener finds a store, or makes one."""
    path = memory / "case.db"
    _fresh(stock, path, place)
    _first_look(stock, path, place)
    after = shape(path)
    for number in range(1, STATEMENTS_MAX):
        _fresh(stock, path, place)

        def work(number: int = number) -> None:
            Faulty.plan = Plan(number, "killed")
            _first_look(stock, path, place)

        (code,) = exit_codes([fork(work)])
        assert code in (0, -signal.SIGKILL)
        _first_look(stock, path, place)
        assert is_whole(path)
        assert shape(path) == after
        if code == 0:
            return
    raise AssertionError("it never ran without a fault")
