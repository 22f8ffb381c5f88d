"""`herdsman doctor`: each point of host, database and configuration, and what it mends."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from queue_core import Queue
from queue_core.upkeep import Diagnostics
from supervisor import doctor, points
from supervisor.host import Room
from supervisor.points import Point, Status
from supervisor.settings import without_file
from tests.surface.commands import document, herdsman


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue[Any]]:
    """A queue `emails` with a job, in `jobs.db`."""
    with Queue[Any](tmp_path / "jobs.db", "emails") as opened:
        opened.put(1)
        yield opened


def named(found: list[Point] | Iterator[Point], name: str) -> Point:
    """Return the one point of a name."""
    (point,) = [one for one in found if one.name == name]
    return point


def examine(tmp_path: Path, **options: bool) -> dict[str, Point]:
    """Examine the database in this process; return the points by name."""
    found = doctor.examine(without_file(str(tmp_path / "jobs.db")), **options)
    assert len({one.name for one in found}) == len(found)
    for one in found:
        assert one.seen
        assert one.next or one.status in (Status.OK, Status.INFO), one
    return {one.name: one for one in found}


def drift(tmp_path: Path) -> None:
    """Write SQL by hand, as somebody will."""
    with closing(sqlite3.connect(tmp_path / "jobs.db")) as connection:
        connection.execute(
            "UPDATE stat SET value = value + 5 WHERE name = 'queue_jobs' AND label = 'ready'"
        )
        connection.commit()


def test_a_sound_database_passes_every_point(tmp_path: Path, queue: Queue[Any]) -> None:
    """Exit code 0, a line per point in text, the same points in JSON."""
    done = herdsman("doctor", "--recount", "-d", tmp_path / "jobs.db", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    seen = {line.split()[1]: line.split()[0] for line in done.stdout.splitlines() if line[0] != " "}
    assert {"locks", "owners", "modes", "disk", "integrity", "counters", "package"} <= set(seen)
    assert "fail" not in seen.values()
    found = examine(tmp_path, recount=True)
    assert {one.status for one in found.values()} <= {Status.OK, Status.INFO, Status.WARN}
    assert found["supervisor"].seen == "none runs on this database"


def test_drifted_counters_are_told_with_numbers_and_mended_on_request(
    tmp_path: Path, queue: Queue[Any]
) -> None:
    """Nothing is changed without `--mend`; after it the counters are right."""
    drift(tmp_path)
    assert "counters" not in examine(tmp_path), "rows are read only when asked"
    done = herdsman("doctor", "--recount", "--json", "-d", tmp_path / "jobs.db", cwd=tmp_path)
    assert done.returncode == 1
    (failed,) = [p for p in document(done)["points"] if p["status"] == "fail"]
    assert failed["name"] == "counters"
    assert "queue emails has 1 ready, its counter says 6" in failed["seen"]
    assert "--mend" in failed["next"]
    assert queue.counts().ready == 6, "it was mended without being asked"
    mended = examine(tmp_path, mend=True)["counters"]
    assert mended.status is Status.INFO
    assert mended.seen.endswith("mended")
    assert queue.counts().ready == 1
    assert examine(tmp_path, recount=True)["counters"].status is Status.OK


def test_a_damaged_file_fails_and_so_does_the_command(tmp_path: Path) -> None:
    """Exit code 1 and a sentence, where other commands end with 69."""
    (tmp_path / "jobs.db").write_bytes(b"not a database at all\n" * 500)
    done = herdsman("doctor", "-d", tmp_path / "jobs.db", cwd=tmp_path)
    assert done.returncode == 1
    assert "fail  database" in done.stdout


def test_damaged_pages_are_found(tmp_path: Path, queue: Queue[Any]) -> None:
    """The quick check reads every page."""
    queue.put_many([{"x": "y" * 500}] * 500)
    queue.close()
    path = tmp_path / "jobs.db"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\xff" * 8192)
    found = examine(tmp_path)
    point = found.get("integrity") or found["database"]
    assert point.status is Status.FAIL


def test_a_database_that_is_not_there_is_a_warning_and_is_not_made(tmp_path: Path) -> None:
    """The doctor can be asked before the first start."""
    found = examine(tmp_path)
    assert found["database"].status is Status.WARN
    assert list(tmp_path.iterdir()) == []


def test_files_that_others_can_read_or_own_are_told(
    tmp_path: Path, queue: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Payloads are private; a stranger's sidecar makes every write fail."""
    assert examine(tmp_path)["modes"].status is Status.OK
    (tmp_path / "jobs.db-wal").chmod(0o644)
    point = examine(tmp_path)["modes"]
    assert point.status is Status.WARN
    assert "jobs.db-wal has mode 0644" in point.seen
    uid = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    point = named(points.files(tmp_path / "jobs.db"), "owners")
    assert point.status is Status.FAIL
    assert f"you are {uid}" in point.seen


