"""Say which numbers the queue keeps about itself, and add them up in batches.

The engine stores every number as one row `(queue, task, name, label) → value`
and changes it in the transaction of the transition it counts. A histogram is a
name whose labels are `<series>|<bucket index>` and `<series>|sum` (the sum in
microseconds); buckets are not cumulative in storage.

Boundary: pure; no clock, no SQL. Names here are the metric names without their
`herdsman_` prefix, so that SQL, Python and Prometheus use one word.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

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

WAIT: Final = "queue_wait_seconds"
"""Histogram: ready until started."""
DURATION: Final = "attempt_duration_seconds"
"""Histogram by outcome: ok or error."""
LATENCY: Final = "job_latency_seconds"
"""Histogram: first ready until done, retries included."""
ATTEMPTS: Final = "job_attempts"
"""Histogram: attempts a job had taken when it reached its end."""

COUNTERS: Final = (
    ENQUEUED, REJECTED, CLAIMS, STARTED, FINISHED, JOBS_FINISHED, RETRIES,
    DEAD_LETTERS, REPLAYED, REAPED, PROMOTED, STALE, PRUNED,
)  # fmt: skip
HISTOGRAMS: Final = (WAIT, DURATION, LATENCY, ATTEMPTS)

# Bounds in microseconds. Wait and latency reach an hour because a backlog does;
# the defaults of metric libraries stop at 10 s, where operators begin to care.
SECONDS_BOUNDS: Final = (
    0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    120.0, 300.0, 600.0, 1800.0, 3600.0,
)  # fmt: skip
ATTEMPTS_BOUNDS: Final = (1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0)
_SECONDS_BOUNDS_US: Final = tuple(int(bound * 1_000_000) for bound in SECONDS_BOUNDS)
_ATTEMPTS_BOUNDS_INT: Final = tuple(int(bound) for bound in ATTEMPTS_BOUNDS)


def bounds(name: str) -> tuple[float, ...]:
    """Return the upper bounds of a histogram's buckets, +Inf left out."""
    return ATTEMPTS_BOUNDS if name == ATTEMPTS else SECONDS_BOUNDS


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

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        self._sums: defaultdict[tuple[int, str, str, str], int] = defaultdict(int)

    def add(self, queue: int, task: str, name: str, label: str = "", value: int = 1) -> None:
        """Add to a counter, or move a depth up or down."""
        self._sums[(queue, task, name, label)] += value

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

    def observe_attempts(self, queue: int, task: str, attempts: int) -> None:
        """Put the number of attempts a finished job took into its histogram."""
        bucket = bisect_left(_ATTEMPTS_BOUNDS_INT, attempts)
        self._sums[(queue, task, ATTEMPTS, f"|{bucket}")] += 1
        self._sums[(queue, task, ATTEMPTS, "|sum")] += attempts

    def rows(self) -> Iterator[Row]:
        """Yield what has to be added to the stored rows."""
        for (queue, task, name, label), value in self._sums.items():
            if value:
                yield Row(queue, task, name, label, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """A stored histogram: count per bucket (the last is +Inf), and the sum in its unit."""

    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFacts:
    """What is true of one queue at one moment. Ages are 0 when there is no such job."""

    name: str
    depth: Mapping[str, int]
    paused: bool = False
    max_depth: int | None = None
    oldest_ready_age_seconds: float = 0.0
    oldest_claimed_age_seconds: float = 0.0
    stale_leases: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All numbers of one read transaction.

    Counters are keyed `(name, queue, task, label)`, histograms likewise with
    the series as label. Task "" means the number belongs to the queue as a whole.
    """

    taken_us: int
    queues: tuple[QueueFacts, ...] = ()
    counters: Mapping[tuple[str, str, str, str], int] = field(default_factory=dict)
    histograms: Mapping[tuple[str, str, str, str], Histogram] = field(default_factory=dict)
    database_bytes: int = 0
    log_bytes: int = 0


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
