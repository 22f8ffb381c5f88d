"""Whatever is killed, no job is lost, none that was finished runs again, and none waits long."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from queue_core import State
from supervisor.slot import Kind, SlotState
from tests.conftest import wait_until
from tests.process.service import ENVIRONMENT, Maker, Service, services
from tests.process.tree import alive


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Maker]:
    """Return a function that prepares a service; it is ended at the end."""
    with services(tmp_path) as make:
        yield make


def all_done_once_left(tree: Service) -> None:
    """Check that nothing is left behind after a drain."""
    assert tree.stop() == 0
    assert tree.rows()["claimed"] == 0
    assert tree.all_processes() == []


def test_a_killed_worker_loses_nothing_and_charges_the_running_job_alone(service: Maker) -> None:
    """Of its batch what was finished stays done, what had not started is free."""
    tree = service().started()
    queue = tree.queue()
    tree.warm(queue)
    *before, victim = queue.put_many([*["nothing"] * 4, "once die"])
    after = queue.put_many(["nothing"] * 4)
    wait_until(lambda: tree.done(*before, victim, *after))

    assert tree.outcomes(victim) == ["crashed", "succeeded"]
    crash = tree.job(victim).ledger[0]
    assert crash.cause == "signal"
    assert crash.error is not None
    assert "signal 9" in crash.error
    assert tree.job(victim).ledger[1].started_us - crash.finished_us < 1_000_000
    assert tree.job(victim).deaths == 1
    for job_id in [*before, *after]:
        assert tree.runs()[job_id] == 1, "it was run again"
        assert tree.job(job_id).attempt == 1
        assert tree.job(job_id).deaths == 0
    all_done_once_left(tree)


def test_the_unstarted_rest_of_a_killed_workers_batch_is_free(service: Maker) -> None:
    """Jobs of the same claim, in either place, carry no mark of the death."""
    tree = service().started()
    queue = tree.queue()
    tree.warm(queue)
    jobs = queue.put_many([*["nothing"] * 5, "once die", *["nothing"] * 5])
    wait_until(lambda: tree.done(*jobs))
    victim = jobs[5]
    (handed,) = tree.events("jobs_handed_back")
    assert handed["jobs"] > 1, "the batch held this job alone: the test proves nothing"
    assert {tree.runs()[job_id] for job_id in jobs if job_id != victim} == {1}
    assert {tree.job(job_id).deaths for job_id in jobs if job_id != victim} == {0}
    assert {tuple(tree.outcomes(job_id)) for job_id in jobs if job_id != victim} == {("succeeded",)}
    assert tree.runs()[victim] == 2


def test_twenty_killed_workers_in_a_row_cost_less_than_a_second_each(service: Maker) -> None:
    """Each job runs again in under a second; the median is a small part of it."""
    tree = service(processes=2).started()
    queue = tree.queue()
    waits_us = []
    for number in range(20):
        job_id = queue.put(f"once wait never{number}")
        killed_us = tree.kill_running(job_id)
        wait_until(lambda job_id=job_id: tree.done(job_id))
        assert tree.outcomes(job_id) == ["crashed", "succeeded"]
        crash, rerun = tree.job(job_id).ledger
        assert crash.cause == "signal"
        # From the kill itself: the ledger's end of the crashed attempt is when it was noticed.
        waits_us.append(rerun.started_us - killed_us)
    median_ms = statistics.median(waits_us) / 1000
    print(f"median {median_ms:.0f} ms, worst {max(waits_us) / 1000:.0f} ms", file=sys.stderr)
    assert max(waits_us) < 1_000_000, waits_us
    assert tree.runs("end").total() == 20
    assert queue.counts().totals["attempts_finished_total:crashed"] == 20


def test_a_job_that_kills_three_workers_is_dead(service: Maker) -> None:
    """It is poison, however many attempts it has left, and the others go on."""
    tree = service(processes=2, max_attempts=50).started()
    queue = tree.queue()
    poison, good = queue.put("die"), queue.put("nothing")
    wait_until(lambda: tree.state(poison) is State.DEAD)
    job = tree.job(poison)
    assert (job.reason, job.deaths, tree.outcomes(poison)) == ("poison", 3, ["crashed"] * 3)
    assert job.error is not None
    assert "died while running the job" in job.error
    assert tree.runs()[poison] == 3
    wait_until(lambda: tree.done(good, queue.put("nothing")) or tree.done(good))
    assert queue.counts().totals["dead_letters_total:poison"] == 1


def test_a_job_past_its_hard_timeout_is_killed_on_time(service: Maker) -> None:
    """Even when it never gives the interpreter back; `max_attempts` decides how often."""
    tree = service(timeout="500ms", max_attempts=2, processes=2).started()
    queue = tree.queue()
    for job_id in queue.put_many(["sleep 60", "hold_gil 60"]):
        wait_until(lambda at=job_id: tree.state(at) is State.DEAD)
        job = tree.job(job_id)
        assert (job.reason, tree.outcomes(job_id)) == ("exhausted", ["timed_out"] * 2)
        assert job.deaths == 0
        assert job.traceback is not None
        assert "service_handlers.py" in job.traceback
        for attempt in job.ledger:
            assert attempt.cause == "timeout"
            assert 500_000 <= attempt.finished_us - attempt.started_us < 1_500_000
    wait_until(lambda: tree.workers())
    good = queue.put("nothing")
    wait_until(lambda: tree.done(good))


def test_a_killed_supervisor_leaves_nothing_behind_and_the_next_finishes_all(
    service: Maker,
) -> None:
    """Workers, keeper, web and what handlers started go; running jobs are not charged."""
    tree = service(processes=2, web=True).started()
    queue = tree.queue()
    tree.warm(queue)
    wait_until(lambda: tree.pid_of(Kind.WEB))
    parent = queue.put("once child go")
    grandchild = int(wait_until(lambda: tree.notes("child"))[0][0])
    wait_until(lambda: tree.running(parent))
    quick = queue.put_many([*["nothing"] * 5])
    waiting = queue.put("once wait never")
    rest = queue.put_many(["nothing"] * 5)
    wait_until(lambda: tree.running(waiting))
    before = tree.all_processes()
    assert len(before) == 6
    assert grandchild in before

    tree.send(signal.SIGKILL)
    wait_until(lambda: tree.all_processes() == [], timeout_seconds=2)
    assert not alive(grandchild)
    assert tree.wait() == -signal.SIGKILL
    assert tree.rows()["claimed"] >= 2

    tree.started()
    wait_until(lambda: tree.done(parent, waiting, *quick, *rest))
    for job_id in (parent, waiting):
        assert tree.runs()[job_id] == 2
        assert tree.outcomes(job_id)[-1] == "succeeded"
        assert "crashed" not in tree.outcomes(job_id)
        assert (tree.job(job_id).deaths, tree.job(job_id).attempt) == (0, 1)
    assert {tree.runs()[job_id] for job_id in [*quick, *rest]} == {1}
    all_done_once_left(tree)


def test_what_was_finished_before_the_tree_died_is_not_run_again(service: Maker) -> None:
    """A batch is settled as a whole: the slots tell the next start which were done."""
    tree = service().started()
    queue = tree.queue()
    tree.warm(queue)
    jobs = queue.put_many([*["nothing"] * 5, "once wait never", *["nothing"] * 5])
    wait_until(lambda: tree.running(jobs[5]))
    tree.send(signal.SIGKILL)
    tree.wait()
    wait_until(lambda: tree.all_processes() == [], timeout_seconds=2)
    ended = tree.runs("end")
    assert [ended[job_id] for job_id in jobs[:5]] == [1] * 5
    assert not any(ended[job_id] for job_id in jobs[5:])
    tree.started()
    wait_until(lambda: tree.done(*jobs))
    assert [tree.runs()[job_id] for job_id in jobs] == [1] * 5 + [2] + [1] * 5


def test_a_killed_keeper_is_replaced_and_jobs_go_on(service: Maker) -> None:
    """Leases survive it: the running job is neither reaped nor run twice."""
    tree = service(processes=2).started()
    queue = tree.queue()
    job_id = queue.put("wait go")
    wait_until(lambda: tree.running(job_id))
    keeper = tree.pid_of(Kind.KEEPER)
    os.kill(keeper, signal.SIGKILL)
    other = queue.put("nothing")
    wait_until(lambda: tree.done(other))
    wait_until(lambda: tree.pid_of(Kind.KEEPER) not in (0, keeper))
    delayed = queue.put("nothing", delay=0.05)
    wait_until(lambda: tree.done(delayed), what="the new keeper promotes")
    assert tree.running(job_id)
    tree.make("go")
    wait_until(lambda: tree.done(job_id))
    assert tree.outcomes(job_id) == ["succeeded"]
    assert tree.events("leases_reaped") == []
    all_done_once_left(tree)


def test_a_killed_web_is_replaced_and_jobs_go_on(service: Maker) -> None:
    """Workers do not notice, and the pages come back."""
    tree = service(web=True).started()
    wait_until(lambda: tree.get("livez")[0] == 200)
    workers, web = tree.workers(), tree.pid_of(Kind.WEB)
    os.kill(web, signal.SIGKILL)
    job_id = tree.queue().put("nothing")
    wait_until(lambda: tree.done(job_id))
    wait_until(lambda: tree.pid_of(Kind.WEB) not in (0, web))
    wait_until(lambda: tree.get("readyz")[0] == 200)
    assert tree.workers() == workers


def test_a_job_whose_claimer_was_killed_is_reaped_and_run(service: Maker) -> None:
    """A library user's claim lasts as long as its lease, then the keeper takes it back."""
    tree = service()
    queue = tree.queue()
    job_id = queue.put("nothing")
    code = (
        "import sys, time; from queue_core import Queue\n"
        "queue = Queue(sys.argv[1], 'work', lease_seconds=1)\n"
        "print(queue.get(timeout=0).id, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code, str(tree.database)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
    ) as claimer:
        assert claimer.stdout is not None
        assert int(claimer.stdout.readline()) == job_id
        claimer.kill()
    assert tree.state(job_id) is State.CLAIMED
    tree.started()
    wait_until(lambda: tree.done(job_id))
    assert tree.outcomes(job_id) == ["lease_lost", "succeeded"]
    lost = tree.job(job_id).ledger[0]
    assert lost.finished_us - lost.started_us >= 1_000_000
    assert tree.runs()[job_id] == 1


def test_a_worker_killed_while_idle_is_replaced_and_charges_nobody(service: Maker) -> None:
    """There is nothing to hand back."""
    tree = service().started()
    queue = tree.queue()
    tree.warm(queue)
    (pid,) = tree.workers().values()
    wait_until(lambda: all(s.state is SlotState.IDLE for s in tree.slots() if s.pid == pid))
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    wait_until(lambda: tree.workers() and pid not in tree.workers().values())
    assert time.monotonic() - began < 2
    job_id = queue.put("nothing")
    wait_until(lambda: tree.done(job_id))
    assert "attempts_finished_total:crashed" not in queue.counts().totals
