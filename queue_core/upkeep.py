"""State what an engine does for those who keep a store in order, beyond the life of a job.

Boundary: the protocol and the records that cross it; see `queue_core.engine`
for the transitions themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from queue_core.job import Enqueued, Reason, Record, State
from queue_core.stats import QueueFacts

PROBLEMS_MAX: Final = 100
"""Most problems one check returns: a damaged file can have millions, and ten tell enough."""
IMPORT_BATCH_MAX: Final = 1_000
"""Most jobs one `import_jobs` takes, so that the write lock is held for a short time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportJob:
    """A job of another queue, as it is to stand here.

    `origin` names the job in its old home, for ever: a second import of the
    same origin stores nothing. `state` is ready, delayed, dead or done (a done
    job is imported for the sake of its `key`). `attempts` and `error` are what
    it has behind it. `due_us` counts for delayed, `reason` for dead,
    `finished_us` for dead and done.
    """

    origin: str
    payload: bytes
    task: str
    state: State
    enqueued_us: int
    attempts: int = 0
    max_attempts: int | None = None
    priority: int = 0
    key: str | None = None
    digest: bytes | None = None
    headers: str | None = None
    due_us: int | None = None
    finished_us: int | None = None
    reason: Reason | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A depth that the counters say wrongly: rows counted, and the number stored."""

    queue: str
    state: State
    counted: int
    stored: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Vacuumed:
    """The size of the database before and after it was packed."""

    before_bytes: int
    after_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BackedUp:
    """A finished, verified backup."""

    path: Path
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnostics:
    """What is true of a store at one moment, for a bug report or a dashboard.

    `lock_holder` is None when nobody holds the write lock. `wal_reset_bug`
    says that this SQLite is a build with that bug, from which the write lock
    protects. `leases` counts claims, `leases_expired` those that nobody reaped
    yet; ages and times to come are seconds, None when there is no such job.
    """

    taken_us: int
    path: Path
    sqlite_version: str
    wal_reset_bug: bool
    schema_version: int
    journal_mode: str
    durability: str
    lock: str
    lock_holder: str | None
    page_bytes: int
    pages: int
    pages_free: int
    database_bytes: int
    log_bytes: int
    log_file_bytes: int
    boot: str
    created_us: int
    holders: int
    leases: int
    leases_expired: int
    next_lease_end_seconds: float | None
    next_due_seconds: float | None
    queues: tuple[QueueFacts, ...]


@runtime_checkable
class Upkeep(Protocol):
    """What a store can do besides moving jobs."""

    def import_jobs(self, queue: str, jobs: Sequence[ImportJob]) -> list[Enqueued]:
        """Store jobs of another queue, all or none, each origin once; see `ImportJob`.

        `max_depth` does not bound them: they had been accepted before. Durable
        on return. Raises IdempotencyConflict, PayloadInvalid.
        """
        ...

    def imported(self, origins: Sequence[str]) -> set[str]:
        """Return those of the origins that `import_jobs` has seen before."""
        ...

    def vacuum(self) -> Vacuumed:
        """Give free pages back to the filesystem; everybody else waits meanwhile."""
        ...

    def backup(self, path: Path) -> BackedUp:
        """Copy the store while it is in use; raises QueueError if `path` exists."""
        ...

    def check(self, *, full: bool = False) -> list[str]:
        """Return what is wrong with the store, at most PROBLEMS_MAX sentences."""
        ...

    def recount(self, *, mend: bool = False) -> list[Drift]:
        """Compare the counters with the rows; with `mend`, correct them."""
        ...

    def newest(
        self,
        state: State,
        *,
        queue: str | None = None,
        task: str | None = None,
        reason: Reason | None = None,
        limit: int = 100,
        before: int | None = None,
    ) -> list[Record]:
        """Return one page of jobs in a state, largest id first, below the id `before`."""
        ...

    def diagnostics(self) -> Diagnostics:
        """Return what is true of the store now."""
        ...
