"""Show that a put which another process stores is stored once, whoever dies at whatever step."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from queue_core import DurabilityUnknown, IdempotencyConflict, Queue, QueueBusy, QueueFull
from queue_core.clock import SystemClock
from queue_core.engines import sqlite_board, sqlite_enqueue, sqlite_log, sqlite_shared
from queue_core.engines.sqlite_board import Answer, Board, Posted
from queue_core.engines.sqlite_shared import SharedFile
from queue_core.job import NewJob
from queue_core.lockfile import FileLock
from tests.conftest import wait_until
from tests.engine.conftest import QUEUE, Fork, exit_codes

Results = list[dict[str, Any]]


class Stage:
    """One database, a lock in our hand, and children that open it and put when told to."""

    def __init__(self, database: Path, fork: Fork) -> None:
        self.database = database
        self._fork = fork
        self._reader, self._writer = os.pipe()
        self._opened_reader, self._opened_writer = os.pipe()
        self._go_reader, self._go_writer = os.pipe()
        self._waiting = 0
        self.board = Board(Path(f"{database}.bells"), SystemClock())
        self._lock = FileLock(Path(f"{database}.lock"))
        Queue[str](database, QUEUE).put("first")

    @contextmanager
    def locked(self, number: int | None = None) -> Iterator[list[Posted]]:
        """Hold the lock, let the children put, and wait until so many, or all, are on the board."""
        self.opened()
        number = self._waiting if number is None else number
        assert self._lock.acquire(5.0)
        try:
            self.let_go()
            yield self.waits(number)
        finally:
            self._lock.release()

    def opened(self) -> None:
        """Wait until the children have opened the database, for which they need the lock."""
        for _ in range(self._waiting):
            assert os.read(self._opened_reader, 1) == b"o"

    def let_go(self) -> None:
        """Let the children put."""
        os.write(self._go_writer, b"g" * self._waiting)
        self._waiting = 0

    def child(
        self,
        payload: str,
        before: Callable[[], object] = lambda: None,
        during: Callable[[Queue[Any]], object] = lambda _: None,
        **options: Any,
    ) -> int:
        """Put in a child, which tells what came of it.

        `before` is called before it opens the database, `during` with its queue before it puts.
        """

        def work() -> None:
            before()
            more = {
                name: options.pop(name) for name in ("lock_timeout_seconds",) if name in options
            }
            queue: Queue[Any] = Queue(self.database, options.pop("queue", QUEUE), **more)
            queue.counts()
            os.write(self._opened_writer, b"o")
            assert os.read(self._go_reader, 1) == b"g"
            told: dict[str, Any] = {"payload": payload}
            flushes: list[int] = []
            sync_data = sqlite_log.sync_data

            def counted(descriptor: int) -> None:
                sync_data(descriptor)
                flushes.append(descriptor)

            sqlite_log.sync_data = counted
            during(queue)
            try:
                job_id = queue.put(payload, **options)
                told |= {"id": int(job_id), "duplicate": job_id.duplicate}
            except (QueueBusy, QueueFull, IdempotencyConflict, DurabilityUnknown) as error:
                told["error"] = type(error).__name__
            told["flushes"] = len(flushes)
            told["held"] = queue.engine._file._lock.held  # type: ignore[attr-defined]
            os.write(self._writer, json.dumps(told).encode() + b"\n")

        self._waiting += 1
        return self._fork(work)

    def waits(self, number: int) -> list[Posted]:
        """Wait until so many requests are on the board, and return them."""
        wait_until(lambda: len(self.posted()) >= number, what=f"{number} wait at the board")
        return self.posted()

    def posted(self) -> list[Posted]:
        """Return what is on the board, also if it was not there a moment ago."""
        self.board._absent_until_us = 0
        return self.board.posted()

    def told(self) -> Results:
        """Return what children told."""
        os.close(self._writer)
        with os.fdopen(self._reader) as lines:
            told = [json.loads(line) for line in lines]
        assert not any(one["held"] for one in told), "a put left with the lock"
        return told

    def stored(self) -> Counter[str]:
        """Return how often each payload is stored."""
        with closing(sqlite3.connect(self.database)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            rows = connection.execute(
                "SELECT coalesce(job.payload, body.payload) FROM job LEFT JOIN body USING (id)"
            ).fetchall()
        return Counter(json.loads(text) for (text,) in rows)

    def batches(self) -> int:
        """Return how many transactions stored puts of several processes."""
        with closing(sqlite3.connect(self.database)) as connection:
            row = connection.execute("SELECT value FROM stat WHERE name = 'put_batch'").fetchone()
        return int(row[0]) if row else 0


@pytest.fixture
def stage(database: Path, fork: Fork) -> Iterator[Stage]:
    """Give a database with one job."""
    made = Stage(database, fork)
    yield made
    made.board.close()


def right(stage: Stage, told: Results) -> None:
    """Assert that each told put is stored once under its id, and that depth counts all rows."""
    stored = stage.stored()
    assert all(number == 1 for number in stored.values())
    queue: Queue[str] = Queue(stage.database, QUEUE)
    for one in told:
        if "id" in one:
            job = queue.find(one["id"])
            assert job is not None
            assert job.payload == one["payload"]
    assert queue.counts().ready == stored.total()


def test_puts_that_wait_are_stored_in_one_transaction(stage: Stage) -> None:
    """Each has an id of its own, in one transaction or two, and files are for their owner only."""
    pids = [stage.child(f"job {number}") for number in range(6)]
    with stage.locked():
        for name in os.listdir(f"{stage.database}.bells"):
            assert stat.S_IMODE(os.stat(f"{stage.database}.bells/{name}").st_mode) == 0o600
    assert exit_codes(pids) == [0] * 6
    told = stage.told()
    assert len({one["id"] for one in told}) == 6
    assert 1 <= stage.batches() <= 3
    right(stage, told)
    assert stage.board.posted() == []


def test_what_is_put_arrives_as_it_was_meant(stage: Stage) -> None:
    """Every option of a put goes with it to the process that stores it, and rings its queue."""
    options: dict[str, Any] = {
        "delay": 1000, "priority": 7, "key": "k ü", "task": "other", "headers": {"a": ["b"]},
        "expires": 50, "group": "g", "max_attempts": 3, "queue": "elsewhere",
    }  # fmt: skip
    pids = [stage.child("ünï\ncode", **options), stage.child("beside")]
    with stage.locked():
        pass
    assert exit_codes(pids) == [0, 0]
    found = next(one for one in stage.told() if one["payload"] != "beside")
    queue: Queue[str] = Queue(stage.database, "elsewhere")
    job = queue.find(found["id"])
    assert job is not None
    seen = (job.queue, job.task, job.priority, job.key, job.headers, job.group, job.payload)
    assert seen == ("elsewhere", "other", 7, "k ü", {"a": ["b"]}, "g", "ünï\ncode")
    assert job.max_attempts == 3
    assert job.due_us == job.enqueued_us + 1_000_000_000
    assert job.expires_us == job.due_us + 50_000_000
    again = queue.put("ünï\ncode", key="k ü", task="other")
    assert (int(again), again.duplicate) == (found["id"], True)


def test_a_key_given_by_several_at_once_makes_one_job(stage: Stage) -> None:
    """The others learn its id, and that theirs was a duplicate."""
    pids = [stage.child("same", key="one") for _ in range(4)]
    with stage.locked():
        pass
    assert exit_codes(pids) == [0] * 4
    told = stage.told()
    assert len({one["id"] for one in told}) == 1
    assert sorted(one["duplicate"] for one in told) == [False, True, True, True]
    right(stage, told)


def test_a_refused_put_refuses_nobody_else(stage: Stage) -> None:
    """A conflict and a full queue reach those whom they concern, and the others are stored."""
    Queue[str](stage.database, "small", max_depth=1).put("fills it")
    Queue[str](stage.database, QUEUE).put("holder", key="held")
    pids = [
        stage.child("other data", key="held"),
        stage.child("too many", queue="small"),
        *(stage.child(f"job {number}") for number in range(3)),
    ]
    with stage.locked():
        pass
    assert exit_codes(pids) == [0] * 5
    errors = {one["payload"]: one.get("error") for one in stage.told()}
    assert errors.pop("other data") == "IdempotencyConflict"
    assert errors.pop("too many") == "QueueFull"
    assert set(errors.values()) == {None}
    assert all(stage.stored()[f"job {number}"] == 1 for number in range(3))
    assert Queue[str](stage.database, "small").counts().ready == 1


@pytest.mark.parametrize(
    "body",
    [
        b"not JSON\n{}",
        b"[1, 2]\n{}",
        sqlite_enqueue.packed(QUEUE, NewJob(payload=b"{}", task=QUEUE, key="no digest")),
    ],
)
def test_a_request_that_cannot_be_stored_spoils_no_other(stage: Stage, body: bytes) -> None:
    """Whoever leads leaves it out, and tells its owner to try alone."""
    owner = Board(Path(f"{stage.database}.bells"), SystemClock())
    assert owner.post(body)
    pids = [stage.child(f"job {number}") for number in range(3)]
    with stage.locked(4):
        pass
    assert exit_codes(pids) == [0] * 3
    assert owner.wait(1000) == (Answer.REFUSED, 0)
    owner.close()
    right(stage, stage.told())
    assert stage.stored().total() == 4


def test_the_bell_of_each_queue_rings(stage: Stage) -> None:
    """Whoever stores for others wakes those who wait for them, too."""
    queues = [Queue[str](stage.database, name) for name in ("a", "b", "c")]
    for queue in queues:
        queue.put("so that it has a number")
        queue.engine.listen([queue.name])
    bells = [queue.engine._bell for queue in queues]  # type: ignore[attr-defined]
    for bell, queue in zip(bells, queues, strict=True):
        bell.wait([queue.name], 0)
    pids = [stage.child("job", queue=queue.name) for queue in queues]
    with stage.locked():
        pass
    assert exit_codes(pids) == [0] * 3
    rang = [bell.wait([queue.name], 5) for bell, queue in zip(bells, queues, strict=True)]
    assert rang == [True] * 3


@pytest.mark.parametrize("bytes_", [2047, 2048, 2049, 3900, 10_000])
def test_a_put_of_any_size_is_stored(stage: Stage, bytes_: int) -> None:
    """What does not fit on the board waits for the lock itself."""
    pids = [
        stage.child("x" * (bytes_ - 2)),
        stage.child("small", headers={"long": "y" * (bytes_ - 40)}),
    ]
    with stage.locked(0):
        pass
    assert exit_codes(pids) == [0, 0]
    right(stage, stage.told())


def test_what_was_put_together_is_counted_once(stage: Stage) -> None:
    """Numbers of a shared transaction are those of as many transactions."""
    pids = [stage.child(f"job {number}") for number in range(4)]
    with stage.locked():
        pass
    assert exit_codes(pids) == [0] * 4
    counters = Queue[str](stage.database, QUEUE).engine.snapshot().counters
    assert counters["jobs_enqueued_total", QUEUE, QUEUE, ""] == 5
    assert not [at for at in counters if at[0] == "put_batch"]


# --- deaths -------------------------------------------------------------------------------------


def die_first(marker: Path) -> None:
    """End this process, if it is the first to come here."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def dying(step: str, marker: Path) -> Callable[[], None]:
    """Return what makes a child die at a step of the first transaction it leads for others."""

    def arrange() -> None:
        take, answer, call = Board.take, Board.answer, Board.call_next
        lead = SharedFile._lead

        def dying_take(self: Board, posted: Any, values: Any, generation: int) -> bool:
            done = take(self, posted, values, generation)
            if posted and step == "marked":
                die_first(marker)
            return done

        def dying_lead(self: SharedFile, *given: Any) -> Any:
            led = lead(self, *given)
            if led[1] and step == "committed":
                die_first(marker)
            return led

        def dying_call(self: Board, taken: Any) -> None:
            if taken and step == "released":
                die_first(marker)
            call(self, taken)

        def dying_answer(self: Board, posted: Any, told: Answer) -> None:
            if posted and step == "flushed":
                die_first(marker)
            answer(self, posted, told)

        for owner, name, made in (
            (Board, "take", dying_take), (Board, "answer", dying_answer),
            (Board, "call_next", dying_call), (SharedFile, "_lead", dying_lead),
        ):  # fmt: skip
            setattr(owner, name, made)

    return arrange


