"""Give users a queue: validate, encode, delegate to the engine, decode.

Boundary: no SQL, no processes. Opening and enqueue are here; claim, extend and
finish in `queue_core.claims`; replay, prune, counts in `queue_core.maintenance`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from queue_core import codec
from queue_core.claims import Claiming
from queue_core.codec import JsonSerializer, Serializer
from queue_core.engine import Engine
from queue_core.engines.sqlite import SqliteEngine
from queue_core.errors import (
    DatabaseUnavailable,
    PayloadInvalid,
    QueueFull,
)
from queue_core.job import (
    MAX_ATTEMPTS_DEFAULT,
    PAYLOAD_BYTES_MAX,
    NewJob,
)
from queue_core.maintenance import Counts
from queue_core.retry import (
    DEFAULT_BACKOFF,
    BackoffPolicy,
)

T = TypeVar("T")

LEASE_SECONDS_DEFAULT: Final = 60.0
FULL_PAUSE_SECONDS: Final = 0.01
FULL_PAUSE_SECONDS_MAX: Final = 0.25


class JobId(int):
    """The id of a put job; `duplicate` says that its key was taken and nothing new was stored."""

    duplicate: bool

    def __new__(cls, value: int, *, duplicate: bool = False) -> Self:
        """Make an id that remembers whether it is a duplicate's."""
        made = super().__new__(cls, value)
        made.duplicate = duplicate
        return made


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


def never_fits(error: QueueFull) -> bool:
    """Whether no wait can help: the batch alone is larger than the queue may be."""
    return "split the batch" in str(error)


_UNSAID: Final = (None,) * 6


class Queue(Claiming[T]):
    """A named queue of one database; safe to use from several threads and after a fork.

    Options of the queue itself are stored with it and hold for everybody:
    `max_depth` live jobs at most, `key_ttl_seconds` that a finished job's key is
    held, `keep_done_seconds` and `keep_dead_seconds` after which `prune` removes
    a finished job (never, if nobody says). None leaves what is stored; another
    value replaces it, which is logged as a warning, so that two programs that
    disagree are found. `engine.configure(name, max_depth=None)` lifts a limit.
    `max_attempts` counts the first attempt; it and `backoff` are used for jobs
    settled through this object.
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
        keep_done_seconds: float | None = None,
        keep_dead_seconds: float | None = None,
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
        self._plain = NewJob(b"", self.name)
        self._holder: tuple[int, int] | None = None
        stored: dict[str, Any] = {}
        if max_depth is not None:
            stored["max_depth"] = codec.whole("max_depth", max_depth, 0, 2**62)
        if key_ttl_seconds is not None:
            stored["key_ttl_us"] = codec.duration_us("key_ttl_seconds", key_ttl_seconds)
        if keep_done_seconds is not None:
            stored["keep_done_us"] = codec.duration_us("keep_done_seconds", keep_done_seconds)
        if keep_dead_seconds is not None:
            stored["keep_dead_us"] = codec.duration_us("keep_dead_seconds", keep_dead_seconds)
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
        `duplicate`. With `block`, or a `timeout`, a full queue is waited for,
        `timeout` seconds at most. Inside `transaction()` pass what it yielded as `tx`.

        Raises PayloadInvalid, PayloadTooLarge, IdempotencyConflict, QueueFull,
        QueueBusy and the DatabaseErrors; nothing is stored then. Only after
        DurabilityUnknown, or what a signal's handler raised (KeyboardInterrupt),
        it may be: put it again with the same `key`, or look for it.
        """
        terms = self._terms(delay, priority, task, headers, expires, group, max_attempts)
        wait = block or timeout is not None
        stored = self._enqueue([self._job(payload, key, terms)], tx, wait, timeout)[0]
        return JobId(stored.id, duplicate=stored.duplicate)

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
        terms = self._terms(delay, priority, task, headers, expires, group, max_attempts)
        each_key = [None] * len(payloads) if keys is None else list(keys)
        if len(each_key) != len(payloads):
            raise PayloadInvalid(
                f"{len(each_key)} keys for {len(payloads)} payloads; give each its key, or None"
            )
        jobs = [
            self._job(payload, key, terms) for payload, key in zip(payloads, each_key, strict=True)
        ]
        if not jobs:
            return []
        stored = self._enqueue(jobs, tx, block or timeout is not None, timeout)
        return [JobId(result.id, duplicate=result.duplicate) for result in stored]

    def _terms(
        self,
        delay: float | timedelta,
        priority: int,
        task: str | None,
        headers: Mapping[str, Any] | None,
        expires: float | timedelta | None,
        group: str | None,
        max_attempts: int | None,
    ) -> NewJob:
        """Return a job without payload and key that has all else; raises PayloadInvalid."""
        plain = delay == 0 == priority and type(delay) is int and type(priority) is int
        if plain and (task, headers, expires, group, max_attempts, codec.headers_hook) == _UNSAID:
            return self._plain
        if max_attempts is not None:
            codec.whole("max_attempts", max_attempts, 1, 2**31 - 1)
        return NewJob(
            b"",
            self.name if task is None else codec.name("task", task),
            codec.duration_us("delay", delay) or 0,
            codec.whole("priority", priority, -codec.PRIORITY_MAX, codec.PRIORITY_MAX),
            headers=codec.headers(headers),
            expires_us=codec.duration_us("expires", expires),
            group=None if group is None else codec.name("group", group),
            max_attempts=max_attempts,
        )

    def _job(self, payload: T, key: str | None, terms: NewJob) -> NewJob:
        data = codec.encode(self._serializer, payload, self._payload_bytes_max)
        if codec.key(key) is None:
            return NewJob(data, *terms[1:])
        digest = codec.digest(terms.task, data)
        return terms._replace(payload=data, key=key, digest=digest)

    def _enqueue(
        self, jobs: list[NewJob], tx: object | None, wait: bool, timeout: float | None
    ) -> Any:
        """Store jobs; with `wait`, try again until there is room or the time is up."""
        if not wait:
            return self._engine.enqueue(self.name, jobs, tx=tx)
        codec.duration_us("timeout", timeout)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        pause = FULL_PAUSE_SECONDS
        while tx is None and (left := deadline - time.monotonic()) > 0:
            try:
                # Not counted as refused: that is said once, when the wait is over.
                return self._engine.enqueue(self.name, jobs, quiet=True)
            except QueueFull as error:
                if never_fits(error):
                    break
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, FULL_PAUSE_SECONDS_MAX)
        return self._engine.enqueue(self.name, jobs, tx=tx)

    def transaction(self) -> AbstractContextManager[Any]:
        """Open a transaction on the same file, shared by `tx.execute(…)` and `put(…, tx=tx)`.

        Everything in it is stored, durably, when the block ends, or nothing
        when it raises. Other writers wait meanwhile: keep it short.
        """
        return self._engine.transaction()


__all__ = ["Counts", "JobId", "Queue", "open_engine"]
