"""Show that a lock excludes, is waited for in time, is never left behind, and says who has it."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from queue_core.lockfile import (
    NETWORK_FILESYSTEMS,
    FileLock,
    InstanceLock,
    describe_holder,
    filesystem_type,
    flock_excludes,
    type_in_mountinfo,
)
from tests.conftest import wait_until

Fork = Callable[[Callable[[], object]], int]


class Interruption(Exception):
    """What a signal handler raises here."""


@pytest.fixture
def fork() -> Iterator[Fork]:
    """Run functions in forked processes, and end and reap those that are left."""
    pids: list[int] = []

    def start(work: Callable[[], object]) -> int:
        if (pid := os.fork()) == 0:
            code = 1
            try:
                signal.alarm(60)  # nothing outlives a test that hangs
                work()
                code = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
        return pid

    yield start
    for pid in pids:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[FileLock]:
    """Hand out a lock on a file that does not exist yet."""
    made = FileLock(tmp_path / "db.lock")
    yield made
    made.close()


def ended(pid: int) -> int:
    """Wait for a child, and return its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def is_free(path: Path) -> bool:
    """Say whether an opener of its own gets the lock at once."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def hold(path: Path, ready: int | None = None) -> None:
    """Take the lock, say so, and keep it until killed."""
    held = FileLock(path)
    assert held.acquire(10)
    if ready is not None:
        os.write(ready, b"1")
    signal.pause()


def held_by_child(fork: Fork, path: Path) -> int:
    """Start a process that holds the lock, and return its pid."""
    reader, writer = os.pipe()
    pid = fork(lambda: hold(path, writer))
    os.close(writer)
    assert os.read(reader, 1) == b"1"
    os.close(reader)
    return pid


def kill_soon(fork: Fork, pid: int) -> None:
    """Kill a child in a tenth of a second, when the caller has begun to wait."""

    def kill() -> None:
        time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)

    fork(kill)


def open_paths() -> set[str]:
    """Return the files this process has open."""
    paths = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder listed just now
            paths.add(os.readlink(f"/proc/self/fd/{fd}"))
    return paths


def threads() -> int:
    """Count the threads of this process."""
    return len(os.listdir("/proc/self/task"))


def test_the_file_is_private_and_made_when_first_needed(lock: FileLock) -> None:
    """Nothing is created before a lock is taken, and then nobody else may open it."""
    assert not lock.path.exists()
    assert lock.acquire(0)
    assert stat.S_IMODE(lock.path.stat().st_mode) == 0o600
    assert lock.held
    assert not is_free(lock.path)
    lock.release()
    assert not lock.held
    assert is_free(lock.path)


def test_a_link_in_the_files_place_is_refused(lock: FileLock, tmp_path: Path) -> None:
    """A lock is never taken on a file somebody else chose."""
    lock.path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        lock.acquire(0)
    assert not (tmp_path / "elsewhere").exists()


def test_processes_exclude_each_other(tmp_path: Path, fork: Fork) -> None:
    """A read and a write of a counter, with the lock around them, never lose an increment."""
    path, counter = tmp_path / "db.lock", tmp_path / "counter"
    counter.write_text("0")

    def count() -> None:
        mine = FileLock(path)
        for _ in range(200):
            assert mine.acquire(30)
            counter.write_text(str(int(counter.read_text()) + 1))
            mine.release()

    assert [ended(pid) for pid in [fork(count) for _ in range(4)]] == [0, 0, 0, 0]
    assert counter.read_text() == "800"


def test_a_wait_ends_at_its_deadline(lock: FileLock, fork: Fork) -> None:
    """Whoever cannot have the lock is told in time, and holds nothing."""
    held_by_child(fork, lock.path)
    began = time.monotonic()
    assert not lock.acquire(0.2)
    assert 0.2 <= time.monotonic() - began < 5
    assert not lock.held
    began = time.monotonic()
    assert not lock.acquire(0)
    assert time.monotonic() - began < 0.1


def test_a_killed_holder_frees_the_lock_for_the_waiter(lock: FileLock, fork: Fork) -> None:
    """SIGKILL leaves no stale lock, and who waits gets it then and not at a next poll."""
    pid = held_by_child(fork, lock.path)
    kill_soon(fork, pid)
    assert lock.acquire(20)
    assert lock.held
    lock.release()
    assert is_free(lock.path)


def test_a_lock_that_comes_too_late_is_unlocked_at_once(lock: FileLock, fork: Fork) -> None:
    """The helper left behind by a caller who gave up keeps nobody out."""
    pid = held_by_child(fork, lock.path)
    assert not lock.acquire(0.05)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not lock._helper.fds, what="the helper has had the lock")
    assert is_free(lock.path)
    assert not lock.held
    wait_until(lambda: lock.acquire(0), what="the lock can be taken after the late one")
    assert not is_free(lock.path)


def test_a_wait_that_is_interrupted_gives_the_lock_back(lock: FileLock, fork: Fork) -> None:
    """What arrives after Ctrl-C ended the wait is unlocked like any late lock."""

    def interrupt(*_: object) -> None:
        raise Interruption

    pid = held_by_child(fork, lock.path)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interruption):
            lock.acquire(30)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not lock._helper.fds, what="the helper has had the lock")
    assert is_free(lock.path)
    assert not lock.held


def test_a_late_lock_is_not_taken_from_under_the_helper(lock: FileLock, fork: Fork) -> None:
    """Until the helper has unlocked what came too late, the lock counts as taken."""
    pid = held_by_child(fork, lock.path)
    assert not lock.acquire(0.02)
    with lock._helper.mutex:  # stops the helper between having the lock and giving it back
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: describe_holder(lock.path).startswith(f"process {os.getpid()} "))
        assert not lock.acquire(0)
    wait_until(lambda: lock.acquire(0))
    assert not is_free(lock.path)


def test_a_new_wait_takes_over_the_one_still_running(lock: FileLock, fork: Fork) -> None:
    """However often a caller gives up and returns, there is one helper."""
    pid = held_by_child(fork, lock.path)
    before = threads()
    for _ in range(5):
        assert not lock.acquire(0.02)
    assert threads() == before + 1
    kill_soon(fork, pid)
    assert lock.acquire(20)
    assert not is_free(lock.path)
    # The wait is over for the helper too: it must not unlock what it granted.
    assert not lock._helper.fds
    lock.release()


def test_a_close_while_a_wait_runs_leaks_neither_lock_nor_descriptor(
    lock: FileLock, fork: Fork
) -> None:
    """The helper closes what it still needed, or gives it back to who opens again."""
    pid = held_by_child(fork, lock.path)
    before, open_before = threads(), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        assert not lock.acquire(0.02)
        lock.close()
    assert threads() == before + 1
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: threads() == before, what="the helper has ended")
    assert is_free(lock.path)
    assert len(os.listdir("/proc/self/fd")) == open_before
    assert lock.acquire(0)


def test_an_adopted_wait_is_granted_after_a_close(lock: FileLock, fork: Fork) -> None:
    """A close between two waits costs neither the place in line nor the lock."""
    pid = held_by_child(fork, lock.path)
    assert not lock.acquire(0.02)
    lock.close()
    kill_soon(fork, pid)
    assert lock.acquire(20)
    assert not is_free(lock.path)
    lock.release()
    assert is_free(lock.path)


def test_the_helper_ends_when_idle(
    lock: FileLock, fork: Fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread is there while there is contention, and can be started again after."""
    monkeypatch.setattr("queue_core.lockfile._IDLE_SECONDS", 0.02)
    before = threads()
    for _ in range(2):
        pid = held_by_child(fork, lock.path)
        kill_soon(fork, pid)
        assert lock.acquire(20)
        lock.release()
        wait_until(lambda: threads() <= before)


