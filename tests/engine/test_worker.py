"""Run the in-process worker for real: real jobs, real signals, a database that really fails."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from queue_core import (
    Backoff,
    Done,
    Job,
    Outcome,
    PayloadInvalid,
    Queue,
    QueueClosed,
    Reason,
    Reject,
    Retry,
    Snooze,
    State,
    Worker,
)
from queue_core.lockfile import FileLock
from tests.conftest import wait_until

ROOT = Path(__file__).parents[2]
AT_ONCE = Backoff(kind="fixed", base_seconds=0, jitter=0)


@pytest.fixture
def queue(database: Path) -> Iterator[Queue[Any]]:
    """Open a queue whose failed jobs come back at once."""
    with Queue[Any](database, "jobs", max_attempts=3, backoff=AT_ONCE, durability="normal") as made:
        yield made


def run_in_thread(worker: Worker[Any]) -> threading.Thread:
    """Start a worker's loop beside the test."""
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    return thread


def ended(thread: threading.Thread) -> None:
    """Wait for a thread, which must end."""
    thread.join(20)
    assert not thread.is_alive()


RESULTS: list[tuple[Any, State, Reason | None]] = [
    (None, State.DONE, None),
    (Done(), State.DONE, None),
    ("any other value", State.DONE, None),
    (Retry(error="later", after_seconds=100), State.DELAYED, None),
    (Reject(error="never"), State.DEAD, Reason.REJECTED),
    (Snooze(after_seconds=100), State.DELAYED, None),
]


@pytest.mark.parametrize(("result", "state", "reason"), RESULTS)
def test_a_result_decides_what_becomes_of_the_job(
    queue: Queue[Any], result: Any, state: State, reason: Reason | None
) -> None:
    """Nothing or Done is done; Retry and Snooze come back; Reject is dead."""
    job_id = queue.put({"n": 1})
    worker = Worker(queue, lambda job: result)
    ran = worker.run_once()
    worker.close()
    stored = queue.find(job_id)
    assert ran is not None
    assert ran.settled
    assert stored is not None
    assert (stored.state, stored.reason) == (state, reason)


def test_a_snooze_spends_no_attempt(queue: Queue[Any]) -> None:
    """Whoever says that the time has not come has not failed."""
    job_id = queue.put(1)
    worker = Worker(queue, lambda job: Snooze(after_seconds=0.001))
    worker.run_once()
    again = worker.run_once(timeout=10)
    worker.close()
    assert again is not None
    assert (again.job.id, again.job.attempt) == (job_id, 1)


def test_an_exception_is_tried_again_until_the_attempts_are_spent(queue: Queue[Any]) -> None:
    """The third failure of three makes a job dead, with its error, traceback and ledger."""
    job_id = queue.put(1)

    def handler(job: Job[Any]) -> None:
        raise ValueError(f"no luck in attempt {job.attempt}")

    worker = Worker(queue, handler)
    while worker.run_once() is not None:
        pass
    worker.close()
    stored = queue.find(job_id)
    assert stored is not None
    assert (stored.state, stored.reason) == (State.DEAD, Reason.EXHAUSTED)
    assert stored.error == "ValueError: no luck in attempt 3"
    assert "in handler" in (stored.traceback or "")
    assert [line.outcome for line in stored.ledger] == [Outcome.FAILED] * 3


def test_a_permanent_error_makes_a_job_dead_at_once(queue: Queue[Any]) -> None:
    """An exception of the named kinds, or of kinds derived from them, is not tried again."""
    job_id = queue.put(1)

    def handler(job: Job[Any]) -> None:
        raise KeyError("gone")

    worker = Worker(queue, handler, permanent_errors=(LookupError,))
    worker.run_once()
    worker.close()
    stored = queue.find(job_id)
    assert stored is not None
    assert (stored.state, stored.reason, stored.attempt) == (State.DEAD, Reason.REJECTED, 2)


def test_the_workers_own_back_off_overrules_the_queues(queue: Queue[Any]) -> None:
    """A worker may wait longer between attempts than the queue object says."""
    job_id = queue.put(1)

    def handler(job: Job[Any]) -> None:
        raise ValueError

    worker = Worker(queue, handler, backoff=lambda attempt: 1000.0 * attempt)
    worker.run_once()
    worker.close()
    stored = queue.find(job_id)
    assert stored is not None
    assert stored.state is State.DELAYED
    assert (stored.due_us or 0) > queue.engine.now_us() + 900_000_000


def test_the_heartbeat_keeps_the_lease_of_a_long_job(database: Path) -> None:
    """A handler that runs four leases long keeps its job: nobody else gets it meanwhile."""
    with (
        Queue[int](database, lease_seconds=0.5) as queue,
        Queue[int](database, lease_seconds=0.5) as other,
    ):
        queue.put(1)
        stolen: list[Job[int]] = []

        def handler(job: Job[int]) -> None:
            for _ in range(4):
                taken = other.get(timeout=0.5)
                if taken is not None:
                    stolen.append(taken)

        worker = Worker(queue, handler)
        ran = worker.run_once()
        worker.close()
        assert ran is not None
        assert ran.settled
        assert stolen == []
        assert queue.counts().done == 1


