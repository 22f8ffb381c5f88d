"""Give asyncio programs what comes after a job's run, and the threads that calls run in.

Boundary: the half of the twin that claims nothing; see `queue_core.maintenance`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Generic, TypeVar

from queue_core.job import Job, Reason, State
from queue_core.queue import Counts, Queue
from queue_core.upkeep import BackedUp, Diagnostics, Drift, Vacuumed

T = TypeVar("T")
R = TypeVar("R")


async def in_thread(executor: ThreadPoolExecutor, work: Callable[[], R]) -> R:
    """Run work in a thread; its outcome is lost to a caller that is cancelled."""
    return await asyncio.get_running_loop().run_in_executor(executor, work)


async def to_the_end(executor: ThreadPoolExecutor, work: Callable[[], R]) -> R:
    """Run work whose outcome matters even to a caller that is being cancelled."""
    running = asyncio.wrap_future(executor.submit(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


class AsyncTended(Generic[T]):
    """A named queue as its operator uses it, for coroutines."""

    _queue: Queue[T]
    _calls: ThreadPoolExecutor

    async def _call(self, work: Callable[[], R]) -> R:
        return await in_thread(self._calls, work)

    # ------------------------------------------------------------ replay

    async def replay(self, job_id: int) -> None:
        """Make a dead job ready again; see `Queue.replay`."""
        await self._call(lambda: self._queue.replay(job_id))

    async def replay_all(
        self,
        *,
        reason: Reason | str | None = None,
        task: str | None = None,
        limit: int | None = None,
        dry_run: bool = False,
    ) -> int:
        """Replay the dead jobs that match; see `Queue.replay_all`."""
        return await self._call(
            lambda: self._queue.replay_all(reason=reason, task=task, limit=limit, dry_run=dry_run)
        )

    async def discard(self, job_id: int) -> None:
        """Remove a dead job for good; see `Queue.discard`."""
        await self._call(lambda: self._queue.discard(job_id))

    async def discard_all(
        self,
        *,
        reason: Reason | str | None = None,
        task: str | None = None,
        limit: int | None = None,
        dry_run: bool = False,
    ) -> int:
        """Remove the dead jobs that match for good; see `Queue.discard_all`."""
        return await self._call(
            lambda: self._queue.discard_all(reason=reason, task=task, limit=limit, dry_run=dry_run)
        )

    # ------------------------------------------------------------ prune

    async def prune(self, limit: int = 1000) -> int:
        """Remove finished jobs past their retention; see `Queue.prune`."""
        return await self._call(lambda: self._queue.prune(limit))

    # ------------------------------------------------------------ counts

    async def counts(self) -> Counts:
        """Return jobs per state now, and totals; see `Queue.counts`."""
        return await self._call(self._queue.counts)

    async def qsize(self) -> int:
        """Return how many jobs are ready; see `Queue.qsize`."""
        return await self._call(self._queue.qsize)

    async def empty(self) -> bool:
        """Whether no job is ready; see `Queue.empty`."""
        return await self._call(self._queue.empty)

    async def full(self) -> bool:
        """Whether the queue is at its `max_depth`; see `Queue.full`."""
        return await self._call(self._queue.full)

    async def find(self, job_id: int) -> Job[T] | None:
        """Return a job in whatever state; see `Queue.find`."""
        return await self._call(lambda: self._queue.find(job_id))

    async def peek(self) -> Job[T] | None:
        """Return the job that would be claimed next; see `Queue.peek`."""
        return await self._call(self._queue.peek)

    async def jobs(
        self,
        state: State | str,
        *,
        task: str | None = None,
        limit: int = 100,
        after: int = 0,
        newest: bool = False,
        before: int | None = None,
    ) -> list[Job[T]]:
        """Return one page of jobs in a state; see `Queue.jobs`."""
        return await self._call(
            lambda: self._queue.jobs(
                state, task=task, limit=limit, after=after, newest=newest, before=before
            )
        )

    async def dead(
        self,
        *,
        reason: Reason | str | None = None,
        task: str | None = None,
        limit: int = 100,
        after: int = 0,
        newest: bool = False,
        before: int | None = None,
    ) -> list[Job[T]]:
        """Return one page of dead jobs; see `Queue.dead`."""
        return await self._call(
            lambda: self._queue.dead(
                reason=reason, task=task, limit=limit, after=after, newest=newest, before=before
            )
        )

    async def pause(self) -> None:
        """Let nobody claim from this queue; see `Queue.pause`."""
        await self._call(self._queue.pause)

    async def resume(self) -> None:
        """Let claims go on; see `Queue.resume`."""
        await self._call(self._queue.resume)

    # ------------------------------------------------------------ upkeep

    async def vacuum(self) -> Vacuumed:
        """Pack the database; see `Queue.vacuum`."""
        return await self._call(self._queue.vacuum)

    async def backup(self, path: str | os.PathLike[str]) -> BackedUp:
        """Copy the database while it is in use; see `Queue.backup`."""
        return await self._call(lambda: self._queue.backup(Path(path)))

    async def check(self, *, full: bool = False) -> list[str]:
        """Return what is wrong with the database; see `Queue.check`."""
        return await self._call(lambda: self._queue.check(full=full))

    async def recount(self, *, mend: bool = False) -> list[Drift]:
        """Return where the counters differ from the rows; see `Queue.recount`."""
        return await self._call(lambda: self._queue.recount(mend=mend))

    async def diagnostics(self) -> Diagnostics:
        """Return what is true of the database now; see `Queue.diagnostics`."""
        return await self._call(self._queue.diagnostics)
