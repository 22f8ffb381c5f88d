"""Read the SQLite file of another queue without touching it.

The file and its log are copied, and the copy is read: opening the original would
write to its index file, might run its recovery, and closing it could move its log.

Boundary: rows only; what they mean is the importer's to say.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

from queue_core.engines.sql import load
from queue_core.errors import DatabaseCorrupt, DatabaseUnavailable, QueueError

FOREIGN_SQL = load("foreign.sql")
COPY_TRIES_MAX: Final = 3
Row = tuple[Any, ...]


class Foreign:
    """An open copy of another program's database."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path = path
        self._connection = connection

    def tables(self) -> list[str]:
        """Return the names of its tables."""
        return [row[0] for row in self._rows(FOREIGN_SQL["foreign_tables"])]

    def columns(self, table: str) -> list[str]:
        """Return the names of a table's columns, none for a table that is not there."""
        return [row[0] for row in self._rows(FOREIGN_SQL["foreign_columns"], {"table": table})]

    def litequeue_jobs(self, table: str) -> Iterator[Row]:
        """Yield the messages of a litequeue table."""
        keyed = {"idempotency_key", "claim_id"} <= set(self.columns(table))
        statement = FOREIGN_SQL["litequeue_keyed_jobs" if keyed else "litequeue_jobs"]
        # A table's name cannot be a parameter; doubled quotes keep it a name.
        quoted = '"' + table.replace('"', '""') + '"'
        return self._rows(statement.replace("{table}", quoted))

    def localqueue_jobs(self) -> Iterator[Row]:
        """Yield the messages of all queues of localqueue."""
        return self._rows(FOREIGN_SQL["localqueue_jobs"])

    def _rows(self, statement: str, parameters: dict[str, object] | None = None) -> Iterator[Row]:
        try:
            yield from self._connection.execute(statement, parameters or {})
        except sqlite3.Error as error:
            raise _fault(self._path, error) from error


@contextmanager
def opened(path: Path) -> Iterator[Foreign]:
    """Copy a database into a private folder, open the copy, and remove it in the end.

    Raises DatabaseUnavailable, DatabaseCorrupt, and QueueError when the file
    changes while it is copied.
    """
    with tempfile.TemporaryDirectory(prefix="herdsman-import-") as folder:
        copy = Path(folder) / "source.db"
        try:
            _copy(path, copy)
        except OSError as error:
            raise DatabaseUnavailable(
                f"{error.filename or path} cannot be read ({error.strerror or error})"
            ) from error
        with closing(sqlite3.connect(copy, isolation_level=None)) as connection:
            # A database written elsewhere is hostile: nothing of its schema runs by itself.
            connection.execute(FOREIGN_SQL["foreign_untrusted"])
            connection.text_factory = _text
            try:
                connection.execute(FOREIGN_SQL["foreign_tables"]).fetchone()
            except sqlite3.Error as error:
                raise _fault(path, error) from error
            yield Foreign(path, connection)


def _copy(path: Path, copy: Path) -> None:
    """Copy file and log as they were at one moment, told by neither having changed meanwhile."""
    for _ in range(COPY_TRIES_MAX):
        before = _state(path)
        shutil.copyfile(path, copy)
        log = Path(f"{path}-wal")
        if log.exists():
            shutil.copyfile(log, f"{copy}-wal")
        journal = Path(f"{path}-journal")
        if journal.exists():
            shutil.copyfile(journal, f"{copy}-journal")
        if _state(path) == before:
            return
        for left in (copy, Path(f"{copy}-wal"), Path(f"{copy}-journal")):
            left.unlink(missing_ok=True)
    raise QueueError(f"{path} is being written to; stop the program that uses it, then try again")


def _state(path: Path) -> list[tuple[int, int, int] | None]:
    found: list[tuple[int, int, int] | None] = []
    for suffix in ("", "-wal", "-journal"):
        try:
            status = os.stat(f"{path}{suffix}")
        except FileNotFoundError:
            if not suffix:
                raise
            found.append(None)
        else:
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return found


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _fault(path: Path, error: sqlite3.Error) -> QueueError:
    return DatabaseCorrupt(f"{path} cannot be read as a queue's database ({error})")
