"""Say which numbers the queue keeps about itself, and add them up in batches.

The engine stores every number as one row `(queue, task, name, label) → value`
and changes it in the transaction of the transition it counts. A histogram is a
name whose labels are `<series>|<bucket index>` and `<series>|sum` (the sum in
microseconds); buckets are not cumulative in storage.

Boundary: pure; no clock, no SQL. Names here are the metric names without their
`herdsman_` prefix, so that SQL, Python and Prometheus use one word.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

DEPTH: Final = "queue_jobs"
"""Gauge by state: jobs in each state now (label: the state)."""
ENQUEUED: Final = "jobs_enqueued_total"
REJECTED: Final = "jobs_rejected_total"
"""Puts that stored nothing (label: duplicate, full, conflict)."""
CLAIMS: Final = "claims_total"
STARTED: Final = "attempts_started_total"
FINISHED: Final = "attempts_finished_total"
"""Attempts that ended (label: outcome)."""
JOBS_FINISHED: Final = "jobs_finished_total"
"""Jobs that reached their end (label: succeeded, dead, cancelled, discarded)."""
RETRIES: Final = "retries_total"
"""Attempts that will be followed by another (label: outcome of the one that ended)."""
DEAD_LETTERS: Final = "dead_letters_total"
"""Jobs that became dead (label: reason)."""
REPLAYED: Final = "jobs_replayed_total"
REAPED: Final = "leases_reaped_total"
"""Leases that ran out (label: state the job was put into)."""
PROMOTED: Final = "jobs_promoted_total"
STALE: Final = "stale_claims_total"
"""Writes refused because the claim was no longer held."""
PRUNED: Final = "pruned_jobs_total"
"""Finished jobs removed by retention (label: state)."""
ERRORS: Final = "errors_total"
"""Charged attempts that did not succeed (label: class of the exception)."""
TREE_DEATHS: Final = "tree_deaths_total"
"""Claims handed back because the whole process tree, or the host, went down."""
OPERATED: Final = "operator_actions_total"
"""What operators did (label: `<action>|<via>`), one for each transaction that changed something."""
PARKED: Final = "queue_parked_jobs"
"""Gauge: ready jobs that stepped aside for want of a handler."""

WAIT: Final = "queue_wait_seconds"
"""Histogram: ready until started."""
DURATION: Final = "attempt_duration_seconds"
"""Histogram by outcome: ok or error."""
LATENCY: Final = "job_latency_seconds"
"""Histogram: first ready until done, retries included."""
ATTEMPTS: Final = "job_attempts"
"""Histogram: attempts a job had taken when it reached its end."""
LOCK_WAIT: Final = "lock_wait_seconds"
"""Histogram by operation: waiting for the write lock, given up or not; a put that another process
stored had waited until it was told."""
LOCK_HOLD: Final = "lock_hold_seconds"
"""Histogram by operation: holding the write lock."""

COUNTERS: Final = (
    ENQUEUED, REJECTED, CLAIMS, STARTED, FINISHED, JOBS_FINISHED, RETRIES,
    DEAD_LETTERS, REPLAYED, REAPED, PROMOTED, STALE, PRUNED, ERRORS, TREE_DEATHS, OPERATED,
)  # fmt: skip
GAUGES: Final = (DEPTH, PARKED)
"""Kept as rows too, because counting the jobs at each scrape would cost too much."""
HISTOGRAMS: Final = (WAIT, DURATION, LATENCY, ATTEMPTS, LOCK_WAIT, LOCK_HOLD)

OPERATIONS: Final = (
    "enqueue", "claim", "extend", "finish", "promote", "reap", "replay", "prune",
    "transaction", "checkpoint", "other",
)  # fmt: skip
"""What the write lock is taken for; a worker's turn is a claim, a finish when it only settles."""
ACTIONS: Final = ("cancel", "replay", "discard", "prune", "pause", "resume")
VIAS: Final = ("library", "cli", "web")
"""How an operator reached the queue."""
ERROR_CLASSES_MAX: Final = 20
"""Exception classes a task of a queue counts apart, the first come first; also in the SQL."""
OTHER: Final = "__other__"
"""Label that takes what is over a cap, and errors that name no class."""

