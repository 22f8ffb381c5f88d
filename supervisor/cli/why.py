"""Say why each thing that does not work does not: `herdsman why`.

Boundary: gathers the facts, bounded in time and number; the sentences are `supervisor.why`'s.
A database that cannot be read is a finding, not an error of this command.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from supervisor.cli import output
from supervisor.cli.context import Config, Database, Json, settings_for
from supervisor.cli.workers import Instance

if TYPE_CHECKING:
    from queue_core.engine import Engine
    from queue_core.stats import QueueFacts, Snapshot
    from supervisor.reasons import Delayed, Facts, Group
    from supervisor.settings import Settings

LOCK_SECONDS: Final = 3.0
"""The lock is held for milliseconds; whoever waits this long has found a culprit."""
HOUR_US: Final = 3_600_000_000
LOOKED_AT: Final = 1000
"""Jobs looked at to find those that died of late, or that are delayed; more are not counted."""
TASKS_MAX: Final = 20


def why(
    config: Config = None,
    database: Database = None,
    instance: Instance = None,
    as_json: Json = False,
) -> None:
    """Say in plain sentences why each thing that does not work does not, and what to do.

    Exit code 0 when all is well, 1 when something is not.
    """
    from supervisor import why as thinking
    from supervisor.reasons import Level

    settings = settings_for(config, database)
    if instance is not None:
        settings = settings.model_copy(update={"instance": instance})
    facts = gather(settings, only=instance)
    found = thinking.explain(facts)
    bad = [finding for finding in found if finding.level < Level.NOTE]
    well = "" if bad else thinking.all_well(facts)
    if as_json:
        output.emit(
            "why",
            ok=not bad,
            summary=well or f"{output.counted(len(bad), 'thing')} not working",
            findings=[
                {
                    "level": finding.level.name.lower(), "code": finding.code,
                    "about": finding.about, "what": finding.what, "next": finding.next,
                }
                for finding in found
            ],
        )  # fmt: skip
    else:
        for finding in found:
            output.line(finding.what)
            output.line(f"    next: {finding.next}")
        if well:
            output.line(well)
    if bad:
        raise typer.Exit(1)


def gather(settings: Settings, *, only: str | None = None) -> Facts:
    """Return the facts about a database, its supervisors and its host; raises nothing."""
    from queue_core.errors import QueueError
    from supervisor import closeup, host
    from supervisor.reasons import Facts, Fault

    database = settings.database
    instances = [one for one in host.held_instances(database) if only in (None, one)]
    names = sorted({*instances, settings.instance})
    trees = [tree for name in names if (tree := closeup.look(database, name)) is not None]
    steps = {
        tree.instance: host.clock_step_seconds(database, tree.instance, tree.started_ticks) or 0.0
        for tree in trees
    }
    known: dict[str, Any] = {
        "database": database,
        "instance": settings.instance,
        "instances": tuple(instances),
        "trees": tuple(trees),
        "clock_steps": steps,
        "room": None if "://" in database else host.room(Path(database).resolve()),
        "pools": None
        if settings.path is None
        else {name: pool.queue_names for name, pool in settings.pools.items()},
        "web": settings.path is not None and settings.web.enabled,
        "targets": {name: one.target_wait_seconds for name, one in settings.queues.items()},
    }
    try:
        return Facts(**known, **_stored(settings))
    except QueueError as error:
        return Facts(**known, fault=Fault(kind=type(error).__name__, text=str(error)))


def _stored(settings: Settings) -> dict[str, Any]:
    from queue_core import open_engine

    began = time.monotonic()
    engine = open_engine(settings.database, create=False, lock_timeout_seconds=LOCK_SECONDS)
    try:
        snapshot = engine.snapshot()
        answered_seconds = time.monotonic() - began
        return {
            "answered_seconds": answered_seconds,
            "queues": snapshot.queues,
            "log_bytes": snapshot.log_bytes,
            "orphans": tuple(_orphans(engine, snapshot, settings)),
            "dead": tuple(_died(engine, snapshot)),
            "delayed": tuple(_delayed(engine, snapshot)),
        }
    finally:
        engine.close()


def _orphans(engine: Engine, snapshot: Snapshot, settings: Settings) -> list[Group]:
    """Return the ready jobs of tasks that no handler is configured for."""
    from queue_core import State
    from supervisor.reasons import Group

    if settings.path is None:
        return []
    found: list[Group] = []
    for queue, task in _living_tasks(snapshot):
        if task in settings.handlers or len(found) == TASKS_MAX:
            continue
        jobs = engine.select(State.READY, queue=queue, task=task, limit=LOOKED_AT)
        if jobs:
            more = len(jobs) == LOOKED_AT
            found.append(Group(queue=queue, task=task, number=len(jobs), more=more))
    return found


def _living_tasks(snapshot: Snapshot) -> list[tuple[str, str]]:
    """Return the (queue, task) that still have live jobs, by what was counted of them."""
    from queue_core import stats

    live: Counter[tuple[str, str]] = Counter()
    for (name, queue, task, label), value in snapshot.counters.items():
        if name in (stats.ENQUEUED, stats.REPLAYED):
            live[queue, task] += value
        elif name == stats.JOBS_FINISHED and label != "discarded":
            live[queue, task] -= value
    return sorted(at for at, number in live.items() if number > 0 and at[1])


def _died(engine: Engine, snapshot: Snapshot) -> list[Group]:
    """Return per queue how many jobs died within the hour, with the most frequent cause."""
    from queue_core import State
    from queue_core.upkeep import Upkeep
    from supervisor.reasons import Group

    if not isinstance(engine, Upkeep) or not any(q.depth.get(State.DEAD) for q in snapshot.queues):
        return []
    records = engine.newest(State.DEAD, limit=LOOKED_AT)
    since_us = snapshot.taken_us - HOUR_US
    by_queue: defaultdict[str, Counter[tuple[str, str, str]]] = defaultdict(Counter)
    for record in records:
        if (record.finished_us or 0) >= since_us:
            first = next(iter((record.error or "").splitlines()), "")
            by_queue[record.queue][record.task, str(record.reason or ""), first] += 1
    more = len(records) == LOOKED_AT
    found = []
    for queue, causes in sorted(by_queue.items()):
        (task, reason, error), _ = causes.most_common(1)[0]
        number = causes.total()
        found.append(
            Group(queue=queue, task=task, number=number, more=more, reason=reason, error=error)
        )
    return found


def _delayed(engine: Engine, snapshot: Snapshot) -> list[Delayed]:
    """Return the queues in which nothing is ready or claimed, but something is delayed."""
    from queue_core import State
    from supervisor.reasons import Delayed

    found = []
    for queue in snapshot.queues:
        if not queue.depth.get(State.DELAYED) or queue.paused or _busy(queue):
            continue
        jobs = engine.select(State.DELAYED, queue=queue.name, limit=LOOKED_AT)
        dues = [job.due_us for job in jobs if job.due_us is not None]
        if dues:
            found.append(
                Delayed(
                    queue=queue.name,
                    number=queue.depth[State.DELAYED],
                    next_seconds=max(0, min(dues) - snapshot.taken_us) / 1e6,
                    retries=all(job.attempts for job in jobs),
                )
            )
    return found


def _busy(queue: QueueFacts) -> bool:
    from queue_core import State

    return bool(queue.depth.get(State.READY) or queue.depth.get(State.CLAIMED))
