"""Name every fault the queue can report, each a sentence: what, where, what next.

Boundary: classes only. Expected results (a stale claim inside a batch, a
duplicate put) are values of `queue_core.job`; these are the faults.
"""

from __future__ import annotations


class QueueError(Exception):
    """Base of every error this library raises on purpose."""


class PayloadInvalid(QueueError):
    """A payload, header, name or option cannot be stored as given; nothing was written."""


class PayloadTooLarge(PayloadInvalid):
    """A payload is longer than the cap; store the data elsewhere and enqueue a reference."""


class IdempotencyConflict(QueueError):
    """A key is held by a job with other data.

    `job_id` is the job that holds it.
    """

    def __init__(self, message: str, *, job_id: int) -> None:
        super().__init__(message)
        self.job_id = job_id


class StaleClaim(QueueError):
    """A claim is no longer ours: its lease was lost, or it was settled before.

    `claims` lists the refused `(id, run)` pairs; every other claim of the same call was settled.
    """

    def __init__(self, message: str, *, claims: tuple[tuple[int, int], ...]) -> None:
        super().__init__(message)
        self.claims = claims


class JobNotFound(QueueError):
    """No job of that id is in a state this operation works on."""


class QueueFull(QueueError):
    """The queue is at its stored `max_depth`; wait, or raise the limit."""


class QueueBusy(QueueError):
    """Another process was in the way until the deadline; the message says which, if that is known.

    One that was stopped in the middle of a step holds up others for 10 s, whatever the deadline.
    """


class QueueClosed(QueueError):
    """The queue object was closed before or during the call."""


class DatabaseError(QueueError):
    """The database cannot be used now; subclasses say why. Nothing accepted is lost."""


class DatabaseUnavailable(DatabaseError):
    """The database cannot be opened or reached."""


class DatabaseFull(DatabaseError):
    """The disk, or the page limit of the database, is full; free space and try again."""


class DatabaseReadOnly(DatabaseError):
    """The database or its folder cannot be written by this user."""


class DatabaseCorrupt(DatabaseError):
    """The file is damaged, or is no herdsman database."""


class SchemaTooNew(DatabaseError):
    """A newer herdsman wrote this database; upgrade this installation."""


class SchemaTooOld(DatabaseError):
    """An older herdsman wrote this database, and this version cannot upgrade it."""


class DurabilityUnknown(DatabaseError):
    """A flush failed, or whoever took a put is gone: a power cut may undo it, if it is stored."""