def test_a_wait_without_a_thread_still_ends(
    lock: FileLock, fork: Fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no thread can be started the lock is polled for, to the same deadline."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("queue_core.lockfile._thread.start_new_thread", refuse)
    pid = held_by_child(fork, lock.path)
    assert not lock.acquire(0.05)
    os.kill(pid, signal.SIGKILL)
    assert lock.acquire(20)


@pytest.mark.parametrize("contended", [False, True])
def test_a_storm_of_interruptions_leaves_the_lock_free(
    lock: FileLock, fork: Fork, contended: bool
) -> None:
    """`acquire` returns with the lock, or raises without it, wherever a signal strikes."""

    def disturb() -> None:
        other = FileLock(lock.path)
        while True:
            if other.acquire(1):
                other.release()

    if contended:
        fork(disturb)

    def interrupt(*_: object) -> None:
        raise Interruption

    lock.acquire(10)
    lock.release()
    before = signal.signal(signal.SIGALRM, interrupt)
    taken = interrupted = 0
    end = time.monotonic() + 1.5
    try:
        while time.monotonic() < end:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.00002 + (interrupted % 97) * 0.000002)
                while True:
                    lock.acquire(1)
                    taken += 1
                    lock.release()
            except Interruption:
                interrupted += 1
                # Raised on entry to release(), the lock is held and says so; else it is free.
                if lock.held:
                    lock.release()
                if not contended:
                    assert is_free(lock.path), (taken, interrupted)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 100
    assert not lock.held
    wait_until(lambda: is_free(lock.path), what="the lock is free after the storm")


