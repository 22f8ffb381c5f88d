"""State what every storage engine must do, in the order of a job's life.

Boundary: the protocol and the records that cross it. An engine stores and
moves jobs; it decides nothing about retries (`queue_core.retry`), decodes no
payload (`queue_core.queue`) and starts no process. All methods are safe to
call from any thread and after a fork.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from queue_core.job import (
    Claim,
    Claimed,
    Enqueued,
    Extended,
    NewJob,
    Reaped,
    Reason,
    Record,
    Settled,
    Settlement,
    Stale,
    State,
)
from queue_core.stats import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """What an engine can do beyond the common contract."""

    multi_host: bool
    wait_push: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who takes a claim: shown to operators, and the unit in which claims are handed back.

    `instance` is the supervisor's name, "" for a library user. `worker` is a
    label such as `emails/0`.
    """

    worker: str
    instance: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned:
    """A claim whose holder is gone; `suspect` if the job ran when a whole tree died before."""

    holder: int
    row: Claimed
    suspect: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRequest:
    """What a claimer wants: up to `limit` jobs of these queues, for `lease_us`.

    `queues` None means every queue that is not paused; a listed order is an
    order of preference. `tasks` None takes any task, else only these: a job
    without a handler stays ready. `starts` says that the claim is a start at
    once, as with a library's `get`; a worker that claims a batch starts jobs
    later, and says when in their settlements.
    """

    queues: Sequence[str] | None
    limit: int
    lease_us: int
    tasks: frozenset[str] | None = None
    starts: bool = True


Verdict = Callable[[Claimed, bool], Settlement]
"""Pure decision over a claim whose lease ran out: (row, had it started) → settlement."""


class Engine(Protocol):
    """A durable store of jobs; the façade and the supervisor speak only to this."""

    @property
    def caps(self) -> Caps:
        """What this engine can do beyond the common contract."""
        ...

    def now_us(self) -> int:
        """Return the time by the clock that this engine's instants are of."""
        ...

    def hold(self, holder: Holder) -> int:
        """Register who claims, and return the number that its claims carry."""
        ...

    def enqueue(
        self, queue: str, jobs: Sequence[NewJob], *, tx: object | None = None, quiet: bool = False
    ) -> list[Enqueued]:
        """Store jobs, all or none, and return one result each, in order.

        Durable on return. Raises IdempotencyConflict, QueueFull; with `quiet` a refusal is not
        counted, because the caller will try again.
        """
        ...

    def claim(self, request: ClaimRequest, *, holder: int) -> list[Claimed]:
        """Lease ready jobs, best first; an empty list when there is none."""
        ...

    def extend(self, claims: Sequence[Claim], lease_us: int) -> list[Extended | Stale]:
        """Set each lease to end `lease_us` from now."""
        ...

    def finish(
        self, settlements: Sequence[Settlement], *, tx: object | None = None
    ) -> list[Settled | Stale]:
        """Settle claims in one transaction, the caller's if given; a claim not held is Stale."""
        ...

    def turn(
        self, settlements: Sequence[Settlement], request: ClaimRequest | None, *, holder: int
    ) -> tuple[list[Settled | Stale], list[Claimed]]:
        """Settle what is finished and claim what is next, in one transaction."""
        ...

    def promote(self, limit: int) -> int:
        """Make delayed jobs that are due ready; return how many."""
        ...

    def reap(self, decide: Verdict, limit: int, queue: str | None = None) -> list[Reaped]:
        """Settle claims whose lease ran out, as `decide` says; of one queue, if it is named."""
        ...

    def extend_holders(self, holders: Sequence[int], lease_us: int) -> int:
        """Renew every lease of these holders in one transaction; return how many."""
        ...

    def held(self, holder: int) -> list[Claimed]:
        """Return the claims a holder has now, in claim order."""
        ...

    def abandoned(self, instance: str, living: Sequence[int], limit: int) -> list[Abandoned]:
        """Return claims of a supervisor's holders that are not among the living."""
        ...

    def cancel(self, queue: str | None, ids: Sequence[int]) -> int:
        """Cancel ready and delayed jobs; return how many were."""
        ...

    def replay(self, queue: str | None, ids: Sequence[int]) -> int:
        """Make dead jobs ready with no attempt spent; return how many were dead."""
        ...

    def discard(self, queue: str | None, ids: Sequence[int]) -> int:
        """Remove dead jobs for good; return how many were."""
        ...

    def prune(self, limit: int) -> int:
        """Remove finished jobs past their retention, at most `limit`; return how many."""
        ...

    def counts(self, queue: str) -> dict[str, int]:
        """Return jobs per state now, and the totals since the queue began."""
        ...

    def find(self, job_id: int) -> Record | None:
        """Return one job in whatever state, with its ledger."""
        ...

    def peek(self, queue: str) -> Record | None:
        """Return the job of a queue that would be claimed next, without claiming it."""
        ...

    def select(
        self,
        state: State,
        *,
        queue: str | None = None,
        task: str | None = None,
        reason: Reason | None = None,
        limit: int = 100,
        after: int = 0,
        newest: bool = False,
    ) -> list[Record]:
        """Return one page of jobs in a state, by id, after the id `after`; without ledgers.

        With `newest` the dead of a queue, or of all, who died last come first;
        neither task, reason nor after counts then.
        """
        ...

    def configure(self, queue: str, **options: Any) -> None:
        """Store options of a queue: max_depth, paused, key_ttl_us, keep_done_us, keep_dead_us."""
        ...

    def snapshot(self) -> Snapshot:
        """Read every number in one transaction."""
        ...

    def next_due_us(self) -> int | None:
        """Return microseconds until the next delayed job is due; None when there is none."""
        ...

    def version(self) -> int:
        """Return a number that changes whenever anything was committed by anybody."""
        ...

    def listen(self, queues: Sequence[str] | None) -> None:
        """Make sure that a put from now on ends the next `wait`; call it before the last look."""
        ...

    def wait(
        self, queues: Sequence[str] | None, timeout_seconds: float, wake_fd: int | None = None
    ) -> bool:
        """Sleep until a put rings, `wake_fd` is readable or time is up; only ever a hint."""
        ...

    def transaction(self) -> AbstractContextManager[Any]:
        """Open a write transaction that the caller's own statements and `enqueue` share."""
        ...

    def checkpoint_due(self) -> bool:
        """Whether upkeep of the storage itself is due."""
        ...

    def checkpoint(self) -> bool:
        """Do that upkeep; return whether it could be finished."""
        ...

    def flush(self) -> None:
        """Make everything committed so far survive a power cut."""
        ...

    def close(self) -> None:
        """Release files and connections; the engine opens again when used."""
        ...
