"""Turn what users give into what is stored, and back; refuse what cannot be stored.

Boundary: pure; no engine and no clock. Payloads are hostile: nothing here
evaluates them, and every size is bounded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final, Generic, Protocol, TypeVar

from queue_core.errors import PayloadInvalid, PayloadTooLarge
from queue_core.job import (
    ERROR_CHARS_MAX,
    HEADERS_BYTES_MAX,
    KEY_LENGTH_MAX,
    NAME_LENGTH_MAX,
    Attempt,
    Claimed,
    Job,
    Record,
    State,
)

T = TypeVar("T")
HeadersHook = Callable[[dict[str, Any]], Mapping[str, Any]]
headers_hook: HeadersHook | None = None
"""When set, gets a copy of each put's headers and returns those to store, as tracing does."""
DURATION_SECONDS_MAX: Final = 100 * 365 * 24 * 3600
PRIORITY_MAX: Final = 2**31 - 1


_to_json: Final = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":")
).encode  # `json.dumps` would make such an encoder for every payload


class Serializer(Protocol[T]):
    """Anything that turns a payload into bytes or text, and bytes back into a payload."""

    def dumps(self, payload: T, /) -> bytes | str:
        """Return the payload encoded; may raise anything for what it cannot encode."""
        ...

    def loads(self, data: bytes, /) -> T:
        """Return the payload decoded; may raise anything for what it cannot decode."""
        ...


class JsonSerializer(Generic[T]):
    """JSON as RFC 8259 has it: no NaN, no lone surrogates, nothing executed."""

    def dumps(self, payload: T, /) -> bytes:
        """Return compact UTF-8; raises ValueError or TypeError."""
        return _to_json(payload).encode("utf-8")

    def loads(self, data: bytes, /) -> T:
        """Return the value; raises ValueError."""
        value: T = json.loads(data)
        return value


def encode(serializer: Serializer[T], payload: T, bytes_max: int) -> bytes:
    """Return a payload's bytes; raises PayloadInvalid and PayloadTooLarge."""
    try:
        data = serializer.dumps(payload)
        data = data.encode("utf-8") if isinstance(data, str) else bytes(data)
    except RecursionError as error:
        raise PayloadInvalid("the payload refers to itself or is nested too deeply") from error
    except Exception as error:
        raise PayloadInvalid(f"the payload cannot be encoded: {error}") from error
    if len(data) > bytes_max:
        raise PayloadTooLarge(
            f"the payload has {len(data)} bytes of at most {bytes_max}; "
            "store the data elsewhere and enqueue a reference to it"
        )
    return data


def digest(task: str, payload: bytes) -> bytes:
    """Return what tells two jobs of one key apart: task and payload, nothing else."""
    return hashlib.sha256(len(task).to_bytes(4, "big") + task.encode() + payload).digest()[:16]


def name(kind: str, value: object, length_max: int = NAME_LENGTH_MAX) -> str:
    """Return a queue's, task's or key's name if it can be stored; raises PayloadInvalid."""
    if not isinstance(value, str) or not value or len(value) > length_max:
        raise PayloadInvalid(
            f"{kind} must be a text of 1 to {length_max} characters, not {value!r}"
        )
    if not value.isprintable():
        # Lone surrogates and control characters: they would break logs, labels and UTF-8.
        raise PayloadInvalid(f"{kind} {value!r} has characters that cannot be printed")
    return value


def key(value: str | None) -> str | None:
    """Return an idempotency key if it can be stored; raises PayloadInvalid."""
    return None if value is None else name("key", value, KEY_LENGTH_MAX)


def headers(value: Mapping[str, Any] | None) -> str | None:
    """Return headers as JSON text, after the hook if there is one; raises PayloadInvalid."""
    if headers_hook is not None:
        value = headers_hook(dict(value or {}))
    if not value:
        return None
    if not all(isinstance(at, str) for at in value):
        raise PayloadInvalid("headers must map texts to JSON values")
    try:
        data = encode(JsonSerializer(), dict(value), HEADERS_BYTES_MAX)
    except PayloadInvalid as error:
        raise type(error)(str(error).replace("the payload", "the headers", 1)) from error
    return data.decode("utf-8")


def duration_us(kind: str, value: float | timedelta | None) -> int | None:
    """Return seconds or a timedelta as microseconds; raises PayloadInvalid."""
    if value is None:
        return None
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if (
        not isinstance(seconds, int | float)
        or isinstance(seconds, bool)
        or not 0 <= seconds <= DURATION_SECONDS_MAX
    ):
        raise PayloadInvalid(
            f"{kind} must be seconds from 0 to {DURATION_SECONDS_MAX}, not {value!r}"
        )
    return round(seconds * 1_000_000)


def whole(kind: str, value: object, low: int, high: int) -> int:
    """Return a whole number within bounds; raises PayloadInvalid."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise PayloadInvalid(f"{kind} must be a whole number from {low} to {high}, not {value!r}")
    return value


def job(row: Claimed | Record, serializer: Serializer[T], max_attempts_default: int) -> Job[T]:
    """Return a stored row as the user's job; a payload that does not decode is told apart."""
    payload: Any = None
    payload_error: str | None = None
    try:
        payload = serializer.loads(row.payload)
    except RecursionError:
        payload_error = "RecursionError: the payload is nested too deeply"
    except Exception as error:
        payload_error = f"{type(error).__name__}: {error}"[:ERROR_CHARS_MAX]
    stored = row if isinstance(row, Record) else None
    ledger: tuple[Attempt, ...] = stored.ledger if stored else ()
    return Job(
        id=row.id,
        run=row.run,
        queue=row.queue,
        task=row.task,
        payload=payload,
        attempt=row.attempts + (0 if stored and stored.state is State.DONE else 1),
        max_attempts=row.max_attempts or max_attempts_default,
        deaths=row.deaths,
        state=stored.state if stored else State.CLAIMED,
        priority=row.priority,
        key=row.key,
        headers=json.loads(row.headers) if row.headers else {},
        group=row.group,
        enqueued_us=row.enqueued_us,
        due_us=stored.due_us if stored else None,
        ready_us=row.ready_us,
        claimed_us=row.claimed_us,
        finished_us=stored.finished_us if stored else None,
        expires_us=row.expires_us,
        worker=stored.worker if stored else None,
        reason=stored.reason if stored else None,
        error=stored.error if stored else None,
        traceback=stored.traceback if stored else None,
        ledger=ledger,
        payload_bytes=row.payload,
        payload_error=payload_error,
    )


def claimed(source: Job[Any]) -> Claimed:
    """Return the claimed row behind a user's job, for the decision over its settlement."""
    return Claimed(
        id=source.id,
        run=source.run,
        queue=source.queue,
        task=source.task,
        payload=source.payload_bytes,
        attempts=source.attempt - 1,
        max_attempts=source.max_attempts,
        deaths=source.deaths,
        priority=source.priority,
        key=source.key,
        headers=None,
        group=source.group,
        enqueued_us=source.enqueued_us,
        ready_us=source.ready_us or source.enqueued_us,
        claimed_us=source.claimed_us or source.enqueued_us,
        expires_us=source.expires_us,
    )
