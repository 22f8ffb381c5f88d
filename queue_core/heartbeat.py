"""Extend the lease of the job in hand while its handler runs, in a thread of its own.

Boundary: one job at a time; it runs no handler and settles nothing.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Generic, TypeVar

from queue_core.errors import QueueError, StaleClaim
from queue_core.job import Job
from queue_core.queue import Queue

T = TypeVar("T")

RETRY_SHARE: Final = 4
"""After a fault of the database, the next beat comes after this share of the interval: a lease of
three intervals then sees eight more tries before it ends."""

_log = logging.getLogger("queue_core.worker")


class Hold:
    """The claim that is kept alive now; `lost` says that it is no longer ours."""

    __slots__ = ("job", "lost")

    def __init__(self, job: Job[Any]) -> None:
        self.job = job
        self.lost = False


class Heartbeat(Generic[T]):
    """Keep one claim alive; the thread starts with the first job and sleeps between jobs."""

    def __init__(self, queue: Queue[T], every_seconds: float) -> None:
        """`every_seconds` must be well below the lease, so that one late beat costs nothing."""
        self._queue = queue
        self._every_seconds = every_seconds
        self._condition = threading.Condition()
        self._hold: Hold | None = None
        self._ended = False
        self._thread: threading.Thread | None = None
        self._pid = 0

    @contextmanager
    def keeping(self, job: Job[T]) -> Iterator[Hold]:
        """Extend the job's lease at every beat, until the block ends or the claim is lost."""
        if self._pid != os.getpid():  # a fork copies the object, not its thread
            self._condition = threading.Condition()
            self._thread, self._pid, self._ended = None, os.getpid(), False
        hold = Hold(job)
        with self._condition:
            self._hold = hold
            if self._thread is None:
                self._ended = False
                self._thread = threading.Thread(
                    target=self._run, name="herdsman-heartbeat", daemon=True
                )
                self._thread.start()
            self._condition.notify()
        try:
            yield hold
        finally:
            with self._condition:
                self._hold = None
                self._condition.notify()

    def close(self) -> None:
        """End the thread and wait for it; the next job starts another."""
        with self._condition:
            self._ended = True
            thread, self._thread = self._thread, None
            self._condition.notify()
        if thread is not None and self._pid == os.getpid():
            thread.join()

    def _run(self) -> None:
        pause = self._every_seconds
        while True:
            with self._condition:
                hold = self._hold
                idle = hold is None or hold.lost
                if not self._ended:
                    self._condition.wait(None if idle else pause)
                if self._ended:
                    return
                if hold is None or hold is not self._hold:
                    pause = self._every_seconds  # another job: its lease is fresh
                    continue
            pause = self._beat(hold)

    def _beat(self, hold: Hold) -> float:
        """Extend once; return the seconds until the next beat."""
        try:
            self._queue.extend(hold.job, self._queue.lease_seconds)
        except StaleClaim:
            hold.lost = True
            _log.warning(
                "job %d of queue %s lost its lease while its handler runs; it will not be settled",
                hold.job.id,
                self._queue.name,
            )
        except QueueError as error:
            _log.warning("the lease of job %d was not extended: %s", hold.job.id, error)
            return self._every_seconds / RETRY_SHARE
        return self._every_seconds
