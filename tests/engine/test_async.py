"""Use the queue from coroutines: every method, and above all what a cancellation leaves behind."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from queue_core import (
    AsyncQueue,
    Done,
    IdempotencyConflict,
    JobNotFound,
    PayloadInvalid,
    Queue,
    QueueFull,
    Reject,
    StaleClaim,
    State,
)
from queue_core.aio import PutOptions, QueueOptions
from queue_core.lockfile import FileLock
from tests.conftest import WAIT_SECONDS_MAX


def in_loop(database: Path, work: Callable[[AsyncQueue[Any]], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine with a queue of its own, and close it."""

    async def whole() -> None:
        async with AsyncQueue[Any](database, "jobs") as queue:
            await work(queue)

    asyncio.run(whole())


async def until(fact: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a fact without holding up the loop."""
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        while not await fact():  # noqa: ASYNC110 - the fact is in a database
            await asyncio.sleep(0.005)


def public(kind: type) -> set[str]:
    """Return the names of a class that users see."""
    return {name for name in dir(kind) if not name.startswith("_")}


def test_every_method_has_a_twin() -> None:
    """Whoever knows `Queue` knows `AsyncQueue`: same names, same arguments, awaited."""
    assert public(Queue) | {"name"} == public(AsyncQueue)  # a plain attribute there
    for name in public(Queue):
        method, twin = getattr(Queue, name), getattr(AsyncQueue, name)
        if not inspect.isfunction(method) or name in {"put", "put_many", "transaction"}:
            continue
        assert inspect.iscoroutinefunction(twin), name
        theirs = [
            (p.name, p.kind, p.default)
            for p in inspect.signature(method).parameters.values()
            if p.name != "tx"  # coroutines settle through what their `transaction()` yields
        ]
        ours = [(p.name, p.kind, p.default) for p in inspect.signature(twin).parameters.values()]
        assert ours == theirs, name


def test_the_twins_take_every_option_of_put_and_of_opening() -> None:
    """Options are named once more for type checkers; none may be forgotten."""
    put = set(inspect.signature(Queue.put).parameters) - {"self", "payload", "key", "tx"}
    assert put == set(PutOptions.__annotations__)
    opening = set(inspect.signature(Queue.__init__).parameters)
    rest = opening - {"self", "database", "name", "serializer", "engine", "options"}
    assert rest == set(QueueOptions.__annotations__)


def test_a_job_lives_its_life_in_coroutines(database: Path) -> None:
    """Put, claim, extend, every way to settle, replay, discard, lists and counts."""

    async def work(queue: AsyncQueue[Any]) -> None:
        ids = await queue.put_many([1, 2, 3, 4, 5], priority=1, task="t")
        assert await queue.qsize() == 5
        assert not await queue.empty()
        assert not await queue.full()
        first = await queue.peek()
        assert first is not None
        assert first.id == ids[0]
        job = await queue.get(0)
        assert job is not None
        await queue.extend(job, 100)
        await queue.ack(job)
        with pytest.raises(StaleClaim):
            await queue.ack(job)
        jobs = await queue.get_many(4)
        await queue.nack(jobs[0], error="later", delay=100)
        await queue.fail(jobs[1], error="never")
        await queue.release(jobs[2])
        await queue.finish(jobs[3], Reject(error="never"))
        assert [job.id for job in await queue.dead()] == [jobs[1].id, jobs[3].id]
        assert len(await queue.jobs(State.DELAYED)) == 1
        await queue.replay(jobs[1].id)
        await queue.discard(jobs[3].id)
        with pytest.raises(JobNotFound):
            await queue.discard(jobs[3].id)
        assert await queue.cancel(jobs[0].id) == 1
        counts = await queue.counts()
        assert (counts.ready, counts.done, counts.cancelled, counts.dead) == (2, 1, 1, 0)
        again = await queue.get(0)
        assert again is not None
        await queue.finish(again, Done())
        assert await queue.replay_all(dry_run=True) == 0
        assert await queue.discard_all() == 0
        await queue.pause()
        assert await queue.get(0) is None
        await queue.resume()
        assert await queue.get(0) is not None
        found = await queue.find(ids[0])
        assert found is not None
        assert await queue.prune() == 0

    in_loop(database, work)


def test_the_upkeep_works_in_coroutines(database: Path) -> None:
    """Backup, check, recount, vacuum and diagnostics are awaited like the rest."""

    async def work(queue: AsyncQueue[Any]) -> None:
        await queue.put(1)
        copy = await queue.backup(database.parent / "copy.db")
        assert copy.size_bytes > 0
        assert await queue.check(full=True) == []
        assert await queue.recount() == []
        assert (await queue.vacuum()).after_bytes > 0
        assert (await queue.diagnostics()).queues[0].name == "jobs"

    in_loop(database, work)


def test_a_waiting_get_is_woken_by_a_put(database: Path) -> None:
    """A get without a time-out returns with the job that was put meanwhile."""

    async def work(queue: AsyncQueue[Any]) -> None:
        waiting = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        await queue.put("hello")
        job = await asyncio.wait_for(waiting, WAIT_SECONDS_MAX)
        assert job is not None
        assert job.payload == "hello"

    in_loop(database, work)


def test_a_get_gives_up_after_its_timeout(database: Path) -> None:
    """Nothing came: the answer is None, not an exception."""

    async def work(queue: AsyncQueue[Any]) -> None:
        assert await queue.get(0.05) is None
        assert await queue.get_many(3, timeout=0.05) == []

    in_loop(database, work)


def test_more_gets_may_wait_than_there_are_threads(database: Path) -> None:
    """Waiting gets take turns in the threads; each of them gets its job, and puts go through."""

    async def whole() -> None:
        async with AsyncQueue[int](database, wait_threads=2) as queue:
            waiting = [asyncio.create_task(queue.get()) for _ in range(8)]
            await queue.put_many(list(range(8)))
            jobs = await asyncio.wait_for(asyncio.gather(*waiting), WAIT_SECONDS_MAX)
            assert sorted(job.payload for job in jobs if job is not None) == list(range(8))

    asyncio.run(whole())


def test_a_cancelled_get_holds_no_job(database: Path) -> None:
    """However a cancellation falls, a job that was put is ready again, uncharged, and in order."""

    async def work(queue: AsyncQueue[Any]) -> None:
        for number in range(60):
            waiting = asyncio.create_task(queue.get())
            await asyncio.sleep(0.0002 * (number % 10))
            job_id = await queue.put(number)
            await asyncio.sleep(0.0003 * (number % 7))
            waiting.cancel()
            try:
                job = await waiting
            except asyncio.CancelledError:
                job = None
            if job is None:
                job = await asyncio.wait_for(queue.get(), WAIT_SECONDS_MAX)
            assert job is not None
            assert (job.id, job.attempt, job.payload) == (job_id, 1, number)
            await queue.ack(job)
        counts = await queue.counts()
        assert (counts.done, counts.ready, counts.claimed, counts.dead) == (60, 0, 0, 0)

    in_loop(database, work)


def test_a_job_claimed_after_the_cancellation_is_released(database: Path) -> None:
    """The thread that waits on for a cancelled caller hands what it gets to the next."""

    async def work(queue: AsyncQueue[Any]) -> None:
        claimed, go_on = threading.Event(), threading.Event()
        get_many = queue._queue.get_many

        def slow(limit: int, *, timeout: float | None = 0) -> Any:
            jobs = get_many(limit, timeout=timeout)
            if jobs:
                claimed.set()
                go_on.wait(20)
            return jobs

        queue._queue.get_many = slow  # type: ignore[method-assign]
        job_id = await queue.put(1)
        waiting = asyncio.create_task(queue.get())
        assert await asyncio.to_thread(claimed.wait, 20)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        go_on.set()
        queue._queue.get_many = get_many  # type: ignore[method-assign]

        async def is_back() -> bool:
            stored = await queue.find(job_id)
            return stored is not None and stored.state is State.READY

        await until(is_back)

    in_loop(database, work)


def test_closing_gives_back_what_was_claimed_for_nobody(database: Path) -> None:
    """A program that ends by cancelling its tasks leaves no job to wait for the lease."""

    async def whole() -> None:
        async with AsyncQueue[int](database) as queue:
            waiting = [asyncio.create_task(queue.get()) for _ in range(4)]
            await asyncio.sleep(0.01)
            await queue.put_many([1, 2, 3, 4])
            for task in waiting:
                task.cancel()
            done = await asyncio.gather(*waiting, return_exceptions=True)
            taken = [job for job in done if not isinstance(job, BaseException) and job is not None]
            for job in taken:
                await queue.ack(job)
        with Queue[int](database) as queue_after:
            counts = queue_after.counts()
            assert counts.claimed == 0
            assert counts.ready == 4 - len(taken)

    asyncio.run(whole())


def test_a_put_waits_for_room(database: Path) -> None:
    """With block a full queue is waited for, in the loop and not in a thread."""

    async def whole() -> None:
        async with AsyncQueue[int](database, max_depth=1) as queue:
            await queue.put(1)
            with pytest.raises(QueueFull):
                await queue.put(2)
            with pytest.raises(QueueFull):
                await queue.put(2, block=True, timeout=0.05)
            with pytest.raises(QueueFull):
                await queue.put_many([2, 3], block=True)  # would never fit
            waiting = asyncio.create_task(queue.put(2, block=True))
            job = await queue.get()
            assert job is not None
            await queue.ack(job)
            await asyncio.wait_for(waiting, WAIT_SECONDS_MAX)
            assert await queue.qsize() == 1
            late = asyncio.create_task(queue.put(3, block=True))
            await asyncio.sleep(0.02)
            late.cancel()
            with pytest.raises(asyncio.CancelledError):
                await late
            assert await queue.qsize() == 1

    asyncio.run(whole())


@pytest.mark.parametrize("options", [{"timeout": 20}, {"block": True, "timeout": 20}])
def test_a_timeout_alone_waits_for_room_too(database: Path, options: PutOptions) -> None:
    """As with `Queue`: whoever says how long to wait wants to wait."""

    async def whole() -> None:
        async with AsyncQueue[int](database, max_depth=1) as queue:
            await queue.put(1)
            waiting = asyncio.create_task(queue.put(2, **options))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            job = await queue.get()
            assert job is not None
            await queue.ack(job)
            await asyncio.wait_for(waiting, WAIT_SECONDS_MAX)
            assert await queue.qsize() == 1

    asyncio.run(whole())


def test_waiting_for_room_is_one_refusal_at_most(database: Path) -> None:
    """However often a put tried meanwhile, its caller was refused once, at the end of its time."""

    async def whole() -> None:
        async with AsyncQueue[int](database, max_depth=1) as queue:
            await queue.put(1)
            begun = time.monotonic()
            with pytest.raises(QueueFull):
                await queue.put(2, block=True, timeout=0.3)
            assert time.monotonic() - begun >= 0.3
            assert (await queue.counts()).totals["jobs_rejected_total:full"] == 1

    asyncio.run(whole())


@pytest.mark.parametrize("timeout", ["soon", -1, float("nan"), True])
def test_a_senseless_timeout_is_refused(database: Path, timeout: Any) -> None:
    """By a sentence, as with `Queue`; a job is neither claimed nor stored for it."""

    async def whole() -> None:
        async with AsyncQueue[int](database, max_depth=1) as queue:
            await queue.put(1)
            for call in (queue.get(timeout=timeout), queue.put(2, block=True, timeout=timeout)):
                with pytest.raises(PayloadInvalid, match="timeout"):
                    await asyncio.wait_for(call, WAIT_SECONDS_MAX)
            counts = await queue.counts()
            assert (counts.ready, counts.claimed) == (1, 0)

    asyncio.run(whole())


def test_a_transaction_is_kept_whole(database: Path) -> None:
    """A caller's own rows and jobs stand or fall together."""

    async def work(queue: AsyncQueue[Any]) -> None:
        async with queue.transaction() as tx:
            await tx.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
            await tx.execute("INSERT INTO orders VALUES (?)", (1,))
            assert await tx.put({"order": 1}, key="order-1") > 0

        async def raises() -> None:
            async with queue.transaction() as tx:
                await tx.execute("INSERT INTO orders VALUES (2)")
                await tx.put_many([2, 3])
                raise ZeroDivisionError

        async def conflicts() -> None:
            async with queue.transaction() as tx:
                await tx.execute("INSERT INTO orders VALUES (3)")
                await tx.put({"order": 3}, key="order-1")

        with pytest.raises(ZeroDivisionError):
            await raises()
        with pytest.raises(IdempotencyConflict):
            await conflicts()
        async with queue.transaction() as tx:
            assert await tx.execute("SELECT id FROM orders") == [(1,)]
        assert await queue.qsize() == 1

    in_loop(database, work)


def test_a_transaction_that_began_for_nobody_is_undone(database: Path) -> None:
    """Cancelled while it waits for the lock, it may still begin: it ends at once, by itself."""

    async def work(queue: AsyncQueue[Any]) -> None:
        await queue.put(1)
        lock = FileLock(Path(f"{database}.lock"))
        assert lock.acquire(5)

        async def unit() -> None:
            async with queue.transaction():
                raise AssertionError("the lock was held")

        task = asyncio.create_task(unit())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        lock.release()
        lock.close()
        await asyncio.wait_for(queue.put(2), WAIT_SECONDS_MAX)
        with Queue[Any](database, "jobs", lock_timeout_seconds=5) as other:
            other.put(3)

    in_loop(database, work)


def test_a_cancelled_transaction_leaves_nothing_open(database: Path) -> None:
    """Wherever the cancellation falls, it is undone, and the next writer need not wait."""

    async def work(queue: AsyncQueue[Any]) -> None:
        async def unit() -> None:
            async with queue.transaction() as tx:
                await tx.put("never")
                await asyncio.sleep(20)

        for number in range(20):
            task = asyncio.create_task(unit())
            await asyncio.sleep(0.0005 * number)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.wait_for(queue.put(number), WAIT_SECONDS_MAX)
        assert await queue.qsize() == 20
        assert all(job.payload != "never" for job in await queue.jobs("ready"))

    in_loop(database, work)
