"""List every metric herdsman exposes, one row per family, and bound the names in its labels.

Boundary: pure data and pure naming; no database, no slots, no HTTP. The
collectors, the documentation and the dashboards are all checked against this
table, so a family that is not here does not exist.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Final, Literal

from queue_core import stats
from queue_core.job import Outcome, Reason, State
from supervisor.policy import Cause
from supervisor.processes import WorkerState
from supervisor.slot import FAULT_OPERATIONS, FAULTS
from supervisor.slots import DUTIES

if TYPE_CHECKING:
    from supervisor.settings import Settings

PREFIX: Final = "herdsman_"
OTHER: Final = stats.OTHER
"""Label value that takes what is over a cap; sums stay right."""
PAIRS_MAX: Final = 200
"""(queue, task) pairs with series of their own: about 130 series a pair, so 26,000 at most."""
QUEUES_MAX: Final = 200
LABEL_CHARS_MAX: Final = 128
TARGET_WAIT_SECONDS_DEFAULT: Final = 60.0
"""Target of a queue that no configuration names; equals the default of `target_wait`."""


class Source(StrEnum):
    """Where a family's numbers come from, and which path serves it alone."""

    DATABASE = "database"
    PROCESS = "process"
    EXPORTER = "exporter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One metric family.

    `stored` is the name of its rows in the database, "" when it has none.
    `closed` are all values that the labels after queue and task can have (two
    of them joined by `|`), so that each is shown as zero from the first scrape;
    empty when they are open.
    """

    name: str
    type: Literal["counter", "gauge", "histogram", "info"]
    help: str
    source: Source
    labels: tuple[str, ...] = ()
    stored: str = ""
    closed: tuple[str, ...] = ()


_QUEUE = ("queue",)
_PAIR = ("queue", "task")
_POOL = ("pool",)
_OUTCOMES = tuple(str(outcome) for outcome in Outcome)
_UNSUCCESSFUL = tuple(str(o) for o in Outcome if o is not Outcome.SUCCEEDED)


def _stored(
    stored: str,
    text: str,
    labels: tuple[str, ...],
    closed: tuple[str, ...] = (),
    kind: Literal["counter", "gauge", "histogram"] = "counter",
) -> Family:
    return Family(
        name=PREFIX + stored,
        type=kind,
        help=text,
        source=Source.DATABASE,
        labels=labels,
        stored=stored,
        closed=closed,
    )


def _family(
    source: Source,
    kind: Literal["counter", "gauge", "info"],
    name: str,
    text: str,
    labels: tuple[str, ...] = (),
    closed: tuple[str, ...] = (),
) -> Family:
    return Family(
        name=PREFIX + name, type=kind, help=text, source=source, labels=labels, closed=closed
    )


_D, _P, _E = Source.DATABASE, Source.PROCESS, Source.EXPORTER

CATALOGUE: Final[tuple[Family, ...]] = (
    # Counters kept in the database, in the transaction of what they count.
    _stored(stats.ENQUEUED, "Jobs accepted.", _PAIR),
    _stored(stats.REJECTED, "Puts that stored nothing.", (*_PAIR, "reason"),
            ("duplicate", "full", "conflict")),
    _stored(stats.CLAIMS, "Jobs claimed by a worker; a claim is not yet an attempt.", _PAIR),
    _stored(stats.STARTED, "Attempts started.", _PAIR),
    _stored(stats.FINISHED, "Attempts ended, by outcome.", (*_PAIR, "outcome"), _OUTCOMES),
    _stored(stats.JOBS_FINISHED, "Jobs that reached their end.", (*_PAIR, "outcome"),
            ("succeeded", "dead", "cancelled", "discarded")),
    _stored(stats.RETRIES, "Attempts that another one follows, by how they ended.",
            (*_PAIR, "reason"), _UNSUCCESSFUL),
    _stored(stats.DEAD_LETTERS, "Jobs that became dead, by reason.", (*_PAIR, "reason"),
            tuple(str(reason) for reason in Reason)),
    _stored(stats.REPLAYED, "Dead jobs made ready again by an operator.", _PAIR),
    _stored(stats.PROMOTED, "Delayed jobs that became due and ready.", _QUEUE),
    _stored(stats.REAPED, "Leases that ran out, by the state the job was put into.",
            ("queue", "result"), ("ready", "delayed", "dead")),
    _stored(stats.STALE, "Writes refused because the claim was no longer held.", _QUEUE),
    _stored(stats.PRUNED, "Finished jobs removed by retention.", ("queue", "state"),
            ("done", "cancelled", "dead")),
    _stored(stats.ERRORS, "Charged attempts that did not succeed, by the class of their error;"
            " classes after a task's first 20, and errors without one, are __other__.",
            ("task", "exception")),
    _stored(stats.TREE_DEATHS,
            "Claims handed back because the whole process tree or the host went down.", _PAIR),
    _stored(stats.OPERATED, "Actions of operators that changed something, by how they came.",
            ("action", "via"), tuple(f"{a}|{via}" for a in stats.ACTIONS for via in stats.VIAS)),
    # Histograms, kept likewise.
    _stored(stats.WAIT, "Time from ready to started; delay and back-off not included.", _PAIR,
            kind="histogram"),
    _stored(stats.DURATION, "Time one attempt ran.", (*_PAIR, "outcome"), ("ok", "error"),
            kind="histogram"),
    _stored(stats.LATENCY, "Time from first ready to done, retries included.", _PAIR,
            kind="histogram"),
    _stored(stats.ATTEMPTS, "Attempts a job had taken when it reached its end.", _PAIR,
            kind="histogram"),
    _stored(stats.LOCK_WAIT, "Time waited for the write lock, or to be stored by who held it.",
            ("op",), stats.OPERATIONS, kind="histogram"),
    _stored(stats.LOCK_HOLD, "Time the write lock was held, by every process of this database.",
            ("op",), stats.OPERATIONS, kind="histogram"),
    # Gauges kept likewise: counting the jobs would cost too much.
    _stored(stats.PARKED, "Ready jobs that wait aside because no handler is configured for them.",
            _PAIR, kind="gauge"),
    # Gauges of the database.
    _family(_D, "gauge", stats.DEPTH, "Jobs in each state now.", ("queue", "state"),
            tuple(str(state) for state in State)),
    _family(_D, "gauge", "queue_oldest_ready_age_seconds",
            "Age of the oldest job that could start now; 0 when there is none.", _QUEUE),
    _family(_D, "gauge", "queue_oldest_claimed_age_seconds",
            "Age of the oldest claim; 0 when there is none.", _QUEUE),
    _family(_D, "gauge", "queue_paused", "1 while the queue is paused.", _QUEUE),
    _family(_D, "gauge", "queue_target_wait_seconds",
            "Longest wait the configuration calls fine.", _QUEUE),
    _family(_D, "gauge", "queue_max_depth",
            "Depth at which puts are refused; absent when unlimited.", _QUEUE),
    _family(_D, "gauge", "queue_stale_leases", "Leases that ran out and are not yet reaped.",
            _QUEUE),
    _family(_D, "gauge", "queue_next_due_timestamp_seconds",
            "When the next delayed job becomes ready; absent when there is none.", _QUEUE),
    _family(_D, "gauge", "database_size_bytes", "Size of the database."),
    _family(_D, "gauge", "wal_size_bytes", "Size of the write-ahead log."),
    _family(_D, "gauge", "database_up",
            "1 when this scrape read the database; at 0 its families are absent."),
    # Facts of the process tree, from the shared slots.
    _family(_P, "gauge", "workers", "Workers by what they do.", ("pool", "state"),
            tuple(str(state) for state in WorkerState)),
    _family(_P, "gauge", "workers_configured", "Workers the configuration asks for.", _POOL),
    _family(_P, "counter", "worker_exits_total", "Worker processes that ended, by cause.",
            ("pool", "cause"), tuple(str(cause) for cause in Cause)),
    _family(_P, "counter", "worker_restarts_total", "Workers started again.", _POOL),
    _family(_P, "gauge", "worker_pool_parked", "1 when restarting this pool was given up.",
            _POOL),
    _family(_P, "gauge", "worker_pool_crash_loop", "1 while workers crash in a loop.",
            _POOL),
    _family(_P, "gauge", "worker_backoff_seconds", "Time until the next restart; 0 for none.",
            _POOL),
    _family(_P, "gauge", "worker_resident_memory_bytes", "Resident memory of the pool's workers.",
            _POOL),
    _family(_P, "counter", "worker_cpu_seconds_total",
            "CPU time of the pool's workers, the ended ones included.", _POOL),
    _family(_P, "gauge", "longest_running_job_seconds",
            "How long the longest running job has run; 0 when none runs.", _POOL),
    _family(_P, "gauge", "supervisor_start_timestamp_seconds",
            "When the supervisor started; a reload does not change it."),
    _family(_P, "gauge", "supervisor_heartbeat_timestamp_seconds",
            "When the supervisor's loop last turned."),
    _family(_P, "gauge", "keeper_heartbeat_timestamp_seconds",
            "When the keeper last made progress; absent when there is none."),
    _family(_P, "gauge", "reaper_last_run_timestamp_seconds",
            "When leases were last looked through for expired ones; absent before that."),
    _family(_P, "gauge", "keeper_duty_last_run_timestamp_seconds",
            "When a duty of the keeper last succeeded; absent before the first time.",
            ("duty",), DUTIES),
    _family(_P, "gauge", "keeper_duty_duration_seconds",
            "Time a duty of the keeper took when it last succeeded.", ("duty",), DUTIES),
    _family(_P, "counter", "lease_renewal_failures_total",
            "Times the leases of a pool's busy workers could not be renewed.", _POOL),
    _family(_P, "counter", "transaction_errors_total",
            "Transactions of workers and keeper that failed, by what for and why.",
            ("op", "kind"),
            tuple(f"{op}|{kind}" for op in FAULT_OPERATIONS for kind in FAULTS)),
    _family(_P, "gauge", "supervisor_draining", "1 while the tree shuts down."),
    _family(_P, "gauge", "config_last_reload_success",
            "1 when the configuration in use is the one last asked for."),
    _family(_P, "info", "build_info", "Version of herdsman and its storage engine.",
            ("version", "engine")),
    _family(_P, "info", "config_info", "Configuration this exporter started with, by its digest.",
            ("hash",)),
    # Facts about this exporter.
    _family(_E, "gauge", "collector_duration_seconds", "Time the last database read took."),
    _family(_E, "gauge", "collector_last_success_timestamp_seconds",
            "When the database was last read; absent before the first success."),
    _family(_E, "counter", "collector_errors_total", "Database reads that failed or ran late."),
    _family(_E, "counter", "series_dropped_total",
            "Pairs of queue and task counted under __other__ because of the cap."),
)  # fmt: skip
"""Every family herdsman exposes."""

BY_NAME: Final[Mapping[str, Family]] = {family.name: family for family in CATALOGUE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the configuration promises: names that get zeros before anything happened.

    `pairs` are (queue, task); `target_wait_seconds` is per queue. `config_hash`
    changes when anything in the configuration does.
    """

    queues: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    target_wait_seconds: Mapping[str, float] = field(default_factory=dict)
    config_hash: str = ""


