"""Give users a queue: validate, encode, delegate to the engine, decode.

Boundary: no SQL, no processes. What an engine refuses as a value (a stale
claim) becomes an error here, since a user who ignores it would lose a lease
without noticing.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from queue_core import codec
from queue_core.codec import JsonSerializer, Serializer
from queue_core.engine import ClaimRequest, Engine, Holder
from queue_core.engines.sqlite import SqliteEngine
from queue_core.errors import (
    DatabaseUnavailable,
    JobNotFound,
    QueueFull,
    StaleClaim,
)
from queue_core.job import (
    MAX_ATTEMPTS_DEFAULT,
    PAYLOAD_BYTES_MAX,
    Claimed,
    Job,
    NewJob,
    Reason,
    Settlement,
    Stale,
    State,
)
from queue_core.retry import (
    DEFAULT_BACKOFF,
    BackoffPolicy,
    Done,
    Interrupted,
    LeaseLost,
    Reject,
    Result,
    Retry,
    settle,
)

T = TypeVar("T")

LEASE_SECONDS_DEFAULT: Final = 60.0
UPKEEP_LIMIT: Final = 100
"""Rows a claim promotes and reaps on its way, for those who run no keeper (design: section 10)."""
LOOK_SECONDS_MAX: Final = 5.0
"""A waiting get looks again at least this often, for leases that run out meanwhile."""
FULL_PAUSE_SECONDS_MAX: Final = 0.25
BATCH_MAX: Final = 10_000


class JobId(int):
    """The id of a put job; `duplicate` says that its key was taken and nothing new was stored."""

    duplicate: bool

    def __new__(cls, value: int, *, duplicate: bool = False) -> Self:
        """Make an id that remembers whether it is a duplicate's."""
        made = super().__new__(cls, value)
        made.duplicate = duplicate
        return made


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


def open_engine(database: str | os.PathLike[str], **options: Any) -> Engine:
    """Return the engine for a path or URL; it connects when first used.

    Options are those of `SqliteEngine`. Raises DatabaseUnavailable for what
    this version has no engine for.
    """
    text = os.fspath(database)
    if text.startswith(("postgresql://", "postgres://")):
        raise DatabaseUnavailable(
            "this version of herdsman has no PostgreSQL engine; name a file instead"
        )
    if text in {"", ":memory:"} or "\0" in text or "://" in text:
        raise DatabaseUnavailable(
            f"{text!r} cannot hold a queue: name a file that processes can share"
        )
    return SqliteEngine(text, **options)


