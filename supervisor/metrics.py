"""Turn what the database, the slots and the exporter know into Prometheus families.

Boundary: reads through `reading` and `processes`, names through `catalogue`;
serves nothing. Every number is exact: counters are rows of the database and
words of the shared slots, so no value lives in the memory of a worker.
"""

from __future__ import annotations

import importlib.metadata
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import (
    CONTENT_TYPE_PLAIN_0_0_4,
    choose_encoder,
    generate_latest,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from queue_core import stats
from queue_core.stats import Histogram, QueueFacts, Snapshot
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
)
from supervisor.processes import CpuMeter, ProcessFacts
from supervisor.reading import WAIT_SECONDS, Reader, ReadFailed

_CONTENT_TYPE: Final = re.compile(r"[A-Za-z0-9/.;=\- ]{1,120}")

_Label = tuple[str, ...]
_Cell = tuple[_Label, float]


def render(registry: CollectorRegistry, accept: str | None) -> tuple[bytes, str]:
    """Return one scrape and its content type, in the format the `Accept` header asks for.

    An `Accept` header that makes no sense gets the plain text format.
    """
    encoder: Callable[[CollectorRegistry], bytes] = generate_latest
    content_type = CONTENT_TYPE_PLAIN_0_0_4
    try:
        chosen, chosen_type = choose_encoder(accept or "")
        # The library echoes the version that was asked for, whatever that is.
        if _CONTENT_TYPE.fullmatch(chosen_type):
            encoder, content_type = chosen, chosen_type
    except (TypeError, ValueError):
        pass
    return encoder(registry), content_type


def _scalars(family: Family, cells: Iterable[_Cell]) -> Metric:
    """Build a counter or a gauge."""
    kind = CounterMetricFamily if family.type == "counter" else GaugeMetricFamily
    metric = kind(family.name, family.help, labels=family.labels)
    for labels, value in cells:
        metric.add_metric(labels, value)
    return metric


def _gauge(name: str, cells: Iterable[_Cell]) -> Metric:
    return _scalars(BY_NAME[PREFIX + name], cells)


_counter = _gauge  # the catalogue knows which of the two a name is


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

    def where(self, family: Family, queue: str, task: str) -> _Label:
        """Return a row's labels without its closed one."""
        if "task" in family.labels:
            return self.names.pair(queue, task)
        return (self.names.queue(queue),)

    def zeros(self, family: Family) -> Iterator[_Label]:
        """Yield every label set that has to be shown, whatever was counted."""
        every: Iterable[_Label] = (
            self.names.pairs if "task" in family.labels else ((q,) for q in self.names.queues)
        )
        for labels in every:
            if family.closed:
                yield from ((*labels, value) for value in family.closed)
            else:
                yield labels


def _labels(family: Family, where: _Label, label: str) -> _Label:
    if not family.closed:
        return where
    # A word the catalogue does not know still counts, so that sums stay right.
    return (*where, label if label in family.closed else OTHER)


def _stored_counter(family: Family, rows: _ByName) -> Metric:
    values = dict.fromkeys(rows.zeros(family), 0)
    if family.stored == stats.STALE:
        values[("",)] = 0  # a claim whose row is gone belongs to no queue we could name
    for queue, task, label, value in rows.counters[family.stored]:
        at = _labels(family, rows.where(family, queue, task), label)
        values[at] = values.get(at, 0) + value
    return _scalars(family, values.items())


def _stored_histogram(family: Family, rows: _ByName) -> Metric:
    bounds = [*map(floatToGoString, stats.bounds(family.stored)), "+Inf"]
    empty = Histogram(counts=(0,) * len(bounds), total=0.0)
    values = dict.fromkeys(rows.zeros(family), empty)
    for queue, task, label, histogram in rows.histograms[family.stored]:
        at = _labels(family, rows.where(family, queue, task), label)
        before = values.get(at, empty)
        values[at] = Histogram(
            counts=tuple(map(sum, zip(before.counts, histogram.counts, strict=True))),
            total=before.total + histogram.total,
        )
    metric = HistogramMetricFamily(family.name, family.help, labels=family.labels)
    for labels, histogram in values.items():
        buckets = list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))
        metric.add_metric(labels, buckets, histogram.total)
    return metric


