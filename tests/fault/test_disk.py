"""Fail the disk for real: full, read-only, damaged, gone; nothing accepted is lost."""

from __future__ import annotations

import errno
import os
import random
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from queue_core import (
    DatabaseCorrupt,
    DatabaseFull,
    DatabaseReadOnly,
    DatabaseUnavailable,
    DurabilityUnknown,
    Queue,
    QueueError,
    State,
)
from queue_core.engines import sqlite_log
from tests.fault.checks import is_whole, lock_is_free

BIG = "x" * 50_000
PAGES_DAMAGED = 25


@pytest.fixture
def queue(database: Path) -> Iterator[Queue[Any]]:
    """Give a queue with one job."""
    with Queue(database, "jobs") as made:
        made.put("before")
        yield made


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a filesystem of two megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        if os.environ.get("CI"):
            pytest.fail(f"no filesystem could be mounted: {mounted.stderr}")
        pytest.skip(f"only root may mount a small disk: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def _remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)


def _fill(queue: Queue[Any], fault: type[QueueError]) -> list[int]:
    """Put until it fails; return the ids that were accepted."""
    accepted: list[int] = []

    def put_on() -> None:
        while len(accepted) < 1000:
            accepted.append(queue.put(BIG))

    with pytest.raises(fault, match="full; free space"):
        put_on()
    return accepted


def test_a_full_disk_refuses_puts_and_loses_none(small_disk: Path) -> None:
    """What was accepted can still be read, and with space again everything goes on."""
    database = small_disk / "h.db"
    with Queue(database, "jobs") as queue:
        accepted = _fill(queue, DatabaseFull)
        assert len(accepted) > 3
        with pytest.raises(DatabaseFull):
            queue.put(BIG)
        assert lock_is_free(database)
        assert queue.counts().ready == len(accepted)
        found = queue.find(accepted[-1])
        assert found is not None
        assert found.payload == BIG
        _remount(small_disk, "size=16m")
        accepted.append(queue.put(BIG))
        for id_ in accepted:
            job = queue.get(timeout=0)
            assert job is not None
            assert job.id == id_
            queue.ack(job)
        assert queue.counts().done == len(accepted)
    assert is_whole(database)


def test_a_disk_full_from_the_start_is_told_and_got_over(small_disk: Path) -> None:
    """A file that could not be made whole is made when there is space."""
    (small_disk / "filler").write_bytes(bytes(2 * 1024 * 1024 - 16 * 1024))
    database = small_disk / "h.db"
    with Queue(database, "jobs") as queue:
        with pytest.raises(QueueError, match="full; free space"):
            queue.put(BIG)
        (small_disk / "filler").unlink()
        queue.put(BIG)
    assert is_whole(database)


def test_a_read_only_disk_is_told_and_got_over(small_disk: Path) -> None:
    """Nothing is stored while it is so, and everything afterwards."""
    database = small_disk / "h.db"
    with Queue(database, "jobs") as queue:
        queue.put("before")
    _remount(small_disk, "ro")
    with Queue(database, "jobs") as queue:
        with pytest.raises(DatabaseReadOnly, match="cannot be written"):
            queue.put("now")
        _remount(small_disk, "rw")
        queue.put("after")
        assert queue.counts().ready == 2
    assert is_whole(database)


def test_a_backup_that_finds_no_room_says_so_and_leaves_nothing(
    queue: Queue[Any], small_disk: Path, database: Path
) -> None:
    """Full is told apart from a folder that cannot be written; with space the backup is made."""
    queue.put_many([BIG] * 50)
    with pytest.raises(DatabaseFull, match="full; free space"):
        queue.backup(small_disk / "copy.db")
    assert os.listdir(small_disk) == []
    assert lock_is_free(database)
    _remount(small_disk, "size=16m")
    assert is_whole(queue.backup(small_disk / "copy.db").path)


def test_the_page_limit_of_a_database_is_a_full_disk(queue: Queue[Any], database: Path) -> None:
    """An administrator's limit is told as what it is, and may be raised."""
    connection = queue.engine._file._connection  # type: ignore[attr-defined]
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages + 20}")
    accepted = _fill(queue, DatabaseFull)
    assert lock_is_free(database)
    connection.execute("PRAGMA max_page_count = 100000")
    queue.put(BIG)
    assert queue.counts().ready == len(accepted) + 2
    assert is_whole(database)


