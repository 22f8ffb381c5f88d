"""Say what a source hands over: a job with the queue it goes to, and what it could not hand over.

Boundary: records, and the small conversions that all sources need; no file, no database.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from queue_core import codec
from queue_core.errors import PayloadInvalid
from queue_core.job import State
from queue_core.upkeep import ImportJob

NOTES_MAX: Final = 100
ATTEMPTS_MAX: Final = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A job on its way in, the queue it goes to, and the state it was in at home."""

    queue: str
    job: ImportJob
    was: str


@dataclass(slots=True)
class Notes:
    """What did not come along, and why; at most NOTES_MAX sentences, and how many there are."""

    unreadable: int = 0
    done_without_key: int = 0
    keys_dropped: int = 0
    sentences: list[str] = field(default_factory=list)

    def add(self, sentence: str) -> None:
        """Remember a sentence, unless there are enough."""
        if len(self.sentences) < NOTES_MAX:
            self.sentences.append(sentence)


class Source(Protocol):
    """Another queue's store."""

    kind: str
    notes: Notes

    def arrivals(self, now_us: int) -> Iterator[Arrival]:
        """Yield every job once, in the order in which they were put."""
        ...


def origin(kind: str, *parts: object) -> str:
    """Return a job's name for ever: made of what it is, so that a moved source stays known."""
    text = json.dumps([str(part) for part in parts]).encode("utf-8", "replace")
    return f"{kind}:{hashlib.sha256(text).hexdigest()}"


def digest_of(data: bytes) -> str:
    """Return what stands for a payload in an origin."""
    return hashlib.sha256(data).hexdigest()


def headers(kind: str, id_: object, reason: object = None) -> str | None:
    """Return headers that tell where a job came from."""
    told: dict[str, Any] = {"imported_from": kind, "imported_id": str(id_)[:256]}
    if reason:
        told["imported_reason"] = str(reason)[:256]
    return codec.headers(told)


def key(value: object, notes: Notes, what: str) -> str | None:
    """Return an idempotency key as stored here; one that cannot be is left out and noted."""
    if value is None:
        return None
    try:
        return codec.key(value if isinstance(value, str) else str(value))
    except PayloadInvalid as error:
        notes.keys_dropped += 1
        notes.add(f"{what} arrives without its key: {error}")
        return None


def whole(value: object) -> int:
    """Return a count as stored here, 0 for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return 0
    return min(max(int(value), 0), ATTEMPTS_MAX)


def text(value: object) -> str | None:
    """Return an error's text, None for none."""
    return None if value is None or value == "" else str(value)


def instant_us(value: object) -> int | None:
    """Return an instant in microseconds, whatever unit it is in; None for what is none.

    Seconds, milliseconds, microseconds and nanoseconds since the epoch are
    told apart by size: each is a thousand times the one before, and none of
    the bounds lies within 2,000 years of now.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    if value <= 0:
        return None
    for limit, factor in ((1e11, 1_000_000), (1e14, 1_000), (1e17, 1)):
        if value < limit:
            return int(value * factor)
    return int(value) // 1_000


def finished_in(state: State, us: int | None) -> int | None:
    """Return when a job that has come to its end did."""
    return us if state in {State.DEAD, State.DONE} else None


def encoded(value: Any) -> bytes:
    """Return a JSON value as the payload that a `put` of it would store; raises PayloadInvalid."""
    return codec.encode(codec.JsonSerializer(), value, 2**31)
