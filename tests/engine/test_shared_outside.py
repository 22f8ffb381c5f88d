"""Show that what meets a put in company from outside costs no job: signals, files, forks."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from queue_core import Queue, QueueError
from queue_core.clock import FakeClock, SystemClock
from queue_core.engines import sqlite_board, sqlite_shared
from queue_core.engines.sqlite_board import CHECK_US, Board
from queue_core.engines.sqlite_shared import SharedFile
from queue_core.lockfile import FileLock
from tests.conftest import wait_until
from tests.engine.conftest import QUEUE, Fork, exit_codes
from tests.engine.stage import Stage, right

# --- signals ------------------------------------------------------------------------------------


def on_alarm(act: Callable[[Queue[Any]], object]) -> Callable[[Queue[Any]], None]:
    """Return what makes a child act in a signal's handler, while its put waits."""

    def arrange(queue: Queue[Any]) -> None:
        signal.signal(signal.SIGALRM, lambda *_: act(queue))

    return arrange


def test_a_handler_may_put_while_a_put_waits(stage: Stage, tmp_path: Path) -> None:
    """The inner put is not on the board, where it would take the outer one's place and answer."""
    try_lock = SharedFile._try_lock

    def inner(queue: Queue[Any]) -> None:
        if not queue.engine._file._waiting:  # type: ignore[attr-defined]
            setattr(SharedFile, "_try_lock", try_lock)  # noqa: B010 - the outer one is over already
        (tmp_path / "inner").write_text(str(int(queue.put("inner"))))

    def led_by_others() -> None:
        setattr(SharedFile, "_try_lock", lambda _: False)  # noqa: B010 - a method

    pids = [
        stage.child("outer", before=led_by_others, during=on_alarm(inner)),
        stage.child("leader"),
    ]
    with stage.locked():
        os.kill(pids[0], signal.SIGALRM)
    assert exit_codes(pids) == [0, 0]
    told = stage.told()
    assert int((tmp_path / "inner").read_text()) not in {one["id"] for one in told}
    assert stage.stored() == Counter(["first", "outer", "inner", "leader"])
    right(stage, told)


def test_a_handlers_put_leaves_the_seat_to_the_put_that_waits(stage: Stage) -> None:
    """However many it puts: alone as they are, a seat would be given up after some of them."""

    def inner(queue: Queue[Any]) -> None:
        for number in range(3 * sqlite_shared.COMPANY_PUTS):
            queue.put(f"inner {number}")

    pid = stage.child("outer", during=on_alarm(inner))
    with stage.locked():
        os.kill(pid, signal.SIGALRM)
    assert exit_codes([pid]) == [0]
    (told,) = stage.told()
    assert "error" not in told
    assert stage.stored()["outer"] == 1
    right(stage, [told])


def test_a_handler_may_close_while_a_put_waits(stage: Stage, tmp_path: Path) -> None:
    """Nothing of the put stays on the board, to be stored behind its owner's back."""

    def close(queue: Queue[Any]) -> None:
        (tmp_path / "closing").touch()
        queue.close()

    pid = stage.child("closed", during=on_alarm(close))
    with stage.locked():
        os.kill(pid, signal.SIGALRM)
        wait_until((tmp_path / "closing").exists)
        wait_until(lambda: not stage.posted(), what="its request is withdrawn")
    assert exit_codes([pid]) == [0]
    (told,) = stage.told()
    assert told["error"] == "DurabilityUnknown"
    Queue[str](stage.database, QUEUE).put("after")
    assert stage.stored()["closed"] == 0


# --- another file ---------------------------------------------------------------------------------


def moved_away(database: Path) -> None:
    """Do to a database in use what nobody should."""
    for end in ("", "-wal", "-shm"):
        os.rename(f"{database}{end}", f"{database}.moved{end}")


def telling(marker: Path, *, seated: bool) -> Callable[[], None]:
    """Return what makes a child leave a mark when it waits for the lock itself."""

    def arrange() -> None:
        queue_up = FileLock._queue_up

        def telling_queue_up(self: FileLock, *given: Any) -> bool:
            marker.touch()
            return queue_up(self, *given)

        setattr(FileLock, "_queue_up", telling_queue_up)  # noqa: B010 - a method
        if not seated:
            setattr(Board, "post", lambda *_: False)  # noqa: B010

    return arrange


@pytest.mark.parametrize(
    ("marked", "error"), [(False, "DatabaseUnavailable"), (True, "DurabilityUnknown")]
)
def test_a_put_that_waits_while_its_file_goes_says_what_is_known(
    stage: Stage, marked: bool, error: str
) -> None:
    """A mark on it is of a transaction in whatever file had the name then."""
    pid = stage.child("late")
    with stage.locked() as posted:
        if marked:
            assert stage.board.take(posted, [99], 1)
        moved_away(stage.database)
    assert exit_codes([pid]) == [0]
    (told,) = stage.told()
    assert told["error"] == error


