"""Give users of a queue their turn with a job: claim, extend, finish.

Boundary: the half of the façade that holds leases; `queue_core.queue.Queue` is
the whole. What an engine refuses as a value (a stale claim) becomes an error
here, since a user who ignores it would lose a lease without noticing.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Final, TypeVar

from queue_core import codec
from queue_core.engine import ClaimRequest, Holder
from queue_core.errors import PayloadInvalid, StaleClaim
from queue_core.job import Claimed, Job, Reason, Settlement, Stale
from queue_core.maintenance import Tended
from queue_core.retry import (
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

UPKEEP_LIMIT: Final = 100
"""Rows a claim promotes and reaps on its way, for those who run no keeper."""
LOOK_SECONDS_MAX: Final = 5.0
"""A waiting get looks again at least this often, for leases that run out meanwhile."""
BATCH_MAX: Final = 10_000


class Claiming(Tended[T]):
    """A named queue as its workers use it."""

    _backoff: BackoffPolicy
    _lease_us: int
    _holder: tuple[int, int] | None

    @property
    def lease_seconds(self) -> float:
        """How long a claim of this object holds, unless it is extended."""
        return self._lease_us / 1_000_000

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
        codec.duration_us("timeout", timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        queues = [self.name]
        if timeout != 0:
            self._engine.listen(queues)
        while True:
            self._engine.promote(UPKEEP_LIMIT)
            self._engine.reap(self._judge, UPKEEP_LIMIT, self.name)
            request = ClaimRequest(queues=queues, limit=limit, lease_us=self._lease_us)
            jobs, buried = self._claim(request)
            if jobs:
                return jobs
            if buried:
                continue  # what lies behind them was not seen yet; every turn buries one at least
            left = LOOK_SECONDS_MAX if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return []
            due_us = self._engine.next_due_us()
            due = LOOK_SECONDS_MAX if due_us is None else due_us / 1_000_000
            self._engine.wait(queues, min(left, due, LOOK_SECONDS_MAX))

    def _claim(self, request: ClaimRequest) -> tuple[list[Job[T]], int]:
        """Return the jobs claimed, and how many others died of a payload that does not decode."""
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
        return [job for job in jobs if job.payload_error is None], len(bad)

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
        lease_us = codec.duration_us("seconds", seconds)
        if lease_us is None:
            raise PayloadInvalid("seconds must be a number of seconds, not None")
        self._raise_stale(self._engine.extend([job.claim], lease_us))

    # ------------------------------------------------------------ finish

    def ack(self, job: Job[T] | Sequence[Job[T]], *, tx: object | None = None) -> None:
        """Report jobs as done; raises StaleClaim naming those whose claim was lost.

        Inside `transaction()` pass what it yielded as `tx`: then the job is done, and what it
        put and wrote is stored, or nothing of it.
        """
        self.finish(job, Done(), tx=tx)

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
        self.finish(job, Retry(error=error, after_seconds=after))

    def fail(self, job: Job[T] | Sequence[Job[T]], *, error: str = "") -> None:
        """Report jobs as failed for good: they are dead now. Raises StaleClaim."""
        self.finish(job, Reject(error=error))

    def release(self, job: Job[T] | Sequence[Job[T]], *, error: str = "released") -> None:
        """Give jobs back untouched: ready where they stood, no attempt spent. Raises StaleClaim."""
        self.finish(job, Interrupted(error=error))

    def finish(
        self,
        job: Job[T] | Sequence[Job[T]],
        result: Result,
        *,
        backoff: BackoffPolicy | None = None,
        tx: object | None = None,
    ) -> None:
        """Settle jobs by a result as a value: Done, Retry, Reject, Snooze. Raises StaleClaim.

        `backoff` overrules that of the queue object; `tx` is as with `ack`.
        """
        jobs = [job] if isinstance(job, Job) else list(job)
        settlements = [self._settlement(one, result, backoff) for one in jobs]
        self._raise_stale(self._engine.finish(settlements, tx=tx))

    def _settlement(
        self, job: Job[T], result: Result, backoff: BackoffPolicy | None = None
    ) -> Settlement:
        claimed_us = job.claimed_us or 0
        return settle(
            codec.claimed(job),
            result,
            policy=self._backoff if backoff is None else backoff,
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
