"""Turn one snapshot of the database into metric families.

Boundary: numbers come from `reading`, names and caps from `catalogue`; serves and encodes
nothing. Every number is a row of the database, so no value lives in a worker's memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add

from prometheus_client import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from queue_core import stats
from queue_core.stats import Histogram, QueueFacts, Recent, Snapshot
from supervisor import traceparent
from supervisor.catalogue import (
    BY_NAME,
    CATALOGUE,
    OTHER,
    PREFIX,
    TARGET_WAIT_SECONDS_DEFAULT,
    Expected,
    Family,
    Names,
    Source,
    clean_label,
)
from supervisor.exposition import Histograms, Labels, Scalars
from supervisor.reading import WAIT_SECONDS, Reader, ReadFailed

Cell = tuple[Labels, float]


def scalars(name: str, cells: Iterable[Cell]) -> Metric:
    """Build a counter or a gauge of the catalogue, by its name without the prefix."""
    family = BY_NAME[PREFIX + name]
    return Scalars(family.name, family.help, family.type, family.labels, cells)


class _ByName:
    """The rows of one snapshot, grouped by family and folded into bounded label values."""

    def __init__(self, snapshot: Snapshot, names: Names) -> None:
        keys = [*snapshot.counters, *snapshot.histograms]
        names.admit(
            sorted({facts.name for facts in snapshot.queues}),
            sorted({(queue, task) for _, queue, task, _ in keys if task}),
        )
        self.names = names
        self.counters: defaultdict[str, list[tuple[str, str, str, int]]] = defaultdict(list)
        for (name, queue, task, label), value in snapshot.counters.items():
            self.counters[name].append((queue, task, label, value))
        self.histograms: defaultdict[str, list[tuple[str, str, str, Histogram]]] = defaultdict(list)
        for (name, queue, task, label), histogram in snapshot.histograms.items():
            self.histograms[name].append((queue, task, label, histogram))

    def where(self, family: Family, queue: str, task: str) -> Labels:
        """Return the labels of a row that say where: queue, task, both, or neither."""
        match family.labels[:2]:
            case ("queue", "task"):
                return self.names.pair(queue, task)
            case ("queue", *_):
                return (self.names.queue(queue),)
            case ("task", *_):
                return self.names.pair(queue, task)[1:]
            case _:
                return ()

    def zeros(self, family: Family) -> Iterator[Labels]:
        """Yield every label set that has to be shown, whatever was counted."""
        match family.labels[:2]:
            case ("queue", "task"):
                every: Iterable[Labels] = self.names.pairs
            case ("queue", *_):
                every = ((queue,) for queue in self.names.queues)
            case ("task", *_):
                every = dict.fromkeys((task,) for _, task in self.names.pairs)
            case _:
                every = ((),)
        labels = [tuple(value.split("|")) for value in family.closed]
        for where in every:
            if labels:
                yield from ((*where, *rest) for rest in labels)
            else:
                yield (*where, *[OTHER] * (len(family.labels) - len(where)))


def _labels(family: Family, where: Labels, label: str) -> Labels:
    rest = len(family.labels) - len(where)
    if not rest:
        return where
    if family.closed:
        # A word the catalogue does not know still counts, so that sums stay right.
        return (*where, *(label.split("|") if label in family.closed else [OTHER] * rest))
    # An open label is as many series as its task is: a folded task's are folded too.
    return (*where, OTHER if OTHER in where else clean_label(label))


def _stored_scalar(family: Family, rows: _ByName) -> Metric:
    values = dict.fromkeys(rows.zeros(family), 0)
    if family.stored == stats.STALE:
        values[("",)] = 0  # a claim whose row is gone belongs to no queue we could name
    for queue, task, label, value in rows.counters[family.stored]:
        at = _labels(family, rows.where(family, queue, task), label)
        values[at] = values.get(at, 0) + value
    return scalars(family.stored, values.items())


def _stored_histogram(
    family: Family, rows: _ByName, examples: Mapping[Labels, Mapping[int, Exemplar]]
) -> Metric:
    bounds = [*map(floatToGoString, stats.bounds(family.stored)), "+Inf"]
    empty = Histogram(counts=(0,) * len(bounds), total=0.0)
    values = dict.fromkeys(rows.zeros(family), empty)
    for queue, task, label, histogram in rows.histograms[family.stored]:
        at = _labels(family, rows.where(family, queue, task), label)
        before = values.get(at, empty)
        values[at] = histogram if before is empty else _sum(before, histogram)
    metric = Histograms(family.name, family.help, family.labels, bounds)
    for labels, histogram in values.items():
        found = {
            place: example
            for place, example in examples.get(labels, {}).items()
            if histogram.counts[place]
        }
        counts = list(accumulate(histogram.counts))
        metric.cells.append((labels, counts, histogram.total, found))
    return metric


def _sum(one: Histogram, other: Histogram) -> Histogram:
    return Histogram(
        counts=tuple(map(add, one.counts, other.counts)), total=one.total + other.total
    )


def _examples(
    family: Family, rows: _ByName, recent: Iterable[Recent]
) -> dict[Labels, dict[int, Exemplar]]:
    """Return the latest example of each bucket that has one: the job to look at, and its trace.

    A value is of the times stored with the job, which end when the attempt is
    settled, a little after it ended.
    """
    found: dict[Labels, dict[int, Exemplar]] = {}
    bounds = stats.bounds(family.stored)
    for one in recent:
        seconds = one.wait_seconds if family.stored == stats.WAIT else one.duration_seconds
        if seconds is None:
            continue
        at = _labels(family, rows.where(family, one.queue, one.task), one.series)
        trace = traceparent.of_headers(one.headers)
        labels = {"job_id": str(one.job)} | ({"trace_id": trace.trace_id} if trace else {})
        found.setdefault(at, {}).setdefault(
            bisect_left(bounds, seconds), Exemplar(labels, seconds, one.finished_us / 1e6)
        )
    return found


@dataclass(slots=True, kw_only=True)
class _QueueSum:
    """What the gauges of one queue label show: one queue, or all that share `__other__`."""

    depth: dict[str, int]
    ready_age_seconds: float = 0.0
    claimed_age_seconds: float = 0.0
    stale_leases: int = 0
    paused: bool = True
    max_depth: int | None = None
    next_due_us: int | None = None

    def add(self, facts: QueueFacts, states: Sequence[str]) -> None:
        for state in states:
            self.depth[state] += max(0, facts.depth.get(state, 0))
        self.ready_age_seconds = max(self.ready_age_seconds, facts.oldest_ready_age_seconds)
        self.claimed_age_seconds = max(self.claimed_age_seconds, facts.oldest_claimed_age_seconds)
        self.stale_leases += facts.stale_leases
        self.paused = self.paused and facts.paused
        if facts.max_depth is not None:
            self.max_depth = (self.max_depth or 0) + facts.max_depth
        if facts.next_due_us is not None:
            self.next_due_us = min(facts.next_due_us, self.next_due_us or facts.next_due_us)


def _queue_gauges(snapshot: Snapshot, names: Names, expected: Expected) -> Iterator[Metric]:
    states = BY_NAME[PREFIX + stats.DEPTH].closed
    sums: dict[str, _QueueSum] = {}
    for facts in snapshot.queues:
        label = names.queue(facts.name)
        if label not in sums:
            sums[label] = _QueueSum(depth=dict.fromkeys(states, 0))
        sums[label].add(facts, states)
    for queue in names.queues:
        # Configured, but nothing was ever put into it: empty and not paused.
        sums.setdefault(queue, _QueueSum(depth=dict.fromkeys(states, 0), paused=False))
    target = expected.target_wait_seconds
    yield scalars(
        stats.DEPTH, [((q, state), s.depth[state]) for q, s in sums.items() for state in states]
    )
    yield scalars(
        "queue_oldest_ready_age_seconds", [((q,), s.ready_age_seconds) for q, s in sums.items()]
    )
    yield scalars(
        "queue_oldest_claimed_age_seconds", [((q,), s.claimed_age_seconds) for q, s in sums.items()]
    )
    yield scalars("queue_paused", [((q,), float(s.paused)) for q, s in sums.items()])
    yield scalars(
        "queue_target_wait_seconds",
        [((q,), target.get(q, TARGET_WAIT_SECONDS_DEFAULT)) for q in sums],
    )
    yield scalars(
        "queue_max_depth", [((q,), s.max_depth) for q, s in sums.items() if s.max_depth is not None]
    )
    yield scalars(
        "queue_next_due_timestamp_seconds",
        [((q,), s.next_due_us / 1e6) for q, s in sums.items() if s.next_due_us is not None],
    )
    yield scalars("queue_stale_leases", [((q,), s.stale_leases) for q, s in sums.items()])


class DatabaseCollector(Collector):
    """Expose what the database counts; on a failed read only `database_up` 0.

    `examples` says whether histograms carry exemplars, which only OpenMetrics can show.
    """

    def __init__(
        self,
        reader: Reader[Snapshot],
        expected: Expected,
        names: Names,
        *,
        examples: bool = False,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self._reader = reader
        self._expected = expected
        self._names = names
        self._examples = examples
        self._wait_seconds = wait_seconds

    def collect(self) -> Iterator[Metric]:
        """Yield every database family, or only that the database is down."""
        try:
            snapshot = self._reader.read(self._wait_seconds)
        except ReadFailed:
            # Absent beats frozen: an old number looks like a healthy one.
            yield scalars("database_up", [((), 0)])
            return
        rows = _ByName(snapshot, self._names)
        for family in CATALOGUE:
            if family.source is not Source.DATABASE or not family.stored:
                continue
            if family.type == "histogram":
                shown = self._examples and family.stored in (stats.WAIT, stats.DURATION)
                recent = snapshot.recent if shown else ()
                yield _stored_histogram(family, rows, _examples(family, rows, recent))
            else:
                yield _stored_scalar(family, rows)
        yield from _queue_gauges(snapshot, self._names, self._expected)
        yield scalars("database_size_bytes", [((), snapshot.database_bytes)])
        yield scalars("wal_size_bytes", [((), snapshot.log_bytes)])
        yield scalars("database_up", [((), 1)])
