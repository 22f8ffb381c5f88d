"""Show that a look at the log's file sees every commit, and costs the database nothing else."""

from __future__ import annotations

import os
import select
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from queue_core import Queue
from supervisor.glance import SETTLED_SECONDS, SILENT_MAX, Glance
from tests.conftest import wait_until


def look(glance: Glance) -> bool:
    """Look now."""
    return glance.stirred(time.monotonic())


def settle(glance: Glance) -> None:
    """Look until the answer is no, as it must soon be."""
    wait_until(lambda: not look(glance), what="a log that nobody writes seems to be at rest")


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Path]:
    """Yield a database whose log is kept by an open queue."""
    path = tmp_path / "h.db"
    with Queue(path, "jobs") as queue:
        queue.put({"number": 0})
        yield path


def test_a_commit_of_another_program_is_seen(database: Path) -> None:
    """Someone who knows nothing of us writes with SQLite alone: the next look says so."""
    glance = Glance(f"{database}-wal")
    with closing(sqlite3.connect(database)) as other:
        for _ in range(5):
            settle(glance)
            other.execute("UPDATE stat SET value = value + 1 WHERE name = 'sequence'")
            other.commit()
            assert look(glance)
    settle(glance)


def test_a_commit_into_a_log_that_starts_again_is_seen(database: Path) -> None:
    """After a checkpoint the log is written from its top: it keeps its size, and yet is seen."""
    log = Path(f"{database}-wal")
    glance = Glance(str(log))
    with closing(sqlite3.connect(database)) as other:
        for _ in range(20):
            other.execute("UPDATE stat SET value = value + 1 WHERE name = 'sequence'")
            other.commit()
        other.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        settle(glance)
        size = log.stat().st_size
        other.execute("UPDATE stat SET value = value + 1 WHERE name = 'sequence'")
        other.commit()
        assert log.stat().st_size == size
        assert look(glance)


def test_a_write_that_leaves_no_trace_in_the_file_s_facts_is_not_lost(tmp_path: Path) -> None:
    """Two writes in one tick of the kernel's clock look the same: a look that follows tells."""
    log = tmp_path / "h.db-wal"
    log.write_bytes(b"1")
    glance = Glance(str(log))
    assert glance.stirred(10.0)
    before = log.stat()
    with open(log, "r+b") as file:
        file.write(b"2")
    os.utime(log, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert glance.stirred(10.0 + SETTLED_SECONDS / 2), "a second look that comes soon"
    assert glance.stirred(99.0), "however late the look comes that is the last"
    assert not glance.stirred(99.1)


def test_without_a_log_only_the_database_can_tell(tmp_path: Path) -> None:
    """No file, as with PostgreSQL, or one that comes and goes: the answer is yes."""
    assert Glance("").stirred(0.0)
    path = tmp_path / "h.db-wal"
    glance = Glance(str(path))
    assert look(glance)
    path.touch()
    settle(glance)
    path.unlink()
    assert look(glance)
    path.touch()
    assert look(glance)


def test_a_sleeper_is_told_of_a_write(database: Path) -> None:
    """Whoever armed the glance can sleep: the next commit of anybody wakes it, once each time."""
    glance = Glance(f"{database}-wal")
    with closing(sqlite3.connect(database)) as other:
        for _ in range(3):
            assert glance.arm()
            settle(glance)
            assert select.select([glance.fd], [], [], 0)[0] == []
            other.execute("UPDATE stat SET value = value + 1 WHERE name = 'sequence'")
            other.commit()
            assert select.select([glance.fd], [], [], 5)[0] == [glance.fd]
            assert glance.told(look(glance))
            assert not glance.told(False)
    glance.close()


def test_a_kernel_that_keeps_writes_to_itself_is_not_relied_upon(tmp_path: Path) -> None:
    """Some file systems tell of no write: after a few that only a look found, looking is all."""
    path = tmp_path / "h.db-wal"
    path.touch()
    glance = Glance(str(path))
    for _ in range(SILENT_MAX):
        assert glance.arm()
        assert not glance.told(stirred=True)
    assert glance.fd == -1
    assert not glance.arm()


def test_what_cannot_be_watched_is_looked_at(tmp_path: Path) -> None:
    """Without a log, or with PostgreSQL, there is nothing to be told of."""
    glance = Glance(str(tmp_path / "none"))
    assert not glance.arm()
    glance.close()
    assert not Glance("").arm()
