"""Show how the queues stand: `herdsman status`.

Boundary: one snapshot, and one look at the locks beside the database.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from supervisor.cli import output
from supervisor.cli.context import Config, Database, Json, opened, settings_for

if TYPE_CHECKING:
    from queue_core.stats import QueueFacts, Snapshot

STATES: Final = ("ready", "delayed", "claimed", "done", "dead", "cancelled")
TOTALS: Final = (
    "jobs_enqueued_total",
    "jobs_finished_total",
    "retries_total",
    "dead_letters_total",
)


def status(config: Config = None, database: Database = None, as_json: Json = False) -> None:
    """Show the depth of every queue, the oldest waiting job, and whether a supervisor runs."""
    from supervisor.host import held_instances

    settings = settings_for(config, database)
    with opened(settings.database) as engine:
        snapshot = engine.snapshot()
    instances = held_instances(settings.database)
    queues = [_queue(facts, snapshot) for facts in snapshot.queues]
    totals = {name: sum(queue[name] for queue in queues) for name in (*STATES, *TOTALS)}
    if as_json:
        output.emit(
            "status",
            taken_at=output.instant(snapshot.taken_us),
            database=settings.database,
            database_bytes=snapshot.database_bytes,
            log_bytes=snapshot.log_bytes,
            supervisor={"running": bool(instances), "instances": instances},
            queues=queues,
            totals=totals,
        )
        return
    running = f"running ({', '.join(instances)})" if instances else "not running"
    size, log = output.size(snapshot.database_bytes), output.size(snapshot.log_bytes)
    output.facts({
        "database": f"{settings.database} ({size}, log {log})",
        "supervisor": running,
    })  # fmt: skip
    output.line("")
    rows = [_row(queue) for queue in queues]
    if len(queues) > 1:
        rows.append(["all", *(totals[name] for name in STATES), None, None])
    if not rows:
        output.line("no queues yet")
        return
    output.table(["queue", *STATES, "oldest ready", "note"], rows)


def _queue(facts: QueueFacts, snapshot: Snapshot) -> dict[str, Any]:
    return {
        "queue": facts.name,
        **{state: facts.depth.get(state, 0) for state in STATES},
        "paused": facts.paused,
        "max_depth": facts.max_depth,
        "oldest_ready_age_seconds": round(facts.oldest_ready_age_seconds, 3),
        "oldest_claimed_age_seconds": round(facts.oldest_claimed_age_seconds, 3),
        "stale_leases": facts.stale_leases,
        **{name: _total(snapshot.counters, name, facts.name) for name in TOTALS},
    }


def _total(counters: Mapping[tuple[str, str, str, str], int], name: str, queue: str) -> int:
    return sum(value for at, value in counters.items() if at[0] == name and at[1] == queue)


def _row(queue: Mapping[str, Any]) -> list[object]:
    notes = []
    if queue["paused"]:
        notes.append("paused")
    if queue["max_depth"] is not None:
        notes.append(f"limit {queue['max_depth']}")
    if queue["stale_leases"]:
        notes.append(f"{queue['stale_leases']} leases ran out")
    age = queue["oldest_ready_age_seconds"]
    oldest = output.span(age) if queue["ready"] else None
    return [queue["queue"], *(queue[state] for state in STATES), oldest, ", ".join(notes)]
