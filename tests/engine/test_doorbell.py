"""Show that a ring wakes one waiter, is not lost, and never gets in the way of a put."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from queue_core import doorbell
from queue_core.doorbell import BELLS, Doorbell
from queue_core.engines.sqlite import SqliteEngine
from queue_core.job import NewJob
from tests.conftest import wait_until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Name a folder of bells that does not exist yet."""
    return tmp_path / "db.bells"


@pytest.fixture
def bell(folder: Path) -> Iterator[Doorbell]:
    """Hand out the bells of one process."""
    made = Doorbell(folder)
    yield made
    made.close()


@pytest.fixture
def other(folder: Path) -> Iterator[Doorbell]:
    """Hand out the same bells as another process has them."""
    made = Doorbell(folder)
    yield made
    made.close()


def pipe_of(folder: Path, queue: str) -> Path:
    """Return the path of a queue's pipe."""
    return folder / f"{doorbell._number(queue):02d}"


def test_a_ring_wakes_a_waiter_and_is_used_up(bell: Doorbell, other: Doorbell) -> None:
    """One put, one look; after it the waiter sleeps again."""
    bell.listen(["emails"])
    other.ring("emails")
    assert bell.wait(["emails"], 20)
    assert not bell.wait(["emails"], 0.02)


def test_a_ring_wakes_a_waiter_that_sleeps_already(bell: Doorbell, other: Doorbell) -> None:
    """The wake comes with the ring and not with the timeout."""
    bell.listen(["emails"])
    threading.Timer(0.05, other.ring, ("emails",)).start()
    began = time.monotonic()
    assert bell.wait(["emails"], 30)
    assert time.monotonic() - began < 10


def test_a_ring_between_look_and_sleep_is_kept(bell: Doorbell, other: Doorbell) -> None:
    """Open, look, then sleep: what is put after the look still wakes."""
    bell.listen(None)
    other.ring("emails")
    assert bell.wait(None, 20)


def test_nothing_is_made_by_a_ring_that_nobody_hears(bell: Doorbell, folder: Path) -> None:
    """A producer alone leaves no files, and its puts do not fail."""
    bell.ring("emails")
    assert not folder.exists()
    assert bell.broken is None


def test_a_ring_before_anyone_listened_is_found_by_the_look(
    bell: Doorbell, other: Doorbell
) -> None:
    """Such a put rings nobody; the next ring is heard, although the first found no pipe."""
    other.ring("emails")
    bell.listen(["emails"])
    assert not bell.wait(["emails"], 0.02)
    other.ring("emails")
    assert bell.wait(["emails"], 20)


def test_folder_and_pipes_are_private(bell: Doorbell, folder: Path) -> None:
    """Nobody else may ring, or listen to, this database; and there are 64 bells at most."""
    bell.listen(None)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    pipes = sorted(folder.iterdir())
    assert [path.name for path in pipes] == [f"{number:02d}" for number in range(BELLS)]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in pipes)
    assert all(path.is_fifo() for path in pipes)


def test_a_queue_has_the_same_bell_everywhere() -> None:
    """Producers of another version, and names no encoder likes, find the same pipe."""
    assert doorbell._number("123456789") == 0xCBF43926 % 64  # the check value of CRC-32
    assert 0 <= doorbell._number("\ud83d") < BELLS


def test_a_burst_is_one_wake(bell: Doorbell, other: Doorbell) -> None:
    """A thousand puts are one look, not a thousand."""
    bell.listen(["emails"])
    for _ in range(1000):
        other.ring("emails")
    assert bell.wait(["emails"], 20)
    assert not bell.wait(["emails"], 0.02)


def test_a_full_pipe_neither_blocks_nor_fails(bell: Doorbell, other: Doorbell) -> None:
    """Producers go on while every worker is stuck, and the waiter still hears them."""
    bell.listen(["emails"])
    for _ in range(70_000):
        other.ring("emails")
    assert other.broken is None
    assert bell.wait(["emails"], 20)
    assert not bell.wait(["emails"], 0.02)


