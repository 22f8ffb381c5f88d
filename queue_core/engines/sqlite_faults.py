"""Turn the errors of SQLite and of the file system into ours: what, where, what next.

Boundary: words and kinds only; who tries again, and how often, is the caller's affair.
"""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

from queue_core.errors import (
    DatabaseCorrupt,
    DatabaseError,
    DatabaseFull,
    DatabaseReadOnly,
    DatabaseUnavailable,
    QueueBusy,
    QueueError,
)


def primary_code(error: sqlite3.Error) -> int:
    """Return SQLite's result code without its extension; 0 when there is none."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def is_busy(error: sqlite3.Error) -> bool:
    """Whether somebody is in the way, so that another try may work."""
    return primary_code(error) in {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_PROTOCOL,
    }


def is_damage(error: sqlite3.Error) -> bool:
    """Whether what was read is no sound database."""
    return primary_code(error) in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


def is_full(error: OSError) -> bool:
    """Whether there is no room left on the disk."""
    return error.errno in {errno.ENOSPC, errno.EDQUOT}


def of_sqlite(path: Path, error: sqlite3.Error) -> QueueError:
    """Return our error for SQLite's."""
    if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_IOERR_SHMSIZE:
        # Its word for "no space left", where the log's index is what has to grow.
        return DatabaseFull(f"{path}: the disk is full; free space, then try again")
    match primary_code(error):
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return QueueBusy(f"{path} is locked by a program that does not use {path}.lock")
        case sqlite3.SQLITE_PROTOCOL:
            # SQLite has waited 10 s for a process that is between two steps which take a
            # microsecond: it was stopped there (sqlite.org/rescode.html#protocol).
            return QueueBusy(
                f"{path}: a process that has it open is stopped, or gets no processor time, and "
                "holds up the others; continue it (kill -CONT), or end it"
            )
        case sqlite3.SQLITE_FULL:
            return DatabaseFull(f"{path}: the disk is full; free space, then try again")
        case sqlite3.SQLITE_READONLY:
            return DatabaseReadOnly(f"{path} cannot be written by this user; check its owner")
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return DatabaseCorrupt(
                f"{path} is not a database, or is damaged ({error}); "
                "restore a backup, or name another file"
            )
        case sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM | sqlite3.SQLITE_AUTH:
            return DatabaseUnavailable(f"{path} cannot be opened ({error}); check its folder")
        case sqlite3.SQLITE_IOERR:
            return DatabaseUnavailable(f"{path}: the disk failed ({error}); check its health")
        case _:
            return DatabaseError(f"{path}: {error}")


def of_os(path: Path, error: OSError) -> QueueError:
    """Return our error for the operating system's."""
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return DatabaseFull(f"{path}: the disk is full; free space, then try again")
        case errno.EROFS | errno.EACCES | errno.EPERM:
            return DatabaseReadOnly(
                f"{error.filename or path} cannot be written by this user; check its owner"
            )
        case _:
            return DatabaseUnavailable(
                f"{error.filename or path}: {error.strerror or error}; check the path"
            )
