"""Read a folder of tiny-queue: three files of JSON lines and a lock file per queue.

The files are `NAME.pending.ndjson`, `NAME.inflight.ndjson` and `NAME.dead.ndjson` (or .jsonl, or
`NAME/pending.ndjson`), the lock is `NAME.lock`; a line is an object with `id`, `payload`,
`attempts`, `last_error` and instants in seconds. A job in flight comes in as ready, with that
claim charged. One that a crash left in two files comes once. Boundary: reads; `carry` stores.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from queue_core import codec
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
    text,
    whole,
)

NAMED: Final = re.compile(r"(?P<queue>.+)[._-](?P<state>pending|inflight|dead)\.(ndjson|jsonl)")
NESTED: Final = re.compile(r"(?P<state>pending|inflight|dead)\.(ndjson|jsonl)")
STATES: Final = {
    "dead": ("failed", State.DEAD),
    "inflight": ("in flight", State.READY),
    "pending": ("ready", State.READY),
}
"""In this order: of a job in two files the one that is further along is right, for a move writes
there first. Those in flight were put before those that wait."""
LINE_BYTES_MAX: Final = 64 * 1024 * 1024
ENQUEUED: Final = ("created_at", "enqueued_at", "created", "ts")
DUE: Final = ("available_at", "not_before", "run_at", "due_at", "next_attempt_at")
FINISHED: Final = ("dead_at", "failed_at", "updated_at")
ERRORS: Final = ("last_error", "error")


_NOT_A_JOB: Final = (ValueError, RecursionError, PayloadInvalid, LookupError, TypeError)


class TinyQueueFolder:
    """The files of a folder, one set for each queue."""

    kind = "tiny-queue"

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
        self._folder = folder
        self._only = only
        self._queue = None if queue is None else codec.name("a queue's name", queue)
        self._task = None if task is None else codec.name("task", task)

    def arrivals(self, now_us: int) -> Iterator[Arrival]:
        """Yield every job once, queue by queue. Raises QueueError."""
        queues = self._queues()
        if not queues:
            raise QueueError(
                f"{self._folder} holds no files of tiny-queue, such as NAME.pending.ndjson"
            )
        for name, files in sorted(queues.items()):
            if self._only is not None and name != self._only:
                continue
            with self._still(name, files):
                yield from self._of_queue(name, files, now_us)

    def _queues(self) -> dict[str, dict[str, Path]]:
        found: dict[str, dict[str, Path]] = {}
        for path in sorted(self._folder.iterdir()):
            if path.is_file() and (match := NAMED.fullmatch(path.name)):
                found.setdefault(match["queue"], {})[match["state"]] = path
            elif path.is_dir():
                for inner in sorted(path.iterdir()):
                    if inner.is_file() and (match := NESTED.fullmatch(inner.name)):
                        found.setdefault(path.name, {})[match["state"]] = inner
        return found

    @contextmanager
    def _still(self, name: str, files: Mapping[str, Path]) -> Iterator[None]:
        """Hold the queue's own lock for reading, where there is one, so that nobody moves jobs."""
        folder = next(iter(files.values())).parent
        with ExitStack() as stack:
            for lock in (folder / f"{name}.lock", folder / ".lock", folder / "lock"):
                with suppress(FileNotFoundError):
                    descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
                    stack.callback(os.close, descriptor)
                    try:
                        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    except BlockingIOError:
                        raise QueueError(
                            f"{lock} is held: stop the programs that use the queue, then try again"
                        ) from None
            yield

    def _of_queue(self, name: str, files: Mapping[str, Path], now_us: int) -> Iterator[Arrival]:
        seen: set[str] = set()
        for file_state, (was, state) in STATES.items():
            if file_state not in files:
                continue
            for number, line in enumerate(_lines(files[file_state]), start=1):
                if not line.strip():
                    continue
                where = f"{files[file_state].name} line {number}"
                try:
                    fields = json.loads(line)
                    arrival = self._arrival(name, fields, was, state, now_us)
                except _NOT_A_JOB as fault:
                    # The last line of a crash is half a line: its put never returned.
                    self.notes.unreadable += 1
                    self.notes.add(f"{where} is no job: {_one_line(fault)}")
                    continue
                if arrival.job.origin not in seen:
                    seen.add(arrival.job.origin)
                    yield arrival

    def _arrival(
        self, name: str, fields: Mapping[str, Any], was: str, state: State, now_us: int
    ) -> Arrival:
        id_, payload = fields["id"], encoded(fields["payload"])
        queue = self._queue or codec.name("a queue's name", name)
        task = self._task or queue
        due_us = instant_us(_first(fields, DUE)) or now_us
        if was == "ready" and due_us > now_us:
            was, state = "delayed", State.DELAYED
        created = _first(fields, ENQUEUED)
        stored_key = key(id_, self.notes, f"job {id_} of {name}")
        return Arrival(
            queue=queue,
            was=was,
            job=ImportJob(
                origin=origin(self.kind, name, id_, created, digest_of(payload)),
                payload=payload,
                task=task,
                state=state,
                attempts=whole(fields.get("attempts")),
                key=stored_key,
                digest=None if stored_key is None else codec.digest(task, payload),
                headers=headers(self.kind, id_),
                enqueued_us=instant_us(created) or now_us,
                due_us=due_us if state is State.DELAYED else None,
                finished_us=finished_in(state, instant_us(_first(fields, FINISHED))),
                reason=Reason.EXHAUSTED if state is State.DEAD else None,
                error=text(_first(fields, ERRORS)),
            ),
        )


def _first(fields: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def _lines(path: Path) -> Iterator[bytes]:
    """Yield a file's lines; one that is too long is cut, and so will not parse."""
    with path.open("rb") as file:
        while line := file.readline(LINE_BYTES_MAX):
            yield line


def _one_line(fault: Exception) -> str:
    if isinstance(fault, KeyError):
        return f"it has no {fault.args[0]!r}"
    return " ".join(str(fault).split())[:200] or type(fault).__name__