def test_one_ring_wakes_one_of_many(folder: Path) -> None:
    """Idle workers do not all get up for one job; each ring gets up one more."""
    waiters = [Doorbell(folder) for _ in range(6)]
    ringer = Doorbell(folder)
    woken: list[int] = []
    asleep = threading.Barrier(7)

    def sleep(number: int) -> None:
        waiters[number].listen(["emails"])
        asleep.wait(20)
        if waiters[number].wait(["emails"], 30):
            woken.append(number)

    threads = [threading.Thread(target=sleep, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    asleep.wait(20)
    sleeping = [Path(f"/proc/self/task/{thread.native_id}/syscall") for thread in threads]
    epoll_waits = {"232", "281", "22", "441"}  # epoll_wait, epoll_pwait (x86, arm), epoll_pwait2
    wait_until(
        lambda: all(path.read_text().split()[0] in epoll_waits for path in sleeping),
        what="all six sleep in epoll",
    )
    for rung in range(1, 7):
        ringer.ring("emails")
        wait_until(lambda rung=rung: len(woken) >= rung)
        time.sleep(0.02)  # time for a second to get up, which would be the fault
        assert len(woken) == rung
    for thread in threads:
        thread.join(20)
    for made in [*waiters, ringer]:
        made.close()


def test_other_queues_do_not_wake(bell: Doorbell, other: Doorbell) -> None:
    """A busy neighbour does not keep a worker awake."""
    bell.listen(["emails"])
    other.listen(["reports"])
    other.ring("reports")
    assert not bell.wait(["emails"], 0.02)
    assert bell.wait(None, 20)


@pytest.mark.parametrize("way", ["epoll", "poll"])
def test_the_wake_descriptor_ends_the_wait_without_a_ring(
    bell: Doorbell, other: Doorbell, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker told to stop stops waiting; also where there is no epoll."""
    if way == "poll":
        monkeypatch.setattr("queue_core.doorbell.sys.platform", "darwin")
    reader, writer = os.pipe()
    os.write(writer, b"1")
    assert not bell.wait(["emails"], 20, reader)
    other.ring("emails")
    assert bell.wait(["emails"], 20, reader)
    os.read(reader, 1)
    began = time.monotonic()
    assert not bell.wait(["emails"], 0.05, reader)
    assert time.monotonic() - began < 5
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_what_is_no_pipe_is_refused(
    bell: Doorbell, other: Doorbell, folder: Path, tmp_path: Path, kind: str
) -> None:
    """Nothing is written to a stranger's file; waiting lasts until the timeout, and says why."""
    folder.mkdir()
    path, target = pipe_of(folder, "emails"), tmp_path / "target"
    if kind == "file":
        path.write_bytes(b"")
    elif kind == "link":
        os.mkfifo(target)
        path.symlink_to(target)
    else:
        path.mkdir()
    other.ring("emails")
    assert not bell.wait(["emails"], 0.02)
    assert bell.broken is not None
    assert str(path) in bell.broken
    assert other.broken is not None
    if kind == "file":
        assert path.read_bytes() == b""
    path.rmdir() if kind == "folder" else path.unlink()
    bell.listen(["emails"])
    assert bell.broken is None
    other.ring("emails")
    assert bell.wait(["emails"], 20)


def test_a_folder_that_cannot_be_made_only_costs_the_wake(tmp_path: Path) -> None:
    """Where nothing can be written the queue still works, by looking."""
    made = Doorbell(tmp_path / "none" / "db.bells")
    assert not made.wait(["emails"], 0.02)
    assert made.broken is not None


def test_pipes_that_were_replaced_are_found_within_a_second(
    bell: Doorbell, other: Doorbell, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the folder was removed, ringer and waiter meet again at the new pipe."""
    bell.listen(["emails"])
    other.ring("emails")
    assert bell.wait(["emails"], 20)
    pipe_of(folder, "emails").unlink()
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(doorbell, "_CHECK_SECONDS", 0.0)
    other.ring("emails")
    bell.listen(["emails"])
    other.ring("emails")
    assert bell.wait(["emails"], 20)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_behind_a_link_is_watched_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe replaced there is noticed like anywhere else."""
    (tmp_path / "real").mkdir()
    (tmp_path / "db.bells").symlink_to("real")
    monkeypatch.setattr(doorbell, "_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(doorbell, "_TICK_SECONDS", 0.0)
    waiter, ringer = Doorbell(tmp_path / "db.bells"), Doorbell(tmp_path / "db.bells")
    for _ in range(3):  # by then the folder vouches for its pipes
        waiter.listen(["emails"])
    pipe_of(tmp_path / "real", "emails").unlink()
    waiter.listen(["emails"])
    ringer.ring("emails")
    assert waiter.wait(["emails"], 20)
    waiter.close()
    ringer.close()


def test_queues_that_are_stored_have_bells_of_their_own(tmp_path: Path) -> None:
    """A waiter of one queue never takes the ring of another, up to 63 queues."""
    with (
        closing(SqliteEngine(tmp_path / "d.db")) as putter,
        closing(SqliteEngine(tmp_path / "d.db")) as waiter,
    ):
        names = [f"q{number}" for number in range(BELLS - 1)]
        for name in names:
            putter.enqueue(name, [NewJob(payload=b"{}", task=name)])
        waiter.listen(names)
        bells = [waiter._bell_of(name) for name in names]
        assert len({*bells}) == len(names)
        for name in names:  # the first put made the queue, the second has read its number
            putter.enqueue(name, [NewJob(payload=b"{}", task=name)])
        assert [putter._bell_of(name) for name in names] == bells
        assert waiter._bell_of("not stored yet") not in bells


def test_a_replaced_regular_file_gets_no_byte(
    bell: Doorbell, other: Doorbell, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file put in a pipe's place while it was open is left alone."""
    bell.listen(["emails"])
    other.ring("emails")
    monkeypatch.setattr(doorbell, "_CHECK_SECONDS", 0.0)
    path = pipe_of(folder, "emails")
    path.unlink()
    path.write_bytes(b"")
    other.ring("emails")
    assert path.read_bytes() == b""
    assert other.broken is not None


def test_a_handler_that_raises_ends_the_wait_cleanly(bell: Doorbell, other: Doorbell) -> None:
    """Ctrl-C gets out of an idle wait, leaks nothing, and the bells still work."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    bell.listen(["emails"])
    open_before = len(os.listdir("/proc/self/fd"))
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            bell.wait(["emails"], 30)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(os.listdir("/proc/self/fd")) == open_before
    other.ring("emails")
    assert bell.wait(["emails"], 20)


def test_a_quiet_handler_does_not_end_the_wait(bell: Doorbell) -> None:
    """A signal that raises nothing is no ring, and the timeout goes on."""
    seen: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: seen.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        began = time.monotonic()
        assert not bell.wait(["emails"], 0.2)
        assert time.monotonic() - began >= 0.19
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen


def test_threads_wait_and_ring_at_once(bell: Doorbell) -> None:
    """One object serves all threads of a process, and every ring gets somebody up."""
    woken: list[int] = []
    stop = threading.Event()

    def listen(number: int) -> None:
        while not stop.is_set():
            if bell.wait([f"queue-{number}"], 0.5):
                woken.append(number)

    threads = [threading.Thread(target=listen, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    bell.listen([f"queue-{number}" for number in range(4)])
    for number in range(4):
        bell.ring(f"queue-{number}")
    wait_until(lambda: set(woken) == {0, 1, 2, 3})
    stop.set()
    for thread in threads:
        thread.join(20)


def test_a_child_closes_its_copies_and_the_parent_still_hears(
    bell: Doorbell, other: Doorbell
) -> None:
    """After a fork the child starts afresh, even when a thread of the parent had the lock."""
    bell.listen(["emails"])
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with bell._mutex:
            taken.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(20)
    if (pid := os.fork()) == 0:
        code = 1
        try:
            signal.alarm(20)  # a lock left taken would stop the child for ever
            bell.abandon()
            assert bell._bells == {}
            bell.ring("emails")
            code = 0
        finally:
            os._exit(code)
    done.set()
    thread.join(20)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert bell.wait(["emails"], 20)


def test_bells_open_again_after_a_close(bell: Doorbell, other: Doorbell) -> None:
    """Closing frees the descriptors and ends nothing."""
    before = len(os.listdir("/proc/self/fd"))
    bell.listen(None)
    bell.close()
    assert len(os.listdir("/proc/self/fd")) == before
    bell.listen(["emails"])
    other.ring("emails")
    assert bell.wait(["emails"], 20)