def test_a_put_for_one_alone_sees_that_its_file_went_while_it_waited(
    stage: Stage, tmp_path: Path
) -> None:
    """What is not shared is looked at when the lock is there, too."""
    pid = stage.child("x" * 5000, before=telling(tmp_path / "waits", seated=True))
    with stage.locked(0):
        wait_until((tmp_path / "waits").exists)
        moved_away(stage.database)
    assert exit_codes([pid]) == [0]
    (told,) = stage.told()
    assert told["error"] == "DatabaseUnavailable"


def test_a_put_does_not_go_on_in_a_file_that_a_handler_has_left(
    stage: Stage, tmp_path: Path
) -> None:
    """The handler's puts find the file gone, and then make another one."""

    def inner(queue: Queue[Any]) -> None:
        (tmp_path / "handles").touch()
        with suppress(QueueError):
            queue.put("inner 0")
        queue.put("inner 1")

    before = telling(tmp_path / "waits", seated=False)
    pid = stage.child("outer", before=before, during=on_alarm(inner))
    with stage.locked(0):
        wait_until((tmp_path / "waits").exists)
        moved_away(stage.database)
        os.kill(pid, signal.SIGALRM)
        wait_until((tmp_path / "handles").exists)
    assert exit_codes([pid]) == [0]
    (told,) = stage.told()
    assert told["error"] == "DatabaseUnavailable"
    assert stage.stored() == Counter(["inner 1"])


# --- the folder ---------------------------------------------------------------------------------


