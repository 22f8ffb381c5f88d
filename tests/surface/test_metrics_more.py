"""Check the families that tell of errors, operators, locks, faults and examples."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from queue_core import Queue, QueueBusy, open_engine, stats
from queue_core.clock import FakeClock
from queue_core.engine import ClaimRequest, Holder
from queue_core.engines.sqlite_times import STORE_NS, LockTimes
from queue_core.stats import Snapshot, Tally
from supervisor import settings
from supervisor.catalogue import OTHER, PAIRS_MAX, Expected, expected
from supervisor.exposition import encode
from supervisor.metrics import Registries, render
from supervisor.processes import read_processes
from supervisor.reading import Readable, numbers
from supervisor.slots import DUTIES, SlotTable
from tests.surface.test_metrics import Samples, scrape, value

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
EXPECTED = Expected(queues=("emails",), pairs=(("emails", "emails"),))
TRACE = "0af7651916cd43dd8448eb211c80319c"


def registries(engine: Readable, **options: Any) -> Registries:
    """Build what the web serves, without its cache."""
    options = {"look": None, "version": "1", "engine": "sqlite", **options}
    return Registries(numbers(engine, cache_seconds=0.0), EXPECTED, **options)


def scraped(database: Path) -> Samples:
    """Scrape a database."""
    engine = open_engine(database)
    try:
        return scrape(registries(engine).database)
    finally:
        engine.close()


def summed(samples: Samples, name: str) -> float:
    """Add up all samples of a name."""
    return sum(number for (found, _), number in samples.items() if found == f"herdsman_{name}")


@pytest.fixture
def queue(database: Path) -> Iterator[Queue[Any]]:
    """Open a queue."""
    with Queue[Any](database, "emails") as opened:
        yield opened


# ---- errors -------------------------------------------------------------------------------


def test_errors_count_by_class_and_the_classes_of_a_task_are_bounded(
    database: Path, queue: Queue[Any]
) -> None:
    """The first twenty keep series of their own for ever; the others and the nameless share one."""
    for number in range(30):
        for _ in range(2):
            queue.put(number)
            job = queue.get(timeout=0)
            assert job
            queue.fail(job, error=f"Error{number}: of many")
    queue.put(0)
    job = queue.get(timeout=0)
    assert job
    queue.fail(job, error="something went wrong: badly")
    samples = scraped(database)
    assert summed(samples, "errors_total") == 61
    for number in range(20):
        labels = {"task": "emails", "exception": f"Error{number}"}
        assert value(samples, "errors_total", **labels) == 2
    assert value(samples, "errors_total", task="emails", exception="Error20") is None
    assert value(samples, "errors_total", task="emails", exception=OTHER) == 21


@given(st.text(max_size=90))
def test_any_error_has_a_class_that_a_label_can_be(error: str) -> None:
    """Handlers may write anything into an error; a label is a dotted name or `__other__`."""
    found = stats.error_class(error)
    assert found == OTHER or (found.replace(".", "").replace("_", "a").isalnum())
    assert len(found) <= 80


def test_errors_of_a_folded_task_are_folded_too() -> None:
    """Beyond the cap of tasks their classes have no series either, and the sum stays right."""
    counters = {
        (stats.ERRORS, "emails", f"t{n}", f"Error{m}"): 1 for n in range(300) for m in range(3)
    }

    class One:
        def snapshot(self) -> Snapshot:
            return Snapshot(taken_us=0, counters=counters)

        def flush(self) -> None: ...

    samples = scrape(registries(One()).database)
    assert summed(samples, "errors_total") == 900
    series = [at for at in samples if at[0] == "herdsman_errors_total"]
    assert len(series) <= PAIRS_MAX * 4 + 1
    assert (value(samples, "errors_total", task=OTHER, exception=OTHER) or 0) > 0


# ---- operators ----------------------------------------------------------------------------


def test_what_operators_do_is_counted_by_how_they_came(database: Path) -> None:
    """What changes something counts once; what changes nothing does not, nor does upkeep."""
    for via in ("cli", "web"):
        with Queue[int](database, "emails", via=via) as queue:
            queue.pause()
            queue.pause()
            queue.resume()
            cancelled = queue.put(1, delay=60)
            assert queue.cancel(cancelled)
            assert not queue.cancel(cancelled)
            queue.put(2)
            job = queue.get(timeout=0)
            assert job
            queue.fail(job, error="x")
            queue.replay(job.id)
            again = queue.get(timeout=0)
            assert again
            queue.fail(again, error="x")
            queue.discard(job.id)
    engine = open_engine(database, via="")
    engine.configure("emails", keep_done_us=0)
    assert engine.prune(100) == 2
    engine.close()
    samples = scraped(database)
    found = {
        (labels["action"], labels["via"]): number
        for (name, at), number in samples.items()
        if name == "herdsman_operator_actions_total" and (labels := dict(at))
    }
    done = {(action, via) for action in ("pause", "resume", "cancel", "replay", "discard")
            for via in ("cli", "web")}  # fmt: skip
    assert found == {
        (action, via): float((action, via) in done) for action in stats.ACTIONS
        for via in stats.VIAS
    }  # fmt: skip


# ---- parked, delayed, tree deaths -----------------------------------------------------------


def test_jobs_without_a_handler_are_shown_until_they_have_one(
    database: Path, queue: Queue[Any]
) -> None:
    """Parking, cancelling and unparking move the gauge; the rows say the same."""
    ids = [queue.put(n, task="unknown") for n in range(3)]
    queue.put(9, task="known")
    engine = queue.engine
    holder = engine.hold(Holder(worker="w"))

    def take(*tasks: str) -> int:
        request = ClaimRequest(queues=None, limit=10, lease_us=60_000_000, tasks=frozenset(tasks))
        return len(engine.claim(request, holder=holder))

    assert take("known") == 1
    labels = {"queue": "emails", "task": "unknown"}
    assert value(scraped(database), "queue_parked_jobs", **labels) == 3
    queue.cancel(ids[0])
    assert value(scraped(database), "queue_parked_jobs", **labels) == 2
    assert take("known", "unknown") == 2
    assert value(scraped(database), "queue_parked_jobs", **labels) == 0


def test_the_next_delayed_job_is_shown_by_when_it_is_due(database: Path, queue: Queue[Any]) -> None:
    """Absent without one, for an age would lie; otherwise the instant of the first."""
    queue.put(1)
    assert value(scraped(database), "queue_next_due_timestamp_seconds", queue="emails") is None
    queue.put(1, delay=500)
    queue.put(1, delay=100)
    due = value(scraped(database), "queue_next_due_timestamp_seconds", queue="emails")
    assert due is not None
    assert abs(due - time.time() - 100) < 30


# ---- the write lock -----------------------------------------------------------------------


def test_a_wait_for_the_lock_is_told_by_who_waited(database: Path) -> None:
    """A producer that starved tells so with the put that got through, though it ends then."""
    with Queue[int](database, "emails") as holder, Queue[int](database, "emails") as waiter:
        holder.put(1)
        waiter.put(1)
        took: list[float] = []

        def put() -> None:
            began = time.monotonic()
            waiter.put(2)
            took.append(time.monotonic() - began)

        with holder.transaction():
            thread = threading.Thread(target=put)
            thread.start()
            time.sleep(1.1)  # the wait itself is what is measured
        thread.join(20)
    samples = scraped(database)
    assert took[0] > 1
    assert (value(samples, "lock_wait_seconds_count", op="enqueue") or 0) >= 2
    waited = value(samples, "lock_wait_seconds_sum", op="enqueue") or 0
    assert 1 < waited < took[0] + 1
    long = value(samples, "lock_wait_seconds_count", op="enqueue") or 0
    short = value(samples, "lock_wait_seconds_bucket", op="enqueue", le="1.0") or 0
    assert long - short == 1
    assert value(samples, "lock_hold_seconds_count", op="extend") == 0


def test_a_wait_that_was_given_up_counts_too(database: Path) -> None:
    """Starvation that ends in QueueBusy is the worst of all, and must not be missing."""
    with (
        Queue[int](database, "emails") as holder,
        Queue[int](database, "emails", lock_timeout_seconds=1.1) as waiter,
    ):
        holder.put(1)
        waiter.put(1)
        faults: list[Exception] = []

        def put() -> None:
            try:
                waiter.put(2)
            except QueueBusy as error:
                faults.append(error)

        with holder.transaction():
            thread = threading.Thread(target=put)
            thread.start()
            thread.join(20)
        assert len(faults) == 1
        waiter.put(3)
    assert (value(scraped(database), "lock_wait_seconds_sum", op="enqueue") or 0) > 1


operations = st.lists(
    st.tuples(st.sampled_from(["claim", "finish"]), st.integers(0, 10**11), st.booleans()),
    max_size=40,
)


@given(rounds=st.lists(st.tuples(operations, st.booleans()), max_size=8))
def test_lock_times_are_stored_once_whatever_fails(
    rounds: list[tuple[list[tuple[str, int, bool]], bool]],
) -> None:
    """A transaction that fails gives its numbers back; none is lost or stored twice."""
    times, stored, now_ns, seen = LockTimes(), Tally(), 10**12, 0
    times.give(Tally(), now_ns)
    for observed, commits in [*rounds, ([], True)]:
        for operation, took_ns, wait in observed:
            (times.waited if wait else times.held)(operation, took_ns)
            seen += 1
        now_ns += 2 * STORE_NS
        before, after = dict(stored._sums), stored.copy()
        times.give(after, now_ns)
        if commits:
            times.stored()
            stored = after
        else:
            assert dict(stored._sums) == before
    rows = list(stored.rows())
    assert sum(row.value for row in rows if not row.label.endswith("|sum")) == seen
    whole = sum(took for observed, _ in rounds for _, took, _ in observed) // 1000
    assert whole - 4 <= sum(row.value for row in rows if row.label.endswith("|sum")) <= whole


def test_an_idle_moment_writes_no_lock_times(database: Path, queue: Queue[Any]) -> None:
    """Within a second of the last time nothing is added, so that a put stays as small as it is."""
    queue.put(1)
    queue.put(2)
    assert summed(scraped(database), "lock_wait_seconds_count") == 0


# ---- process facts ------------------------------------------------------------------------


def test_faults_duties_and_renewals_come_from_the_slots(tmp_path: Path) -> None:
    """They are words of shared memory: they can be told while the database cannot be written."""
    table = SlotTable.create(
        tmp_path / "t.slots", instance_uuid=str(uuid.uuid4()), pools=["default"], capacity=6
    )
    try:
        table.pools["default"].active = 1
        table.slots[0].count_fault("claim", "full")
        table.slots[3].count_fault("claim", "full")
        table.slots[5].count_fault("other", "other")
        table.pools["default"].lease_failures = 4
        now_ns = time.monotonic_ns()
        table.record_duty("reap", now_ns - 30_000_000_000 - 5_000_000, now_ns - 30_000_000_000)
        samples = scrape(
            registries(open_engine(tmp_path / "x.db"), look=lambda: read_processes(table)).process
        )
        assert value(samples, "transaction_errors_total", op="claim", kind="full") == 2
        assert value(samples, "transaction_errors_total", op="other", kind="other") == 1
        assert value(samples, "transaction_errors_total", op="reap", kind="busy") == 0
        assert summed(samples, "transaction_errors_total") == 3
        assert value(samples, "lease_renewal_failures_total", pool="default") == 4
        ran = value(samples, "reaper_last_run_timestamp_seconds")
        assert ran is not None
        assert abs(time.time() - 30 - ran) < 10
        took = value(samples, "keeper_duty_duration_seconds", duty="reap")
        assert took == pytest.approx(0.005)
        assert value(samples, "keeper_duty_duration_seconds", duty="prune") is None
        assert "reap" in DUTIES
    finally:
        table.close()


def test_the_configuration_is_told_by_a_digest_that_changes_with_it(tmp_path: Path) -> None:
    """The same file gives the same hash, any change another one."""
    path = tmp_path / "herdsman.toml"

    def digest(text: str) -> str:
        path.write_text('database = "h.db"\n' + text)
        return expected(settings.load(path, {})).config_hash

    assert digest("") == digest("# a comment\n")
    assert digest("") != digest('[queues.a]\ntarget_wait = "5m"\n')
    assert len(digest("")) == 12


# ---- examples -----------------------------------------------------------------------------


def exemplars(text: str) -> list[tuple[str, dict[str, str], float, dict[str, str]]]:
    """Return each exemplar: family, labels of its sample, value, labels of its own."""
    return [
        (family.name, sample.labels, sample.exemplar.value, sample.exemplar.labels)
        for family in parse_openmetrics(text)
        for sample in family.samples
        if sample.exemplar
    ]


def test_openmetrics_shows_a_job_for_a_bucket(database: Path, queue: Queue[Any]) -> None:
    """The last job of a bucket can be looked up by id and trace; plain text shows none."""
    header = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    ended = []
    for number in range(4):
        queue.put(number, headers=header if number == 3 else None)
        job = queue.get(timeout=0)
        assert job
        ended.append(job.id)
        queue.ack(job) if number % 2 else queue.nack(job, error="x", delay=60)
    engine = open_engine(database)
    everything = registries(engine).everything
    body, content_type = render(everything, OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    found = exemplars(body.decode())
    assert b"# {" not in render(everything, None)[0]
    engine.close()
    assert {name for name, *_ in found} == {
        "herdsman_attempt_duration_seconds", "herdsman_queue_wait_seconds",
    }  # fmt: skip
    for name, labels, seconds, own in found:
        assert seconds <= float(labels["le"])
        assert int(own["job_id"]) in ended
        assert labels["queue"] == "emails"
        if "duration" in name:
            good = int(own["job_id"]) in ended[1::2]
            assert labels["outcome"] == ("ok" if good else "error")
        assert own.get("trace_id") == (TRACE if int(own["job_id"]) == ended[3] else None)


def test_examples_cost_a_few_rows_whatever_there_is(database: Path, queue: Queue[Any]) -> None:
    """A snapshot brings a bounded number, newest first, and copes with what was discarded."""
    queue.put_many(list(range(60)))
    for job in queue.get_many(60):
        queue.fail(job, error="x") if job.id % 2 else queue.ack(job)
    recent = queue.engine.snapshot().recent
    good = [one.job for one in recent if one.series == "ok"]
    assert good == sorted(good, reverse=True)
    assert len(good) == 20
    assert len(recent) == 40
    assert queue.discard_all() == 30
    assert {one.series for one in queue.engine.snapshot().recent} == {"ok"}


# ---- the text -----------------------------------------------------------------------------


class Families(Collector):
    """A collector of given families."""

    def __init__(self, families: list[Metric]) -> None:
        self.families = families

    def collect(self) -> Iterator[Metric]:
        """Yield them."""
        yield from self.families


labels = st.dictionaries(
    st.sampled_from(["queue", "task", "outcome"]), st.text(max_size=5), max_size=3
)


@given(
    kind=st.sampled_from(["counter", "gauge", "histogram", "info"]),
    text=st.text(max_size=10),
    samples=st.lists(st.tuples(labels, st.floats()), max_size=8),
    example=st.none() | st.tuples(labels, st.floats(allow_nan=False)),
)
def test_the_text_is_what_the_library_would_write(
    kind: str,
    text: str,
    samples: list[tuple[dict[str, str], float]],
    example: tuple[dict[str, str], float] | None,
) -> None:
    """Ours is only faster: the same bytes, in both formats, for any label, number and help."""
    family = Metric("herdsman_x", text, kind)
    suffix = {"counter": "_total", "gauge": "", "histogram": "_bucket", "info": "_info"}[kind]
    shown = Exemplar(example[0], example[1], 12.5) if example else None
    shown = shown if kind in ("counter", "histogram") else None
    for own, number in samples:
        if kind == "histogram":
            own = {**own, "le": "1.0"}
        family.add_sample("herdsman_x" + suffix, own, number, exemplar=shown)
    registry = CollectorRegistry()
    registry.register(Families([family]))
    assert encode([family], openmetrics=False) == generate_latest(registry)
    assert encode([family], openmetrics=True) == generate_openmetrics(registry)


def test_a_whole_scrape_is_what_the_library_would_write(database: Path, queue: Queue[Any]) -> None:
    """The families that skip the library's samples say the same, in both formats."""
    queue.put_many(list(range(30)), headers={"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"})
    for job in queue.get_many(20):
        queue.fail(job, error="x") if job.id % 2 else queue.ack(job)
    snapshot = queue.engine.snapshot()
    big = {at: number + 12_345_678 for at, number in snapshot.counters.items()}
    histograms = {
        at: replace(one, counts=(one.counts[0] + 2_000_000, *one.counts[1:]))
        for at, one in snapshot.histograms.items()
    }

    class Fixed:
        answer = Snapshot(taken_us=0)

        def snapshot(self) -> Snapshot:
            return self.answer

        def flush(self) -> None: ...

    source = Fixed()
    database_path = registries(source).database
    for answer in (snapshot, replace(snapshot, counters=big, histograms=histograms)):
        source.answer = answer
        for registry in (database_path, database_path.detailed):
            assert registry is not None
            families = [*registry.collect()]
            fixed = CollectorRegistry()
            fixed.register(Families(families))
            assert encode(families, openmetrics=False) == generate_latest(fixed)
            assert encode(families, openmetrics=True) == generate_openmetrics(fixed)


def test_other_escapings_are_left_to_the_library(database: Path) -> None:
    """Who asks for rewritten names gets them rewritten."""
    with Queue[int](database, "emails") as queue:
        everything = registries(queue.engine).everything
        accept = "application/openmetrics-text;version=1.0.0;escaping=dots"
        body, content_type = render(everything, accept)
    assert content_type.endswith("escaping=dots")
    assert b"herdsman__database__up" in body


def test_claims_voided_by_a_reboot_are_counted_as_tree_deaths(database: Path) -> None:
    """What a power cut handed back is told by queue and task, and nothing else changed."""
    clock = FakeClock()
    with Queue[int](database, "emails", clock=clock) as queue:
        queue.put_many([1, 2, 3])
        assert len(queue.get_many(2)) == 2
    clock.reboot()
    with Queue[int](database, "emails", clock=clock) as queue:
        assert queue.counts().ready == 3
        samples = scrape(registries(queue.engine).database)
    pair = {"queue": "emails", "task": "emails"}
    assert value(samples, "tree_deaths_total", **pair) == 2
    assert value(samples, "claims_total", **pair) == 2
