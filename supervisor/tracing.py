"""Carry traces with jobs by OpenTelemetry: from the put to a span for every attempt.

A producer calls `propagate()` once: from then on each put inside a span carries that
span's `traceparent` (and `tracestate`) in the job's headers. A worker records a span for
each attempt, as a child of it, when the handlers' modules have set a tracer provider; when
they have not, an attempt costs nothing. Jobs that a handler puts continue its trace.

The spans follow OpenTelemetry's conventions for messaging, which are still in development;
`SPAN_ATTRIBUTES` and `METRICS` say what here means what there.

Boundary: the only module that knows OpenTelemetry, and it imports it when asked to.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from queue_core import codec, stats
from queue_core.job import Claimed, Outcome
from queue_core.retry import Done, Reject, Result, Retry
from supervisor import traceparent

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer, TracerProvider

TRACE_HEADERS: Final = (traceparent.HEADER, "tracestate")
FLUSH_MILLISECONDS: Final = 2_000
"""For the last spans of a process to leave it: it is about to end, and may be waited for."""

SPAN_ATTRIBUTES: Final[Mapping[str, str]] = {
    "messaging.system": '"herdsman"',
    "messaging.operation.name": '"process"',
    "messaging.operation.type": '"process"',
    "messaging.destination.name": "queue",
    "messaging.message.id": "job id",
    "messaging.message.body.size": "bytes of the payload",
    "error.type": "class of the exception, else the outcome; on failure only",
    "herdsman.task": "task",
    "herdsman.run": "run",
    "herdsman.attempt": "number of the attempt, 1 for the first",
    "herdsman.outcome": "outcome of the attempt",
}
"""What the attributes of an attempt's span hold."""

METRICS: Final[Mapping[str, str]] = {
    "herdsman_jobs_enqueued_total": "messaging.client.sent.messages",
    "herdsman_claims_total": "messaging.client.consumed.messages",
    "herdsman_attempt_duration_seconds": "messaging.process.duration",
}
"""Our metrics whose meaning OpenTelemetry's conventions have a name for."""


def outcome_of(result: Result) -> Outcome:
    """Return how an attempt ended, before anything is decided about the job."""
    match result:
        case Done():
            return Outcome.SUCCEEDED
        case Retry(outcome=outcome):
            return outcome
        case Reject():
            return Outcome.REJECTED
        case _:
            return Outcome.INTERRUPTED


def propagate() -> None:
    """Let every put of this process carry the current span; call it once, in a producer.

    Raises ImportError when OpenTelemetry is not installed (`pip install herdsman[otel]`).
    A hook that is there already is called first.
    """
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    before, propagator = codec.headers_hook, TraceContextTextMapPropagator()
    if getattr(before, "carries_traces", False):
        return

    def carry(headers: dict[str, Any]) -> Mapping[str, Any]:
        found: MutableMapping[str, Any] = dict(headers if before is None else before(headers))
        if traceparent.HEADER not in found:
            propagator.inject(found)  # adds nothing outside a span
        return found

    carry.carries_traces = True  # type: ignore[attr-defined]
    codec.headers_hook = carry


class Spans:
    """Record a span for each attempt of this process."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import context, trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer: Tracer = provider.get_tracer("herdsman")
        self._context, self._trace = context, trace
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def attempt(self, row: Claimed) -> Iterator[Span]:
        """Make the attempt's span the current one; end it with `finish`."""
        parent = self._propagator.extract(_carried(row.headers), self._context.Context())
        span = self._tracer.start_span(
            f"process {row.queue}",
            parent,
            self._trace.SpanKind.CONSUMER,
            {
                "messaging.system": "herdsman",
                "messaging.operation.name": "process",
                "messaging.operation.type": "process",
                "messaging.destination.name": row.queue,
                "messaging.message.id": str(row.id),
                "messaging.message.body.size": len(row.payload),
                "herdsman.task": row.task,
                "herdsman.run": row.run,
                "herdsman.attempt": row.attempts + 1,
            },
        )
        token = self._context.attach(self._trace.set_span_in_context(span))
        try:
            yield span
        finally:
            self._context.detach(token)
            span.end()

    def finish(self, span: Span, result: Result) -> None:
        """Say on a span how its attempt ended."""
        outcome = outcome_of(result)
        span.set_attribute("herdsman.outcome", outcome.value)
        error = getattr(result, "error", None)
        if outcome in {Outcome.SUCCEEDED, Outcome.INTERRUPTED}:
            return
        kind = stats.error_class(error)
        span.set_attribute("error.type", outcome.value if kind == stats.OTHER else kind)
        span.set_status(self._trace.StatusCode.ERROR, error)

    def flush(self) -> None:
        """Send what is left, within FLUSH_MILLISECONDS; a provider that cannot keeps it."""
        flush = getattr(self._provider, "force_flush", None)
        if flush is not None:
            flush(FLUSH_MILLISECONDS)


def spans() -> Spans | None:
    """Return what records spans; None when no module of this process has set it up.

    Looks at what is imported already, so that who does not trace loads nothing. Jobs that
    are put while a span is recorded continue its trace.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    propagate()
    return Spans(provider)


def _carried(headers: str | None) -> dict[str, str]:
    """Return the trace headers of a job as the propagator takes them."""
    if traceparent.of_headers(headers) is None:
        return {}
    found = json.loads(headers or "{}")
    return {name: found[name] for name in TRACE_HEADERS if isinstance(found.get(name), str)}