def expected(settings: Settings) -> Expected:
    """Return the names a configuration promises.

    A queue without a handler counts with the task of its own name, which its jobs have.
    """
    pairs = {(handler.queue or task, task) for task, handler in settings.handlers.items()}
    queues = settings.queue_names
    served = {queue for queue, _ in pairs}
    pairs.update((queue, queue) for queue in queues if queue not in served)
    return Expected(
        queues=queues,
        pairs=tuple(sorted(pairs)),
        target_wait_seconds={
            name: queue.target_wait_seconds for name, queue in settings.queues.items()
        },
        config_hash=sha256(settings.model_dump_json().encode()).hexdigest()[:12],
    )


def targets_between_bounds(settings: Settings) -> tuple[str, ...]:
    """Return a sentence for each queue whose share of late waits cannot be counted.

    A histogram counts what is below its bounds, so a target between two of them has no count.
    """
    bounds = stats.bounds(stats.WAIT)
    listed = ", ".join(map(_span, bounds))
    return tuple(
        f"queue {name} has target_wait {_span(queue.target_wait_seconds)}, which is no bound of "
        "the wait histogram, so the alerts on its wait budget cannot count late jobs; the nearest "
        f"is {_span(min(bounds, key=lambda bound: abs(bound - queue.target_wait_seconds)))}, "
        f"all are {listed}"
        for name, queue in settings.queues.items()
        if queue.target_wait_seconds not in bounds
    )


