"""Give asyncio programs the queue: every method of `Queue` as a coroutine.

Boundary: threads and cancellation; what the calls do is `queue_core.queue`'s. A
call that was cancelled may still take effect, as a database commits or not; but a
job that was claimed for nobody is given back.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Generic, Self, TypedDict, TypeVar, Unpack

from queue_core import codec
from queue_core.aio_maintenance import AsyncTended, in_thread, to_the_end
from queue_core.codec import Serializer
from queue_core.engine import Engine
from queue_core.errors import QueueError, QueueFull
from queue_core.job import Job, NewJob
from queue_core.queue import FULL_PAUSE_SECONDS, FULL_PAUSE_SECONDS_MAX, JobId, Queue, never_fits
from queue_core.retry import BackoffPolicy, Result

T = TypeVar("T")
R = TypeVar("R")

CALL_THREADS: Final = 4
"""Threads for calls that end soon. SQLite takes one at a time; the others wait for the disk."""
WAIT_THREADS_DEFAULT: Final = 16
"""Calls of get that may wait at the same time; more take turns."""
WAIT_SLICE_SECONDS: Final = 1.0
"""Longest wait in a thread, so that one whose caller was cancelled is free again soon."""


class PutOptions(TypedDict, total=False):
    """What `put` and `put_many` take beside payload and key; see `Queue.put`."""

    delay: float | timedelta
    priority: int
    task: str | None
    headers: Mapping[str, Any] | None
    expires: float | timedelta | None
    group: str | None
    max_attempts: int | None
    block: bool
    timeout: float | None


class QueueOptions(TypedDict, total=False):
    """What a queue object is opened with; see `Queue`."""

    max_attempts: int
    backoff: BackoffPolicy
    lease_seconds: float
    max_depth: int | None
    key_ttl_seconds: float | None
    keep_done_seconds: float | None
    keep_dead_seconds: float | None
    payload_bytes_max: int


class _Trying(Queue[T]):
    """The queue below: asked to wait for room, it tries once, which is no refusal yet."""

    def _enqueue(
        self, jobs: list[NewJob], tx: object | None, wait: bool, timeout: float | None
    ) -> Any:
        if wait and tx is None:
            return self._engine.enqueue(self.name, jobs, quiet=True)
        return super()._enqueue(jobs, tx, False, None)


class AsyncTransaction(Generic[T]):
    """A write transaction on the queue's file: statements and puts that stand or fall together."""

    def __init__(self, queue: Queue[T], tx: Any, executor: ThreadPoolExecutor) -> None:
        self._queue = queue
        self._tx = tx
        self._executor = executor

    async def execute(self, statement: str, parameters: Any = ()) -> list[Any]:
        """Run a statement of the caller's own and return its rows."""
        return await in_thread(
            self._executor, lambda: list(self._tx.execute(statement, parameters).fetchall())
        )

    async def put(
        self, payload: T, *, key: str | None = None, **options: Unpack[PutOptions]
    ) -> JobId:
        """Store one job in this transaction."""
        return await in_thread(
            self._executor, lambda: self._queue.put(payload, key=key, tx=self._tx, **options)
        )

    async def put_many(
        self,
        payloads: Sequence[T],
        *,
        keys: Sequence[str | None] | None = None,
        **options: Unpack[PutOptions],
    ) -> list[JobId]:
        """Store several jobs in this transaction."""
        return await in_thread(
            self._executor,
            lambda: self._queue.put_many(payloads, keys=keys, tx=self._tx, **options),
        )

    async def ack(self, job: Job[T] | Sequence[Job[T]]) -> None:
        """Report jobs as done in this transaction; see `Queue.ack`."""
        await in_thread(self._executor, lambda: self._queue.ack(job, tx=self._tx))

    async def finish(
        self,
        job: Job[T] | Sequence[Job[T]],
        result: Result,
        *,
        backoff: BackoffPolicy | None = None,
    ) -> None:
        """Settle jobs in this transaction; see `Queue.finish`."""
        await in_thread(
            self._executor,
            lambda: self._queue.finish(job, result, backoff=backoff, tx=self._tx),
        )