def _everything(queue: Queue[Any]) -> Iterator[Callable[[], object]]:
    yield lambda: queue.put("another", key="k")
    yield lambda: [queue.ack(job) for job in queue.get_many(20)]
    yield queue.counts
    yield lambda: [queue.find(id_) for id_ in range(1, 200, 10)]
    for state in State:
        yield lambda state=state: queue.jobs(state)  # type: ignore[misc]
    yield lambda: queue.cancel(100, 101)
    yield lambda: queue.replay_all()
    yield queue.prune
    yield queue.check
    yield queue.recount
    yield queue.diagnostics


def test_a_damaged_page_is_told_and_crashes_nothing(memory: Path) -> None:
    """Whatever page is damaged, each call works or raises an error of ours that names the file."""
    original = memory / "original.db"
    with Queue(original, "jobs") as queue:
        queue.put_many([f"{number}" + "x" * (number % 7 * 600) for number in range(300)])
        for job in queue.get_many(100):
            queue.fail(job) if job.id % 3 else queue.ack(job)
        queue.get_many(20)
    data = original.read_bytes()
    chance = random.Random(3)
    told = named = 0
    pages = len(data) // 4096
    for page in chance.sample(range(1, pages), min(PAGES_DAMAGED, pages - 1)):
        path = memory / f"damaged-{page}.db"
        damage = chance.randbytes(4096) if page % 2 else bytes(4096)
        path.write_bytes(data[: page * 4096] + damage + data[(page + 1) * 4096 :])
        queue = Queue(path, "jobs", lock_timeout_seconds=1)
        for work in _everything(queue):
            try:
                work()
            except QueueError as error:
                named += str(path) in str(error)
                told += isinstance(error, DatabaseCorrupt)
        assert lock_is_free(path)
        queue.close()
        path.unlink()
    assert named >= told > PAGES_DAMAGED


def test_a_file_that_is_removed_in_use_takes_no_put_along(
    queue: Queue[Any], database: Path
) -> None:
    """A put into a file without a name would be accepted and lost: it is refused."""
    database.rename(database.with_name("moved.db"))
    Path(f"{database}-wal").rename(database.with_name("moved.db-wal"))
    with pytest.raises(DatabaseUnavailable, match="removed or replaced"):
        queue.put("now")
    queue.put("into a new file")
    assert queue.counts().ready == 1
    assert is_whole(database)
    with closing(sqlite3.connect(database.with_name("moved.db"))) as moved:
        assert moved.execute("SELECT count(*) FROM job").fetchone() == (1,)


def test_a_file_that_is_replaced_in_use_is_taken_up(queue: Queue[Any], database: Path) -> None:
    """After a backup was restored over it, the backup is what is used, its log untouched."""
    backup = database.with_name("backup.db")
    queue.backup(backup)
    queue.put("after the backup")
    Path(f"{database}-wal").unlink()
    Path(f"{database}-shm").unlink()
    backup.rename(database)
    with Queue(database, "jobs") as other:
        other.put("by another process")
        with pytest.raises(DatabaseUnavailable, match="removed or replaced"):
            queue.put("now")
        queue.put("again")
        assert Path(f"{database}-wal").exists()
        assert other.counts().ready == queue.counts().ready == 3
    assert is_whole(database)


def test_a_log_that_is_removed_in_use_takes_no_put_along(queue: Queue[Any], database: Path) -> None:
    """The put that meets it is told so, and what stands in the lost log is saved into the file."""
    Path(f"{database}-wal").unlink()
    with pytest.raises(DurabilityUnknown, match="removed while in use"):
        queue.put("now")
    queue.put("after")
    queue.close()
    with Queue(database, "jobs") as again:
        assert [job.payload for job in again.jobs(State.READY)] == ["before", "now", "after"]
    assert is_whole(database)


def test_after_a_failed_flush_puts_wait_for_a_checkpoint(
    queue: Queue[Any], database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that lost a write once may say yes the next time: the file alone can be trusted."""
    real = sqlite_log.sync_data
    failing = True

    def sync(descriptor: int) -> None:
        if failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    monkeypatch.setattr(sqlite_log, "sync_data", sync)
    with pytest.raises(DurabilityUnknown, match="may not survive a power cut"):
        queue.put("uncertain")
    failing = False
    with closing(sqlite3.connect(database, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        (before,) = reader.execute("SELECT count(*) FROM job").fetchone()
        with Queue(database, "other") as other:  # the log grows behind the reader
            other.put("by another process")
        with pytest.raises(DurabilityUnknown, match="an earlier flush failed"):
            queue.put("refused")
        assert queue.counts().ready == before == 2
        reader.execute("ROLLBACK")
    queue.put("accepted")
    assert [job.payload for job in queue.jobs(State.READY)] == ["before", "uncertain", "accepted"]
    assert is_whole(database)
