"""Cut the power at any moment: what a returned put has stored is there afterwards.

First the system calls of a real process are watched: whatever an operation wrote to the log, a
flush of the log has ended before it returned, and the lock was free while the disk worked. Then
the log is cut where a power cut may cut it, and opened.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from queue_core import Queue
from tests.fault.checks import is_whole

ROOT = Path(__file__).resolve().parents[2]
CALL = re.compile(
    r"^\d+\s+(\w+)\((?:\d+<(?P<path>[^>]*)>|\"(?P<name>[^\"]*)\")(?P<rest>.*)\)\s+= (-?\d+)"
)
FLUSHED = {
    "put", "duplicate", "ack", "nack", "fail", "release", "replay", "discard", "cancel",
    "configure",
}  # fmt: skip
UNFLUSHED = {"claim", "extend", "turn"}
FRAME_HEADER_BYTES = 24
CUTS_MAX = 1000


@dataclass(frozen=True)
class Call:
    """One system call on one file."""

    name: str
    path: str
    rest: str
    result: int


@dataclass(frozen=True)
class Told:
    """An operation that returned: what, on which job, and where the log ended then."""

    what: str
    id: int
    end_bytes: int


@dataclass(frozen=True)
class Trace:
    """What a process did, operation by operation, and the files it left."""

    database: Path
    steps: list[tuple[Told, list[Call]]]

    @property
    def log(self) -> Path:
        """The log as it was when the process was killed."""
        return Path(f"{self.database}-wal")

    def paths(self, told: Told, calls: list[Call], name: str, path: Path) -> list[int]:
        """Return the places of an operation's calls on a file."""
        return [
            at
            for at, call in enumerate(calls)
            if call.name in name.split("|") and call.path == str(path) and call.result >= 0
        ]