def test_a_result_whose_lease_was_lost_is_not_stored(queue: Queue[Any]) -> None:
    """Who no longer holds the claim settles nothing; what the new holder does stands."""
    job_id = queue.put(1)

    def handler(job: Job[Any]) -> None:
        queue.release(job)  # as a reaper would, behind the worker's back
        again = queue.get(0)
        assert again is not None
        queue.fail(again, error="by another")

    worker = Worker(queue, handler)
    ran = worker.run_once()
    worker.close()
    stored = queue.find(job_id)
    assert ran is not None
    assert not ran.settled
    assert stored is not None
    assert stored.error == "by another"


def test_a_lease_lost_is_noted_by_the_heartbeat(
    queue: Queue[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The loss is said while the handler still runs, not only when it ends."""
    queue.put(1)

    def noted() -> bool:
        return "lost its lease while its handler runs" in caplog.text

    def handler(job: Job[Any]) -> None:
        queue.ack(job)
        wait_until(noted)
        threading.Event().wait(0.1)  # five more beats, which must not come

    worker = Worker(queue, handler, heartbeat_seconds=0.02)
    ran = worker.run_once()
    worker.close()
    assert ran is not None
    assert not ran.settled
    assert caplog.text.count("lost its lease while its handler runs") == 1


def test_the_heartbeat_follows_from_job_to_job(database: Path) -> None:
    """One thread serves job after job, and ends with the worker."""
    with Queue[int](database, lease_seconds=0.3) as queue:
        queue.put_many([1, 2, 3])
        done = threading.Event()

        def handler(job: Job[int]) -> None:
            if job.payload == 2:
                done.wait(0.7)  # more than two leases

        worker = Worker(queue, handler)
        settled = [ran.settled for ran in iter(worker.run_once, None)]
        named = [t for t in threading.enumerate() if t.name == "herdsman-heartbeat"]
        worker.close()
        assert settled == [True, True, True]
        assert len(named) == 1
        assert not named[0].is_alive()


def test_stop_ends_an_idle_worker_at_once(queue: Queue[Any]) -> None:
    """A worker that waits for jobs for an hour hears `stop`."""
    worker = Worker(queue, lambda job: None, poll_seconds=3600)
    thread = run_in_thread(worker)
    queue.put(1)
    wait_until(lambda: queue.counts().done == 1)
    worker.stop()
    ended(thread)


def test_a_put_wakes_an_idle_worker(queue: Queue[Any]) -> None:
    """Whoever sleeps for an hour hears a put of another process's connection."""
    worker = Worker(queue, lambda job: None, poll_seconds=3600)
    thread = run_in_thread(worker)
    with Queue[Any](queue.engine.path, "jobs") as other:  # type: ignore[attr-defined]
        for number in range(3):
            other.put(number)
            wait_until(lambda number=number: queue.counts().done == number + 1)
    worker.stop()
    ended(thread)


def test_a_delayed_job_wakes_an_idle_worker(queue: Queue[Any]) -> None:
    """The sleep ends when the next delayed job is due."""
    worker = Worker(queue, lambda job: None, poll_seconds=3600)
    queue.put(1, delay=0.2)
    thread = run_in_thread(worker)
    wait_until(lambda: queue.counts().done == 1)
    worker.stop()
    ended(thread)


def test_stop_lets_the_job_in_hand_finish(queue: Queue[Any]) -> None:
    """After `stop` the running job is settled, and no other is begun."""
    queue.put_many([1, 2])
    began, go_on = threading.Event(), threading.Event()

    def handler(job: Job[Any]) -> None:
        began.set()
        assert go_on.wait(20)

    worker = Worker(queue, handler)
    thread = run_in_thread(worker)
    assert began.wait(20)
    worker.stop()
    go_on.set()
    ended(thread)
    counts = queue.counts()
    assert (counts.done, counts.ready, counts.claimed) == (1, 1, 0)


def test_a_worker_outlives_a_busy_database(database: Path) -> None:
    """A lock that somebody holds too long is waited for; the job runs once it is free."""
    ran: list[int] = []
    with Queue[int](database, lock_timeout_seconds=0.05) as queue, Queue[int](database) as other:
        other.put(7)
        lock = FileLock(Path(f"{database.resolve()}.lock"))
        assert lock.acquire(5)
        worker = Worker(queue, lambda job: ran.append(job.payload), poll_seconds=0.1)
        thread = run_in_thread(worker)
        blocked = threading.Event()
        assert not blocked.wait(0.3)
        assert ran == []
        lock.release()
        lock.close()
        wait_until(lambda: ran == [7])
        wait_until(lambda: other.counts().done == 1)
        worker.stop()
        ended(thread)


def test_a_result_is_kept_while_the_database_is_busy(database: Path) -> None:
    """A job that is done while nobody can write is settled as soon as one can."""
    lock_path = Path(f"{database.resolve()}.lock")
    with Queue[int](database, lock_timeout_seconds=0.05) as queue:
        queue.put(1)
        held = FileLock(lock_path)
        timer = threading.Timer(0.4, held.release)

        def handler(job: Job[int]) -> None:
            assert held.acquire(5)
            timer.start()

        worker = Worker(queue, handler)
        ran = worker.run_once()
        worker.close()
        timer.join()
        held.close()
        assert ran is not None
        assert ran.settled
        assert queue.counts().done == 1


def test_a_closed_queue_ends_the_worker(queue: Queue[Any]) -> None:
    """To wait for a queue that was closed for good would be to wait for ever."""
    queue.close()
    with pytest.raises(QueueClosed):
        Worker(queue, lambda job: None).run()


def test_an_interrupt_gives_the_job_back(queue: Queue[Any]) -> None:
    """Ctrl-C in a handler is no fault of the job: it is ready again, uncharged."""
    job_id = queue.put(1)

    def handler(job: Job[Any]) -> None:
        raise KeyboardInterrupt

    worker = Worker(queue, handler)
    with pytest.raises(KeyboardInterrupt):
        worker.run_once()
    worker.close()
    stored = queue.find(job_id)
    assert stored is not None
    assert (stored.state, stored.attempt) == (State.READY, 1)


@pytest.mark.parametrize("options", [
    {"heartbeat_seconds": 0}, {"heartbeat_seconds": 60}, {"poll_seconds": 0},
])  # fmt: skip
def test_an_option_out_of_range_is_refused(queue: Queue[Any], options: dict[str, float]) -> None:
    """A heartbeat as long as the lease would come too late."""
    with pytest.raises(PayloadInvalid):
        Worker(queue, lambda job: None, **options)  # type: ignore[arg-type]


PROGRAM = """
import pathlib, sys, time
from queue_core import Queue, Worker

folder = pathlib.Path(sys.argv[1])

def handler(job):
    (folder / "began").touch()
    while not (folder / "go-on").exists():
        time.sleep(0.01)

with Queue(folder / "herdsman.db", "jobs") as queue:
    Worker(queue, handler, poll_seconds=3600).run()
print("left in peace")
"""


@pytest.fixture
def program(database: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Start a process that works until it is told to stop; end it with the test."""
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(database.parent)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_sigterm_finishes_the_job_in_hand(
    database: Path, program: Callable[[], subprocess.Popen[str]]
) -> None:
    """A service manager's stop costs no job and no attempt; the process ends by itself."""
    with Queue[Any](database, "jobs") as queue:
        queue.put_many([1, 2])
        process = program()
        wait_until((database.parent / "began").exists)
        process.send_signal(signal.SIGTERM)
        (database.parent / "go-on").touch()
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out, err) == (0, "left in peace\n", "")
        counts = queue.counts()
        assert (counts.done, counts.ready, counts.claimed) == (1, 1, 0)


def test_a_second_signal_does_what_it_did_before(
    database: Path, program: Callable[[], subprocess.Popen[str]]
) -> None:
    """Who asks twice does not want to wait: the second SIGTERM ends the process."""
    with Queue[Any](database, "jobs") as queue:
        queue.put(1)
        process = program()
        wait_until((database.parent / "began").exists)

        def gone() -> bool:
            process.send_signal(signal.SIGTERM)
            return process.poll() is not None

        wait_until(gone)
        assert process.returncode == -signal.SIGTERM
        assert queue.counts().claimed == 1  # its lease runs out, and it is run again


def test_a_worker_works_on_after_a_fork(queue: Queue[Any]) -> None:
    """A child has no heartbeat thread of its parent's; it starts one of its own."""
    queue.put_many([1, 2])
    worker = Worker(queue, lambda job: None)
    assert worker.run_once() is not None
    child = os.fork()
    if child == 0:
        code = 1
        try:
            ran = worker.run_once()
            code = 0 if ran is not None and ran.settled else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    worker.close()
    assert os.waitstatus_to_exitcode(status) == 0
    assert queue.counts().done == 2


def test_a_damaged_database_is_waited_for_and_not_a_traceback(
    queue: Queue[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A fault of the database is logged as one sentence, and the loop goes on."""
    queue.put(1)
    path = queue.engine.path  # type: ignore[attr-defined]
    raw = sqlite3.connect(path)
    raw.execute("ALTER TABLE job RENAME TO elsewhere")
    worker = Worker(queue, lambda job: None, poll_seconds=0.05)
    thread = run_in_thread(worker)
    wait_until(lambda: "claiming failed, trying again" in caplog.text)
    raw.execute("ALTER TABLE elsewhere RENAME TO job")
    raw.close()
    wait_until(lambda: queue.counts().done == 1)
    worker.stop()
    ended(thread)