class AsyncQueue(AsyncTended[T]):
    """A named queue for coroutines; the twin of `Queue`, method by method.

    One object may be used by any number of tasks of one event loop.
    """

    def __init__(
        self,
        database: str | os.PathLike[str],
        name: str = "default",
        *,
        serializer: Serializer[T] | None = None,
        engine: Engine | None = None,
        wait_threads: int = WAIT_THREADS_DEFAULT,
        engine_options: Mapping[str, Any] | None = None,
        **options: Unpack[QueueOptions],
    ) -> None:
        """Open a queue; `engine_options` go to the engine, the others are those of `Queue`."""
        self._queue: Queue[T] = _Trying(
            database, name, serializer=serializer, engine=engine,
            **options, **(engine_options or {}),
        )  # fmt: skip
        self._calls = ThreadPoolExecutor(CALL_THREADS, thread_name_prefix="herdsman-call")
        self._waits = ThreadPoolExecutor(wait_threads, thread_name_prefix="herdsman-wait")

    @property
    def name(self) -> str:
        """The queue's name."""
        return self._queue.name

    @property
    def engine(self) -> Engine:
        """The engine below; its calls block."""
        return self._queue.engine

    @property
    def lease_seconds(self) -> float:
        """How long a claim of this object holds, unless it is extended."""
        return self._queue.lease_seconds

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Wait for the calls that run, give back what they claimed for nobody, and close."""

        def end() -> None:
            self._waits.shutdown(wait=True, cancel_futures=True)
            self._calls.shutdown(wait=True)
            self._queue.close()

        await asyncio.shield(asyncio.to_thread(end))

    # ------------------------------------------------------------ enqueue

    async def put(
        self, payload: T, *, key: str | None = None, **options: Unpack[PutOptions]
    ) -> JobId:
        """Store one job and return its id; see `Queue.put`.

        When cancelled, it may have been stored: use a `key` to put again safely.
        """
        return (await self.put_many([payload], keys=[key], **options))[0]

    async def put_many(
        self,
        payloads: Sequence[T],
        *,
        keys: Sequence[str | None] | None = None,
        **options: Unpack[PutOptions],
    ) -> list[JobId]:
        """Store several jobs, all or none; see `Queue.put_many`."""
        loop = asyncio.get_running_loop()
        block, timeout = options.pop("block", False), options.pop("timeout", None)
        codec.duration_us("timeout", timeout)
        deadline = math.inf if timeout is None else loop.time() + timeout
        trying: PutOptions = {**options, "block": True}
        pause = FULL_PAUSE_SECONDS
        while (block or timeout is not None) and (left := deadline - loop.time()) > 0:
            try:
                return await self._call(lambda: self._queue.put_many(payloads, keys=keys, **trying))
            except QueueFull as error:
                if never_fits(error):
                    break
            # Waited for here, and not in a thread: a cancelled put must not be stored later.
            await asyncio.sleep(min(pause, left))
            pause = min(pause * 1.5, FULL_PAUSE_SECONDS_MAX)
        return await self._call(lambda: self._queue.put_many(payloads, keys=keys, **options))

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncTransaction[T]]:
        """Open a transaction for own statements and puts; other writers wait meanwhile.

        It lives in a thread of its own, since a transaction belongs to one.
        """
        executor = ThreadPoolExecutor(1, thread_name_prefix="herdsman-transaction")
        stack = ExitStack()
        try:
            tx = await in_thread(executor, lambda: stack.enter_context(self._queue.transaction()))
            try:
                yield AsyncTransaction(self._queue, tx, executor)
            except BaseException as error:
                # The exception rolls back inside the thread, and goes on out here.
                caught = error
                with suppress(type(error)):
                    await to_the_end(
                        executor, lambda: stack.__exit__(type(caught), caught, caught.__traceback__)
                    )
                raise
            await to_the_end(executor, stack.close)
        finally:
            # A cancelled entry may still have begun one: this ends it, undone.
            executor.submit(_roll_back, stack)
            executor.shutdown(wait=False)

    # ------------------------------------------------------------ claim

    # The twin's argument; a time-out that lost the claim is what asyncio.timeout would be.
    async def get(self, timeout: float | None = None) -> Job[T] | None:
        """Claim the next job, waiting at most `timeout` seconds; see `Queue.get`."""
        jobs = await self.get_many(1, timeout=timeout)
        return jobs[0] if jobs else None

    async def get_many(
        self,
        limit: int,
        *,
        timeout: float | None = 0,
    ) -> list[Job[T]]:
        """Claim up to `limit` jobs, as soon as there is one; see `Queue.get_many`.

        A cancelled call holds no job: what was claimed meanwhile is released,
        uncharged and where it stood.
        """
        codec.duration_us("timeout", timeout)
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while True:
            left = WAIT_SLICE_SECONDS if deadline is None else max(0.0, deadline - loop.time())
            jobs = await self._claim(limit, min(left, WAIT_SLICE_SECONDS))
            if jobs or (deadline is not None and loop.time() >= deadline):
                return jobs

    async def _claim(self, limit: int, seconds: float) -> list[Job[T]]:
        executor = self._waits if seconds > 0 else self._calls
        claimed = executor.submit(lambda: self._queue.get_many(limit, timeout=seconds))
        try:
            return await asyncio.shield(asyncio.wrap_future(claimed))
        except asyncio.CancelledError:
            if not claimed.cancel():
                claimed.add_done_callback(self._give_back)
            raise

    def _give_back(self, claimed: Future[list[Job[T]]]) -> None:
        """Release what nobody waits for; called where the claim ended, at any time."""
        if claimed.cancelled() or claimed.exception() is not None or not claimed.result():
            return
        jobs = claimed.result()

        def release() -> None:
            with suppress(QueueError):  # else the lease runs out, which is only slower
                self._queue.release(jobs, error="the call that claimed it was cancelled")

        try:
            self._calls.submit(release)
        except RuntimeError:  # closing: there is no thread left but this one
            release()

    # ------------------------------------------------------------ extend

    async def extend(self, job: Job[T], seconds: float) -> None:
        """Let the lease end `seconds` from now; see `Queue.extend`."""
        await self._call(lambda: self._queue.extend(job, seconds))

    # ------------------------------------------------------------ finish

    async def ack(self, job: Job[T] | Sequence[Job[T]]) -> None:
        """Report jobs as done; see `Queue.ack`."""
        await self._call(lambda: self._queue.ack(job))

    async def nack(
        self,
        job: Job[T] | Sequence[Job[T]],
        *,
        error: str = "",
        delay: float | timedelta | None = None,
    ) -> None:
        """Report jobs as failed, to be tried again; see `Queue.nack`."""
        await self._call(lambda: self._queue.nack(job, error=error, delay=delay))

    async def fail(self, job: Job[T] | Sequence[Job[T]], *, error: str = "") -> None:
        """Report jobs as failed for good; see `Queue.fail`."""
        await self._call(lambda: self._queue.fail(job, error=error))

    async def release(self, job: Job[T] | Sequence[Job[T]], *, error: str = "released") -> None:
        """Give jobs back untouched; see `Queue.release`."""
        await self._call(lambda: self._queue.release(job, error=error))

    async def finish(
        self,
        job: Job[T] | Sequence[Job[T]],
        result: Result,
        *,
        backoff: BackoffPolicy | None = None,
    ) -> None:
        """Settle jobs by a result as a value; see `Queue.finish`."""
        await self._call(lambda: self._queue.finish(job, result, backoff=backoff))

    async def cancel(self, *job_ids: int) -> int:
        """Cancel jobs that are ready or delayed; see `Queue.cancel`."""
        return await self._call(lambda: self._queue.cancel(*job_ids))


class _Abandoned(Exception):
    """Rolls a transaction back."""


def _roll_back(stack: ExitStack) -> None:
    with suppress(_Abandoned):
        fault = _Abandoned()
        stack.__exit__(_Abandoned, fault, None)
