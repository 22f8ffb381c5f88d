"""Say in plain sentences why each thing that does not work does not, and what to do about it.

Boundary: pure; facts in, sentences out, most severe first. Who gathers the facts is
`cli/why.py`; each sentence says what, where and what next.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Final

from queue_core.job import State
from supervisor import judgement
from supervisor.catalogue import TARGET_WAIT_SECONDS_DEFAULT
from supervisor.closeup import Person, Tree
from supervisor.processes import PoolFacts, WorkerState
from supervisor.reasons import (
    CLOCK_STEP_SECONDS,
    FREE_BYTES_LOW,
    FREE_BYTES_OUT,
    FREE_INODES_LOW,
    LOG_BYTES_LARGE,
    Facts,
    Finding,
    Level,
    brief,
    jobs_are,
    key,
    ordinal,
    span,
)
from supervisor.slots import KEEPER_POOL, WEB_POOL, Kind

BOOT_SLOW_SECONDS: Final = 10.0
"""Importing handlers takes a second or two; who needs more is worth a look."""
NEAR_TIMEOUT_SHARE: Final = 0.8
SILENT_SECONDS: Final = 15.0
"""An idle worker shows a sign of life every 5 s."""


def explain(facts: Facts) -> list[Finding]:
    """Return what does not work, most severe first; empty when all is well."""
    found = [*_database(facts), *_instances(facts)]
    for tree in facts.trees:
        found += _tree(tree, facts)
    found += [*_queues(facts), *_jobs(facts), *_place(facts)]
    return sorted(found, key=lambda finding: finding.level)  # stable: in the order found


def all_well(facts: Facts) -> str:
    """Return the sentence for a system in which nothing is wrong, with how that is known."""
    parts = []
    for tree in facts.trees:
        workers = tree.of(Kind.WORKER)
        keeper = min((one.beat_age_seconds for one in tree.of(Kind.KEEPER)), default=0.0)
        parts.append(
            f"supervisor {tree.instance} turned {span(tree.processes.supervisor_age_seconds)} ago "
            f"with {len(workers)} workers, its keeper gave a sign of life {span(keeper)} ago"
        )
    parts.append(f"the database answered in {facts.answered_seconds * 1000:.0f} ms")
    parts.append("no lease is stale, and no job died within the hour")
    return f"everything works: {', '.join(parts)}"


# ---- the database ---------------------------------------------------------------------


_DATABASE_NEXT: Final[Mapping[str, tuple[str, str]]] = {
    "QueueBusy": ("locked", "end the process it names, or wait for it"),
    "DatabaseFull": ("full", "free space on that disk; nothing accepted is lost meanwhile"),
    "DatabaseReadOnly": ("read-only", "give the file and its folder to the user of the service"),
    "DatabaseCorrupt": ("damaged", "stop the service, run `herdsman doctor`, restore a backup"),
    "SchemaTooNew": ("of a newer herdsman", "upgrade this installation"),
    "SchemaTooOld": ("of an older herdsman", "open it with a version in between"),
}


def _database(facts: Facts) -> Iterator[Finding]:
    if facts.fault is None:
        return
    kind, after = _DATABASE_NEXT.get(
        facts.fault.kind, ("unreachable", "check its path, its folder and the disk")
    )
    yield Finding(
        level=Level.DOWN, code=f"database_{kind.split()[0].replace('-', '_')}", about="database",
        what=f"the database is {kind}: {brief(facts.fault.text)}", next=after,
    )  # fmt: skip


# ---- supervisors ----------------------------------------------------------------------


def _instances(facts: Facts) -> Iterator[Finding]:
    if not facts.instances and not facts.trees:
        waiting = sum(queue.depth.get(State.READY, 0) for queue in facts.queues)
        jobs = f"; {jobs_are(waiting, 'wait')}" if waiting else ""
        yield Finding(
            level=Level.DOWN, code="no_supervisor", about="supervisor",
            what=f"no supervisor runs on {facts.database}{jobs}",
            next="start it with `herdsman run`, or your service manager",
        )  # fmt: skip
    seen = {tree.instance for tree in facts.trees}
    for name in facts.instances:
        if name not in seen:
            yield Finding(
                level=Level.LOOK, code="supervisor_hidden", about=f"supervisor {name}",
                what=f"supervisor {name} holds the database, but cannot be looked into: it is "
                "starting, or runs in another container or as another user",
                next="ask again in some seconds, or where it runs",
            )  # fmt: skip


def _tree(tree: Tree, facts: Facts) -> Iterator[Finding]:
    name = f"supervisor {tree.instance}"
    processes = tree.processes
    if not processes.alive:
        yield Finding(
            level=Level.DOWN, code="supervisor_silent", about=name,
            what=f"{name} (process {tree.supervisor_pid}) has not turned for "
            f"{span(processes.supervisor_age_seconds)}: it is stopped, or the host is overloaded",
            next=f"look at it (`kill -CONT {tree.supervisor_pid}` if it was stopped), "
            "else restart it; leases keep every job",
        )  # fmt: skip
    if processes.draining:
        busy = [one for one in tree.of(Kind.WORKER) if one.job]
        yield Finding(
            level=Level.DOWN, code="supervisor_draining", about=name,
            what=f"{name} is shutting down and claims nothing: "
            f"{jobs_are(len(busy), 'are still running')}",
            next="wait for it, then start it again",
        )  # fmt: skip
        return  # that its processes leave is no further reason
    if not processes.reload_ok:
        yield Finding(
            level=Level.LOOK, code="reload_failed", about=name,
            what=f"the last reload of {name} failed: the configuration before it is in use",
            next="run `herdsman check`, mend what it names, and send HUP again",
        )  # fmt: skip
    step = facts.clock_steps.get(tree.instance, 0.0)
    if abs(step) > CLOCK_STEP_SECONDS:
        way = "forward" if step > 0 else "back"
        yield Finding(
            level=Level.LOOK, code="clock_stepped", about=name,
            what=f"the wall clock was set {way} by {span(abs(step))} since {name} started: delayed "
            "jobs and schedules moved with it, leases did not",
            next="see that the host's time service runs",
        )  # fmt: skip
    for pool in processes.pools:
        if pool.active:
            yield from _pool(pool, tree, facts)
    for person in tree.people:
        yield from _person(person, tree.supervisor_pid)


def _pool(pool: PoolFacts, tree: Tree, facts: Facts) -> Iterator[Finding]:
    live = [one for one in tree.people if one.pool == pool.name]
    ready = [one for one in live if one.state in (WorkerState.IDLE, WorkerState.BUSY)]
    name = {KEEPER_POOL: "the keeper", WEB_POOL: "the web server"}.get(
        pool.name, f"pool {pool.name}"
    )
    if len(facts.trees) > 1:
        name += f" of {tree.instance}"
    if pool.drained:
        yield Finding(
            level=Level.BROKEN, code="pool_drained", about=name,
            what=f"{name}: drained by an operator, {len(live)} of {pool.processes} workers are "
            "left" if live else f"{name}: drained by an operator, no worker runs",
            next="`herdsman workers resume` puts it to work again",
        )  # fmt: skip
        return
    note = f", {brief(pool.note)}" if pool.note else ""
    times = f", {ordinal(pool.failures)} time" if pool.failures else ""
    level = Level.BROKEN if ready else Level.DOWN
    again = "mend it, then `herdsman workers restart --all` tries at once"
    if pool.name == WEB_POOL:
        level = Level.BROKEN
    if pool.parked:
        yield Finding(
            level=level, code="pool_parked", about=name, next=again,
            what=f"{name}: parked, no process of it was ever ready{note}{times}; "
            "one is tried now and then",
        )  # fmt: skip
    elif pool.crash_loop:
        wait = f", next try in {span(pool.backoff_seconds)}" if pool.backoff_seconds else ""
        yield Finding(
            level=level, code="pool_crash_loop", about=name, next=again,
            what=f"{name}: crash loop, its processes keep dying{note}{times}{wait}",
        )  # fmt: skip
    elif pool.backoff_seconds > 0 and len(live) < pool.processes:
        yield Finding(
            level=level, code="pool_backoff", about=name, next=again,
            what=f"{name}: back-off {span(pool.backoff_seconds)}{note}{times}",
        )  # fmt: skip
    elif pool.failures and live and not ready:
        yield Finding(
            level=level, code="pool_retrying", about=name, next=again,
            what=f"{name}: being tried again{note}, failed the {ordinal(pool.failures)} time",
        )  # fmt: skip
    elif not live and pool.processes:
        why = {
            KEEPER_POOL: "leases are not renewed and nothing is promoted until it is back",
            WEB_POOL: "no page and no metrics are served until it is back",
        }.get(pool.name, "none of its jobs is run")
        if pool.name == WEB_POOL and not facts.web:
            return
        yield Finding(
            level=level, code="pool_empty", about=name,
            what=f"{name}: no process runs: {why}{note}",
            next="it is started again within a second or so; ask again, else see the log",
        )  # fmt: skip


def _person(person: Person, supervisor_pid: int) -> Iterator[Finding]:
    worker = person.kind is Kind.WORKER
    name = f"worker {person.name}" if worker else f"the {person.name}"
    if person.state is WorkerState.STARTING:
        if person.age_seconds > BOOT_SLOW_SECONDS:
            yield Finding(
                level=Level.LOOK, code="boot_slow", about=name,
                what=f"{name}: has been starting for {span(person.age_seconds)}",
                next="see what its handlers do at import: "
                f"`kill -USR2 {supervisor_pid}` logs all stacks",
            )  # fmt: skip
        return
    if person.job and person.limit_seconds:
        share = person.since_seconds / person.limit_seconds
        if share >= NEAR_TIMEOUT_SHARE:
            past = "past" if share >= 1 else "near"
            yield Finding(
                level=Level.LOOK, code=f"job_{past}_timeout", about=name,
                what=f"{name}: runs job {person.job} for {span(person.since_seconds)}, {past} its "
                f"timeout of {span(person.limit_seconds)}",
                next=f"`kill -USR2 {supervisor_pid}` logs where it is; raise the timeout if it "
                "is only slow",
            )  # fmt: skip
    silent_seconds = SILENT_SECONDS if worker else judgement.KEEPER_TICK_SECONDS
    if not person.job and person.beat_age_seconds > silent_seconds:
        yield Finding(
            level=Level.LOOK, code="process_silent", about=name,
            what=f"{name}: no sign of life for {span(person.beat_age_seconds)}",
            next="it is killed and replaced at 30 s at the latest",
        )  # fmt: skip
    if person.note and not person.job:
        yield Finding(
            level=Level.BROKEN, code="process_troubled", about=name,
            what=f"{name}: {brief(person.note)}",
            next="mend what it says; it tries again by itself, and nothing accepted is lost",
        )  # fmt: skip


# ---- queues and jobs ------------------------------------------------------------------


def _queues(facts: Facts) -> Iterator[Finding]:
    covered = _covered(facts.pools)
    for queue in facts.queues:
        name = f"queue {queue.name}"
        ready = queue.depth.get(State.READY, 0)
        live = sum(queue.depth.get(s, 0) for s in (State.READY, State.DELAYED, State.CLAIMED))
        if queue.paused:
            yield Finding(
                level=Level.BROKEN if ready else Level.NOTE, code="queue_paused", about=name,
                what=f"{name}: paused, {jobs_are(ready, 'wait')}",
                next=f"`herdsman queues resume {shlex.quote(queue.name)}` lets claims go on",
            )  # fmt: skip
        elif covered is not None and queue.name not in covered:
            yield Finding(
                level=Level.BROKEN if ready else Level.NOTE, code="queue_in_no_pool", about=name,
                what=f"{name}: in no pool, {jobs_are(ready, 'wait')} for ever",
                next="name it in the queues of a pool, and reload",
            )  # fmt: skip
        elif queue.oldest_ready_age_seconds > _target(facts, queue.name):
            yield Finding(
                level=Level.LOOK, code="queue_late", about=name,
                what=f"{name}: late, its oldest job has waited "
                f"{span(queue.oldest_ready_age_seconds)}, the target is "
                f"{span(_target(facts, queue.name))}",
                next="add processes to its pool, or see above for what holds its workers up",
            )  # fmt: skip
        if queue.max_depth is not None and live >= queue.max_depth:
            yield Finding(
                level=Level.BROKEN, code="queue_full", about=name,
                what=f"{name}: full, {live} jobs at a max_depth of {queue.max_depth}: "
                "puts are refused",
                next="let it drain, or raise max_depth",
            )  # fmt: skip
        if queue.stale_leases:
            yield Finding(
                level=Level.LOOK, code="leases_stale", about=name,
                what=f"{name}: {queue.stale_leases} leases ran out and nobody has reaped them",
                next="a keeper does it within a second: see whether one runs",
            )  # fmt: skip


def _target(facts: Facts, queue: str) -> float:
    return facts.targets.get(queue, TARGET_WAIT_SECONDS_DEFAULT)


def _covered(pools: Mapping[str, tuple[str, ...] | None] | None) -> set[str] | None:
    """Return the queues that some pool serves; None when all are, or nobody knows."""
    if pools is None or None in pools.values():
        return None
    return {name for names in pools.values() for name in names or ()}


def _jobs(facts: Facts) -> Iterator[Finding]:
    for group in facts.orphans:
        yield Finding(
            level=Level.BROKEN, code="task_without_handler", about=f"task {group.task}",
            what=f"task {group.task}: no handler, {jobs_are(group.number, 'wait', group.more)} "
            f"in queue {group.queue}",
            next=f"configure [handlers.{key(group.task)}] and reload; the jobs stay",
        )  # fmt: skip
    for group in facts.dead:
        error = f": {brief(group.error)}" if group.error else ""
        yield Finding(
            level=Level.LOOK, code="jobs_died", about=f"queue {group.queue}",
            what=f"queue {group.queue}: {jobs_are(group.number, 'died', group.more)} within the "
            f"hour, most as {group.reason}{error}",
            next=f"`herdsman dead list --queue {group.queue}`, mend it, then `dead replay`",
        )  # fmt: skip
    for delayed in facts.delayed:
        whose = "its" if delayed.number == 1 else "their"
        for_what = f"{whose} {'back-off' if delayed.retries else 'time'}"
        yield Finding(
            level=Level.NOTE, code="jobs_delayed", about=f"queue {delayed.queue}",
            what=f"queue {delayed.queue}: {jobs_are(delayed.number, 'wait')} for {for_what}, "
            f"the next is due in {span(delayed.next_seconds)}",
            next="nothing: that is how they were put",
        )  # fmt: skip


# ---- the place ------------------------------------------------------------------------


def _place(facts: Facts) -> Iterator[Finding]:
    if facts.log_bytes > LOG_BYTES_LARGE:
        yield Finding(
            level=Level.LOOK, code="log_large", about="database",
            what=f"the database's log has grown to {facts.log_bytes // 2**20} MiB: a long reader "
            "keeps it from being copied, or no keeper runs",
            next="end programs that keep a read transaction open on the file",
        )  # fmt: skip
    room = facts.room
    if room is None:
        return
    if room.free_bytes < FREE_BYTES_LOW:
        out = room.free_bytes < FREE_BYTES_OUT
        yield Finding(
            level=Level.BROKEN if out else Level.LOOK, code="disk_low", about="disk",
            what=f"the disk under {facts.database} has {room.free_bytes // 2**20} MiB left",
            next="free space, or shorten keep_done and keep_dead",
        )  # fmt: skip
    if room.free_inodes is not None and room.free_inodes < FREE_INODES_LOW:
        yield Finding(
            level=Level.LOOK, code="inodes_low", about="disk",
            what=f"the disk under {facts.database} has {room.free_inodes} inodes left",
            next="remove small files",
        )  # fmt: skip
