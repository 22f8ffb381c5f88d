"""Serve scrapes: all metric families, or those of one source, in the format asked for.

Boundary: facts come from `families` (the database) and `processes` (the slots), texts from
`exposition`; no HTTP. Process facts are words of the shared slots, so no value lives in the
memory of a worker.
"""

from __future__ import annotations

import importlib.metadata
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder
from prometheus_client.registry import Collector

from queue_core.stats import Snapshot
from supervisor.catalogue import BY_NAME, PREFIX, Expected, Names
from supervisor.exposition import encode
from supervisor.families import DatabaseCollector, scalars
from supervisor.processes import CpuMeter, ProcessFacts
from supervisor.reading import WAIT_SECONDS, Reader

_CONTENT_TYPE: Final = re.compile(r"[A-Za-z0-9/.;=\- ]{1,120}")
_REWRITING: Final = re.compile(r"escaping=(dots|values)")


class Registry(CollectorRegistry):
    """What one path serves. `detailed` is the same with exemplars, for OpenMetrics."""

    def __init__(self, *collectors: Collector, detailed: Registry | None = None) -> None:
        super().__init__()
        self.detailed = detailed
        for collector in collectors:
            self.register(collector)


def render(registry: CollectorRegistry, accept: str | None) -> tuple[bytes, str]:
    """Return one scrape and its content type, in the format the `Accept` header asks for.

    An `Accept` header that makes no sense gets the plain text format.
    """
    content_type = CONTENT_TYPE_PLAIN_0_0_4
    try:
        encoder, chosen_type = choose_encoder(accept or "")
        # The library echoes the version that was asked for, whatever that is.
        if _CONTENT_TYPE.fullmatch(chosen_type):
            content_type = chosen_type
            if _REWRITING.search(chosen_type):  # rewrites even names that need no escape
                return encoder(registry), content_type
    except (TypeError, ValueError):
        pass
    openmetrics = content_type.startswith("application/openmetrics-text")
    if openmetrics and isinstance(registry, Registry) and registry.detailed is not None:
        registry = registry.detailed
    return encode(registry.collect(), openmetrics=openmetrics), content_type


class ExporterCollector(Collector):
    """Expose how reading the database went. Registered after the database's collector."""

    def __init__(self, reader: Reader[Snapshot], names: Names) -> None:
        self._reader = reader
        self._names = names

    def collect(self) -> Iterator[Metric]:
        """Yield the exporter's own families."""
        health = self._reader.health
        seen = health.last_success_seconds
        yield scalars("collector_duration_seconds", [((), health.duration_seconds)])
        yield scalars(
            "collector_last_success_timestamp_seconds", [] if seen is None else [((), seen)]
        )
        yield scalars("collector_errors_total", [((), health.errors)])
        yield scalars("series_dropped_total", [((), self._names.dropped_pairs)])


class ProcessCollector(Collector):
    """Expose the process tree; only `build_info` and `config_info` when there is none to look at.

    `config_hash` is "" when no configuration is known.
    """

    def __init__(
        self,
        look: Callable[[], ProcessFacts] | None,
        *,
        version: str,
        engine: str,
        config_hash: str = "",
    ) -> None:
        self._look = look
        self._infos = {"build_info": {"version": version, "engine": engine}}
        if config_hash:
            self._infos["config_info"] = {"hash": config_hash}
        self._cpu = CpuMeter()
        self._mutex = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """Yield every process family."""
        for name, labels in self._infos.items():
            info = BY_NAME[PREFIX + name]
            yield InfoMetricFamily(info.name.removesuffix("_info"), info.help, labels)
        if self._look is None:
            return
        with self._mutex:  # scrapes run side by side, and an older look counted last counts twice
            facts = self._look()
            cpu = self._cpu.seconds(facts)
        yield from self._tree(facts)
        yield from self._pools(facts, cpu)

    def _tree(self, facts: ProcessFacts) -> Iterator[Metric]:
        now_seconds = time.time_ns() / 1e9
        keeper = facts.keeper_age_seconds
        started = facts.supervisor_started_seconds
        yield scalars(
            "supervisor_start_timestamp_seconds", [] if started is None else [((), started)]
        )
        yield scalars(
            "supervisor_heartbeat_timestamp_seconds",
            [((), now_seconds - facts.supervisor_age_seconds)],
        )
        yield scalars(
            "keeper_heartbeat_timestamp_seconds",
            [] if keeper is None else [((), now_seconds - keeper)],
        )
        duties = facts.duties
        yield scalars(
            "keeper_duty_last_run_timestamp_seconds",
            [((name,), now_seconds - duty.age_seconds) for name, duty in duties.items()],
        )
        yield scalars(
            "keeper_duty_duration_seconds",
            [((name,), duty.took_seconds) for name, duty in duties.items()],
        )
        yield scalars(
            "reaper_last_run_timestamp_seconds",
            [((), now_seconds - duties["reap"].age_seconds)] if "reap" in duties else [],
        )
        yield scalars("transaction_errors_total", facts.faults.items())
        yield scalars("supervisor_draining", [((), float(facts.draining))])
        yield scalars("config_last_reload_success", [((), float(facts.reload_ok))])

    def _pools(self, facts: ProcessFacts, cpu: Mapping[str, float]) -> Iterator[Metric]:
        # The keeper and `web` end and start again like workers, but are none:
        # they have exits and memory, and no place among workers and jobs.
        every = facts.pools
        active = [pool for pool in every if pool.active]
        worker_pools = [pool for pool in active if not pool.internal]
        yield scalars(
            "workers",
            [((p.name, state), n) for p in worker_pools for state, n in facts.states(p).items()],
        )
        yield scalars("workers_configured", [((p.name,), p.processes) for p in worker_pools])
        yield scalars(
            "longest_running_job_seconds",
            [
                ((p.name,), max((w.running_seconds for w in facts.of(p.name)), default=0.0))
                for p in worker_pools
            ],
        )
        yield scalars(
            "worker_exits_total",
            [((p.name, cause), number) for p in every for cause, number in p.exits.items()],
        )
        yield scalars(
            "lease_renewal_failures_total", [((p.name,), p.lease_failures) for p in worker_pools]
        )
        yield scalars("worker_restarts_total", [((p.name,), p.restarts) for p in every])
        yield scalars(
            "worker_cpu_seconds_total", [((p.name,), cpu.get(p.name, 0.0)) for p in every]
        )
        yield scalars("worker_pool_parked", [((p.name,), float(p.parked)) for p in active])
        yield scalars("worker_pool_crash_loop", [((p.name,), float(p.crash_loop)) for p in active])
        yield scalars("worker_backoff_seconds", [((p.name,), p.backoff_seconds) for p in active])
        yield scalars(
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
        names = Names(expected)

        def database(examples: bool) -> DatabaseCollector:
            return DatabaseCollector(
                reader, expected, names, examples=examples, wait_seconds=wait_seconds
            )

        process = ProcessCollector(
            look, version=version, engine=engine, config_hash=expected.config_hash
        )
        # After the database's, so that it tells of this very read.
        exporter = ExporterCollector(reader, names)
        plain, detailed = database(False), database(True)
        self.everything = Registry(
            plain, process, exporter, detailed=Registry(detailed, process, exporter)
        )
        self.database = Registry(plain, exporter, detailed=Registry(detailed, exporter))
        self.process = Registry(process)


def version() -> str:
    """Return the installed version of herdsman."""
    try:
        return importlib.metadata.version("herdsman")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