@dataclass(slots=True, kw_only=True)
class _QueueSum:
    """What the gauges of one queue label show: one queue, or all that share `__other__`."""

    depth: dict[str, int]
    ready_age_seconds: float = 0.0
    claimed_age_seconds: float = 0.0
    stale_leases: int = 0
    paused: bool = True
    max_depth: int | None = None

    def add(self, facts: QueueFacts, states: Sequence[str]) -> None:
        for state in states:
            self.depth[state] += max(0, facts.depth.get(state, 0))
        self.ready_age_seconds = max(self.ready_age_seconds, facts.oldest_ready_age_seconds)
        self.claimed_age_seconds = max(self.claimed_age_seconds, facts.oldest_claimed_age_seconds)
        self.stale_leases += facts.stale_leases
        self.paused = self.paused and facts.paused
        if facts.max_depth is not None:
            self.max_depth = (self.max_depth or 0) + facts.max_depth


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
    yield _gauge(
        stats.DEPTH, [((q, state), s.depth[state]) for q, s in sums.items() for state in states]
    )
    yield _gauge(
        "queue_oldest_ready_age_seconds", [((q,), s.ready_age_seconds) for q, s in sums.items()]
    )
    yield _gauge(
        "queue_oldest_claimed_age_seconds", [((q,), s.claimed_age_seconds) for q, s in sums.items()]
    )
    yield _gauge("queue_paused", [((q,), float(s.paused)) for q, s in sums.items()])
    yield _gauge(
        "queue_target_wait_seconds",
        [((q,), target.get(q, TARGET_WAIT_SECONDS_DEFAULT)) for q in sums],
    )
    yield _gauge(
        "queue_max_depth", [((q,), s.max_depth) for q, s in sums.items() if s.max_depth is not None]
    )
    yield _gauge("queue_stale_leases", [((q,), s.stale_leases) for q, s in sums.items()])


class DatabaseCollector(Collector):
    """Expose what the database counts; on a failed read only `database_up` 0."""

    def __init__(
        self, reader: Reader[Snapshot], expected: Expected, *, wait_seconds: float = WAIT_SECONDS
    ) -> None:
        self._reader = reader
        self._expected = expected
        self._wait_seconds = wait_seconds
        self.names = Names(expected)

    def collect(self) -> Iterator[Metric]:
        """Yield every database family, or only that the database is down."""
        try:
            snapshot = self._reader.read(self._wait_seconds)
        except ReadFailed:
            # Absent beats frozen: an old number looks like a healthy one.
            yield _gauge("database_up", [((), 0)])
            return
        rows = _ByName(snapshot, self.names)
        for family in CATALOGUE:
            if family.source is Source.DATABASE and family.stored:
                build = _stored_histogram if family.type == "histogram" else _stored_counter
                yield build(family, rows)
        yield from _queue_gauges(snapshot, self.names, self._expected)
        yield _gauge("database_size_bytes", [((), snapshot.database_bytes)])
        yield _gauge("wal_size_bytes", [((), snapshot.log_bytes)])
        yield _gauge("database_up", [((), 1)])


class ExporterCollector(Collector):
    """Expose how reading the database went. Registered after the database's collector."""

    def __init__(self, reader: Reader[Snapshot], names: Names) -> None:
        self._reader = reader
        self._names = names

    def collect(self) -> Iterator[Metric]:
        """Yield the exporter's own families."""
        health = self._reader.health
        seen = health.last_success_seconds
        yield _gauge("collector_duration_seconds", [((), health.duration_seconds)])
        yield _gauge(
            "collector_last_success_timestamp_seconds", [] if seen is None else [((), seen)]
        )
        yield _counter("collector_errors_total", [((), health.errors)])
        yield _counter("series_dropped_total", [((), self._names.dropped_pairs)])