# Bounds in microseconds. Wait and latency reach an hour because a backlog does;
# the defaults of metric libraries stop at 10 s, where operators begin to care.
SECONDS_BOUNDS: Final = (
    0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    120.0, 300.0, 600.0, 1800.0, 3600.0,
)  # fmt: skip
ATTEMPTS_BOUNDS: Final = (1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0)
# A turn holds the lock for half a millisecond; who waits a second for it is starved.
LOCK_BOUNDS: Final = (
    0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
_SECONDS_BOUNDS_US: Final = tuple(int(bound * 1_000_000) for bound in SECONDS_BOUNDS)
_ATTEMPTS_BOUNDS_INT: Final = tuple(int(bound) for bound in ATTEMPTS_BOUNDS)


def bounds(name: str) -> tuple[float, ...]:
    """Return the upper bounds of a histogram's buckets, +Inf left out."""
    if name in (LOCK_WAIT, LOCK_HOLD):
        return LOCK_BOUNDS
    return ATTEMPTS_BOUNDS if name == ATTEMPTS else SECONDS_BOUNDS


_CLASS: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*", re.ASCII)
_CLASS_LENGTH_MAX: Final = 80


def error_class(error: str | None) -> str:
    """Return the exception class that a stored error begins with, `ValueError: no such user`.

    A text that begins otherwise gives `__other__`: handlers may write anything.
    """
    found, colon, _ = (error or "").partition(":")
    found = found.strip()
    # A word alone is a class only if it is written as one: "never" is what a handler said.
    named = colon or found.rpartition(".")[2][:1].isupper()
    fits = len(found) <= _CLASS_LENGTH_MAX and _CLASS.fullmatch(found)
    return found if named and fits else OTHER


_new: Final[Any] = tuple.__new__  # a third of what a NamedTuple's own __new__ costs, each put


class Row(NamedTuple):
    """One stored number."""

    queue: int
    task: str
    name: str
    label: str
    value: int


class Tally:
    """Add up the numbers of one transaction, so that each row is written once.

    Not shared between threads: the engine makes one per transaction.
    """

    __slots__ = ("_errors", "_sums")

    def __init__(self) -> None:
        self._sums: defaultdict[tuple[int, str, str, str], int] = defaultdict(int)
        self._errors: defaultdict[tuple[int, str, str, str], int] = defaultdict(int)

    def add(self, queue: int, task: str, name: str, label: str = "", value: int = 1) -> None:
        """Add to a counter, or move a depth up or down."""
        self._sums[(queue, task, name, label)] += value

    def add_error(self, queue: int, task: str, error: str | None) -> None:
        """Count an attempt's error under its class; the store caps the number of classes."""
        self._errors[(queue, task, ERRORS, error_class(error))] += 1

    def move(self, queue: int, old: str | None, new: str | None, number: int = 1) -> None:
        """Count jobs of a queue out of one state and into another; None is "no job"."""
        if old is not None:
            self._sums[(queue, "", DEPTH, old)] -= number
        if new is not None:
            self._sums[(queue, "", DEPTH, new)] += number

    def observe_us(self, queue: int, task: str, name: str, value_us: int, series: str = "") -> None:
        """Put one duration into a histogram; negative durations (a clock step) count as 0."""
        value_us = max(0, value_us)
        bucket = bisect_left(_SECONDS_BOUNDS_US, value_us)
        self._sums[(queue, task, name, f"{series}|{bucket}")] += 1
        self._sums[(queue, task, name, f"{series}|sum")] += value_us

    def observe_many_us(
        self, queue: int, task: str, name: str, values_us: Sequence[int], series: str = ""
    ) -> None:
        """Put many durations into a histogram; the same as `observe_us` for each."""
        sums = self._sums
        for bucket, number in Counter(
            [bisect_left(_SECONDS_BOUNDS_US, value_us) for value_us in values_us]
        ).items():
            sums[(queue, task, name, f"{series}|{bucket}")] += number
        sums[(queue, task, name, f"{series}|sum")] += sum(
            [value_us for value_us in values_us if value_us > 0]
        )

    def observe_attempts(self, queue: int, task: str, attempts: int, times: int = 1) -> None:
        """Put the number of attempts a finished job took into its histogram."""
        bucket = bisect_left(_ATTEMPTS_BOUNDS_INT, attempts)
        self._sums[(queue, task, ATTEMPTS, f"|{bucket}")] += times
        self._sums[(queue, task, ATTEMPTS, "|sum")] += attempts * times

    def copy(self) -> Tally:
        """Return a tally of its own with the same sums, for a transaction that may run twice."""
        made = Tally()
        made._sums.update(self._sums)
        made._errors.update(self._errors)
        return made

    def errors(self) -> list[Row]:
        """Return what has to be added to the rows of errors, whose labels are capped."""
        return [Row(*at, value) for at, value in self._errors.items()]

    def rows(self) -> list[Row]:
        """Return what has to be added to the stored rows."""
        return [_new(Row, (*at, value)) for at, value in self._sums.items() if value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """A stored histogram: count per bucket (the last is +Inf), and the sum in its unit."""

    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFacts:
    """What is true of one queue at one moment. Ages are 0 when there is no such job.

    `next_due_us` is when its next delayed job becomes ready; None when it has none.
    """

    name: str
    depth: Mapping[str, int]
    paused: bool = False
    max_depth: int | None = None
    oldest_ready_age_seconds: float = 0.0
    oldest_claimed_age_seconds: float = 0.0
    stale_leases: int = 0
    next_due_us: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recent:
    """One attempt that ended lately, as an example to look at. Seconds are None when unknown."""

    job: int
    queue: str
    task: str
    series: str
    finished_us: int
    duration_seconds: float
    wait_seconds: float | None = None
    headers: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All numbers of one read transaction.

    Counters are keyed `(name, queue, task, label)`, histograms likewise with
    the series as label. Task "" means the number belongs to the queue as a whole,
    queue "" to the database. `recent` are a few attempts that ended lately.
    """

    taken_us: int
    queues: tuple[QueueFacts, ...] = ()
    counters: Mapping[tuple[str, str, str, str], int] = field(default_factory=dict)
    histograms: Mapping[tuple[str, str, str, str], Histogram] = field(default_factory=dict)
    database_bytes: int = 0
    log_bytes: int = 0
    recent: tuple[Recent, ...] = ()


def assemble(
    rows: Iterable[tuple[str, str, str, str, int]],
) -> tuple[dict[tuple[str, str, str, str], int], dict[tuple[str, str, str, str], Histogram]]:
    """Turn stored rows `(queue name, task, name, label, value)` into counters and histograms.

    Depth rows are left out: they are part of `QueueFacts`.
    """
    counters: dict[tuple[str, str, str, str], int] = {}
    buckets: dict[tuple[str, str, str, str], list[int]] = {}
    sums: dict[tuple[str, str, str, str], int] = {}
    for queue, task, name, label, value in rows:
        if name in HISTOGRAMS:
            series, _, part = label.rpartition("|")
            at = (name, queue, task, series)
            counts = buckets.setdefault(at, [0] * (len(bounds(name)) + 1))
            if part == "sum":
                sums[at] = value
            else:
                counts[int(part)] += value
        elif name != DEPTH:
            counters[(name, queue, task, label)] = value
    histograms = {
        at: Histogram(
            counts=tuple(counts),
            total=sums.get(at, 0) / (1 if at[0] == ATTEMPTS else 1_000_000),
        )
        for at, counts in buckets.items()
    }
    return counters, histograms
