"""Read a folder of localqueue 1.x: all its queues, or one.

A leased message comes in as ready, with that claim charged: whoever held it is taken to be
stopped. Acknowledged ones come along where they hold a key, as done. Boundary: reads; `carry`
stores.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from queue_core import codec
from queue_core.engines import sqlite_foreign
from queue_core.errors import QueueError
from queue_core.job import Reason, State
from queue_core.upkeep import ImportJob
from supervisor.importing.arrival import (
    Arrival,
    Notes,
    digest_of,
    finished_in,
    headers,
    instant_us,
    key,
    origin,
    text,
    whole,
)

DATABASE: Final = "localqueue.db"
COLUMNS: Final = {
    "id", "queue", "payload", "status", "attempts", "max_attempts", "available_at", "last_error",
    "failure_reason", "failure_category", "job_id", "dedup_key", "created_at", "updated_at",
}  # fmt: skip
STATES: Final = {
    0: ("ready", State.READY),
    1: ("in flight", State.READY),
    2: ("done", State.DONE),
    3: ("failed", State.DEAD),
}
REASONS: Final = {
    "retries_exhausted": Reason.EXHAUSTED,
    "handler_timeout": Reason.EXHAUSTED,
    "invalid_payload": Reason.UNDECODABLE,
    "invalid_envelope": Reason.INVALID,
    "unknown_event_type": Reason.INVALID,
    "no_handler": Reason.INVALID,
}
"""Its reasons in our words; all others say that somebody rejected the job. The word itself
travels in the header `imported_reason`."""


class LocalQueueFolder:
    """The database of a folder, with its many queues."""

    kind = "localqueue"

    def __init__(
        self,
        folder: Path,
        *,
        only: str | None = None,
        queue: str | None = None,
        task: str | None = None,
    ) -> None:
        """Name the folder; `only` takes one of its queues, `queue` renames what is taken."""
        self.notes = Notes()
        self._path = folder / DATABASE if folder.is_dir() else folder
        self._only = only
        self._queue = None if queue is None else codec.name("a queue's name", queue)
        self._task = None if task is None else codec.name("task", task)

    def arrivals(self, now_us: int) -> Iterator[Arrival]:
        """Yield every message but acknowledged ones without a key. Raises QueueError."""
        with sqlite_foreign.opened(self._path) as foreign:
            missing = COLUMNS - set(foreign.columns("messages"))
            if missing:
                raise QueueError(
                    f"{self._path} is no database of localqueue 1.x: its table messages lacks "
                    f"{', '.join(sorted(missing))}; open it once with localqueue 1.4 or newer"
                )
            for row in foreign.localqueue_jobs():
                if self._only is None or row[1] == self._only:
                    arrival = self._arrival(row, now_us)
                    if arrival is not None:
                        yield arrival

    def _arrival(self, row: tuple[Any, ...], now_us: int) -> Arrival | None:
        (id_, source_queue, payload, status, attempts, max_attempts, available, last_error,
         reason, category, job_id, dedup_key, created, updated) = row  # fmt: skip
        what = f"message {id_} of {source_queue}"
        if status not in STATES:
            self.notes.unreadable += 1
            self.notes.add(f"{what} has the unknown status {status!r}")
            return None
        was, state = STATES[status]
        queue = self._queue or codec.name("a queue's name", source_queue)
        task = self._task or queue
        data = payload if isinstance(payload, bytes) else str(payload).encode()
        due_us = instant_us(available) or now_us
        if status == 0 and due_us > now_us:
            was, state = "delayed", State.DELAYED
        stored_key = key(dedup_key if job_id is None else job_id, self.notes, what)
        if state is State.DONE and stored_key is None:  # nothing hangs on it any more
            self.notes.done_without_key += 1
            return None
        why = "/".join(str(part) for part in (reason, category) if part)
        return Arrival(
            queue=queue,
            was=was,
            job=ImportJob(
                origin=origin(self.kind, source_queue, id_, created, digest_of(data)),
                payload=data,
                task=task,
                state=state,
                attempts=whole(attempts),
                max_attempts=whole(max_attempts) or None,
                key=stored_key,
                digest=None if stored_key is None else codec.digest(task, data),
                headers=headers(self.kind, id_, why),
                enqueued_us=instant_us(created) or now_us,
                due_us=due_us if state is State.DELAYED else None,
                finished_us=finished_in(state, instant_us(updated)),
                reason=REASONS.get(str(reason), Reason.REJECTED) if state is State.DEAD else None,
                error=text(last_error) or (why or None if state is State.DEAD else None),
            ),
        )
