"""Read a file of litequeue, of any version from 0.4 to 0.14.

A message that somebody had popped comes in as ready, with that claim charged: whoever held it
is taken to be stopped. Done messages come along where they hold a key, as done, so that a
repeated put is still recognised. Boundary: reads; `carry` stores.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from queue_core import codec
from queue_core.engines import sqlite_foreign
from queue_core.errors import PayloadInvalid, QueueError
from queue_core.job import Reason, State
from queue_core.upkeep import ImportJob
from supervisor.importing.arrival import (
    Arrival,
    Notes,
    digest_of,
    encoded,
    finished_in,
    headers,
    instant_us,
    key,
    origin,
    whole,
)

COLUMNS: Final = {"data", "message_id", "status", "in_time", "lock_time", "done_time"}
STATES: Final = {
    0: ("ready", State.READY),
    1: ("in flight", State.READY),
    2: ("done", State.DONE),
    3: ("failed", State.DEAD),
}


class LiteQueueFile:
    """One table of one file, which is one queue."""

    kind = "litequeue"

    def __init__(
        self,
        path: Path,
        *,
        queue: str,
        task: str | None = None,
        table: str = "Queue",
        json_payloads: bool = False,
    ) -> None:
        """Name file and table; `json_payloads` takes each text for the JSON document it holds.

        Else a text stays a text, as `pop` would have returned it.
        """
        self.notes = Notes()
        self._path = path
        self._queue = codec.name("a queue's name", queue)
        self._task = self._queue if task is None else codec.name("task", task)
        self._table = table
        self._json = json_payloads

    def arrivals(self, now_us: int) -> Iterator[Arrival]:
        """Yield every message but done ones without a key. Raises QueueError."""
        with sqlite_foreign.opened(self._path) as foreign:
            fit = [name for name in foreign.tables() if set(foreign.columns(name)) >= COLUMNS]
            if self._table not in fit:
                known = (
                    f"those of its kind are {', '.join(fit)}" if fit else "it has none of its kind"
                )
                raise QueueError(f"{self._path} has no litequeue table {self._table!r}; {known}")
            for row in foreign.litequeue_jobs(self._table):
                arrival = self._arrival(row, now_us)
                if arrival is not None:
                    yield arrival

    def _arrival(self, row: tuple[Any, ...], now_us: int) -> Arrival | None:
        data, message_id, status, in_time, lock_time, done_time, raw_key, claims = row
        what = f"message {message_id}"
        if status not in STATES:
            self.notes.unreadable += 1
            self.notes.add(f"{what} has the unknown status {status!r}")
            return None
        was, state = STATES[status]
        if state is State.DONE and raw_key is None:
            self.notes.done_without_key += 1
            return None
        try:
            payload = self._payload(data)
        except (PayloadInvalid, ValueError) as error:
            self.notes.unreadable += 1
            self.notes.add(f"{what} cannot be stored: {error}")
            return None
        stored_key = key(raw_key, self.notes, what)
        # Before 0.11 nothing counted claims: a lock time says that there was one.
        attempts = whole(claims) if claims is not None else int(lock_time is not None)
        return Arrival(
            queue=self._queue,
            was=was,
            job=ImportJob(
                origin=origin(self.kind, message_id, in_time, digest_of(payload)),
                payload=payload,
                task=self._task,
                state=state,
                attempts=attempts,
                key=stored_key,
                digest=None if stored_key is None else codec.digest(self._task, payload),
                headers=headers(self.kind, message_id),
                enqueued_us=instant_us(in_time) or now_us,
                finished_us=finished_in(state, instant_us(done_time) or instant_us(lock_time)),
                reason=Reason.REJECTED if state is State.DEAD else None,
                error="marked as failed in litequeue" if state is State.DEAD else None,
            ),
        )

    def _payload(self, data: object) -> bytes:
        if isinstance(data, bytes):
            return data  # no text at all: kept as it is, for a serializer that knows it
        if self._json and isinstance(data, str):
            return encoded(codec.JsonSerializer[Any]().loads(data.encode()))
        return encoded(data)
