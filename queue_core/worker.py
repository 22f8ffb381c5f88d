"""Run jobs one after the other in this process, for those who want no supervisor.

Boundary: claims, calls, settles. A handler that hangs is not killed and a death
of this process is noticed by the end of the lease alone: the supervisor does
better in both.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, Generic, TypeVar

from queue_core.codec import PRIORITY_MAX
from queue_core.errors import PayloadInvalid, QueueClosed, QueueError, StaleClaim
from queue_core.heartbeat import Heartbeat
from queue_core.job import Job
from queue_core.queue import Queue
from queue_core.retry import BackoffPolicy, Done, Interrupted, Reject, Result, Retry, Snooze

T = TypeVar("T")

HandlerResult = Done | Retry | Reject | Snooze
Handler = Callable[[Job[T]], HandlerResult | None]
"""Takes the job; returns None or Done when it is done, else Retry, Reject or Snooze."""

POLL_SECONDS: Final = 5.0
"""A put rings, so this is how long a lease that ran out elsewhere may wait, not a job."""
FAULT_PAUSE_SECONDS: Final = 0.1
FAULT_PAUSE_SECONDS_MAX: Final = 15.0
SETTLE_TRIES_MAX: Final = 12
"""With pauses that double up to the limit, a result is kept for about a minute and a half."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran(Generic[T]):
    """A job that was run: how it ended, and whether that was stored.

    `settled` is False when the lease was lost meanwhile (another worker has the
    job, or will) or the database could not be written for too long.
    """

    job: Job[T]
    result: Result
    settled: bool


class Worker(Generic[T]):
    """Claim a job, run it, settle it, and again; one at a time, its lease kept alive.

    A handler that raises is tried again after the back-off, until the job's
    attempts are spent; an exception of `permanent_errors` makes the job dead
    at once. What it returns decides otherwise: see `Handler`.
    """

    def __init__(
        self,
        queue: Queue[T],
        handler: Handler[T],
        *,
        heartbeat_seconds: float | None = None,
        permanent_errors: Iterable[type[Exception]] = (),
        backoff: BackoffPolicy | None = None,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """Make a worker; nothing runs yet.

        `heartbeat_seconds` is a third of the lease, unless given; `backoff`
        that of the queue object. Raises PayloadInvalid for values out of range.
        """
        lease = queue.lease_seconds
        beat = lease / 3 if heartbeat_seconds is None else heartbeat_seconds
        if not 0 < beat < lease:
            raise PayloadInvalid(
                f"heartbeat_seconds is {beat!r}; it must lie between 0 and the lease of {lease:g} s"
            )
        if not 0 < poll_seconds <= PRIORITY_MAX:
            raise PayloadInvalid(f"poll_seconds is {poll_seconds!r}; it must be more than 0")
        self._queue = queue
        self._handler = handler
        self._permanent = tuple(permanent_errors)
        self._backoff = backoff
        self._poll_seconds = poll_seconds
        self._heartbeat = Heartbeat(queue, beat)
        self._stopping = threading.Event()
        self._wake_read = self._wake_write = -1

    def run(self, *, signals: Iterable[int] = (signal.SIGTERM, signal.SIGINT)) -> None:
        """Run jobs until `stop`, or until one of `signals` comes; the job in hand is finished.

        Signals are handled when this is the main thread, and until the first
        has come: a second one does what it did before. A busy or failing
        database is waited for. Raises QueueClosed when the queue is closed.
        """
        with self._awake(), self._handling(signals):
            pause = FAULT_PAUSE_SECONDS
            try:
                while not self._stopping.is_set():
                    try:
                        if self.run_once() is None:
                            self._rest()
                        pause = FAULT_PAUSE_SECONDS
                    except QueueClosed:
                        raise
                    except QueueError as error:
                        _log.warning("claiming failed, trying again in %g s: %s", pause, error)
                        self._stopping.wait(pause)
                        pause = min(pause * 2, FAULT_PAUSE_SECONDS_MAX)
            finally:
                self._heartbeat.close()
                self._stopping.clear()

    def run_once(self, timeout: float = 0) -> Ran[T] | None:
        """Claim one job, run it and settle it; None when none came within `timeout` seconds."""
        job = self._queue.get(timeout=timeout)
        if job is None:
            return None
        with self._heartbeat.keeping(job) as hold:
            try:
                result = self._call(job)
            except BaseException as error:
                # Ctrl-C, or an exit: no fault of the job, which goes back uncharged.
                with suppress(QueueError):
                    self._queue.release(job, error=f"interrupted by {type(error).__name__}")
                raise
            settled = not hold.lost and self._settle(job, result)
        return Ran(job=job, result=result, settled=settled)

    def stop(self) -> None:
        """Let `run` return after the job in hand; may be called from anywhere, handlers too."""
        self._stopping.set()
        if self._wake_write >= 0:
            with suppress(BlockingIOError):  # a full pipe wakes too
                os.write(self._wake_write, b"\0")

    def close(self) -> None:
        """End the heartbeat's thread, after `run_once` was used alone; the queue stays open."""
        self._heartbeat.close()

    # ------------------------------------------------------------ one job

    def _call(self, job: Job[T]) -> Result:
        try:
            returned: object = self._handler(job)
        except self._permanent as error:
            return Reject(error=_one_line(error), traceback=traceback.format_exc())
        except Exception as error:
            return Retry(error=_one_line(error), traceback=traceback.format_exc())
        if isinstance(returned, Done | Retry | Reject | Snooze | Interrupted):
            return returned
        return Done()

    def _settle(self, job: Job[T], result: Result) -> bool:
        """Store a result; a database that fails is tried again while the heartbeat goes on."""
        pause = FAULT_PAUSE_SECONDS
        for _ in range(SETTLE_TRIES_MAX):
            try:
                self._queue.finish(job, result, backoff=self._backoff)
                return True
            except StaleClaim:
                _log.warning("job %d lost its lease; its result is not stored", job.id)
                return False
            except QueueClosed:
                break
            except QueueError as error:
                _log.warning(
                    "job %d was not settled, trying again in %g s: %s", job.id, pause, error
                )
                threading.Event().wait(pause)
                pause = min(pause * 2, FAULT_PAUSE_SECONDS_MAX)
        _log.error("the result of job %d is given up; it will run again", job.id)
        return False

    # ------------------------------------------------------------ waiting and signals

    def _rest(self) -> None:
        """Sleep until a put rings, a delayed job is due, `stop` is called, or for the poll."""
        engine = self._queue.engine
        due_us = engine.next_due_us()
        seconds = self._poll_seconds if due_us is None else due_us / 1_000_000
        engine.wait([self._queue.name], min(seconds, self._poll_seconds), self._wake_read)

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Own the pipe that `stop` writes to, and hear puts from before the first look."""
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self._listen()
            yield
        finally:
            read, write = self._wake_read, self._wake_write
            self._wake_read = self._wake_write = -1
            os.close(read)
            os.close(write)

    def _listen(self) -> None:
        self._queue.engine.listen([self._queue.name])

    @contextmanager
    def _handling(self, signals: Iterable[int]) -> Iterator[None]:
        """Stop at a signal, in the main thread; the handlers of before come back."""
        before: dict[int, Any] = {}

        def back() -> None:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            before.clear()

        def handle(number: int, _frame: FrameType | None) -> None:
            _log.info("stopping at %s, after the job in hand", signal.Signals(number).name)
            back()
            self.stop()

        if threading.current_thread() is threading.main_thread():
            for number in signals:
                before[number] = signal.signal(number, handle)
        try:
            yield
        finally:
            back()


def _one_line(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be made)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
