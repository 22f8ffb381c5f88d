"""Hold the numbers of a real service to a recount of its rows, through load, reload and restart."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from queue_core import Queue
from supervisor.slot import Kind
from tests.conftest import wait_until
from tests.process.service import Maker, Service, services
from tests.surface.truth import GROWING, Samples, fell, recounted, shown, total


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Maker]:
    """Prepare services, and end them."""
    with services(tmp_path) as maker:
        yield maker


def scrape(service: Service) -> Samples:
    """Return the database's samples as the service shows them now; a failure is "not yet"."""
    code, text = service.get("metrics/database")
    assert code == 200
    samples = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["herdsman_database_up", frozenset()] == 1
    return samples


class Watch:
    """Look at one service again and again; what it shows may never go back."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.before: Samples = {}
        self.replayed: list[int] = []

    def look(self) -> Samples:
        """Scrape, and hold it to the scrape before."""
        samples = scrape(self.service)
        if back := fell(self.before, samples):
            pytest.fail(f"went back: {back[:5]}")
        self.before = samples
        return samples

    def equals_the_rows(self) -> None:
        """Wait until all jobs ended, and compare every number with the rows."""
        rest = ("ready", "delayed", "claimed")

        def ended() -> bool:
            rows = self.service.rows()  # once: between two looks a job moves from state to state
            return not any(rows[state] for state in rest)

        wait_until(ended, what="all ended")
        wanted = recounted(self.service.database, replayed=self.replayed)

        def same() -> bool:
            samples = self.look()
            assert shown(samples, wanted) == wanted
            rows = self.service.rows()
            assert {state: total(samples, "queue_jobs", state=state) for state in rows} == rows
            return True

        wait_until(same, what="the numbers are those of the rows")


def load(queue: Queue[Any]) -> None:
    """Put jobs that end in every way."""
    queue.put_many(["nothing"] * 60)
    for payload in ("raise", "once raise", "once die", "reject", "once snooze 0.05",
                    "once retry 0.05", "retry 0.05"):  # fmt: skip
        queue.put(payload)
    queue.cancel(queue.put("nothing", delay=600))


def test_the_numbers_are_those_of_the_rows_through_reload_restart_and_kill(make: Maker) -> None:
    """Load, a reload, a killed web, a restart and a killed supervisor: nothing lost or doubled."""
    service = make(processes=2, web=True, max_attempts=2)
    queue = service.queue()
    service.started()
    watch = Watch(service)
    load(queue)
    key = queue.put("nothing", key="once")
    assert queue.put("nothing", key="once") == key
    watch.equals_the_rows()
    assert total(watch.before, "jobs_rejected_total", reason="duplicate") == 1

    service.send(signal.SIGHUP)
    load(queue)
    wait_until(lambda: service.events("reload_finished"), what="the reload is over")
    watch.equals_the_rows()

    os.kill(service.pid_of(Kind.WEB), signal.SIGKILL)
    addresses = len(service.events("web_listening"))
    wait_until(lambda: len(service.events("web_listening")) > addresses, what="web is back")
    wait_until(watch.look, what="web answers again")

    assert service.stop() == 0
    job = queue.dead(limit=1)[0]
    watch.replayed.append(job.attempt - 1)
    queue.replay(job.id)
    service.started()
    load(queue)
    watch.equals_the_rows()
    assert total(watch.before, "operator_actions_total", action="replay", via="library") == 1

    alone = queue.put("wait go")
    wait_until(lambda: service.running(alone), what="the job runs")
    service.send(signal.SIGKILL)
    service.wait()
    service.make("go")
    wait_until(lambda: not service.all_processes(), what="the tree is gone")
    service.started()
    wait_until(lambda: service.done(alone), what="the job is done")
    watch.equals_the_rows()
    assert total(watch.before, "tree_deaths_total") == 1
    assert queue.recount() == []


def test_a_reload_and_a_restart_change_no_number(make: Maker) -> None:
    """Every counter and bucket is the same after as before, and goes on from there."""
    service = make(processes=2, web=True, max_attempts=2)
    queue = service.queue()
    service.started()
    watch = Watch(service)
    load(queue)
    watch.equals_the_rows()

    def numbers() -> Samples:
        """Return what jobs alone can change; the keeper takes the lock whether they do or not."""
        return {
            (name, labels): number
            for (name, labels), number in watch.look().items()
            if name.startswith(GROWING) and "_lock_" not in name
        }

    before = numbers()
    assert len(before) > 100
    service.send(signal.SIGHUP)
    wait_until(lambda: service.events("reload_finished"), what="the reload is over")
    wait_until(lambda: numbers() == before, what="the numbers are those of before the reload")

    assert service.stop() == 0
    service.started()
    wait_until(lambda: numbers() == before, what="the numbers are those of before the restart")

    ids = queue.put_many(["nothing"] * 25)
    wait_until(lambda: service.done(*ids), what="the jobs are done")
    watch.equals_the_rows()
    after = numbers()
    names = ("jobs_enqueued_total", "claims_total", "attempts_started_total",
             "jobs_finished_total", "queue_wait_seconds_count", "job_attempts_sum")  # fmt: skip
    assert {name: total(after, name) - total(before, name) for name in names} == dict.fromkeys(
        names, 25
    )


def test_a_lock_that_is_held_shows_while_it_is_held(make: Maker) -> None:
    """Whoever hogs the write lock is seen at once, stops no look, and costs no job."""
    service = make(web=True)
    queue = service.queue()
    service.started()
    first = queue.put("nothing")
    wait_until(lambda: service.done(first))
    wait_until(lambda: scrape(service), what="web has opened the database")
    late = queue.put("nothing", delay=0.3)

    def faults() -> int:
        code, text = service.get("metrics/process")
        assert code == 200
        return sum(
            round(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "herdsman_transaction_errors_total"
            and sample.labels == {"op": "promote", "kind": "busy"}
        )

    assert faults() == 0
    with queue.transaction():
        wait_until(lambda: faults() > 0, what="the keeper's fault is shown")
        assert service.get("livez")[0] == 200
        assert scrape(service)
    wait_until(lambda: service.done(late), what="the job runs")