class ProcessCollector(Collector):
    """Expose the process tree; nothing but `build_info` when there is none to look at."""

    def __init__(
        self, look: Callable[[], ProcessFacts] | None, *, version: str, engine: str
    ) -> None:
        self._look = look
        self._build = {"version": version, "engine": engine}
        self._cpu = CpuMeter()

    def collect(self) -> Iterator[Metric]:
        """Yield every process family."""
        info = BY_NAME[PREFIX + "build_info"]
        yield InfoMetricFamily(info.name.removesuffix("_info"), info.help, self._build)
        if self._look is None:
            return
        facts = self._look()
        yield from self._tree(facts)
        yield from self._pools(facts)

    def _tree(self, facts: ProcessFacts) -> Iterator[Metric]:
        now_seconds = time.time_ns() / 1e9
        keeper = facts.keeper_age_seconds
        yield _gauge(
            "supervisor_heartbeat_timestamp_seconds",
            [((), now_seconds - facts.supervisor_age_seconds)],
        )
        yield _gauge(
            "keeper_heartbeat_timestamp_seconds",
            [] if keeper is None else [((), now_seconds - keeper)],
        )
        yield _gauge("supervisor_draining", [((), float(facts.draining))])
        yield _gauge("config_last_reload_success", [((), float(facts.reload_ok))])

    def _pools(self, facts: ProcessFacts) -> Iterator[Metric]:
        # The keeper and `web` end and start again like workers, but are none:
        # they have exits and memory, and no place among workers and jobs.
        every = facts.pools
        active = [pool for pool in every if pool.active]
        worker_pools = [pool for pool in active if not pool.internal]
        cpu = self._cpu.seconds(facts)
        yield _gauge(
            "workers",
            [((p.name, state), n) for p in worker_pools for state, n in facts.states(p).items()],
        )
        yield _gauge("workers_configured", [((p.name,), p.processes) for p in worker_pools])
        yield _gauge(
            "longest_running_job_seconds",
            [
                ((p.name,), max((w.running_seconds for w in facts.of(p.name)), default=0.0))
                for p in worker_pools
            ],
        )
        yield _counter(
            "worker_exits_total",
            [((p.name, cause), number) for p in every for cause, number in p.exits.items()],
        )
        yield _counter("worker_restarts_total", [((p.name,), p.restarts) for p in every])
        yield _counter(
            "worker_cpu_seconds_total", [((p.name,), cpu.get(p.name, 0.0)) for p in every]
        )
        yield _gauge("worker_pool_parked", [((p.name,), float(p.parked)) for p in active])
        yield _gauge("worker_pool_crash_loop", [((p.name,), float(p.crash_loop)) for p in active])
        yield _gauge("worker_backoff_seconds", [((p.name,), p.backoff_seconds) for p in active])
        yield _gauge(
            "worker_resident_memory_bytes",
            [((p.name,), facts.resident_bytes.get(p.name, 0)) for p in active],
        )


class Registries:
    """The registries behind the scrape paths: everything, or one source alone.

    All share the same collectors, so that a label admitted on one path is the same on all.
    """

    def __init__(
        self,
        reader: Reader[Snapshot],
        expected: Expected,
        *,
        look: Callable[[], ProcessFacts] | None,
        version: str,
        engine: str,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        database = DatabaseCollector(reader, expected, wait_seconds=wait_seconds)
        process = ProcessCollector(look, version=version, engine=engine)
        # After the database's, so that it tells of this very read.
        exporter = ExporterCollector(reader, database.names)
        self.everything = _registry(database, process, exporter)
        self.database = _registry(database, exporter)
        self.process = _registry(process)


def _registry(*collectors: Collector) -> CollectorRegistry:
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return registry


def version() -> str:
    """Return the installed version of herdsman."""
    try:
        return importlib.metadata.version("herdsman")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