def test_a_child_closing_its_copy_does_not_free_the_parents_lock(
    lock: FileLock, fork: Fork
) -> None:
    """A forked child shares the description; only closing is harmless."""
    assert lock.acquire(0)
    assert ended(fork(lock.abandon)) == 0
    assert not is_free(lock.path)
    assert ended(fork(lock.close)) == 0
    assert not is_free(lock.path)


@pytest.mark.parametrize("closed", [False, True])
def test_a_child_takes_the_lock_for_itself_after_abandoning(
    lock: FileLock, fork: Fork, closed: bool
) -> None:
    """After a fork in the middle of a wait the child starts afresh, without a thread of its own."""
    pid = held_by_child(fork, lock.path)
    assert not lock.acquire(0.02)
    if closed:  # as the engine does before a fork; the helper keeps what it waits on
        lock.close()

    def child() -> None:
        assert str(lock.path) in open_paths()
        lock.abandon()
        assert str(lock.path) not in open_paths()
        assert lock.acquire(20)

    forked = fork(child)
    os.kill(pid, signal.SIGKILL)
    assert ended(forked) == 0


def test_a_removed_file_is_made_again(lock: FileLock, fork: Fork) -> None:
    """An operator who removes the file does not make two writers of one lock."""
    assert lock.acquire(0)
    lock.release()
    lock.path.unlink()
    assert lock.acquire(0)
    assert lock.path.exists()
    assert not is_free(lock.path)


def test_the_holder_is_named(lock: FileLock, fork: Fork) -> None:
    """Whoever waits in vain learns the pid and the command to look for."""
    pid = held_by_child(fork, lock.path)
    text = describe_holder(lock.path)
    assert text.startswith(f"process {pid} (")
    assert len(text) <= len(f"process {pid} ()") + 80
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: describe_holder(lock.path) == "an unknown process")
    assert describe_holder(lock.path.with_name("none")) == "an unknown process"


def test_a_holder_that_is_gone_is_told_apart(tmp_path: Path, fork: Fork) -> None:
    """A lock kept alive by a child of its taker is not blamed on a pid that no longer runs."""
    path = tmp_path / "db.lock"
    reader, writer = os.pipe()

    def take_and_fork() -> None:
        assert FileLock(path).acquire(0)
        if os.fork() == 0:
            os.close(writer)
            os.read(reader, 1)  # ends when the test closes its end
            os._exit(0)

    pid = fork(take_and_fork)
    os.close(reader)
    assert ended(pid) == 0
    assert describe_holder(path).startswith(f"process {pid}, which is gone")
    os.close(writer)
    wait_until(lambda: is_free(path))


