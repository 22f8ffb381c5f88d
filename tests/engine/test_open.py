"""Show what opening makes, what it refuses, and that it harms no file that is not ours."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from queue_core import (
    DatabaseCorrupt,
    DatabaseReadOnly,
    DatabaseUnavailable,
    Queue,
    QueueClosed,
    QueueError,
    SchemaTooNew,
    SchemaTooOld,
    State,
    open_engine,
)
from queue_core.engines.sqlite import SqliteEngine
from tests.engine.conftest import QUEUE, Fork, exit_codes, put


def mode(path: Path | str) -> int:
    """Return the permissions of a file."""
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.fixture
def open_umask() -> Iterator[None]:
    """Take away the protection that a usual umask gives."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
def test_every_file_is_private(tmp_path: Path) -> None:
    """Payloads are nobody else's business, whatever the umask."""
    path = tmp_path / "made" / "by us" / "herdsman.db"
    queue: Queue[Any] = Queue(path, QUEUE)
    queue.put(1)
    queue.get(timeout=0.01)
    queue.get(timeout=0.01)
    assert {mode(path.parent), mode(path.parent.parent)} == {0o700}
    found = {entry.name for entry in path.parent.iterdir()}
    assert found == {f"herdsman.db{end}" for end in ("", "-wal", "-shm", ".lock", ".bells")}
    for entry in path.parent.rglob("*"):
        assert mode(entry) == (0o700 if entry.is_dir() else 0o600), entry
    queue.close()


def test_a_new_file_is_ours_and_in_wal_mode(database: Path) -> None:
    """Other programs can see what the file is: its application id says so."""
    put(SqliteEngine(database))
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA application_id").fetchone() == (0x48455244,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_an_empty_file_becomes_a_database(database: Path) -> None:
    """A file that a tool made in advance is as good as none."""
    database.touch(mode=0o600)
    engine = SqliteEngine(database)
    put(engine)
    assert engine.counts(QUEUE)["ready"] == 1
    engine.close()


def test_nothing_is_opened_before_it_is_used(database: Path) -> None:
    """Naming a database makes no file."""
    SqliteEngine(database).close()
    Queue[Any](database, QUEUE).close()
    assert list(database.parent.iterdir()) == []


@pytest.mark.parametrize("round_", range(5))
def test_sixteen_processes_may_open_a_new_file_at_once(
    database: Path, fork: Fork, round_: int
) -> None:
    """One of them makes the schema; all of them put."""
    queue: Queue[Any] = Queue(database, QUEUE)
    gate, opener = os.pipe()

    def child() -> None:
        os.close(opener)
        os.read(gate, 1)  # ends for all at once, when the parent closes
        queue.put_many([1, 2, 3])
        queue.close()

    pids = [fork(child) for _ in range(16)]
    os.close(gate)
    os.close(opener)
    assert exit_codes(pids) == [0] * 16
    assert queue.counts().ready == 48
    queue.close()


@pytest.mark.parametrize(
    "name", ["with space.db", "a?b#c%20d.db", "ünï✓.db", "line\nbreak.db", "'quote\".db", "-.db"]
)
def test_any_file_name_will_do(tmp_path: Path, name: str) -> None:
    """A name is a name, and not a URI or an option."""
    path = tmp_path / name
    with Queue[Any](path, QUEUE) as queue:
        queue.put(1)
        assert queue.counts().ready == 1
    assert path.exists()


def test_a_name_that_is_no_utf8_will_do(tmp_path: Path) -> None:
    """The system's names are bytes."""
    path = tmp_path / os.fsdecode(b"caf\xe9.db")
    with Queue[Any](path, QUEUE) as queue:
        queue.put(1)
    assert path.exists()


def test_a_link_leads_to_the_same_database_and_lock(database: Path, tmp_path: Path) -> None:
    """Two names of one file must not mean two locks."""
    link = tmp_path / "link.db"
    link.symlink_to(database)
    with Queue[Any](link, QUEUE) as one, Queue[Any](database, QUEUE) as two:
        one.put(1)
        two.put(2)
        assert one.counts().ready == two.counts().ready == 2
    assert not Path(f"{link}.lock").exists()