@pytest.mark.parametrize("step", ["marked", "committed", "released", "flushed"])
def test_a_leader_that_dies_leaves_every_other_put_stored_once(
    stage: Stage, tmp_path: Path, step: str
) -> None:
    """Before its commit the others store their own; after it they find that it is done."""
    arrange = dying(step, tmp_path / "died")
    pids = [stage.child(f"job {number}", before=arrange) for number in range(5)]
    with stage.locked():
        pass
    assert sorted(exit_codes(pids)) == [-9, 0, 0, 0, 0]
    told = stage.told()
    assert len(told) == 4
    right(stage, told)
    if step in ("committed", "released"):
        assert all(one["flushes"] for one in told), "a put returned that nobody had flushed"


def test_what_is_committed_and_not_yet_told_is_not_refused(stage: Stage, tmp_path: Path) -> None:
    """The next leader's own trouble must not make those of the last one put twice."""
    free, hanging = tmp_path / "free", tmp_path / "hanging"

    def slow() -> None:
        flush = SharedFile.flush

        def late(self: SharedFile, *given: Any) -> None:
            hanging.touch()
            wait_until(free.exists)
            flush(self, *given)

        setattr(SharedFile, "flush", late)  # noqa: B010 - a method
        sqlite_shared.TAKEN_MS = 60_000  # type: ignore[misc] # no look for itself meanwhile

    pids = [stage.child(f"job {number}", before=slow) for number in range(2)]
    with stage.locked():
        pass
    wait_until(hanging.exists)
    owner = Board(Path(f"{stage.database}.bells"), SystemClock())
    assert owner.post(b"rubbish")
    Queue[str](stage.database, QUEUE).put("leader")
    assert owner.wait(1000) == (Answer.REFUSED, 0)
    free.touch()
    assert exit_codes(pids) == [0, 0]
    owner.close()
    told = stage.told()
    right(stage, told)
    assert stage.stored().total() == 4


