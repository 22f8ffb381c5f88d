"""Define what a job is: its states, what may happen to it, and the records that say so.

Boundary: frozen records and enums only; no clock, no SQL, no I/O. Instants are
integer microseconds since the epoch (`_us`), durations integer microseconds too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Generic, NamedTuple, TypeVar

T = TypeVar("T")

MAX_ATTEMPTS_DEFAULT: Final = 5
PAYLOAD_BYTES_MAX: Final = 1024 * 1024
NAME_LENGTH_MAX: Final = 128
KEY_LENGTH_MAX: Final = 512
HEADERS_BYTES_MAX: Final = 16 * 1024
ERROR_CHARS_MAX: Final = 2_048
"""Of a longer error the beginning is kept: it names the class and what happened."""
TRACEBACK_CHARS_MAX: Final = 16_384
"""Of a longer traceback the end is kept: it names the line that failed."""
POISON_DEATHS: Final = 3
"""Worker deaths after which a job is dead, whatever its attempts say."""


class State(StrEnum):
    """Where a job stands. Exactly one holds at any time."""

    READY = "ready"
    DELAYED = "delayed"
    CLAIMED = "claimed"
    DONE = "done"
    DEAD = "dead"
    CANCELLED = "cancelled"


class Outcome(StrEnum):
    """How one attempt ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    REJECTED = "rejected"
    TIMED_OUT = "timed_out"
    CRASHED = "crashed"
    INTERRUPTED = "interrupted"
    LEASE_LOST = "lease_lost"


class Reason(StrEnum):
    """Why a job is dead."""

    EXHAUSTED = "exhausted"
    REJECTED = "rejected"
    POISON = "poison"
    EXPIRED = "expired"
    UNDECODABLE = "undecodable"
    INVALID = "invalid"


TRANSITIONS: Final[Mapping[str, tuple[frozenset[State], frozenset[State]]]] = {
    # transition: (from these states, to these states); an empty set is "no job".
    "enqueue": (frozenset(), frozenset({State.READY, State.DELAYED})),
    "claim": (frozenset({State.READY}), frozenset({State.CLAIMED, State.DEAD})),
    "extend": (frozenset({State.CLAIMED}), frozenset({State.CLAIMED})),
    "finish": (
        frozenset({State.CLAIMED}),
        frozenset({State.DONE, State.DELAYED, State.READY, State.DEAD}),
    ),
    "promote": (frozenset({State.DELAYED}), frozenset({State.READY})),
    "reap": (
        frozenset({State.CLAIMED}),
        frozenset({State.READY, State.DELAYED, State.DEAD}),
    ),
    "cancel": (frozenset({State.READY, State.DELAYED}), frozenset({State.CANCELLED})),
    "replay": (frozenset({State.DEAD}), frozenset({State.READY})),
    "discard": (frozenset({State.DEAD}), frozenset()),
    "prune": (frozenset({State.DONE, State.CANCELLED, State.DEAD}), frozenset()),
}


# The records that pass through every put and every turn are tuples: a frozen dataclass takes
# several times as long to make, and a turn makes hundreds.


class NewJob(NamedTuple):
    """A job on its way in; already validated and encoded by the façade.

    `delay_us` 0 means ready now. `expires_us` is a duration after which a job
    that has not started is dead (`expired`); None keeps it for ever. `digest`
    covers payload and task and is set when `key` is.
    """

    payload: bytes
    task: str
    delay_us: int = 0
    priority: int = 0
    key: str | None = None
    digest: bytes | None = None
    headers: str | None = None
    expires_us: int | None = None
    group: str | None = None
    max_attempts: int | None = None


class Enqueued(NamedTuple):
    """What `enqueue` did for one job: the id, and whether a stored job already had the key."""

    id: int
    duplicate: bool = False


_new: Final[Any] = tuple.__new__
_DONE: Final = State.DONE  # looking a member up by its name takes Python 3.11 half a microsecond
_SUCCEEDED: Final = Outcome.SUCCEEDED


class Claim(NamedTuple):
    """The fence of one claim: every write names it, and none works for another run."""

    id: int
    run: int