def _span(seconds: float) -> str:
    """Write a duration as the configuration takes it, in the largest unit that leaves it whole."""
    for size, unit in ((3600.0, "h"), (60.0, "m"), (1.0, "s")):
        if seconds >= size and (seconds % size == 0 or unit == "s"):
            return f"{seconds / size:.10g}{unit}"
    return f"{seconds * 1000:.10g}ms"


@lru_cache(maxsize=4096)
def clean_label(value: str) -> str:
    """Return a label value that every format can carry: no control characters, bounded.

    Names come from producers. A lone surrogate would make the whole scrape
    unencodable, and a line break would be escaped differently by each reader.
    """
    text = value[:LABEL_CHARS_MAX].encode("utf-8", "replace").decode("utf-8")
    return "".join(char if char.isprintable() else "_" for char in text)


class Names:
    """Decide which queues and pairs get series of their own; the rest become `__other__`.

    Who was admitted stays admitted for this process's life, so that no series
    loses its value to `__other__` between two scrapes. Configured names come first.
    """

    __slots__ = ("_pairs", "_queues", "dropped_pairs")

    def __init__(self, expected: Expected) -> None:
        self._queues: dict[str, None] = {}
        self._pairs: dict[tuple[str, str], None] = {}
        self.dropped_pairs = 0
        """Most pairs ever folded at once: it only grows, as a counter must."""
        self.admit(expected.queues, expected.pairs)

    @property
    def queues(self) -> Collection[str]:
        """Queues with series of their own."""
        return self._queues.keys()

    @property
    def pairs(self) -> Collection[tuple[str, str]]:
        """(queue, task) pairs with series of their own."""
        return self._pairs.keys()

    def admit(self, queues: Iterable[str], pairs: Iterable[tuple[str, str]]) -> None:
        """Take in names while there is room; call with all names of one snapshot."""
        wanted = [(clean_label(queue), clean_label(task)) for queue, task in pairs]
        for queue in [*map(clean_label, queues), *(queue for queue, _ in wanted)]:
            if queue not in self._queues and len(self._queues) < QUEUES_MAX:
                self._queues[queue] = None
        folded: set[tuple[str, str]] = set()
        for pair in wanted:
            if pair in self._pairs:
                continue
            if pair[0] in self._queues and len(self._pairs) < PAIRS_MAX:
                self._pairs[pair] = None
            else:
                folded.add(pair)
        self.dropped_pairs = max(self.dropped_pairs, len(folded))

    def queue(self, queue: str) -> str:
        """Return the label of a queue."""
        queue = clean_label(queue)
        return queue if queue in self._queues or not queue else OTHER

    def pair(self, queue: str, task: str) -> tuple[str, str]:
        """Return the labels of a pair; task "" stays "", it means the queue as a whole."""
        queue, task = clean_label(queue), clean_label(task)
        if (queue, task) in self._pairs or (not task and queue in self._queues):
            return queue, task
        return (queue if queue in self._queues else OTHER), (OTHER if task else "")
