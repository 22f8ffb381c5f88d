"""`herdsman why`: a sentence for each thing that does not work, and none for what does."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from queue_core import Queue
from queue_core.lockfile import FileLock
from queue_core.stats import QueueFacts
from supervisor import why
from supervisor.closeup import Person, Tree
from supervisor.host import Room
from supervisor.policy import Cause
from supervisor.processes import PoolFacts, ProcessFacts, WorkerState
from supervisor.reasons import Delayed, Facts, Fault, Finding, Group, Level
from supervisor.slots import Kind
from tests.conftest import wait_until
from tests.process.service import Maker, Service, services
from tests.surface.commands import document, herdsman

MIB = 2**20


def pool(name: str = "emails", **changes: Any) -> PoolFacts:
    """Return a pool of two that is well."""
    fine = PoolFacts(
        name=name, active=True, processes=2, exits=dict.fromkeys(Cause, 0), restarts=0,
        backoff_seconds=0, crash_loop=False, parked=False, note="",
    )  # fmt: skip
    return replace(fine, **changes)


def person(
    name: str = "emails/0", pool: str = "emails", kind: Kind = Kind.WORKER, **changes: Any
) -> Person:
    """Return an idle process that is well."""
    fine = Person(
        name=name, pool=pool, kind=kind, slot=1, epoch=1, pid=77, start_ticks=5,
        state=WorkerState.IDLE, job=None, since_seconds=1, age_seconds=100, beat_age_seconds=1,
        limit_seconds=None, jobs_done=3, jobs_failed=0, resident_bytes=1, note="",
        asked_to_restart=False,
    )  # fmt: skip
    return replace(fine, **changes)


KEEPER = person("keeper", "@keeper", Kind.KEEPER)
WEB = person("web", "@web", Kind.WEB)
PEOPLE = (KEEPER, WEB, person(), person("emails/1"))


def tree(
    *, emails: PoolFacts | None = None, people: tuple[Person, ...] = PEOPLE, **changes: Any
) -> Tree:
    """Return a supervisor with one pool, its keeper and its web."""
    upkeep = (pool("@keeper", processes=1), pool("@web", processes=1))
    processes = ProcessFacts(
        pools=(*upkeep, emails or pool()), workers=(), supervisor_age_seconds=0.1,
        keeper_age_seconds=0.1, draining=False, reload_ok=True, resident_bytes={}, cpu_us={},
    )  # fmt: skip
    return Tree(
        instance="main", supervisor_pid=7, started_ticks=1, people=people, deaths={},
        processes=replace(processes, **changes),
    )  # fmt: skip


def facts(**changes: Any) -> Facts:
    """Return the facts of a system in which all is well, with changes."""
    fine = Facts(
        database="/var/h.db", instances=("main",), trees=(tree(),), web=True,
        pools={"emails": ("emails",)}, queues=(queue(),),
        room=Room(free_bytes=10_000 * MIB, total_bytes=20_000 * MIB, free_inodes=10**6),
    )  # fmt: skip
    return replace(fine, **changes)


def queue(name: str = "emails", ready: int = 0, **changes: Any) -> QueueFacts:
    """Return a queue with ready jobs."""
    return replace(QueueFacts(name=name, depth={"ready": ready}), **changes)


def only(found: list[Finding]) -> Finding:
    """Return the one finding."""
    assert len(found) == 1, found
    return found[0]


def test_a_pool_in_back_off_is_told_with_its_error_and_how_often() -> None:
    """The sentence an operator needs at 3 a.m."""
    waiting = pool(backoff_seconds=14.2, note="ImportError in myapp.tasks:12", failures=4)
    found = only(why.explain(facts(trees=(tree(emails=waiting, people=(KEEPER, WEB)),))))
    assert found.what == "pool emails: back-off 14 s, ImportError in myapp.tasks:12, 4th time"
    assert (found.level, found.code) == (Level.DOWN, "pool_backoff")


ROOM = Room(free_bytes=MIB, total_bytes=9 * MIB, free_inodes=10**6)
BUSY = person(state=WorkerState.BUSY, job=12, since_seconds=27, limit_seconds=30)
CASES = {
    "no_supervisor": (facts(instances=(), trees=(), queues=(queue(ready=3),)), "3 jobs wait"),
    "supervisor_hidden": (facts(trees=()), "cannot be looked into"),
    "supervisor_silent": (facts(trees=(tree(supervisor_age_seconds=60),)), "not turned for 60 s"),
    "supervisor_draining": (facts(trees=(tree(draining=True),)), "shutting down"),
    "reload_failed": (facts(trees=(tree(reload_ok=False),)), "last reload of supervisor main"),
    "clock_stepped": (facts(clock_steps={"main": -3600.0}), "set back by 60 min"),
    "pool_parked": (facts(trees=(tree(emails=pool(parked=True, crash_loop=True)),)), "parked"),
    "pool_crash_loop": (facts(trees=(tree(emails=pool(crash_loop=True, note="boom")),)), "boom"),
    "pool_retrying": (
        facts(trees=(tree(
            emails=pool(failures=2, note="boom"),
            people=(KEEPER, WEB, person(state=WorkerState.STARTING, age_seconds=1)),
        ),)),
        "pool emails: being tried again, boom, failed the 2nd time",
    ),
    "pool_drained": (facts(trees=(tree(emails=pool(drained=True)),)), "drained by an operator"),
    "boot_slow": (
        facts(trees=(tree(people=(*PEOPLE, person(state=WorkerState.STARTING, age_seconds=50))),)),
        "starting for 50 s",
    ),
    "job_near_timeout": (facts(trees=(tree(people=(*PEOPLE, BUSY)),)), "near its timeout of 30 s"),
    "job_past_timeout": (
        facts(trees=(tree(people=(*PEOPLE, replace(BUSY, since_seconds=31))),)),
        "past its timeout",
    ),
    "process_silent": (
        facts(trees=(tree(people=(*PEOPLE[1:], replace(KEEPER, beat_age_seconds=20))),)),
        "the keeper: no sign of life for 20 s",
    ),
    "process_troubled": (
        facts(trees=(tree(people=(*PEOPLE[1:], replace(KEEPER, note="prune: disk full"))),)),
        "the keeper: prune: disk full",
    ),
    "queue_paused": (facts(queues=(queue(ready=2, paused=True),)), "paused, 2 jobs wait"),
    "queue_in_no_pool": (facts(queues=(queue("sms", 1),)), "in no pool, 1 job waits for ever"),
    "queue_late": (facts(queues=(queue(ready=1, oldest_ready_age_seconds=90),)), "waited 90 s"),
    "queue_full": (facts(queues=(queue(ready=5, max_depth=5),)), "max_depth of 5"),
    "leases_stale": (facts(queues=(queue(stale_leases=2),)), "2 leases ran out"),
    "task_without_handler": (
        facts(orphans=(Group(queue="emails", task="pdf", number=1000, more=True),)),
        "at least 1000 jobs wait in queue emails",
    ),
    "jobs_died": (
        facts(dead=(Group(queue="q", task="t", number=2, reason="exhausted", error="boom"),)),
        "2 jobs died within the hour, most as exhausted: boom",
    ),
    "log_large": (facts(log_bytes=200 * MIB), "grown to 200 MiB"),
    "disk_low": (facts(room=ROOM), "1 MiB left"),
    "inodes_low": (facts(room=replace(ROOM, free_bytes=9000 * MIB, free_inodes=5)), "5 inodes"),
    "database_locked": (facts(fault=Fault(kind="QueueBusy", text="held by 9")), "locked: held"),
    "database_full": (facts(fault=Fault(kind="DatabaseFull", text="x")), "is full"),
    "database_read_only": (facts(fault=Fault(kind="DatabaseReadOnly", text="x")), "is read-only"),
    "database_unreachable": (facts(fault=Fault(kind="DatabaseUnavailable", text="x")), "unreach"),
}  # fmt: skip


@pytest.mark.parametrize("code", CASES)
def test_each_thing_that_does_not_work_has_one_sentence(code: str) -> None:
    """What is wrong, where, and what next; nothing else is said beside it."""
    known, words = CASES[code]
    found = only(why.explain(known))
    assert found.code == code
    assert words in found.what
    assert found.next
    assert found.level < Level.NOTE


@pytest.mark.parametrize("code", ["boot_slow", "job_near_timeout", "job_past_timeout"])
def test_stacks_are_asked_of_the_supervisor_which_logs_them(code: str) -> None:
    """A worker that is asked writes them where only the supervisor looks."""
    found = next(one for one in why.explain(CASES[code][0]) if one.code == code)
    assert "`kill -USR2 7`" in found.next


def test_a_missing_keeper_or_web_is_told_and_the_keeper_is_worse() -> None:
    """Without a keeper leases run out; without pages nobody sees, yet jobs are run."""
    keeper, web = why.explain(facts(trees=(tree(people=PEOPLE[2:]),)))
    assert keeper.what.startswith("the keeper: no process runs: leases are not renewed")
    assert web.what.startswith("the web server: no process runs: no page")
    assert (keeper.level, web.level) == (Level.DOWN, Level.BROKEN)
    assert why.explain(facts(web=False, trees=(tree(people=(KEEPER, *PEOPLE[2:])),))) == []


def test_the_worst_comes_first_and_what_waits_by_intent_comes_last() -> None:
    """An operator reads the first line."""
    found = why.explain(
        facts(
            fault=Fault(kind="DatabaseFull", text="x"),
            queues=(queue(paused=True), queue("sms", 4)),
            delayed=(Delayed(queue="emails", number=1, next_seconds=30, retries=True),),
            log_bytes=200 * MIB,
        )
    )
    assert [one.code for one in found] == [
        "database_full", "queue_in_no_pool", "log_large", "queue_paused", "jobs_delayed",
    ]  # fmt: skip
    assert found[-1].what == "queue emails: 1 job waits for its back-off, the next is due in 30 s"


def test_when_all_is_well_one_sentence_says_so_and_how_it_is_known() -> None:
    """Silence would not tell a healthy system from a blind command."""
    assert why.explain(facts()) == []
    text = why.all_well(facts(answered_seconds=0.004))
    assert text.startswith("everything works: supervisor main turned 0.1 s ago with 2 workers")
    assert "answered in 4 ms" in text


# ---- the command --------------------------------------------------------------------------


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Maker]:
    """Return a function that prepares a service; it is ended at the end."""
    with services(tmp_path) as make:
        yield make


def codes(tree: Service, code: int) -> dict[str, str]:
    """Run the command; return what it found, by code."""
    done = herdsman("why", "--json", cwd=tree.folder)
    assert done.returncode == code, done.stdout
    found = document(done)
    assert found["ok"] is (code == 0)
    return {one["code"]: one["what"] for one in found["findings"]}


def test_a_real_service_is_well_and_then_told_what_is_not(service: Maker) -> None:
    """Exit code 0, then 1 with the pool's error, the orphan, the dead letter and the clock."""
    tree = service(processes=1).started()
    jobs = tree.queue()
    well = herdsman("why", cwd=tree.folder)
    assert (well.returncode, well.stderr) == (0, "")
    assert well.stdout.startswith("everything works: supervisor main turned")

    jobs.put("nothing", delay=300)
    died = jobs.put("reject")
    tree.queue("pdf").put("nobody can")
    wait_until(lambda: tree.state(int(died)) == "dead")
    lock = Path(f"{tree.database}.main.lock")
    lock.write_text(json.dumps(json.loads(lock.read_text()) | {"started": 0}))
    (tree.folder / "service_handlers.py").write_text("import nothing_of_that_name\n")
    os.kill(next(iter(tree.workers().values())), signal.SIGKILL)
    wait_until(lambda: len(tree.events("worker_exited")) >= 3, what="the successor failed twice")
    found = codes(tree, 1)
    told = next(what for code, what in found.items() if code.startswith("pool_"))
    assert "No module named 'nothing_of_that_name'" in told
    assert found["task_without_handler"] == "task pdf: no handler, 1 job waits in queue pdf"
    assert found["jobs_died"].endswith("1 job died within the hour, most as rejected: never")
    assert "set forward" in found["clock_stepped"]
    assert "jobs_delayed" in found


def test_a_locked_database_is_told_with_its_holder(tmp_path: Path) -> None:
    """The command does not hang, and is no error itself: it names the process."""
    with Queue[Any](tmp_path / "jobs.db", "emails") as queue:
        queue.put(1)
    lock = FileLock(tmp_path / "jobs.db.lock")
    assert lock.acquire(0)
    done = herdsman("why", "-d", tmp_path / "jobs.db", cwd=tmp_path)
    lock.release()
    lock.close()
    assert done.returncode == 1
    first, after, *rest = done.stdout.splitlines()
    assert first.startswith("the database is locked: ")
    assert f"process {os.getpid()}" in first
    assert after.strip().startswith("next: ")
    assert rest[0].startswith("no supervisor runs")


def test_a_database_that_is_not_there_is_a_finding(tmp_path: Path) -> None:
    """No traceback, no file made, exit code 1."""
    done = herdsman("why", "-d", tmp_path / "jobs.db", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith("the database is unreachable: ")
    assert list(tmp_path.iterdir()) == []
