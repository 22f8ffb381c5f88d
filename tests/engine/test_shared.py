"""Show that a put which another process stores is stored once, whoever dies at whatever step."""

from __future__ import annotations

import os
import signal
import stat
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from queue_core import DurabilityUnknown, Queue
from queue_core.clock import SystemClock
from queue_core.engines import sqlite_enqueue, sqlite_shared
from queue_core.engines.sqlite_board import Answer, Board, Posted
from queue_core.engines.sqlite_shared import SharedFile
from queue_core.job import NewJob
from tests.conftest import wait_until
from tests.engine.conftest import QUEUE, exit_codes
from tests.engine.stage import Stage, right


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
