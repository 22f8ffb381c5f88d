"""Follow a trace from the put to the handler: headers, spans, logs, and what it costs when off."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from queue_core import Queue, codec, stats
from queue_core.errors import PayloadInvalid
from queue_core.job import Claimed, Outcome
from queue_core.retry import Done, Interrupted, Reject, Result, Retry
from supervisor import traceparent, tracing
from supervisor.calls import python_call
from supervisor.catalogue import BY_NAME
from supervisor.telling import watched
from tests.conftest import wait_until
from tests.process.service import Maker, services

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def _hook_restored() -> Iterator[None]:
    """Leave puts as other tests expect them."""
    yield
    codec.headers_hook = None


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    """Collect spans in memory."""
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> TracerProvider:
    """Give a tracer provider of this test's own."""
    made = TracerProvider()
    made.add_span_processor(SimpleSpanProcessor(exporter))
    return made


def claimed(headers: dict[str, Any] | str | None = None, payload: bytes = b"1") -> Claimed:
    """Make a claimed row."""
    text = json.dumps(headers) if isinstance(headers, dict) else headers
    return Claimed(
        id=7, run=2, queue="emails", task="welcome", payload=payload, attempts=1,
        max_attempts=None, deaths=0, priority=0, key=None, headers=text, group=None,
        enqueued_us=0, ready_us=0, claimed_us=0, expires_us=None,
    )  # fmt: skip


def attributes(span: ReadableSpan) -> dict[str, Any]:
    """Return a span's attributes."""
    return dict(span.attributes or {})


# ---- traceparent, with no library ---------------------------------------------------------


def test_a_traceparent_is_read_and_written_as_the_standard_has_it() -> None:
    """What is made is what is read; a child stays in its trace."""
    found = traceparent.parse(PARENT)
    assert found is not None
    assert (found.trace_id, found.span_id, found.sampled) == (TRACE, "b7ad6b7169203331", True)
    assert str(found) == PARENT
    child = traceparent.fresh(found)
    assert (child.trace_id, child.sampled) == (TRACE, True)
    assert child.span_id != found.span_id
    assert traceparent.parse(str(traceparent.fresh())) is not None
    later = traceparent.parse(f"01-{TRACE}-b7ad6b7169203331-00-more")
    assert later is not None
    assert not later.sampled


@pytest.mark.parametrize(
    "text",
    [
        "", None, 7, PARENT.upper(), PARENT + "-x", PARENT + "\n", "ff" + PARENT[2:], PARENT[:-1],
        f"00-{'0' * 32}-b7ad6b7169203331-01", f"00-{TRACE}-{'0' * 16}-01", PARENT + "-" + "x" * 999,
    ],
)  # fmt: skip
def test_what_is_no_traceparent_is_as_if_not_there(text: object) -> None:
    """Headers are hostile; the wrong ones start no trace and break no log."""
    assert traceparent.parse(text) is None
    assert traceparent.of_headers(json.dumps({"traceparent": text})) is None


@given(st.text(max_size=80))
def test_any_text_is_read_without_a_fault(text: str) -> None:
    """Reading never raises, and what it accepts it writes again."""
    found = traceparent.parse(text)
    assert found is None or traceparent.parse(str(found)) == found
    assert traceparent.of_headers(f'{{"traceparent": {text}') is None


# ---- from the put -------------------------------------------------------------------------


def test_a_put_inside_a_span_carries_it(database: Path, provider: TracerProvider) -> None:
    """The header is the current span's; none is added outside one, or beside a given one."""
    tracing.propagate()
    tracing.propagate()  # once is enough, twice is the same
    with Queue[int](database, "emails") as queue:
        with provider.get_tracer("test").start_as_current_span("request") as span:
            inside = queue.put(1, headers={"tenant": "a"})
            given_one = queue.put(1, headers={"traceparent": PARENT})
        outside = queue.put(1)
        found = [queue.find(job) for job in (inside, given_one, outside)]
    headers = [dict(job.headers) for job in found if job]
    context = span.get_span_context()
    flags = context.trace_flags
    made = f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"
    assert headers == [{"tenant": "a", "traceparent": made}, {"traceparent": PARENT}, {}]


def test_without_a_hook_headers_are_stored_as_given(database: Path) -> None:
    """The library adds nothing by itself, and a hook of the user's is held to the same rules."""
    with Queue[int](database, "emails") as queue:
        job = queue.find(queue.put(1, headers={"a": 1}))
        assert job
        assert dict(job.headers) == {"a": 1}
        codec.headers_hook = lambda headers: {**headers, "b": object()}
        with pytest.raises(PayloadInvalid):
            queue.put(1)


# ---- the attempt --------------------------------------------------------------------------


def run(provider: TracerProvider, row: Claimed, result: Result) -> None:
    """Run one attempt with spans, as the worker does."""
    call = watched(
        lambda handler, row: result,
        tell=None,
        spans=tracing.Spans(provider),
        now_us=int,
        steady_ns=int,
    )
    assert call(None, row) is result