class Claimed(NamedTuple):
    """A claimed row as the engine hands it out, undecoded.

    `attempts` counts the attempts charged so far, this one not included, and
    `deaths` the workers that died while running it. `eligible_us` is when the
    job could first have run, and `started` says that the claim was its start.
    """

    id: int
    run: int
    queue: str
    task: str
    payload: bytes
    attempts: int
    max_attempts: int | None
    deaths: int
    priority: int
    key: str | None
    headers: str | None
    group: str | None
    enqueued_us: int
    ready_us: int
    claimed_us: int
    expires_us: int | None
    eligible_us: int = 0
    started: bool = False

    @property
    def claim(self) -> Claim:
        """The fence of this row."""
        return Claim(id=self.id, run=self.run)


class Settlement(NamedTuple):
    """How one claim ends: decided by `queue_core.retry`, carried out by `Engine.finish`.

    `to` is done, ready, delayed or dead. `charge` spends an attempt; `death`
    adds a worker death, `tree_death` one of the whole process tree, which
    charges nothing by itself, and `suspect` has the job run again only when no
    other suspect runs. `started_us` is None for a job that never started,
    which then leaves no line in the ledger. `duration_us` is measured on the
    monotonic clock. `delay_us` counts for `to=delayed`, `reason` for `to=dead`.
    `row` is what was claimed, if its claimer still has it: it spares a look.
    """

    claim: Claim
    to: State
    outcome: Outcome
    charge: bool = True
    death: bool = False
    tree_death: bool = False
    suspect: bool = False
    delay_us: int = 0
    reason: Reason | None = None
    started_us: int | None = None
    duration_us: int = 0
    cause: str | None = None
    error: str | None = None
    traceback: str | None = None
    row: Claimed | None = None

    @classmethod
    def success(cls, row: Claimed, started_us: int, duration_us: int) -> Settlement:
        """Return the end of a job that did what it should.

        The same as with keywords in a fifth of the time, for the one that ends most jobs.
        """
        made: Settlement = _new(cls, (
            _new(Claim, row[:2]), _DONE, _SUCCEEDED, True, False, False, False, 0,
            None, started_us, duration_us, None, None, None, row,
        ))  # fmt: skip
        return made


class Settled(NamedTuple):
    """A claim that was settled, and the state its job is in now."""

    claim: Claim
    state: State


@dataclass(frozen=True, slots=True, kw_only=True)
class Extended:
    """A claim whose lease was extended."""

    claim: Claim


@dataclass(frozen=True, slots=True, kw_only=True)
class Stale:
    """A claim that is no longer ours; nothing was written for it."""

    claim: Claim


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaped:
    """A claim whose lease ran out, and the state its job was put into."""

    claim: Claim
    queue: str
    task: str
    state: State
    reason: Reason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One line of a job's ledger: an attempt that started, and how it ended."""

    run: int
    started_us: int
    finished_us: int
    outcome: Outcome
    cause: str | None = None
    error: str | None = None
    worker: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A job as stored, in any state: what `find`, `dead` and the lists return, undecoded."""

    id: int
    run: int
    queue: str
    task: str
    state: State
    payload: bytes
    attempts: int
    max_attempts: int | None
    deaths: int
    priority: int
    key: str | None
    headers: str | None
    group: str | None
    enqueued_us: int
    due_us: int | None = None
    ready_us: int | None = None
    claimed_us: int | None = None
    finished_us: int | None = None
    expires_us: int | None = None
    worker: str | None = None
    reason: Reason | None = None
    error: str | None = None
    traceback: str | None = None
    ledger: tuple[Attempt, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Generic[T]):
    """A job as the user sees it: decoded payload, headers, times and ledger.

    `attempt` is the number of the current attempt, 1 for the first; on a job
    that is not claimed it is the number the next attempt would have.
    `payload` is None and `payload_error` set when the bytes did not decode;
    `payload_bytes` always holds them.
    """

    id: int
    run: int
    queue: str
    task: str
    payload: T
    attempt: int
    max_attempts: int | None
    deaths: int = 0
    state: State = State.CLAIMED
    priority: int = 0
    key: str | None = None
    headers: Mapping[str, Any] = field(default_factory=dict)
    group: str | None = None
    enqueued_us: int = 0
    due_us: int | None = None
    ready_us: int | None = None
    claimed_us: int | None = None
    finished_us: int | None = None
    expires_us: int | None = None
    worker: str | None = None
    reason: Reason | None = None
    error: str | None = None
    traceback: str | None = None
    ledger: Sequence[Attempt] = ()
    payload_bytes: bytes = b""
    payload_error: str | None = None

    @property
    def claim(self) -> Claim:
        """The fence of this claim."""
        return Claim(id=self.id, run=self.run)
