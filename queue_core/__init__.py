"""Keep background jobs in one SQLite file, so that none that was accepted is lost.

A job's life: `put` stores it as ready, or delayed until it is due. `get`
claims it, for the length of a lease. `ack` makes it done; `nack` delays it by
its back-off, or makes it dead when its attempts are spent; `fail` makes it
dead; `release` puts it back as if nothing had been. A claim whose lease runs
out is reaped. A dead job can be replayed. What is finished is pruned in time.

    from queue_core import Queue

    queue = Queue("var/herdsman.db", "emails")
    queue.put({"to": "a@b.c"}, delay=5, key="welcome-42")
    job = queue.get(timeout=10)
    if job is not None:
        queue.ack(job)

Delivery is at least once: a job runs again when its worker died, so handlers
must bear that. Every write of a claim is fenced by `(id, run)`: who lost a
lease cannot settle what another has claimed since.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from queue_core.codec import JsonSerializer, Serializer
from queue_core.engine import Engine
from queue_core.errors import (
    DatabaseCorrupt,
    DatabaseError,
    DatabaseFull,
    DatabaseReadOnly,
    DatabaseUnavailable,
    DurabilityUnknown,
    IdempotencyConflict,
    JobNotFound,
    PayloadInvalid,
    PayloadTooLarge,
    QueueBusy,
    QueueClosed,
    QueueError,
    QueueFull,
    SchemaTooNew,
    SchemaTooOld,
    StaleClaim,
)
from queue_core.job import Attempt, Job, Outcome, Reason, State
from queue_core.queue import Counts, JobId, Queue, open_engine
from queue_core.retry import Backoff, Done, Reject, Retry, Snooze
from queue_core.worker import Ran, Worker

if TYPE_CHECKING:
    from queue_core.aio import AsyncQueue

__all__ = [
    "AsyncQueue",
    "Attempt",
    "Backoff",
    "Counts",
    "DatabaseCorrupt",
    "DatabaseError",
    "DatabaseFull",
    "DatabaseReadOnly",
    "DatabaseUnavailable",
    "Done",
    "DurabilityUnknown",
    "Engine",
    "IdempotencyConflict",
    "Job",
    "JobId",
    "JobNotFound",
    "JsonSerializer",
    "Outcome",
    "PayloadInvalid",
    "PayloadTooLarge",
    "Queue",
    "QueueBusy",
    "QueueClosed",
    "QueueError",
    "QueueFull",
    "Ran",
    "Reason",
    "Reject",
    "Retry",
    "SchemaTooNew",
    "SchemaTooOld",
    "Serializer",
    "Snooze",
    "StaleClaim",
    "State",
    "Worker",
    "open_engine",
]


def __getattr__(name: str) -> Any:
    """Import asyncio for those alone who ask for `AsyncQueue`: it costs more than all the rest."""
    if name == "AsyncQueue":
        from queue_core.aio import AsyncQueue

        return AsyncQueue
    raise AttributeError(f"module 'queue_core' has no attribute {name!r}")