def _strace() -> str:
    found = shutil.which("strace")
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("strace is missing; .ci/run installs it")
        pytest.skip("strace is not installed here: apt-get install strace")
    return found


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Watch a process that does every operation once, and 50 puts."""
    folder = tmp_path_factory.mktemp("power")
    database, report, calls = (
        folder / "new" / "folder" / "h.db",
        folder / "report",
        folder / "calls",
    )
    done = subprocess.run(
        [_strace(), "-f", "-y", "-s", "80", "-o", calls, "-e",
         "trace=pwrite64,pwritev,write,fdatasync,fsync,flock,mkdir",
         sys.executable, "-m", "tests.fault.traced", database, report],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), done.stderr
    steps: list[tuple[Told, list[Call]]] = []
    seen: list[Call] = []
    for line in calls.read_text(errors="replace").splitlines():
        found = CALL.match(line)
        if found is None:
            continue
        path = found["path"] or found["name"]
        call = Call(found[1], path, found["rest"], int(found[5]))
        if call.path == str(report):
            words = re.findall(r"\"(.*?)\\n\"", call.rest)[0].split()
            steps.append((Told(words[0], int(words[1]), int(words[2])), seen))
            seen = []
        else:
            seen.append(call)
    assert len(steps) == len(report.read_text().splitlines())
    return Trace(database, steps)


def test_a_flush_ends_before_an_operation_returns(trace: Trace) -> None:
    """Between the last write to the log and the return stands a flush of the log that succeeded."""
    met = set()
    for told, calls in trace.steps:
        if told.what not in FLUSHED:
            continue
        met.add(told.what)
        writes = trace.paths(told, calls, "pwrite64|pwritev", trace.log)
        flushes = trace.paths(told, calls, "fdatasync", trace.log)
        assert writes, told
        assert flushes, told
        assert flushes[-1] > writes[-1], told
        assert calls[flushes[-1]].result == 0
    assert met == FLUSHED
    assert sum(told.what == "put" for told, _ in trace.steps) > 50


def test_claims_and_extensions_and_a_workers_turn_wait_for_no_disk(trace: Trace) -> None:
    """What a power cut undoes of them is done again; a turn that waited would be slow."""
    met = set()
    for told, calls in trace.steps:
        if told.what in UNFLUSHED:
            met.add(told.what)
            assert trace.paths(told, calls, "pwrite64|pwritev", trace.log), told
            assert not [call for call in calls if call.name in ("fsync", "fdatasync")], told
    assert met == UNFLUSHED


def test_nobody_holds_the_lock_while_the_disk_works(trace: Trace) -> None:
    """The lock is given back between the commit and the flush, so that flushes are shared."""
    lock = Path(f"{trace.database}.lock")
    for told, calls in trace.steps[1:]:  # the first also makes the file
        if told.what not in FLUSHED or told.id == trace.steps[-4][0].id:
            continue
        last_flush = trace.paths(told, calls, "fdatasync", trace.log)[-1]
        locks = [calls[at] for at in trace.paths(told, calls[:last_flush], "flock", lock)]
        assert "LOCK_UN" in locks[-1].rest, told


def test_a_checkpoint_writes_nothing_that_is_not_safe_in_the_log(trace: Trace) -> None:
    """Log, then file, then the log anew: each is on the disk before the next is touched."""
    at = next(at for at, (told, _) in enumerate(trace.steps) if told.what == "checkpoint")
    told, calls = trace.steps[at]
    into_file = trace.paths(told, calls, "pwrite64|pwritev", trace.database)
    assert into_file
    assert trace.paths(told, calls[: into_file[0]], "fdatasync|fsync", trace.log)
    assert trace.paths(told, calls[into_file[-1] :], "fdatasync|fsync", trace.database)
    told, calls = trace.steps[at + 1]
    assert trace.paths(told, calls, "pwrite64|pwritev", trace.log), "the log begins anew"


def test_new_folders_and_files_outlast_a_power_cut(trace: Trace) -> None:
    """Each name made for a new database is synced in its folder before the first put returns."""
    _, calls = trace.steps[0]
    synced = {call.path for call in calls if call.name in ("fsync", "fdatasync")}
    made = trace.database.parent
    assert {str(made.parent.parent), str(made.parent), str(made)} <= synced


# --- the cut ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def before_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Told]]:
    """Give a database whose puts are in the log alone, and where the log ended after each."""
    database = tmp_path_factory.mktemp("cut") / "h.db"
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        code = 1
        try:
            queue: Queue[str] = Queue(database, "jobs")
            for number in range(50):
                large = "x" * 5000 if number % 10 == 0 else ""
                id_ = queue.put(f"{number}{large}", key=f"key {number}")
                end = 32 + queue.engine._file.log_bytes()  # type: ignore[attr-defined]
                os.write(writer, f"{id_} {end}\n".encode())
            code = 0
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        lines = [line.split() for line in pipe]
    os.waitpid(pid, 0)
    assert len(lines) == 50
    return database, [Told("put", int(id_), int(end)) for id_, end in lines]


def _stored(database: Path) -> set[int]:
    with closing(sqlite3.connect(database)) as connection:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'job'").fetchone():
            return set()
        return {id_ for (id_,) in connection.execute("SELECT id FROM job")}


def _after(folder: Path, database: Path, log: bytes) -> Path:
    """Lay out what the disk holds after a cut: the file, and this much of the log."""
    path = folder / "cut.db"
    shutil.copy(database, path)
    Path(f"{path}-shm").unlink(missing_ok=True)
    Path(f"{path}-wal").write_bytes(log)
    return path


def test_a_log_cut_anywhere_keeps_every_put_that_had_returned(
    memory: Path, before_checkpoint: tuple[Path, list[Told]]
) -> None:
    """At each end of a frame, and within each frame, from the first returned put on."""
    database, puts = before_checkpoint
    whole = Path(f"{database}-wal").read_bytes()
    frame_bytes = int.from_bytes(whole[8:12], "big") + FRAME_HEADER_BYTES
    ends = range(puts[0].end_bytes, len(whole) + 1, frame_bytes)
    cuts = [at for end in ends for at in (end, min(len(whole), end + 1 + end % frame_bytes))]
    assert 100 < len(cuts) < 2 * CUTS_MAX
    for cut in cuts:
        path = _after(memory, database, whole[:cut])
        returned = {put.id for put in puts if put.end_bytes <= cut}
        assert returned <= _stored(path), cut
    assert returned == {put.id for put in puts}


def test_blocks_lost_behind_the_last_flush_take_no_returned_put_along(
    memory: Path, before_checkpoint: tuple[Path, list[Told]]
) -> None:
    """A disk writes blocks in any order: behind the flushed part any of them may be missing."""
    database, puts = before_checkpoint
    whole = Path(f"{database}-wal").read_bytes()
    chance = random.Random(20)
    for position, put in enumerate(puts):
        torn = bytearray(whole)
        for block in range(-(-put.end_bytes // 512), -(-len(whole) // 512)):
            if chance.random() < 0.3:
                at = max(block * 512, put.end_bytes)
                size = len(torn[at : (block + 1) * 512])
                torn[at : at + size] = bytes(size) if position % 2 else chance.randbytes(size)
        path = _after(memory, database, bytes(torn))
        assert {told.id for told in puts[: position + 1]} <= _stored(path)
        with Queue(path, "jobs") as queue:
            assert queue.put("goes on") > puts[position].id
        assert is_whole(path)
