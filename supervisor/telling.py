"""Tell of attempts: one line of the log each, one span each, and why a transaction failed.

Boundary: looks on; decides nothing, and changes no result. When neither lines nor spans are
wanted there is nothing here to call, so that a job costs nothing.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any, Final

import structlog

from queue_core.errors import (
    DatabaseCorrupt,
    DatabaseFull,
    DatabaseReadOnly,
    DurabilityUnknown,
    QueueBusy,
    QueueError,
)
from queue_core.job import Claimed, Outcome, Settlement, State
from queue_core.retry import Result
from supervisor import traceparent
from supervisor.sections import LogSettings
from supervisor.tracing import Spans, outcome_of

log = structlog.get_logger("herdsman.attempts")

ATTEMPT_FINISHED: Final = "attempt_finished"

_LEVELS: Final = ("debug", "info", "warning", "error")
_MEMORY_UNIT: Final = 1024  # Linux counts ru_maxrss in KiB
Tell = Callable[..., Any]


def fault_of(error: QueueError) -> str:
    """Return why a transaction failed, one of `slot.FAULTS`."""
    match error:
        case QueueBusy():
            return "busy"
        case DatabaseFull():
            return "full"
        case DatabaseReadOnly():
            return "read_only"
        case DatabaseCorrupt():
            return "corrupt"
        case DurabilityUnknown():
            return "durability"
        case _:
            return "other"


def line_of(logs: LogSettings) -> Tell | None:
    """Return what writes an attempt's line; None when `logs.attempts` or `logs.level` rules it out.

    Looked up once: a line below the level is not even put together.
    """
    if logs.attempts == "off" or _LEVELS.index(logs.attempts) < _LEVELS.index(logs.level):
        return None
    tell: Tell = getattr(log, logs.attempts)
    return tell


def watched(
    call: Callable[[Any, Claimed], Result],
    *,
    tell: Tell | None,
    spans: Spans | None,
    now_us: Callable[[], int],
    steady_ns: Callable[[], int],
) -> Callable[[Any, Claimed], Result]:
    """Return `call` with what is to be told around it; `call` itself when that is nothing.

    Args:
        call: runs one claimed job, and returns a result whatever happens.
        tell: writes a line, see `line_of`.
        spans: records spans, see `tracing.spans`.
        now_us: the engine's clock.
        steady_ns: the clock that durations are measured by.
    """
    if spans is not None:
        call = _spanned(call, spans)
    return call if tell is None else _lined(call, tell, now_us, steady_ns)


def _spanned(
    call: Callable[[Any, Claimed], Result], spans: Spans
) -> Callable[[Any, Claimed], Result]:
    def spanned(handler: Any, row: Claimed) -> Result:
        with spans.attempt(row) as span:
            result = call(handler, row)
            spans.finish(span, result)
            return result

    return spanned


def _lined(
    call: Callable[[Any, Claimed], Result],
    tell: Tell,
    now_us: Callable[[], int],
    steady_ns: Callable[[], int],
) -> Callable[[Any, Claimed], Result]:
    def lined(handler: Any, row: Claimed) -> Result:
        wait_us = max(0, now_us() - row.ready_us)
        began_ns, cpu_seconds = steady_ns(), _cpu_seconds()
        result = call(handler, row)
        tell(
            ATTEMPT_FINISHED,
            **_who(row),
            outcome=outcome_of(result).value,
            wait_seconds=wait_us / 1e6,
            duration_seconds=round((steady_ns() - began_ns) / 1e9, 6),
            cpu_seconds=round(_cpu_seconds() - cpu_seconds, 6),
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MEMORY_UNIT,
            error=getattr(result, "error", None),
        )
        return result

    return lined


def tell_death(tell: Tell | None, row: Claimed, settlement: Settlement) -> None:
    """Write the line of an attempt whose worker could not: it is gone."""
    if tell is None or settlement.started_us is None or settlement.to is State.DONE:
        return
    tell(
        ATTEMPT_FINISHED,
        **_who(row),
        outcome=Outcome(settlement.outcome).value,
        wait_seconds=max(0, settlement.started_us - row.ready_us) / 1e6,
        duration_seconds=settlement.duration_us / 1e6,
        cause=settlement.cause,
        error=settlement.error,
    )


def _who(row: Claimed) -> dict[str, Any]:
    who = {
        "job_id": row.id,
        "run": row.run,
        "queue": row.queue,
        "task": row.task,
        "attempt": row.attempts + 1,
    }
    trace = traceparent.of_headers(row.headers)
    return who if trace is None else {**who, "trace_id": trace.trace_id}


def _cpu_seconds() -> float:
    """Return the processor time of this process and of the programs it has run so far."""
    times = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(used.ru_utime + used.ru_stime for used in times)
