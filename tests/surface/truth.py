"""Say what the numbers of a database must be, from its rows alone.

Boundary: a connection of its own, and no counter is trusted; no test is here.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from supervisor.catalogue import CATALOGUE, Source

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""One scrape: name and labels of each sample, and its value."""
GROWING = tuple(
    family.name
    for family in CATALOGUE
    if family.source is Source.DATABASE and family.type in ("counter", "histogram")
)
"""What no restart sets back; an exporter's own counters begin with its process."""


def total(samples: Samples, name: str, **labels: str) -> int:
    """Add up the samples of a name that have these labels."""
    wanted = set(labels.items())
    return round(
        sum(n for (at, own), n in samples.items() if at == f"herdsman_{name}" and wanted <= own)
    )


def fell(before: Samples, now: Samples) -> list[tuple[object, float, float | None]]:
    """Return what grows by its nature and shows less than in the scrape before, or is gone."""
    return [
        (at, number, now.get(at))
        for at, number in before.items()
        if at[0].startswith(GROWING) and not now.get(at, -1.0) >= number
    ]


def recounted(database: Path, *, replayed: Sequence[int] = ()) -> dict[str, int]:
    """Say what the numbers must be when every job has ended.

    `replayed` are the attempts of each dead job that was made ready again: its row is gone.
    """
    uri = f"file:{database}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as connection:
        connection.execute("BEGIN")  # all of it of one moment

        def one(text: str) -> int:
            return int(connection.execute(text).fetchone()[0] or 0)

        outcomes = dict(
            connection.execute("SELECT outcome, count(*) FROM attempt GROUP BY outcome")
        )
        done = one("SELECT count(*) FROM done WHERE outcome = 'succeeded'")
        cancelled = one("SELECT count(*) FROM done WHERE outcome = 'cancelled'")
        dead = one("SELECT count(*) FROM dead") + len(replayed)
        rows = one("SELECT count(*) FROM job") + done + cancelled + dead - len(replayed)
        runs = sum(one(f"SELECT sum(run) FROM {table}") for table in ("job", "done", "dead"))
        spent = one("SELECT sum(attempts) FROM done WHERE outcome = 'succeeded'")
        spent += one("SELECT sum(attempts) FROM dead") + sum(replayed)
    failed = sum(n for outcome, n in outcomes.items() if outcome != "interrupted")
    ended = done + sum(outcomes.values())
    return {
        "jobs_enqueued_total": rows,
        "claims_total": runs,
        "attempts_started_total": ended,
        "attempts_finished_total": ended,
        **{f"attempts_finished_total:{outcome}": n for outcome, n in outcomes.items()},
        "attempts_finished_total:succeeded": done,
        "jobs_finished_total:succeeded": done,
        "jobs_finished_total:dead": dead,
        "jobs_finished_total:cancelled": cancelled,
        "dead_letters_total": dead,
        "retries_total": failed - dead,
        "errors_total": failed,
        "jobs_replayed_total": len(replayed),
        "queue_wait_seconds_count": ended,
        "attempt_duration_seconds_count": ended,
        "attempt_duration_seconds_count:ok": done,
        "job_latency_seconds_count": done,
        "job_attempts_count": done + dead,
        "job_attempts_sum": spent,
    }


def shown(samples: Samples, names: dict[str, int]) -> dict[str, int]:
    """Return what a scrape says under the names of a recount."""
    found = {}
    for name in names:
        family, _, label = name.partition(":")
        found[name] = total(samples, family, **({"outcome": label} if label else {}))
    return found
