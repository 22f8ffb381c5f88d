"""Put the facts of database and slots into one document, and say what is wrong.

Boundary: pure; facts in, plain data out. The page, `/api/status` and `/readyz`
all show this document, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from queue_core import stats
from queue_core.job import Record, State
from queue_core.stats import QueueFacts, Snapshot
from supervisor.catalogue import TARGET_WAIT_SECONDS_DEFAULT, Expected, clean_label
from supervisor.policy import Cause
from supervisor.processes import PoolFacts, ProcessFacts, WorkerFacts, WorkerState

SCHEMA_VERSION: Final = 1
ERROR_CHARS_MAX: Final = 400
QUEUES_SHOWN_MAX: Final = 200
WORKERS_SHOWN_MAX: Final = 500

_READY: Final = frozenset({WorkerState.IDLE, WorkerState.BUSY})


def document(
    *,
    snapshot: Snapshot | None,
    error: str | None,
    facts: ProcessFacts | None,
    dead: Sequence[Record],
    expected: Expected,
    now_seconds: float,
    about: Mapping[str, str],
) -> dict[str, Any]:
    """Return everything an operator sees, ready for JSON.

    `snapshot` is None when the database could not be read, and `error` says
    why. `about` goes in as it is: version, instance, engine.
    """
    queues = _queues(snapshot, expected)
    reasons = [*readiness(facts, error)]
    return {
        "schema_version": SCHEMA_VERSION,
        "taken": _instant(now_seconds),
        **about,
        "live": facts is not None and facts.alive,
        "ready": not reasons,
        "reasons": reasons,
        "warnings": [*_warnings(queues, facts)],
        "draining": facts is not None and facts.draining,
        "database": {
            "up": snapshot is not None,
            "error": error,
            "size_bytes": snapshot.database_bytes if snapshot else None,
            "log_bytes": snapshot.log_bytes if snapshot else None,
        },
        "depth": None if snapshot is None else _depth(snapshot),
        "totals": _totals(snapshot, facts),
        "queues": queues[:QUEUES_SHOWN_MAX],
        "queues_total": len(queues),
        "pools": [_pool(pool, facts) for pool in facts.pools if pool.active] if facts else [],
        "workers": [_worker(worker) for worker in facts.workers[:WORKERS_SHOWN_MAX]]
        if facts
        else [],
        "dead": [_dead(record) for record in dead],
    }


def readiness(facts: ProcessFacts | None, error: str | None) -> Iterable[str]:
    """Yield one sentence for each reason why new jobs would not be run now."""
    if error is not None:
        yield f"the database cannot be read: {error}"
    if facts is None:
        yield "no supervisor runs here"
        return
    if not facts.alive:
        yield f"the supervisor has been silent for {facts.supervisor_age_seconds:.0f} s"
    if facts.draining:
        yield "the supervisor is draining: it shuts down"
        return  # that its workers leave is no further reason
    for pool in facts.pools:
        if not pool.active or pool.internal or pool.processes == 0:
            continue
        if not any(worker.state in _READY for worker in facts.of(pool.name)):
            note = f": {clean_text(pool.note)}" if pool.note else ""
            state = "parked" if pool.parked else "without a ready worker"
            state = "drained by an operator" if pool.drained else state
            yield f"pool {clean_label(pool.name)} is {state}{note}"


def _warnings(queues: Sequence[Mapping[str, Any]], facts: ProcessFacts | None) -> Iterable[str]:
    for queue in queues:
        if queue["late"]:
            yield (
                f"queue {queue['name']} is late: its oldest job waits "
                f"{queue['oldest_ready_age_seconds']:.0f} s, the target is "
                f"{queue['target_wait_seconds']:g} s"
            )
        if queue["stale_leases"]:
            yield f"queue {queue['name']} has {queue['stale_leases']} leases that ran out"
    for pool in facts.pools if facts else ():
        if pool.active and pool.crash_loop and not pool.parked:
            note = f": {clean_text(pool.note)}" if pool.note else ""
            yield f"pool {clean_label(pool.name)} crashes in a loop{note}"
    if facts and facts.keeper_age_seconds is None and not facts.draining:
        yield "no keeper runs: leases are not renewed until it is back"
    if facts and not facts.reload_ok:
        yield "the last reload failed; the configuration before it is in use"


def _queues(snapshot: Snapshot | None, expected: Expected) -> list[dict[str, Any]]:
    if snapshot is None:
        return []
    found = {facts.name: facts for facts in snapshot.queues}
    for name in expected.queues:
        found.setdefault(name, QueueFacts(name=name, depth={}))
    return [
        _queue(found[name], expected.target_wait_seconds.get(name, TARGET_WAIT_SECONDS_DEFAULT))
        for name in sorted(found)
    ]


def _queue(facts: QueueFacts, target_seconds: float) -> dict[str, Any]:
    age = facts.oldest_ready_age_seconds
    return {
        "name": clean_label(facts.name),
        "depth": {str(state): max(0, facts.depth.get(state, 0)) for state in State},
        "paused": facts.paused,
        "max_depth": facts.max_depth,
        "oldest_ready_age_seconds": round(age, 3),
        "oldest_claimed_age_seconds": round(facts.oldest_claimed_age_seconds, 3),
        "target_wait_seconds": target_seconds,
        "late": age > target_seconds and not facts.paused,
        "stale_leases": facts.stale_leases,
    }


def _depth(snapshot: Snapshot) -> dict[str, int]:
    return {
        str(state): sum(max(0, facts.depth.get(state, 0)) for facts in snapshot.queues)
        for state in State
    }


def _totals(snapshot: Snapshot | None, facts: ProcessFacts | None) -> dict[str, int | None]:
    sums: dict[str, int] = {}
    for (name, _, _, label), value in snapshot.counters.items() if snapshot else ():
        sums[name] = sums.get(name, 0) + value
        sums[f"{name}:{label}"] = sums.get(f"{name}:{label}", 0) + value

    def total(name: str) -> int | None:
        return None if snapshot is None else sums.get(name, 0)

    pools = facts.pools if facts else ()
    crashes = frozenset(Cause) - {Cause.RECYCLE, Cause.SCALE, Cause.DRAIN}
    return {
        "enqueued": total(stats.ENQUEUED),
        "started": total(stats.STARTED),
        "succeeded": total(f"{stats.JOBS_FINISHED}:succeeded"),
        "retries": total(stats.RETRIES),
        "dead_letters": total(stats.DEAD_LETTERS),
        "replayed": total(stats.REPLAYED),
        "leases_reaped": total(stats.REAPED),
        "stale_claims": total(stats.STALE),
        "worker_restarts": sum(pool.restarts for pool in pools) if facts else None,
        "worker_crashes": sum(
            number for pool in pools for cause, number in pool.exits.items() if cause in crashes
        )
        if facts
        else None,
    }


def _pool(pool: PoolFacts, facts: ProcessFacts) -> dict[str, Any]:
    return {
        "name": clean_label(pool.name),
        "internal": pool.internal,
        "processes": pool.processes,
        "states": {str(state): number for state, number in facts.states(pool).items()},
        "exits": {str(cause): number for cause, number in pool.exits.items()},
        "restarts": pool.restarts,
        "backoff_seconds": round(pool.backoff_seconds, 3),
        "crash_loop": pool.crash_loop,
        "parked": pool.parked,
        "note": clean_text(pool.note),
    }


def _worker(worker: WorkerFacts) -> dict[str, Any]:
    return {
        "name": clean_label(worker.name),
        "pool": clean_label(worker.pool),
        "pid": worker.pid,
        "state": str(worker.state),
        "job": worker.job,
        "running_seconds": round(worker.running_seconds, 3),
        "age_seconds": round(worker.age_seconds, 3),
        "jobs_done": worker.jobs_done,
        "jobs_failed": worker.jobs_failed,
        "resident_bytes": worker.resident_bytes,
    }


def _dead(record: Record) -> dict[str, Any]:
    return {
        "id": record.id,
        "queue": clean_label(record.queue),
        "task": clean_label(record.task),
        "reason": str(record.reason) if record.reason else None,
        "error": clean_text(record.error) if record.error else None,
        "attempts": record.attempts,
        "finished": None if record.finished_us is None else _instant(record.finished_us / 1e6),
    }


def clean_text(text: str) -> str:
    """Return one line that can be shown: bounded, no control or direction-changing characters."""
    flat = " ".join(text[: 4 * ERROR_CHARS_MAX].split())
    shown = "".join(char if char.isprintable() else "�" for char in flat)
    return shown if len(shown) <= ERROR_CHARS_MAX else shown[: ERROR_CHARS_MAX - 1] + "…"


def _instant(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