def test_an_attempt_is_a_child_of_the_span_that_put_the_job(
    provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    """The trace goes on, and the attributes are those of the mapping."""
    run(provider, claimed({"traceparent": PARENT, "tracestate": "a=b"}), Done())
    [span] = exporter.get_finished_spans()
    assert span.context is not None
    assert span.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    assert span.context.trace_state.get("a") == "b"
    assert (span.name, span.kind) == ("process emails", trace.SpanKind.CONSUMER)
    found = attributes(span)
    assert found == {
        "messaging.system": "herdsman",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "emails",
        "messaging.message.id": "7",
        "messaging.message.body.size": 1,
        "herdsman.task": "welcome",
        "herdsman.run": 2,
        "herdsman.attempt": 2,
        "herdsman.outcome": "succeeded",
    }
    assert set(found) | {"error.type"} == set(tracing.SPAN_ATTRIBUTES)


@pytest.mark.parametrize(
    ("result", "outcome", "kind"),
    [
        (Retry(error="ValueError: no"), "failed", "ValueError"),
        (Retry(error="late", outcome=Outcome.TIMED_OUT), "timed_out", "timed_out"),
        (Retry(error="not yet", outcome=Outcome.TIMED_OUT), "timed_out", "timed_out"),
        (Reject(error="KeyError"), "rejected", "KeyError"),
        (Interrupted(error="told to stop"), "interrupted", None),
    ],
)
def test_a_failed_attempt_is_an_error_with_its_type(
    provider: TracerProvider,
    exporter: InMemorySpanExporter,
    result: Result,
    outcome: str,
    kind: str | None,
) -> None:
    """An exception names its class, anything else its outcome; an interruption is no error."""
    run(provider, claimed(), result)
    [span] = exporter.get_finished_spans()
    found = attributes(span)
    assert (found["herdsman.outcome"], found.get("error.type")) == (outcome, kind)
    assert (span.status.status_code is trace.StatusCode.ERROR) == (kind is not None)
    assert span.parent is None


def test_the_handler_runs_inside_the_span_and_its_puts_continue_the_trace(
    database: Path, provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    """Spans and jobs made by a handler are of the job's trace, and nothing is left current."""
    tracing.propagate()
    with Queue[int](database, "next") as queue:

        def handler(payload: int) -> None:
            with provider.get_tracer("app").start_as_current_span("inner"):
                queue.put(payload)

        function = python_call(handler)
        call = watched(
            lambda handler, row: function(row), tell=None, spans=tracing.Spans(provider),
            now_us=int, steady_ns=int,
        )  # fmt: skip
        assert call(None, claimed({"traceparent": PARENT})) == Done()
        job = queue.peek()
    assert job is not None
    inner, attempt = exporter.get_finished_spans()
    assert inner.parent is not None
    assert attempt.context is not None
    assert inner.parent.span_id == attempt.context.span_id
    followed = traceparent.parse(job.headers["traceparent"])
    assert followed is not None
    assert followed.trace_id == TRACE
    assert not trace.get_current_span().get_span_context().is_valid


def test_hostile_headers_start_a_trace_of_their_own(
    provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    """Whatever the headers are, the attempt runs and has its span."""
    for headers in ("{", "[]", '{"traceparent": 7}', '{"traceparent": "00-x"}', "null", None):
        run(provider, claimed(headers), Done())
    assert len(exporter.get_finished_spans()) == 6


def test_without_a_provider_there_is_nothing_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt that nobody traces costs nothing, and loads nothing."""
    assert tracing.spans() is None  # installed, and set up by nobody
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    assert tracing.spans() is None
    assert "opentelemetry.trace" not in sys.modules


def test_the_mapping_of_metrics_names_metrics_that_exist() -> None:
    """What is documented for OpenTelemetry's names is in the catalogue."""
    assert set(tracing.METRICS) <= set(BY_NAME)
    assert stats.error_class("a.B: c") == "a.B"


# ---- a real service -----------------------------------------------------------------------

SETUP = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
provider = TracerProvider()
provider.add_span_processor(
    BatchSpanProcessor(ConsoleSpanExporter(out=open(FOLDER / "spans", "a")))
)
trace.set_tracer_provider(provider)
"""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Maker]:
    """Prepare services, and end them."""
    with services(tmp_path) as maker:
        yield maker


def test_a_worker_records_spans_and_sends_them_before_it_ends(make: Maker) -> None:
    """A provider that a handler's module sets up gets a span an attempt, in the job's trace."""
    service = make(processes=1)
    handlers = service.folder / "service_handlers.py"
    handlers.write_text(handlers.read_text() + SETUP)
    queue = service.queue()
    service.started()
    good = queue.put("nothing", headers={"traceparent": PARENT})
    bad = queue.put("once raise", headers={"traceparent": PARENT})
    wait_until(lambda: service.done(good, bad))
    assert service.stop() == 0
    decoder, text, spans = json.JSONDecoder(), (service.folder / "spans").read_text(), []
    while text.strip():
        span, end = decoder.raw_decode(text.lstrip())
        spans.append(span)
        text = text.lstrip()[end:]
    assert {span["context"]["trace_id"] for span in spans} == {"0x" + TRACE}
    outcomes = [
        (int(span["attributes"]["messaging.message.id"]), span["attributes"]["herdsman.outcome"])
        for span in spans
    ]
    assert sorted(outcomes) == [(good, "succeeded"), (bad, "failed"), (bad, "succeeded")]
