"""The service works through jobs that other processes put, and tells the truth about them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from queue_core import State
from supervisor.catalogue import CATALOGUE, PREFIX, Source
from supervisor.slot import Kind
from tests.conftest import wait_until
from tests.process.service import Maker, Service, services

Counters = dict[str, dict[tuple[str, str], float]]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Maker]:
    """Return a function that prepares a service; it is ended at the end."""
    with services(tmp_path) as make:
        yield make


def scraped(page: str) -> Counters:
    """Return the stored counters of a scrape: name to (queue, closed label) to value."""
    found: Counters = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = dict(sample.labels)
            queue = labels.pop("queue", "")
            labels.pop("task", None)
            at = (queue, next(iter(labels.values()), ""))
            values = found.setdefault(sample.name, {})
            values[at] = values.get(at, 0) + sample.value
    return found


def stored(service: Service) -> Counters:
    """Return the counters of the database in the same form; some are told of no queue."""
    found: Counters = {}
    of_a_queue = {family.name for family in CATALOGUE if "queue" in family.labels}
    snapshot = service.queue().engine.snapshot()
    for (name, queue, _, label), value in snapshot.counters.items():
        values = found.setdefault(PREFIX + name, {})
        at = (queue if PREFIX + name in of_a_queue else "", label)
        values[at] = values.get(at, 0) + value
    return found


def numbers_told(tree: Service, counted: Counters) -> Counters:
    """Return a scrape that agrees with the database; what it shows is up to a second old."""
    page = scraped(tree.get("metrics")[1])
    for family in CATALOGUE:
        if family.source is Source.DATABASE and family.stored and family.type == "counter":
            told = {at: value for at, value in page[family.name].items() if value}
            assert told == counted.get(family.name, {}), family.name
    return page


def test_jobs_of_another_process_are_done_and_every_number_is_right(service: Maker) -> None:
    """Two workers share them; scrape, snapshot and a recount of rows agree once all is idle."""
    tree = service(processes=2, web=True).started()
    queue = tree.queue()
    wait_until(lambda: tree.get("readyz") == (200, "ok\n"))
    assert tree.get("livez") == (200, "ok\n")

    ids = queue.put_many(["nothing"] * 300)
    ids += [queue.put("sleep 0.03") for _ in range(12)]
    failing = [queue.put("once retry 0"), queue.put("once raise")]
    rejected = queue.put("reject")
    assert queue.put("nothing", key="k") == queue.put("nothing", key="k")
    wait_until(lambda: queue.counts().done == 315 and queue.counts().dead == 1)

    assert tree.done(*ids, *failing)
    assert tree.job(rejected).reason == "rejected"
    runs = tree.runs()
    assert all(runs[job_id] == 1 for job_id in ids)
    assert {words[2] for words in tree.notes("begin")} == {str(p) for p in tree.workers().values()}

    page = wait_until(lambda: numbers_told(tree, stored(tree)), what="the scrape is right")
    rows = tree.rows()
    assert rows == {"done": 315, "dead": 1, "ready": 0, "delayed": 0, "claimed": 0, "cancelled": 0}
    assert {state: page[f"{PREFIX}queue_jobs"]["work", state] for state in rows} == rows
    assert page[f"{PREFIX}jobs_enqueued_total"]["work", ""] == 316
    assert page[f"{PREFIX}jobs_finished_total"]["work", "succeeded"] == 315
    assert page[f"{PREFIX}attempts_finished_total"]["work", "failed"] == 2
    assert page[f"{PREFIX}retries_total"]["work", "failed"] == 2
    assert page[f"{PREFIX}dead_letters_total"]["work", "rejected"] == 1
    assert page[f"{PREFIX}attempts_started_total"]["work", ""] == 318
    assert page[f"{PREFIX}queue_wait_seconds_count"]["work", ""] == 318
    assert page[f"{PREFIX}job_latency_seconds_count"]["work", ""] == 315
    assert page[f"{PREFIX}workers_configured"]["", "default"] == 2
    assert tree.stop() == 0


def test_a_scrape_grows_with_no_worker_that_comes_and_goes(service: Maker) -> None:
    """The same series before and after, none names a process, and no counter goes back."""
    tree = service(web=True)
    with tree.config.open("a") as file:  # its last section is the pool
        file.write("max_jobs = 1\n")
    tree.started()
    queue = tree.queue()
    wait_until(lambda: tree.get("livez")[0] == 200)

    recycled = ("herdsman_worker_exits_total", (("cause", "recycle"), ("pool", "default")))

    def scrape_after(recycles: int) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """Work until so many workers have gone; return name and labels to value."""
        while len(tree.events("worker_recycled")) <= recycles:
            *_, last = queue.put_many(["sleep 0.01"] * 10)
            wait_until(lambda at=last: tree.done(at))

        def scrape() -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
            page = {
                (sample.name, tuple(sorted(sample.labels.items()))): sample.value
                for family in text_string_to_metric_families(tree.get("metrics")[1])
                for sample in family.samples
            }
            return page if page[recycled] >= recycles else {}

        return wait_until(scrape)

    before, after = scrape_after(2), scrape_after(8)
    assert after.keys() == before.keys()
    assert not {"pid", "worker", "host"} & {name for _, labels in after for name, _ in labels}
    counters = [at for at in after if at[0].endswith(("_total", "_count", "_sum", "_bucket"))]
    assert [at for at in counters if after[at] < before[at]] == []


def test_a_result_in_the_middle_of_a_batch_is_settled_as_it_says(service: Maker) -> None:
    """Each of the others goes on as if its neighbours had been done well."""
    tree = service().started()
    queue = tree.queue()
    tree.warm(queue)
    wishes = ["nothing", "retry 600", "nothing", "reject", "nothing", "snooze 600", "nothing",
              "once raise", "nothing"]  # fmt: skip
    ids = dict(zip(range(9), queue.put_many(wishes), strict=True))
    good = [ids[at] for at in (0, 2, 4, 6, 8)]
    wait_until(lambda: tree.done(*good, ids[7]))

    assert [tree.state(ids[at]) for at in (1, 3, 5)] == [State.DELAYED, State.DEAD, State.DELAYED]
    retried, snoozed, raised = tree.job(ids[1]), tree.job(ids[5]), tree.job(ids[7])
    assert (retried.attempt, tree.outcomes(ids[1])) == (2, ["failed"])
    assert (snoozed.attempt, tree.outcomes(ids[5])) == (1, ["interrupted"])
    assert tree.outcomes(ids[7]) == ["failed", "succeeded"]
    assert raised.ledger[0].error == "ValueError: as the payload wished"
    assert tree.runs() == tree.runs() | dict.fromkeys(good, 1)
    assert tree.rows()["claimed"] == 0


def test_a_slow_job_does_not_hold_up_those_claimed_behind_it(service: Maker) -> None:
    """The keeper hands them back; the other worker does them within a second, uncharged."""
    tree = service(processes=2).started()
    queue = tree.queue()
    tree.warm(queue)
    slow, *quick = queue.put_many(["wait go", *["nothing"] * 30])
    begun = wait_until(lambda: tree.running(slow)).started_ns
    wait_until(lambda: tree.done(*quick))
    assert time.monotonic_ns() - begun < 1_000_000_000
    assert tree.state(slow) is State.CLAIMED
    assert {tree.runs()[job_id] for job_id in quick} == {1}
    assert {tuple(tree.outcomes(job_id)) for job_id in quick} == {("succeeded",)}
    tree.make("go")
    wait_until(lambda: tree.done(slow))
    assert tree.runs()[slow] == 1


def test_what_was_done_before_a_slow_job_of_its_batch_is_soon_known_to_be_done(
    service: Maker,
) -> None:
    """A finished job is not shown as claimed for as long as a slow one behind it runs."""
    tree = service().started()
    queue = tree.queue()
    tree.warm(queue)
    *quick, slow = queue.put_many([*["nothing"] * 5, "wait go"])
    wait_until(lambda: tree.running(slow))
    wait_until(lambda: tree.done(*quick), timeout_seconds=2)
    tree.make("go")
    wait_until(lambda: tree.done(*quick, slow))
    assert {tree.runs()[job_id] for job_id in [*quick, slow]} == {1}
    assert queue.counts().totals.get("stale_claims_total", 0) == 0
    assert tree.events("claim_stale") == []


def test_a_delayed_job_runs_when_it_is_due(service: Maker) -> None:
    """Within half a second, and never before."""
    tree = service().started()
    queue = tree.queue()
    job_id = queue.put("nothing", delay=1.2)
    due_us = tree.job(job_id).due_us
    wait_until(lambda: tree.done(job_id))
    started_us = tree.job(job_id).ledger[-1].started_us
    assert due_us is not None
    assert 0 <= started_us - due_us < 500_000


def test_a_put_wakes_an_idle_worker_at_once(service: Maker) -> None:
    """The bell rings: far sooner than the slow look that catches writers who do not ring."""
    tree = service().started()
    queue = tree.queue()
    tree.warm(queue)
    waits_us = []
    for _ in range(5):
        wait_until(lambda: tree.slots() and all(s.state == 2 for s in tree.slots()
                                                if s.kind is Kind.WORKER))  # fmt: skip
        job_id = queue.put("nothing")
        wait_until(lambda job_id=job_id: tree.done(job_id))
        waits_us.append(tree.job(job_id).ledger[-1].started_us - tree.job(job_id).enqueued_us)
    assert sorted(waits_us)[2] < 100_000, waits_us


def test_a_writer_that_does_not_ring_is_noticed(service: Maker) -> None:
    """Within two seconds: idle workers look now and then whether anybody has committed."""
    tree = service().started()
    queue = tree.queue()
    tree.warm(queue)
    engine: Any = queue.engine
    engine._bell.close()
    engine._bell.folder = tree.folder / "nobody-listens-here"
    job_id = queue.put("nothing")
    wait_until(lambda: tree.done(job_id))
    wait_us = tree.job(job_id).ledger[-1].started_us - tree.job(job_id).enqueued_us
    print(f"noticed after {wait_us / 1000:.0f} ms", file=sys.stderr)
    assert wait_us < 2_000_000


def test_a_job_put_before_the_start_is_done_after_it(service: Maker) -> None:
    """The first opener makes the database, whoever it is."""
    tree = service()
    job_id = tree.queue().put("nothing")
    tree.started()
    wait_until(lambda: tree.done(job_id))
    assert tree.stop() == 0
    assert tree.rows() == dict.fromkeys(tree.rows(), 0) | {"done": 1}
    assert tree.all_processes() == []
