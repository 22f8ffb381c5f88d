"""Break each SQL statement of the engine in turn: nothing is ever half-done.

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

from queue_core.engines import sql
from queue_core.engines.sqlite import SqliteEngine
from queue_core.errors import (
    DatabaseCorrupt,
    DatabaseFull,
    DatabaseReadOnly,
    DatabaseUnavailable,
    QueueBusy,
    QueueError,
)
from tests.fault.checks import is_whole, lock_is_free, shape
from tests.fault.conftest import QUEUE, Fork, Stock, exit_codes
from tests.fault.operations import LOOKS, MINE, OPERATIONS

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
    met: ClassVar[set[str]] = set()
    """Every statement that came by."""

    def _run(self, statement: str, run: Callable[[], sqlite3.Cursor]) -> sqlite3.Cursor:
        plan = Faulty.plan
        Faulty.met.add(statement)
        if plan is None or MINE in statement or not plan.strikes():
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


# --- one operation after the other ------------------------------------------------------------


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

PLACES = ["new", "at rest", "after a reboot"]


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
@pytest.mark.parametrize("place", PLACES)
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


@pytest.mark.parametrize("place", PLACES)
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


# --- all of them --------------------------------------------------------------------------------

CREATION = {"schema_tables", "schema_sequence", "pragma_set_application_id",
            "pragma_set_user_version"}  # fmt: skip
"""These run as one script, which fails or is killed as a whole."""
ELSEWHERE = {"put_batch"}
"""Asked by whom a dead process has left in the dark: see `tests/engine/test_shared.py`."""


def test_every_statement_is_met(memory: Path, stock: Stock) -> None:
    """A statement that no operation above runs would be one that nobody ever broke."""
    Faulty.met.clear()
    for name in OPERATIONS:
        Case(memory, stock, name)
    for place in PLACES:
        _fresh(stock, memory / "case.db", place)
        _first_look(stock, memory / "case.db", place)
    stored = {**sql.load("sqlite.sql"), **sql.load("maintenance.sql")}
    assert {name for name, text in stored.items() if text not in Faulty.met} == (
        CREATION | ELSEWHERE
    )
    assert all(any(stored[name] in met for met in Faulty.met) for name in CREATION)