def test_a_mark_whose_number_is_given_anew_stores_nothing(stage: Stage) -> None:
    """A leader died before its commit; the next to reach that number must not be taken for it."""
    pid = stage.child("marked")
    with stage.locked() as posted:
        assert stage.board.take(posted, [99], stage.batches() + 1)  # and so it died
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: not stage.board.posted()[0].fresh, what="its stamp is old")
    others = [stage.child(f"job {number}") for number in range(3)]
    with stage.locked(4):
        pass
    assert exit_codes(others) == [0] * 3
    assert stage.batches() >= 1
    os.kill(pid, signal.SIGCONT)
    assert exit_codes([pid]) == [0]
    told = stage.told()
    assert len(told) == 4
    assert 99 >> 1 not in {one["id"] for one in told}
    right(stage, told)


def test_the_request_of_a_dead_process_is_not_stored_later(stage: Stage) -> None:
    """Whoever puts it again because it did not return shall not meet a ghost of it."""
    pid = stage.child("ghost")
    with stage.locked():
        os.kill(pid, signal.SIGKILL)
        assert exit_codes([pid]) == [-9]
        wait_until(lambda: not stage.board.posted()[0].fresh, what="its stamp is old")
    others = [stage.child(f"job {number}") for number in range(2)]
    with stage.locked(2):
        pass
    assert exit_codes(others) == [0, 0]
    assert stage.stored()["ghost"] == 0
    right(stage, stage.told())
    assert stage.board.posted() == []


