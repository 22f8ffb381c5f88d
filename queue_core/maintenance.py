"""Give users of a queue what comes after a job's run: replay, prune, counts, lists, upkeep.

Boundary: the half of the façade that claims nothing; `queue_core.queue.Queue` is
the whole. No SQL here: it decodes, and delegates to the engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

from queue_core import codec
from queue_core.codec import Serializer
from queue_core.engine import Engine
from queue_core.errors import JobNotFound, PayloadInvalid, QueueError
from queue_core.job import Job, Reason, Record, State
from queue_core.stats import QueueFacts
from queue_core.upkeep import BackedUp, Diagnostics, Drift, Upkeep, Vacuumed

T = TypeVar("T")

BULK_SLICE: Final = 500
"""Dead jobs moved in one transaction by a bulk replay or discard: a short hold of the lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Jobs of a queue per state now (rows kept), and its totals since it began."""

    ready: int
    delayed: int
    claimed: int
    done: int
    dead: int
    cancelled: int
    totals: Mapping[str, int]

    @property
    def live(self) -> int:
        """Jobs that wait or run: ready, delayed and claimed; `max_depth` bounds these."""
        return self.ready + self.delayed + self.claimed


class Tended(Generic[T]):
    """A named queue as its operator uses it."""

    name: str
    _engine: Engine
    _serializer: Serializer[T]
    _max_attempts: int

    # ------------------------------------------------------------ replay

    def replay(self, job_id: int) -> None:
        """Make a dead job ready again with no attempt spent; raises JobNotFound if it is not dead.

        Of two who replay one job, one wins. The queue's `max_depth` does not
        stand in the way: the job had been accepted before.
        """
        if not self._engine.replay(self.name, [job_id]):
            raise JobNotFound(f"queue {self.name!r} has no dead job {job_id} to replay")

    def replay_all(
        self,
        *,
        reason: Reason | str | None = None,
        task: str | None = None,
        limit: int | None = None,
        dry_run: bool = False,
    ) -> int:
        """Replay this queue's dead jobs that match, oldest id first; return how many.

        Each job is replayed once, whoever else replays at the same time: the
        number counts those won here. With `dry_run` nothing changes, and the
        number is of those that match.
        """
        return self._in_bulk(self._engine.replay, reason, task, limit, dry_run)

    def discard(self, job_id: int) -> None:
        """Remove a dead job for good; raises JobNotFound if it is not dead."""
        if not self._engine.discard(self.name, [job_id]):
            raise JobNotFound(f"queue {self.name!r} has no dead job {job_id} to discard")

    def discard_all(
        self,
        *,
        reason: Reason | str | None = None,
        task: str | None = None,
        limit: int | None = None,
        dry_run: bool = False,
    ) -> int:
        """Remove this queue's dead jobs that match for good; see `replay_all`."""
        return self._in_bulk(self._engine.discard, reason, task, limit, dry_run)

    def _in_bulk(
        self,
        move: Callable[[str, Sequence[int]], int],
        reason: Reason | str | None,
        task: str | None,
        limit: int | None,
        dry_run: bool,
    ) -> int:
        if limit is not None:
            codec.whole("limit", limit, 0, 2**62)
        wanted = _reason(reason)
        after = moved = 0
        while limit is None or moved < limit:
            size = BULK_SLICE if limit is None else min(BULK_SLICE, limit - moved)
            page = self._engine.select(
                State.DEAD, queue=self.name, task=task, reason=wanted, limit=size, after=after
            )
            if not page:
                break
            # A job that dies again meanwhile keeps its id: going upwards, it is met once.
            after = page[-1].id
            moved += len(page) if dry_run else move(self.name, [record.id for record in page])
        return moved

    # ------------------------------------------------------------ prune

    def prune(self, limit: int = 1000) -> int:
        """Remove at most `limit` finished jobs past the queues' retention; return how many."""
        return self._engine.prune(limit)

    # ------------------------------------------------------------ counts

    def counts(self) -> Counts:
        """Return jobs per state now and totals since the queue began; the cost is constant."""
        found = self._engine.counts(self.name)
        states = {state.value: found.pop(state.value) for state in State}
        return Counts(**states, totals=found)

    def qsize(self) -> int:
        """Return how many jobs are ready to be claimed now."""
        return self.counts().ready

    def empty(self) -> bool:
        """Whether no job is ready to be claimed now; delayed and claimed ones may be there."""
        return self.counts().ready == 0

    def full(self) -> bool:
        """Whether the queue is at its `max_depth`, so that a put of new data raises QueueFull."""
        facts = self._facts()
        if facts is None or facts.max_depth is None:
            return False
        live = (State.READY, State.DELAYED, State.CLAIMED)
        return sum(facts.depth.get(state, 0) for state in live) >= facts.max_depth

    def _facts(self) -> QueueFacts | None:
        facts = self._engine.snapshot().queues
        return next((queue for queue in facts if queue.name == self.name), None)

    def find(self, job_id: int) -> Job[T] | None:
        """Return a job of this queue in whatever state, with its ledger; None if there is none."""
        if not isinstance(job_id, int):
            raise PayloadInvalid(f"a job's id is a whole number, not {job_id!r}")
        record = self._engine.find(job_id)
        if record is None or record.queue != self.name:
            return None
        return codec.job(record, self._serializer, self._max_attempts)

    def peek(self) -> Job[T] | None:
        """Return the job that would be claimed next, without claiming it."""
        record = self._engine.peek(self.name)
        if record is None:
            return None
        return codec.job(record, self._serializer, self._max_attempts)

    def jobs(
        self,
        state: State | str,
        *,
        task: str | None = None,
        limit: int = 100,
        after: int = 0,
        newest: bool = False,
        before: int | None = None,
    ) -> list[Job[T]]:
        """Return one page of this queue's jobs in a state, by id, after the id `after`.

        With `newest` the largest id comes first, and the page ends below the
        id `before`. A page may be empty, and is never longer than `limit`.
        """
        return self._page(_state(state), None, task, limit, after, newest, before)

    def dead(
        self,
        *,
        reason: Reason | str | None = None,
        task: str | None = None,
        limit: int = 100,
        after: int = 0,
        newest: bool = False,
        before: int | None = None,
    ) -> list[Job[T]]:
        """Return one page of dead jobs, with reason, error and traceback; see `jobs`."""
        return self._page(State.DEAD, _reason(reason), task, limit, after, newest, before)

    def _page(
        self,
        state: State,
        reason: Reason | None,
        task: str | None,
        limit: int,
        after: int,
        newest: bool,
        before: int | None,
    ) -> list[Job[T]]:
        codec.whole("limit", limit, 0, 2**31 - 1)
        codec.whole("after", after, 0, 2**63 - 1)
        if newest and after:
            raise PayloadInvalid("after= goes upwards from an id; with newest=True use before=")
        if before is not None and not newest:
            raise PayloadInvalid("before= goes downwards from an id; it needs newest=True")
        records: list[Record]
        if newest:
            records = self._upkeep().newest(
                state, queue=self.name, task=task, reason=reason, limit=limit, before=before
            )
        else:
            records = self._engine.select(
                state, queue=self.name, task=task, reason=reason, limit=limit, after=after
            )
        return [codec.job(record, self._serializer, self._max_attempts) for record in records]

    def pause(self) -> None:
        """Let nobody claim from this queue until `resume`; puts go on."""
        self._engine.configure(self.name, paused=True)

    def resume(self) -> None:
        """Let claims go on."""
        self._engine.configure(self.name, paused=False)

    # ------------------------------------------------------------ upkeep of the whole database

    def vacuum(self) -> Vacuumed:
        """Pack the database and give free space back; writers wait meanwhile.

        It takes seconds a gigabyte and as much free disk as the database is
        large. Raises QueueBusy and the DatabaseErrors.
        """
        return self._upkeep().vacuum()

    def backup(self, path: str | os.PathLike[str]) -> BackedUp:
        """Copy the database to a new file of mode 0600 while it is in use, and verify the copy.

        The copy is of one moment. Opened by herdsman, its claims are void and
        its ids go on well past those of the original. A fork of this process
        waits for the end. Raises QueueError when `path` exists.
        """
        return self._upkeep().backup(Path(path))

    def check(self, *, full: bool = False) -> list[str]:
        """Return what is wrong with the database, at most 100 sentences; an empty list is well.

        `full` also compares indexes with tables and looks for lost payloads.
        """
        return self._upkeep().check(full=full)

    def recount(self, *, mend: bool = False) -> list[Drift]:
        """Return where the counters differ from the rows; with `mend`, correct them.

        Only SQL by hand makes them differ. The cost grows with the rows.
        """
        return self._upkeep().recount(mend=mend)

    def diagnostics(self) -> Diagnostics:
        """Return what is true of the database now: versions, sizes, leases, ages, lock holder."""
        return self._upkeep().diagnostics()

    def _upkeep(self) -> Upkeep:
        if not isinstance(self._engine, Upkeep):
            raise QueueError(f"{type(self._engine).__name__} has no upkeep of its own")
        return self._engine


def _reason(value: Reason | str | None) -> Reason | None:
    try:
        return None if value is None else Reason(value)
    except ValueError:
        known = ", ".join(reason.value for reason in Reason)
        raise PayloadInvalid(f"{value!r} is no reason of a dead job; those are {known}") from None


def _state(value: State | str) -> State:
    try:
        return State(value)
    except ValueError:
        known = ", ".join(state.value for state in State)
        raise PayloadInvalid(f"{value!r} is no state of a job; those are {known}") from None