@pytest.mark.parametrize("way", ["option", "environment"])
def test_the_lock_can_be_left_out(
    database: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A filesystem without flock still has SQLite's own lock."""
    if way == "environment":
        monkeypatch.setenv("HERDSMAN_NO_FLOCK", "1")
        monkeypatch.setenv("HERDSMAN_UNSAFE_SQLITE", "1")
    by_option = way == "option"
    engine = SqliteEngine(database, lock="off" if by_option else "flock", unsafe_sqlite=by_option)
    put(engine)
    assert not Path(f"{database}.lock").exists()
    engine.close()


@pytest.mark.parametrize("version", [(3, 40, 1), (3, 51, 3)])
def test_a_sqlite_that_needs_the_lock_keeps_it(
    database: Path, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int]
) -> None:
    """Without it two processes could damage the log; a newer SQLite does not need it so."""
    monkeypatch.setattr(sqlite3, "sqlite_version_info", version)
    engine = SqliteEngine(database, lock="off")
    if version < (3, 51, 3):
        with pytest.raises(DatabaseUnavailable, match="allow this by name"):
            put(engine)
        assert not database.exists()
    else:
        put(engine)
    engine.close()


# --- refusals -----------------------------------------------------------------------------------


def before_and_after(path: Path, error: type[QueueError], match: str) -> None:
    """Expect a refusal that leaves the file as it was, to the byte."""
    before = path.read_bytes()
    engine = SqliteEngine(path)
    with pytest.raises(error, match=match):
        put(engine)
    with pytest.raises(error, match=match):
        engine.counts(QUEUE)
    engine.close()
    assert path.read_bytes() == before


def test_a_text_file_is_refused(database: Path) -> None:
    """A slip of the path costs nobody his notes."""
    database.write_text("dear diary, " * 1000)
    before_and_after(database, DatabaseCorrupt, "not a database")


@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_a_database_of_another_program_is_refused(database: Path, journal: str) -> None:
    """Neither its tables nor its journal mode are touched."""
    with closing(sqlite3.connect(database)) as connection:
        connection.execute(f"PRAGMA journal_mode = {journal}")
        connection.execute("CREATE TABLE job (id INTEGER)")
        connection.commit()
    before_and_after(database, DatabaseCorrupt, "another program")


def stamped(path: Path, version: int) -> None:
    """Make a database of ours that says it has this schema."""
    engine = SqliteEngine(path)
    put(engine)
    engine.close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


@pytest.mark.parametrize("version", [99, 2**31 - 1])
def test_a_newer_schema_is_refused(database: Path, version: int) -> None:
    """An old program does not guess what a new one wrote."""
    stamped(database, version)
    before_and_after(database, SchemaTooNew, "upgrade herdsman")


def test_an_older_schema_is_refused_by_the_library(database: Path) -> None:
    """It is left as it is, and the message says what to do."""
    stamped(database, 0)
    before_and_after(database, SchemaTooOld, "restore a backup")


def test_a_file_cut_in_half_is_refused(database: Path) -> None:
    """Damage is told as damage, not as an empty queue."""
    engine = SqliteEngine(database)
    put(engine)
    engine.close()
    whole = database.read_bytes()
    database.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(QueueError):
        put(SqliteEngine(database))


def test_a_missing_file_can_be_refused(tmp_path: Path) -> None:
    """A tool that only looks must not leave an empty database behind a slip of the path."""
    path = tmp_path / "missing" / "herdsman.db"
    engine = SqliteEngine(path, create=False)
    with pytest.raises(DatabaseUnavailable, match="does not exist"):
        engine.counts(QUEUE)
    assert not path.parent.exists()


def test_an_empty_file_can_be_refused(tmp_path: Path) -> None:
    """A tool that only looks makes no database of what somebody else may mean to fill."""
    path = tmp_path / "herdsman.db"
    path.touch()
    with pytest.raises(DatabaseUnavailable, match="is empty"):
        SqliteEngine(path, create=False).counts(QUEUE)
    assert path.stat().st_size == 0
    SqliteEngine(path).counts(QUEUE)
    assert path.stat().st_size > 0


