"""Examine host, database and configuration, and say what is going to be trouble.

Boundary: looks, and mends counters only when told to; the host's points are `points`'. `why`
says what does not work now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from queue_core import open_engine
from queue_core.errors import QueueError
from queue_core.upkeep import Diagnostics, Drift, Upkeep
from supervisor import closeup, host, points
from supervisor.catalogue import targets_between_bounds
from supervisor.points import Point, Status, well
from supervisor.reasons import CLOCK_STEP_SECONDS, LOG_BYTES_LARGE, brief, span
from supervisor.settings import Settings

LOCK_SECONDS: Final = 5.0


def examine(settings: Settings, *, recount: bool = False, mend: bool = False) -> list[Point]:
    """Examine everything; `recount` compares counters with rows, `mend` corrects them."""
    path = Path(settings.database).resolve()
    found = [*points.kernel(), points.package(), points.descriptors(settings)]
    if "://" not in settings.database:
        found += [
            *points.place(path), *points.files(path), *points.room(path), points.slots(settings),
        ]  # fmt: skip
    found += [*_configuration(settings), *_clocks(settings), *points.systemd()]
    return found + _database(settings, recount=recount or mend, mend=mend)


# ---- configuration and clocks ---------------------------------------------------------


def _configuration(settings: Settings) -> Iterator[Point]:
    if settings.path is None:
        yield Point(
            name="configuration", status=Status.INFO, seen="none was read: --database was given"
        )
        return
    warnings = (*settings.warnings, *targets_between_bounds(settings))
    for warning in warnings:
        yield Point(
            name="configuration", status=Status.WARN, seen=warning, next=f"see {settings.path}"
        )
    if not warnings:
        yield well(
            "configuration",
            f"{settings.path}: {len(settings.handlers)} handlers, {len(settings.pools)} pools",
        )


def _clocks(settings: Settings) -> Iterator[Point]:
    running = host.held_instances(settings.database)
    if not running:
        yield Point(
            name="supervisor", status=Status.INFO, seen="none runs on this database",
            next="`herdsman run` starts one",
        )  # fmt: skip
    for name in running:
        tree = closeup.look(settings.database, name)
        if tree is None:
            yield Point(
                name="supervisor", status=Status.INFO,
                seen=f"{name} holds the database, and cannot be looked into from here",
            )  # fmt: skip
            continue
        yield well("supervisor", f"{name} is process {tree.supervisor_pid}")
        step = host.clock_step_seconds(settings.database, name, tree.started_ticks) or 0.0
        if abs(step) > CLOCK_STEP_SECONDS:
            yield Point(
                name="clock", status=Status.WARN,
                seen=f"the wall clock was set by {span(abs(step))} since {name} started",
                next="see that the host's time service runs; leases are not touched by it",
            )  # fmt: skip
        else:
            yield well("clock", f"the wall clock was not set since {name} started")


# ---- the database ---------------------------------------------------------------------


def _database(settings: Settings, *, recount: bool, mend: bool) -> list[Point]:
    if "://" not in settings.database and not Path(settings.database).exists():
        return [Point(
            name="database", status=Status.WARN, seen=f"{settings.database} does not exist yet",
            next="`herdsman run` or the first put makes it",
        )]  # fmt: skip
    found: list[Point] = []
    try:
        engine = open_engine(settings.database, create=False, lock_timeout_seconds=LOCK_SECONDS)
        try:
            if not isinstance(engine, Upkeep):
                return [well("database", "it answers")]
            found += judge_database(engine.diagnostics())
            found.append(_integrity(engine.check))
            if recount:
                found.append(judge_drift(engine.recount(mend=mend), mended=mend))
        finally:
            engine.close()
    except QueueError as error:
        found.append(Point(
            name="database", status=Status.FAIL, seen=brief(str(error)),
            next="see `herdsman why`; restore a backup if the file is damaged",
        ))  # fmt: skip
    return found


def judge_database(facts: Diagnostics) -> Iterator[Point]:
    """Judge what the database says of itself."""
    yield well(
        "database",
        f"SQLite {facts.sqlite_version}, schema {facts.schema_version}, {facts.journal_mode}, "
        f"durability {facts.durability}, {facts.database_bytes // 2**20} MiB",
    )
    if facts.wal_reset_bug:
        off = facts.lock == "off"
        yield Point(
            name="sqlite bug", status=Status.FAIL if off else Status.INFO,
            seen=f"SQLite {facts.sqlite_version} can damage a database when its log starts anew; "
            + ("the lock is off, so nothing protects it" if off else "the lock keeps us clear"),
            next="let every writer use herdsman's lock" if not off else "turn the lock on",
        )  # fmt: skip
    if facts.log_bytes > LOG_BYTES_LARGE:
        yield Point(
            name="log", status=Status.WARN, seen=f"{facts.log_bytes // 2**20} MiB wait in the log",
            next="end programs that keep a read transaction open, and see that a keeper runs",
        )  # fmt: skip
    else:
        yield well("log", f"{facts.log_bytes // 1024} KiB wait in the log")
    if facts.leases_expired:
        yield Point(
            name="leases", status=Status.WARN,
            seen=f"{facts.leases_expired} of {facts.leases} leases ran out unreaped",
            next="start a supervisor: its keeper reaps them within a second",
        )  # fmt: skip
    else:
        yield well("leases", f"{facts.leases} claims, none ran out")


def _integrity(check: Callable[[], list[str]]) -> Point:
    problems = check()
    if problems:
        return Point(
            name="integrity", status=Status.FAIL,
            seen=f"{len(problems)} problems, the first: {brief(problems[0])}",
            next="stop the service and restore a backup; keep the damaged file",
        )  # fmt: skip
    return well("integrity", "every page is sound")


def judge_drift(drifts: list[Drift], *, mended: bool) -> Point:
    """Judge where counters and rows differ."""
    if not drifts:
        return well("counters", "they equal the rows")
    first = drifts[0]
    seen = (
        f"{len(drifts)} differ from the rows: queue {first.queue} has {first.counted} "
        f"{first.state}, its counter says {first.stored}"
    )
    if mended:
        return Point(name="counters", status=Status.INFO, seen=f"{seen}; mended")
    return Point(
        name="counters", status=Status.FAIL, seen=seen,
        next="`herdsman doctor --mend` corrects them; find who writes SQL by hand",
    )  # fmt: skip
