"""Make a file a herdsman database, verify that it is one, and notice a reboot.

Boundary: runs once per opening, under the write lock, before anything else does.
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Final

from queue_core.clock import Clock
from queue_core.engines.sql import SQL
from queue_core.errors import (
    DatabaseCorrupt,
    DatabaseUnavailable,
    SchemaTooNew,
    SchemaTooOld,
)
from queue_core.lockfile import InstanceLock
from queue_core.stats import DEPTH, TREE_DEATHS, Row

SCHEMA_VERSION: Final = 1
APPLICATION_ID: Final = 0x48455244
"""'HERD': marks the file as ours, so that another program's database is refused."""
SEQUENCE_LEAP: Final = 2**20
"""Ids skipped at the first opening after a boot: a power cut may have undone a put whose id
somebody has seen, and that id must never name another job."""


def instance_lock_path(database: Path, instance: str) -> Path:
    """Return the lock file that a supervisor of this name holds while it lives."""
    return Path(f"{database}.{instance}.lock")


def prepare(connection: sqlite3.Connection, path: Path, clock: Clock) -> bool:
    """Create or verify the schema, and void the claims of an earlier boot.

    Returns whether something was written that must be flushed. Raises
    DatabaseCorrupt, SchemaTooNew, SchemaTooOld, DatabaseUnavailable.
    """
    application = _number(connection, "pragma_application_id")
    version = _number(connection, "pragma_user_version")
    if application == 0 and version == 0 and _number(connection, "schema_foreign_tables") == 0:
        _create(connection, clock)
        return True
    if application != APPLICATION_ID:
        raise DatabaseCorrupt(
            f"{path} is a SQLite database of another program; name another file "
            "(your own tables may live in ours, not ours in yours)"
        )
    if version > SCHEMA_VERSION:
        raise SchemaTooNew(
            f"{path} has schema {version} and this herdsman knows {SCHEMA_VERSION}; "
            "upgrade herdsman"
        )
    if version < SCHEMA_VERSION:
        raise SchemaTooOld(
            f"{path} has schema {version} and this herdsman needs {SCHEMA_VERSION}; "
            "open it with a version in between, or restore a backup of this version"
        )
    if connection.execute(SQL["pragma_journal_mode"]).fetchone()[0] != "wal":
        connection.execute(SQL["pragma_wal"])
    row = connection.execute(SQL["meta_get"], {"name": "boot"}).fetchone()
    if row is None:
        raise DatabaseCorrupt(f"{path} has lost rows of its own table meta; restore a backup")
    if row[0] != clock.boot_id():
        _void_claims(connection, path, clock)
        return True
    return False


def _number(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(SQL[name]).fetchone()[0])


def _create(connection: sqlite3.Connection, clock: Clock) -> None:
    connection.execute(SQL["pragma_wal"])
    script = ";\n".join(
        SQL[name]
        for name in (
            "begin_write",
            "schema_tables",
            "schema_sequence",
            "pragma_set_application_id",
            "pragma_set_user_version",
        )
    )
    connection.executescript(script + ";")
    connection.execute(SQL["meta_set"], {"name": "boot", "value": clock.boot_id()})
    connection.execute(SQL["meta_set"], {"name": "created_us", "value": str(clock.wall_us())})
    connection.execute(SQL["commit"])


def _void_claims(connection: sqlite3.Connection, path: Path, clock: Clock) -> None:
    """Hand back every claim of an earlier boot; no attempt is charged for a power cut.

    A supervisor that lives on under another boot id means that two kernels
    share the file, where neither lock nor lease holds: that is refused.
    """
    boot = clock.boot_id()
    for (instance,) in connection.execute(SQL["boot_instances"], {"boot": boot}).fetchall():
        lock = instance_lock_path(path, instance)
        if InstanceLock.is_held(lock) and _boot_of(lock) != boot:
            raise DatabaseUnavailable(
                f"{path} is in use by supervisor {instance!r} on another kernel; one SQLite file "
                "serves one host: stop the other, or use PostgreSQL"
            )
    connection.execute(SQL["begin_write"])
    for queue, task, number in connection.execute(SQL["boot_depths"]).fetchall():
        rows = [
            Row(queue, "", DEPTH, "claimed", -number),
            Row(queue, "", DEPTH, "ready", number),
            Row(queue, task, TREE_DEATHS, "", number),
        ]
        connection.executemany(SQL["stat_add"], rows)
    connection.execute(SQL["boot_release"])
    connection.execute(SQL["stat_sequence"], {"number": SEQUENCE_LEAP}).fetchone()
    connection.execute(SQL["meta_set"], {"name": "boot", "value": boot})
    connection.execute(SQL["commit"])


def _boot_of(lock: Path) -> str:
    try:
        return str(json.loads(lock.read_text(encoding="utf-8")).get("boot", ""))
    except (OSError, ValueError, AttributeError):
        return ""


def has_wal_reset_bug(version: tuple[int, ...]) -> bool:
    """Whether a SQLite version can corrupt a database when its log starts again.

    Versions 3.7.0 to 3.51.2 have that bug, save 3.44.6 and 3.50.7 and their successors of the
    same line (SQLite release notes for 3.51.3).
    """
    if not (3, 7, 0) <= version < (3, 51, 3):
        return False
    fixed = {(3, 44): 6, (3, 50): 7}.get((version[0], version[1]))
    return fixed is None or version[2] < fixed