def test_a_seat_is_free_again_when_its_process_is_gone(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one seat only, the second waits for the lock itself; a third finds the seat free."""
    monkeypatch.setattr(sqlite_board, "SEATS", 1)
    pids = [stage.child("one"), stage.child("two")]
    with stage.locked(1):
        pass
    assert exit_codes(pids) == [0, 0]
    pid = stage.child("three")
    with stage.locked():
        pass
    assert exit_codes([pid]) == [0]
    right(stage, stage.told())


@pytest.mark.parametrize("what", ["folder", "pipe", "link", "seat", "rubbish"])
def test_puts_go_on_when_the_board_cannot_be_used(stage: Stage, what: str) -> None:
    """Whatever stands in its place, puts are stored one by one, as before there was one."""
    bells = Path(f"{stage.database}.bells")
    bells.mkdir(exist_ok=True)
    place = stage.board._path
    if what == "folder":
        place.mkdir()
    elif what == "pipe":
        os.mkfifo(place)
    elif what == "link":
        place.symlink_to(stage.database)
    elif what == "rubbish":
        place.write_bytes(os.urandom(8192))
    else:
        for number in range(sqlite_board.SEATS):
            (bells / f"seat{number:02d}").mkdir()
    pids = [stage.child(f"job {number}") for number in range(3)]
    with stage.locked(3 if what == "rubbish" else 0):
        pass
    assert exit_codes(pids) == [0] * 3
    told = stage.told()
    assert len(told) == 3
    right(stage, told)


def test_a_removed_folder_costs_no_put(stage: Stage) -> None:
    """Those at the old board and those at a new one all get their turn."""
    pids = [stage.child(f"old {number}") for number in range(3)]
    with stage.locked():
        bells = Path(f"{stage.database}.bells")
        for path in bells.iterdir():
            path.unlink()
        bells.rmdir()
    pids += [stage.child(f"new {number}") for number in range(3)]
    with stage.locked(0):
        pass
    assert exit_codes(pids) == [0] * 6
    told = stage.told()
    assert [one for one in told if "error" in one] == []
    right(stage, told)


def test_a_folder_that_was_moved_away_makes_no_put_look_stored(stage: Stage) -> None:
    """Each board counts its own transactions: the numbers of another mean nothing to its marks."""
    pid = stage.child("marked")
    with stage.locked() as posted:
        assert stage.board.take(posted, [99], 1)  # and so it died
        os.kill(pid, signal.SIGSTOP)
        bells = Path(f"{stage.database}.bells")
        bells.rename(bells.with_suffix(".old"))
    others = [stage.child(f"job {number}") for number in range(3)]
    with stage.locked(0):
        wait_until(bells.exists)
    assert exit_codes(others) == [0] * 3
    os.kill(pid, signal.SIGCONT)
    assert exit_codes([pid]) == [0]
    told = stage.told()
    right(stage, told)
    assert stage.stored()["marked"] == 1


def test_a_removed_pipe_is_no_seat(tmp_path: Path) -> None:
    """Another process would take the seat of that name, and each the other's answers."""
    owner, other = (Board(tmp_path, SystemClock()) for _ in range(2))
    assert owner.post(b"one")
    owner.withdraw()
    (tmp_path / "seat00").unlink()
    assert other.post(b"other")
    assert not owner.post(b"two")
    assert owner.post(b"two")
    assert sorted(one.body for one in other.posted()) == [b"other", b"two"]
    assert len({one.seat for one in other.posted()}) == 2
    owner.close()
    other.close()


def test_a_board_that_lost_its_name_is_left_after_a_while(tmp_path: Path) -> None:
    """Nobody reads it; until it is looked for anew, whoever waits there waits for the lock."""
    clock = FakeClock()
    owner, other = (Board(tmp_path, clock) for _ in range(2))
    assert owner.post(b"one")
    owner.withdraw()
    owner._path.unlink()
    assert other.post(b"other")
    assert owner.post(b"two")
    assert [one.body for one in other.posted()] == [b"other"]
    owner.withdraw()
    clock.advance(CHECK_US / 1e6)
    assert owner.post(b"three")
    assert sorted(one.body for one in other.posted()) == [b"other", b"three"]
    owner.close()
    other.close()


@pytest.mark.parametrize("left", [0, 1000])
def test_a_board_that_was_cut_short_costs_no_traceback(stage: Stage, left: int) -> None:
    """Whoever waits there cannot know any more; everybody else goes on."""
    pid = stage.child("waits")
    with stage.locked():
        os.truncate(stage.board._path, left)
        stage.posted()
    assert exit_codes([pid]) == [0]
    Queue[str](stage.database, QUEUE).put("after")
    (told,) = stage.told()
    assert told.get("error") in (None, "DurabilityUnknown")
    assert stage.stored()["after"] == 1


def test_trouble_while_waiting_leaves_no_lock_behind(stage: Stage) -> None:
    """A board that fails at the worst moment keeps nobody out."""

    def broken() -> None:
        def fail(_: Board) -> tuple[int, int]:
            raise OSError(5, "the disk is gone")

        setattr(Board, "mark", fail)  # noqa: B010 - a method

    queues: list[Queue[Any]] = []
    pid = stage.child("trouble", before=broken, during=queues.append)
    with stage.locked():
        pass
    assert exit_codes([pid]) == [0]
    (told,) = stage.told()
    assert told["error"] == "DurabilityUnknown"
    with Queue[str](stage.database, QUEUE, lock_timeout_seconds=1.0) as queue:
        queue.put("after")


def test_a_seat_is_left_when_there_is_no_company(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seats are few: a process that puts alone for a while holds none, and no pipe."""
    monkeypatch.setattr(sqlite_shared, "COMPANY_PUTS", 2)
    queue: Queue[str] = Queue(stage.database, QUEUE)
    queue.counts()
    board = queue.engine._file._board  # type: ignore[attr-defined]
    assert board.post(b"rubbish")
    board.withdraw()
    assert board._seat >= 0
    for number in range(6):
        queue.put(f"job {number}")
    assert board._seat == -1
    assert board._pipe == -1


# --- forks and threads --------------------------------------------------------------------------


def test_a_child_that_is_forked_in_a_transaction_has_no_seat(stage: Stage, fork: Fork) -> None:
    """It closes what it inherited, and the seat stays its parent's."""
    queue: Queue[str] = Queue(stage.database, QUEUE)
    queue.counts()
    board = queue.engine._file._board  # type: ignore[attr-defined]
    assert board.post(b"rubbish")
    bells = f"{stage.database}.bells/"

    def child() -> None:
        for name in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):
                assert not os.readlink(f"/proc/self/fd/{name}").startswith(bells)

    with queue.transaction():
        pid = fork(child)
    assert exit_codes([pid]) == [0]
    other = Board(Path(bells), SystemClock())
    assert other.post(b"other")
    assert other._seat != board._seat
    other.close()
    board.withdraw()
    queue.close()


def test_parent_child_and_threads_put_at_once(
    database: Path, fork: Fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A seat is one process's; its threads take turns, and none gets another's answer."""
    monkeypatch.setattr(sqlite_shared, "COMPANY_PUTS", 10**6)
    queue: Queue[Any] = Queue(database, QUEUE)
    queue.put("first")

    def puts(name: str) -> None:
        for number in range(40):
            payload = f"{name} {number}"
            job = queue.find(queue.put(payload))
            assert job is not None
            assert job.payload == payload

    def with_threads(name: str) -> None:
        threads = [
            threading.Thread(target=puts, args=(f"{name} thread {number}",)) for number in range(2)
        ]
        for thread in threads:
            thread.start()
        puts(name)
        for thread in threads:
            thread.join(60)

    pids = [fork(lambda number=number: with_threads(f"child {number}")) for number in range(3)]  # type: ignore[misc]
    with_threads("parent")
    assert exit_codes(pids) == [0] * 3
    assert queue.counts().ready == 1 + 4 * 3 * 40
    queue.close()