def test_a_folder_is_no_database(tmp_path: Path) -> None:
    """Each wrong kind of path gets a sentence of ours."""
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "herdsman.db"):
        with pytest.raises(DatabaseUnavailable, match=str(tmp_path)):
            put(SqliteEngine(path))


@pytest.mark.parametrize(
    "name",
    ["", ":memory:", "a\0b", "redis://host/0", "postgresql://host/db", "file:x.db?mode=memory"],
)
def test_what_no_two_processes_can_share_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A queue in memory would lose every job; another system's address is not ours."""
    monkeypatch.chdir(tmp_path)
    if name.startswith("file:"):  # is only an odd file name here, and never a URI
        put(open_engine(name))  # type: ignore[arg-type]
        assert (tmp_path / name).exists()
        return
    with pytest.raises(DatabaseUnavailable):
        open_engine(name)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def folder_for_all() -> Iterator[Path]:
    """Make a folder that every user of this host can enter."""
    folder = Path(tempfile.mkdtemp(prefix="herdsman-open-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("create", [True, False])
@pytest.mark.parametrize("private", [True, False])
def test_a_user_who_may_not_write_is_told(
    folder_for_all: Path, fork: Fork, create: bool, private: bool
) -> None:
    """Whether the folder or the file is closed to this user: one sentence, no traceback."""
    path = folder_for_all / "inner" / "herdsman.db"
    engine = SqliteEngine(path)
    put(engine)
    engine.close()
    if not private:
        path.parent.chmod(0o755)
    else:
        path.parent.chmod(0o700 if os.geteuid() == 0 else 0)
    Path(f"{path}.lock").chmod(0 if os.geteuid() else 0o600)

    def child() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        with pytest.raises((DatabaseReadOnly, DatabaseUnavailable), match=str(path.parent)):
            put(SqliteEngine(path, create=create))

    code = exit_codes([fork(child)])
    path.parent.chmod(0o700)
    assert code == [0]


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every path seem to be on NFS: mounting one takes a server."""
    for name, module in list(sys.modules.items()):
        if name.startswith("queue_core.engines.") and hasattr(module, "filesystem_type"):
            monkeypatch.setattr(module, "filesystem_type", lambda _path: "nfs4")


@pytest.mark.usefixtures("network")
def test_a_network_filesystem_is_refused_unless_allowed_by_name(database: Path) -> None:
    """Locks that do not reach the other host would let two of them write at once."""
    with pytest.raises(DatabaseUnavailable, match="nfs4"):
        put(SqliteEngine(database))
    assert not database.exists()
    allowed = SqliteEngine(database, network_filesystem=True)
    put(allowed)
    allowed.close()


# --- closing ------------------------------------------------------------------------------------


def test_the_last_to_close_leaves_one_whole_file(database: Path) -> None:
    """A closed database can be copied as a single file."""
    one, two = SqliteEngine(database), SqliteEngine(database)
    put(one)
    put(two)
    one.close()
    assert Path(f"{database}-wal").exists()
    two.close()
    assert not Path(f"{database}-wal").exists()
    again = SqliteEngine(database)
    assert len(again.select(State.READY)) == 2
    again.close()


def test_a_closed_queue_says_so(database: Path) -> None:
    """Use after close is a fault of the caller, told in one sentence; closing twice is not."""
    queue: Queue[Any] = Queue(database, QUEUE)
    queue.put(1)
    queue.close()
    queue.close()
    for use in (lambda: queue.put(2), lambda: queue.get(timeout=0), queue.counts):
        with pytest.raises(QueueClosed, match="closed"):
            use()


def test_an_engine_that_was_passed_in_is_not_closed(database: Path) -> None:
    """Several queues share one engine; who made it closes it."""
    engine = SqliteEngine(database)
    with Queue[Any]("unused", "a", engine=engine) as queue:
        queue.put(1)
    assert engine.counts("a")["ready"] == 1
    engine.close()


def test_opening_again_writes_nothing(database: Path) -> None:
    """An open without need leaves file and log as they were."""
    engine = SqliteEngine(database)
    put(engine)
    engine.close()
    before = database.read_bytes()
    looked = SqliteEngine(database)
    looked.counts(QUEUE)
    assert os.stat(f"{database}-wal").st_size == 0
    looked.close()
    assert database.read_bytes() == before