def test_files_of_two_owners_are_told(
    tmp_path: Path, queue: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a command run as root beside a service of another user."""
    real = os.lstat

    def lstat(path: str) -> Any:
        found = real(path)
        if str(path).endswith("-wal"):
            return os.stat_result([*found[:4], found.st_uid + 1, *found[5:]])
        return found

    monkeypatch.setattr(os, "lstat", lstat)
    point = named(points.files(tmp_path / "jobs.db"), "owners")
    assert point.status is Status.FAIL
    assert point.next.startswith(f"chown {os.geteuid()} ")
    assert point.next.endswith("jobs.db-wal")


def test_another_distribution_of_our_name_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two packages named supervisor lie over each other, whichever came last."""
    info = tmp_path / "supervisor-4.2.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: supervisor\nVersion: 4.2.5\n")
    (info / "top_level.txt").write_text("supervisor\n")
    (info / "RECORD").write_text("supervisor/__init__.py,,\n")
    assert points.package().status is Status.OK
    monkeypatch.syspath_prepend(str(tmp_path))
    point = points.package()
    assert point.status is Status.FAIL
    assert "uninstall supervisor" in point.next


@pytest.mark.parametrize(
    ("kind", "name", "status"),
    [
        ("nfs4", "filesystem", Status.FAIL),
        ("overlay", "filesystem", Status.INFO),
        ("ext4", "locks", Status.FAIL),
    ],
)
def test_places_where_a_database_should_not_lie_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str, status: Status
) -> None:
    """Networks, container layers, and filesystems on which flock keeps nobody out."""
    monkeypatch.setattr(points, "filesystem_type", lambda folder: kind)
    monkeypatch.setattr(points, "is_tmpfs", lambda folder: False)
    monkeypatch.setattr(points, "flock_excludes", lambda folder: kind != "ext4")
    assert named(points.place(tmp_path / "jobs.db"), name).status is status


def test_a_disk_nearly_full_is_a_warning_and_a_full_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes and inodes both end."""
    rooms = {
        Status.OK: Room(free_bytes=2**34, total_bytes=2**40, free_inodes=None),
        Status.WARN: Room(free_bytes=2**34, total_bytes=2**40, free_inodes=3),
        Status.FAIL: Room(free_bytes=2**20, total_bytes=2**40, free_inodes=2**20),
    }
    for status, room in rooms.items():
        monkeypatch.setattr(points.host, "room", lambda path, room=room: room)
        assert named(points.room(tmp_path), "disk").status is status


def test_a_unit_that_kills_more_than_it_must_is_told() -> None:
    """Only what systemd shows is judged."""
    (point,) = points.judge_unit({"KillMode": "control-group", "OOMPolicy": "continue"})
    assert (point.status, point.next) == (Status.WARN, "set KillMode=mixed in the unit")
    (point,) = points.judge_unit({"KillMode": "mixed", "OOMPolicy": "continue"})
    assert point.status is Status.OK


def test_the_bug_of_this_sqlite_matters_only_without_the_lock(
    tmp_path: Path, queue: Queue[Any]
) -> None:
    """The flock around every write and checkpoint is what keeps us clear of it."""
    facts: Diagnostics = replace(queue.diagnostics(), wal_reset_bug=True)
    assert named(doctor.judge_database(facts), "sqlite bug").status is Status.INFO
    off = replace(facts, lock="off")
    assert named(doctor.judge_database(off), "sqlite bug").status is Status.FAIL
    fine = [point.name for point in doctor.judge_database(replace(facts, wal_reset_bug=False))]
    assert "sqlite bug" not in fine


def test_a_long_log_and_leases_that_ran_out_are_told(tmp_path: Path, queue: Queue[Any]) -> None:
    """Both grow quietly until somebody looks."""
    facts = replace(queue.diagnostics(), log_bytes=2**30, leases=4, leases_expired=2)
    found = list(doctor.judge_database(facts))
    assert "1024 MiB" in named(found, "log").seen
    assert named(found, "leases").seen == "2 of 4 leases ran out unreaped"
    assert {named(found, "log").status, named(found, "leases").status} == {Status.WARN}