def test_one_supervisor_at_a_time_holds_a_database(tmp_path: Path, fork: Fork) -> None:
    """The second is refused, the file says who was first, and death makes room."""
    path = tmp_path / "db.main.lock"
    assert not InstanceLock.is_held(path)
    assert not path.exists()
    first = InstanceLock.take(path, {"pid": os.getpid(), "instance": "main", "at": tmp_path})
    assert first is not None
    assert first.fileno() >= 0
    assert InstanceLock.is_held(path)
    assert json.loads(path.read_text())["pid"] == os.getpid()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert InstanceLock.take(path, {"pid": 1}) is None
    assert json.loads(path.read_text())["pid"] == os.getpid()

    assert ended(fork(first.close_in_child)) == 0
    assert InstanceLock.is_held(path)
    first.close()
    first.close()
    assert first.fileno() == -1
    assert not InstanceLock.is_held(path)


def test_a_dead_supervisors_lock_is_free(tmp_path: Path, fork: Fork) -> None:
    """Its liveness is the lock, so that nobody waits for a heartbeat to grow old."""
    path = tmp_path / "db.main.lock"

    def supervise() -> None:
        taken = InstanceLock.take(path, {})
        assert taken is not None
        signal.pause()

    pid = fork(supervise)
    wait_until(lambda: InstanceLock.is_held(path))
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not InstanceLock.is_held(path))


def test_looking_at_an_instance_does_not_keep_it_out(tmp_path: Path, fork: Fork) -> None:
    """A probe at the moment of the start is not taken for another supervisor."""
    path = tmp_path / "db.main.lock"
    path.touch(0o600)

    def look() -> None:
        while True:
            InstanceLock.is_held(path)

    fork(look)
    assert not any(InstanceLock.is_held(path) for _ in range(2000))
    for _ in range(200):
        taken = InstanceLock.take(path, {})
        assert taken is not None
        taken.close()


def test_flock_is_proved_where_it_works(tmp_path: Path) -> None:
    """The start check says yes here, and leaves nothing behind."""
    assert flock_excludes(tmp_path)
    assert os.listdir(tmp_path) == []
    with pytest.raises(OSError, match="No such file"):
        flock_excludes(tmp_path / "none")


@pytest.mark.parametrize("error", [None, OSError(95, "not supported")])
def test_flock_that_does_nothing_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError | None
) -> None:
    """A filesystem that grants every lock, or none, does not pass the check."""

    def flock(*_: object) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr("queue_core.lockfile.fcntl.flock", flock)
    assert not flock_excludes(tmp_path)
    assert os.listdir(tmp_path) == []


def test_the_filesystem_is_told_by_the_longest_mount_point() -> None:
    """A share mounted below a local disk is seen, with blanks in its name, and a later cover."""
    text = "\n".join(
        [
            "22 1 8:1 / / rw - ext4 /dev/sda1 rw",
            "23 22 0:40 / /mnt/my\\040share rw shared:1 - nfs4 host:/x rw",
            "24 22 0:41 / /srv rw - xfs /dev/sdb rw",
            "25 24 0:42 / /srv rw - cifs //host/x rw",
            "garbage",
        ]
    )
    assert type_in_mountinfo(text, "/home/me/db") == "ext4"
    assert type_in_mountinfo(text, "/mnt/my share/db") == "nfs4"
    assert type_in_mountinfo(text, "/mnt/my sharelike/db") == "ext4"
    assert type_in_mountinfo(text, "/srv") == "cifs"
    assert {"nfs4", "cifs"} <= NETWORK_FILESYSTEMS
    assert "ext4" not in NETWORK_FILESYSTEMS
    assert filesystem_type(Path("/proc/self/status")) == "proc"