class Queue(Generic[T]):
    """A named queue of one database; safe to use from several threads and after a fork.

    Options of the queue itself (`max_depth`, `key_ttl_seconds`) are stored with
    it when given, and hold for everybody. `max_attempts` counts the first
    attempt; it and `backoff` are used for jobs settled through this object.
    """

    def __init__(
        self,
        database: str | os.PathLike[str],
        name: str = "default",
        *,
        serializer: Serializer[T] | None = None,
        max_attempts: int = MAX_ATTEMPTS_DEFAULT,
        backoff: BackoffPolicy = DEFAULT_BACKOFF,
        lease_seconds: float = LEASE_SECONDS_DEFAULT,
        max_depth: int | None = None,
        key_ttl_seconds: float | None = None,
        payload_bytes_max: int = PAYLOAD_BYTES_MAX,
        engine: Engine | None = None,
        **options: Any,
    ) -> None:
        """Open a queue, creating the database and the queue when they are not there.

        `options` go to the engine: `durability`, `lock`, `lock_timeout_seconds`,
        `clock`, `create`. Raises PayloadInvalid for options out of range.
        """
        self.name = codec.name("a queue's name", name)
        self._engine = engine or open_engine(database, **options)
        self._owns_engine = engine is None
        self._serializer: Serializer[T] = serializer or JsonSerializer()
        self._max_attempts = codec.whole("max_attempts", max_attempts, 1, 2**31 - 1)
        self._backoff = backoff
        self._lease_us = codec.duration_us("lease_seconds", lease_seconds) or 1
        self._payload_bytes_max = payload_bytes_max
        self._holder: tuple[int, int] | None = None
        stored: dict[str, Any] = {}
        if max_depth is not None:
            stored["max_depth"] = codec.whole("max_depth", max_depth, 0, 2**62)
        if key_ttl_seconds is not None:
            stored["key_ttl_us"] = codec.duration_us("key_ttl_seconds", key_ttl_seconds)
        if stored:
            self._engine.configure(self.name, **stored)

    @property
    def engine(self) -> Engine:
        """The engine below, for what concerns more than this queue."""
        return self._engine

    def __enter__(self) -> Self:
        """Use the queue in a with statement."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close on the way out."""
        self.close()

    def close(self) -> None:
        """Release files and connections, unless the engine was passed in."""
        if self._owns_engine:
            self._engine.close()

    # ------------------------------------------------------------ enqueue

    def put(
        self,
        payload: T,
        *,
        delay: float | timedelta = 0,
        priority: int = 0,
        key: str | None = None,
        task: str | None = None,
        headers: Mapping[str, Any] | None = None,
        expires: float | timedelta | None = None,
        group: str | None = None,
        max_attempts: int | None = None,
        tx: object | None = None,
        block: bool = False,
        timeout: float | None = None,
    ) -> JobId:
        """Store one job and return its id; on return it survives a crash and a power cut.

        `delay` and `expires` are seconds from now; a job not started `expires`
        seconds after it became ready is dead. Larger `priority` goes first. A
        `key` seen before with the same data returns that job's id, marked
        `duplicate`. With `block`, a full queue is waited for, `timeout` seconds
        at most. Inside `transaction()` pass what it yielded as `tx`.

        Raises PayloadInvalid, PayloadTooLarge, IdempotencyConflict, QueueFull,
        QueueBusy and the DatabaseErrors; nothing is stored then.
        """
        ids = self.put_many(
            [payload],
            delay=delay,
            priority=priority,
            keys=None if key is None else [key],
            task=task,
            headers=headers,
            expires=expires,
            group=group,
            max_attempts=max_attempts,
            tx=tx,
            block=block,
            timeout=timeout,
        )
        return ids[0]

    def put_many(
        self,
        payloads: Sequence[T],
        *,
        delay: float | timedelta = 0,
        priority: int = 0,
        keys: Sequence[str | None] | None = None,
        task: str | None = None,
        headers: Mapping[str, Any] | None = None,
        expires: float | timedelta | None = None,
        group: str | None = None,
        max_attempts: int | None = None,
        tx: object | None = None,
        block: bool = False,
        timeout: float | None = None,
    ) -> list[JobId]:
        """Store several jobs, all or none, and return their ids in order; see `put`.

        `keys` gives each payload its key, None for none.
        """
        task = self.name if task is None else codec.name("task", task)
        delay_us = codec.duration_us("delay", delay) or 0
        priority = codec.whole("priority", priority, -codec.PRIORITY_MAX, codec.PRIORITY_MAX)
        expires_us = codec.duration_us("expires", expires)
        header_text = codec.headers(headers)
        group = None if group is None else codec.name("group", group)
        if max_attempts is not None:
            codec.whole("max_attempts", max_attempts, 1, 2**31 - 1)
        jobs = []
        each_key = [None] * len(payloads) if keys is None else list(keys)
        for payload, raw_key in zip(payloads, each_key, strict=True):
            data = codec.encode(self._serializer, payload, self._payload_bytes_max)
            key = codec.key(raw_key)
            jobs.append(
                NewJob(
                    payload=data,
                    task=task,
                    delay_us=delay_us,
                    priority=priority,
                    key=key,
                    digest=None if key is None else codec.digest(task, data),
                    headers=header_text,
                    expires_us=expires_us,
                    group=group,
                    max_attempts=max_attempts,
                )
            )
        if not jobs:
            return []
        stored = self._enqueue(jobs, tx, None if block else 0.0, timeout)
        return [JobId(result.id, duplicate=result.duplicate) for result in stored]

    def _enqueue(
        self, jobs: list[NewJob], tx: object | None, wait: float | None, timeout: float | None
    ) -> Any:
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = 0.01
        while True:
            try:
                return self._engine.enqueue(self.name, jobs, tx=tx)
            except QueueFull as error:
                late = deadline is not None and time.monotonic() + pause > deadline
                never = "split the batch" in str(error)
                if wait == 0.0 or tx is not None or late or never:
                    raise
                time.sleep(pause)
                pause = min(pause * 1.5, FULL_PAUSE_SECONDS_MAX)

    def transaction(self) -> AbstractContextManager[Any]:
        """Open a transaction on the same file, shared by `tx.execute(…)` and `put(…, tx=tx)`.

        Everything in it is stored, durably, when the block ends, or nothing
        when it raises. Other writers wait meanwhile: keep it short.
        """
        return self._engine.transaction()

    # ------------------------------------------------------------ claim

    def get(self, timeout: float | None = None) -> Job[T] | None:
        """Claim the next job; wait for one `timeout` seconds (0: not at all, None: for ever).

        Returns None when nothing came. The job is ours for `lease_seconds`;
        settle it with ack, nack, fail or release, or extend it.
        """
        jobs = self.get_many(1, timeout=timeout)
        return jobs[0] if jobs else None

    def get_many(self, limit: int, *, timeout: float | None = 0) -> list[Job[T]]:
        """Claim up to `limit` jobs at once, as soon as there is one; see `get`."""
        limit = codec.whole("limit", limit, 1, BATCH_MAX)
        deadline = None if timeout is None else time.monotonic() + timeout
        queues = [self.name]
        if timeout != 0:
            self._engine.listen(queues)
        while True:
            self._engine.promote(UPKEEP_LIMIT)
            self._engine.reap(self._judge, UPKEEP_LIMIT)
            jobs = self._claim(ClaimRequest(queues=queues, limit=limit, lease_us=self._lease_us))
            if jobs:
                return jobs
            left = LOOK_SECONDS_MAX if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return []
            due_us = self._engine.next_due_us()
            due = LOOK_SECONDS_MAX if due_us is None else due_us / 1_000_000
            self._engine.wait(queues, min(left, due, LOOK_SECONDS_MAX))

    def _claim(self, request: ClaimRequest) -> list[Job[T]]:
        rows = self._engine.claim(request, holder=self._hold())
        jobs = [codec.job(row, self._serializer, self._max_attempts) for row in rows]
        bad = [job for job in jobs if job.payload_error is not None]
        if bad:
            # Never raised at the reader: the next one would meet the same bytes again.
            self._engine.finish(
                [
                    self._settlement(
                        job,
                        Reject(
                            error=f"the payload does not decode: {job.payload_error}",
                            reason=Reason.UNDECODABLE,
                        ),
                    )
                    for job in bad
                ]
            )
        return [job for job in jobs if job.payload_error is None]

    def _hold(self) -> int:
        """Return this process's holder number; a forked child is a holder of its own."""
        if self._holder is None or self._holder[0] != os.getpid():
            number = self._engine.hold(Holder(worker=f"pid {os.getpid()}"))
            self._holder = (os.getpid(), number)
        return self._holder[1]

    def _judge(self, row: Claimed, started: bool) -> Settlement:
        return settle(
            row,
            LeaseLost(),
            policy=self._backoff,
            max_attempts_default=self._max_attempts,
            random=random.random(),
            started_us=row.claimed_us if started else None,
            duration_us=0,
        )

    # ------------------------------------------------------------ extend

    def extend(self, job: Job[T], seconds: float) -> None:
        """Let the lease end `seconds` from now; raises StaleClaim when it is lost already."""
        lease_us = codec.duration_us("seconds", seconds) or 0
        self._raise_stale(self._engine.extend([job.claim], lease_us))

    # ------------------------------------------------------------ finish

    def ack(self, job: Job[T] | Sequence[Job[T]]) -> None:
        """Report jobs as done; raises StaleClaim naming those whose claim was lost."""
        self._finish(job, Done())

    def nack(
        self,
        job: Job[T] | Sequence[Job[T]],
        *,
        error: str = "",
        delay: float | timedelta | None = None,
    ) -> None:
        """Report jobs as failed: they come back after `delay`, else after the back-off.

        The last allowed attempt makes a job dead instead. Raises StaleClaim.
        """
        delay_us = codec.duration_us("delay", delay)
        after = None if delay_us is None else delay_us / 1_000_000
        self._finish(job, Retry(error=error, after_seconds=after))

    def fail(self, job: Job[T] | Sequence[Job[T]], *, error: str = "") -> None:
        """Report jobs as failed for good: they are dead now. Raises StaleClaim."""
        self._finish(job, Reject(error=error))

    def release(self, job: Job[T] | Sequence[Job[T]], *, error: str = "released") -> None:
        """Give jobs back untouched: ready where they stood, no attempt spent. Raises StaleClaim."""
        self._finish(job, Interrupted(error=error))

    def _finish(self, job: Job[T] | Sequence[Job[T]], result: Result) -> None:
        jobs = [job] if isinstance(job, Job) else list(job)
        self._raise_stale(self._engine.finish([self._settlement(one, result) for one in jobs]))

    def _settlement(self, job: Job[T], result: Result) -> Settlement:
        claimed_us = job.claimed_us or 0
        return settle(
            codec.claimed(job),
            result,
            policy=self._backoff,
            max_attempts_default=self._max_attempts,
            random=random.random(),
            started_us=claimed_us,
            duration_us=max(0, self._engine.now_us() - claimed_us),
        )

    def _raise_stale(self, results: Sequence[object]) -> None:
        stale = [result.claim for result in results if isinstance(result, Stale)]
        if stale:
            named = ", ".join(f"job {claim.id} run {claim.run}" for claim in stale[:5])
            raise StaleClaim(
                f"queue {self.name!r}: the claim of {named} is no longer ours: the lease ran out "
                "or it was settled before; another worker may have it",
                claims=tuple((claim.id, claim.run) for claim in stale),
            )

    def cancel(self, *job_ids: int) -> int:
        """Cancel jobs that are ready or delayed; return how many were."""
        return self._engine.cancel(self.name, job_ids)

    # ------------------------------------------------------------ replay

    def replay(self, job_id: int) -> None:
        """Make a dead job ready again with no attempt spent; raises JobNotFound if it is not dead.

        Of two who replay one job, one wins. The queue's `max_depth` does not
        stand in the way: the job had been accepted before.
        """
        if not self._engine.replay(self.name, [job_id]):
            raise JobNotFound(f"queue {self.name!r} has no dead job {job_id} to replay")

    def discard(self, job_id: int) -> None:
        """Remove a dead job for good; raises JobNotFound if it is not dead."""
        if not self._engine.discard(self.name, [job_id]):
            raise JobNotFound(f"queue {self.name!r} has no dead job {job_id} to discard")

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

    def find(self, job_id: int) -> Job[T] | None:
        """Return a job of this queue in whatever state, with its ledger; None if there is none."""
        record = self._engine.find(job_id)
        if record is None or record.queue != self.name:
            return None
        return codec.job(record, self._serializer, self._max_attempts)

    def peek(self) -> Job[T] | None:
        """Return the oldest ready job by id without claiming it."""
        found = self.jobs(State.READY, limit=1)
        return found[0] if found else None

    def jobs(
        self, state: State | str, *, task: str | None = None, limit: int = 100, after: int = 0
    ) -> list[Job[T]]:
        """Return one page of this queue's jobs in a state, by id, after the id `after`."""
        records = self._engine.select(
            State(state), queue=self.name, task=task, limit=limit, after=after
        )
        return [codec.job(record, self._serializer, self._max_attempts) for record in records]

    def dead(
        self, *, reason: Reason | str | None = None, limit: int = 100, after: int = 0
    ) -> list[Job[T]]:
        """Return one page of dead jobs, with reason, error and traceback."""
        records = self._engine.select(
            State.DEAD,
            queue=self.name,
            reason=None if reason is None else Reason(reason),
            limit=limit,
            after=after,
        )
        return [codec.job(record, self._serializer, self._max_attempts) for record in records]

    def pause(self) -> None:
        """Let nobody claim from this queue until `resume`; puts go on."""
        self._engine.configure(self.name, paused=True)

    def resume(self) -> None:
        """Let claims go on."""
        self._engine.configure(self.name, paused=False)
