"""Copy a database while it is in use, and tell whether a database is sound.

Boundary: works on a connection inside a read transaction that its caller holds.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from pathlib import Path
from typing import Final
from urllib.parse import quote

from queue_core.engines import sqlite_faults
from queue_core.engines.sql import load
from queue_core.errors import DatabaseCorrupt, DatabaseUnavailable, QueueError
from queue_core.upkeep import PROBLEMS_MAX, BackedUp

UPKEEP_SQL = load("maintenance.sql")
PAGES_PER_STEP: Final = 256
"""A step of about a megabyte: between two, the copy can be stopped."""


class _Unsound(Exception):
    """What was found wrong with a copy."""


def backup(source: sqlite3.Connection, path: Path, stop: threading.Event) -> BackedUp:
    """Copy to a file beside `path`, verify it, flush it, and give it its name.

    Raises QueueError when `path` is taken, and the DatabaseError that says what is
    wrong with the folder, the disk or the copy; SQLite's own while the source is busy,
    for another try. No file is ever written over.
    """
    path = Path(os.path.abspath(path))
    if os.path.lexists(path):
        raise QueueError(f"{path} exists; a backup never overwrites: name another file")
    part = path.with_name(f".{os.getpid()}-{threading.get_native_id()}.part")
    try:
        os.close(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        try:
            _copy(source, part, stop)
            _sync(part)
            if stop.is_set():
                raise QueueError(f"the backup to {path} was stopped")
            _name(part, path)
            _sync(path.parent)
        finally:
            for left in (part, Path(f"{part}-journal"), Path(f"{part}-wal"), Path(f"{part}-shm")):
                left.unlink(missing_ok=True)
    except (sqlite3.Error, _Unsound) as error:
        if isinstance(error, _Unsound) or sqlite_faults.is_damage(error):
            raise DatabaseCorrupt(
                f"the copy to {path} is not sound ({error}) and was not kept; "
                "check the original with 'herdsman doctor'"
            ) from error
        if sqlite_faults.is_busy(error):
            raise
        raise sqlite_faults.of_sqlite(path, error) from error
    except OSError as error:
        if sqlite_faults.is_full(error):
            raise sqlite_faults.of_os(path, error) from error
        raise DatabaseUnavailable(
            f"{error.filename or path} cannot be written ({error.strerror}); "
            "check the folder, or name another file"
        ) from error
    return BackedUp(path=path, size_bytes=path.stat().st_size)


def _copy(source: sqlite3.Connection, part: Path, stop: threading.Event) -> None:
    def progress(_status: int, _left: int, _total: int) -> None:
        if stop.is_set():
            raise QueueError(f"the backup to {part} was stopped")

    # Without a read of our own first, every step would begin a transaction of
    # its own, and the copy would begin anew whenever somebody has written.
    source.execute(UPKEEP_SQL["backup_pin"]).fetchone()
    target = sqlite3.connect(
        f"file:{quote(os.fsencode(part))}?mode=rw", uri=True, isolation_level=None
    )
    try:
        source.backup(target, pages=PAGES_PER_STEP, progress=progress, sleep=0.0)
        target.execute(UPKEEP_SQL["backup_journal"]).fetchone()
        target.execute(UPKEEP_SQL["backup_detach"])
        found = problems(target, full=True)
    finally:
        target.close()
    if found:
        raise _Unsound(found[0])


def _name(part: Path, path: Path) -> None:
    """Give the finished copy its name, unless somebody took it meanwhile."""
    try:
        os.link(part, path)  # unlike a rename, it refuses to replace
    except FileExistsError:
        raise QueueError(f"{path} has come to exist; the backup was not kept") from None
    except OSError:  # a filesystem without hard links
        if os.path.lexists(path):
            raise QueueError(f"{path} has come to exist; the backup was not kept") from None
        os.rename(part, path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def problems(connection: sqlite3.Connection, *, full: bool) -> list[str]:
    """Return sentences on what is wrong with a database, at most a few hundred; none is sound."""
    try:
        rows = connection.execute(UPKEEP_SQL["check_full" if full else "check_quick"]).fetchall()
        found = [str(row[0]) for row in rows if row[0] != "ok"]
        if full and not found:
            for name, fault in (
                ("check_no_payload", "job {} has lost its payload"),
                ("check_no_job", "a payload is kept for job {}, which does not exist"),
                ("check_twice", "job {} stands in two states at once"),
            ):
                listed = connection.execute(UPKEEP_SQL[name], {"limit": PROBLEMS_MAX})
                found.extend(fault.format(row[0]) for row in listed)
    except sqlite3.DatabaseError as error:
        if not sqlite_faults.is_damage(error):
            raise
        return [str(error)]
    return found