def test_a_put_whose_time_is_up_is_not_stored_afterwards(stage: Stage) -> None:
    """QueueBusy means that nothing was stored, and nothing will be."""
    pid = stage.child("late", lock_timeout_seconds=2.0)
    with stage.locked():
        assert exit_codes([pid]) == [0]
        assert stage.board.posted() == []
    Queue[str](stage.database, QUEUE).put("after")
    (told,) = stage.told()
    assert told["error"] == "QueueBusy"
    assert stage.stored()["late"] == 0


def test_a_put_that_gave_up_while_it_was_being_taken_is_not_stored(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever read it before its owner gave up looks again before the commit, and undoes all."""
    pid = stage.child("late", lock_timeout_seconds=2.0)
    stage.opened()
    queue: Queue[str] = Queue(stage.database, QUEUE)
    queue.counts()
    posted = Board.posted

    def slow(self: Board) -> list[Posted]:
        monkeypatch.setattr(Board, "posted", posted)
        stage.let_go()
        stage.waits(1)
        found = posted(self)
        assert exit_codes([pid]) == [0]
        return found

    monkeypatch.setattr(Board, "posted", slow)
    queue.put("leader")
    (told,) = stage.told()
    assert told["error"] == "QueueBusy"
    assert stage.stored() == Counter({"first": 1, "leader": 1})


def test_a_refusal_takes_its_mark_back(tmp_path: Path) -> None:
    """Its owner would take the number, which the next transaction reaches, for its own success."""
    owner, leader = (Board(tmp_path, SystemClock()) for _ in range(2))
    assert owner.post(b"body")
    posted = leader.posted()
    assert [one.body for one in posted] == [b"body"]
    assert leader.take(posted, [14], 5)
    assert owner.mark() == (5, 14)
    leader.refuse(posted)
    assert owner.wait(0) == (Answer.REFUSED, 0)
    assert owner.mark() == (0, 0)
    owner.close()
    leader.close()


def test_a_put_that_somebody_took_and_never_ended_is_said_to_be_unknown(stage: Stage) -> None:
    """Its leader hangs before the commit: stored or not, nobody can say."""
    pid = stage.child("taken", lock_timeout_seconds=2.0)
    with stage.locked() as posted:
        assert stage.board.take(posted, [99], 10**6)
        assert exit_codes([pid]) == [0]
    (told,) = stage.told()
    assert told["error"] == "DurabilityUnknown"


def test_a_leader_whose_flush_fails_tells_those_it_took_along(stage: Stage) -> None:
    """A put that returned is one that was flushed, whoever flushed it."""

    def broken() -> None:
        def fail(*_: object) -> None:
            raise DurabilityUnknown("the disk is gone")

        SharedFile.flush = fail  # type: ignore[assignment, method-assign]

    pids = [stage.child(f"job {number}", before=broken) for number in range(3)]
    with stage.locked():
        pass
    assert exit_codes(pids) == [0] * 3
    assert [one["error"] for one in stage.told()] == ["DurabilityUnknown"] * 3


def test_what_interrupts_a_leaders_flush_is_no_trouble_of_others(
    stage: Stage, tmp_path: Path
) -> None:
    """A soft timeout or Ctrl-C strikes one process; the others' puts are stored, and say so."""

    def interrupted() -> None:
        flush = SharedFile.flush

        def struck(self: SharedFile, *given: Any) -> None:
            with suppress(FileExistsError):
                os.close(os.open(tmp_path / "struck", os.O_CREAT | os.O_EXCL))
                raise KeyboardInterrupt
            flush(self, *given)

        setattr(SharedFile, "flush", struck)  # noqa: B010 - a method

    pids = [stage.child(f"job {number}", before=interrupted) for number in range(4)]
    with stage.locked():
        pass
    assert sorted(exit_codes(pids)) == [0, 0, 0, 1]
    told = stage.told()
    assert [one for one in told if "error" in one] == []
    assert len(told) == 3
    right(stage, told)


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
