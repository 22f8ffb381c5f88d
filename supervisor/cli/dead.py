"""List, show and replay dead jobs: `herdsman dead`.

Boundary: pages by id, replays in batches; a bulk action says how many before it acts, and an
empty filter is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from supervisor.cli import output
from supervisor.cli.context import (
    After,
    Config,
    Database,
    Json,
    Limit,
    QueueFilter,
    TaskFilter,
    opened,
    settings_for,
)
from supervisor.cli.errors import CommandFailed, UsageFault
from supervisor.cli.jobs import attempts, brief, show_record

if TYPE_CHECKING:
    from queue_core.engine import Engine

BATCH: Final = 500

app = typer.Typer(help="List, show and replay dead jobs.", no_args_is_help=True)


class ReasonFilter(StrEnum):
    """Why a job is dead."""

    EXHAUSTED = "exhausted"
    REJECTED = "rejected"
    POISON = "poison"
    EXPIRED = "expired"
    UNDECODABLE = "undecodable"
    INVALID = "invalid"


Reason = Annotated[
    ReasonFilter | None, typer.Option("--reason", "-r", help="Only jobs dead for this reason.")
]


@app.command("list")
def list_dead(
    queue: QueueFilter = None,
    task: TaskFilter = None,
    reason: Reason = None,
    limit: Limit = 50,
    after: After = 0,
    config: Config = None,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """List dead jobs by id, with reason and error."""
    with opened(settings_for(config, database).database) as engine:
        found = _page(engine, queue, task, reason, limit + 1, after)
    page = found[:limit]
    next_after = page[-1].id if len(found) > limit else None
    if as_json:
        output.emit("dead list", jobs=[brief(record) for record in page], next_after=next_after)
        return
    output.table(
        ["id", "queue", "task", "reason", "attempts", "died", "error"],
        [
            [
                record.id, record.queue, record.task, record.reason and record.reason.value,
                attempts(record), output.instant(record.finished_us), record.error,
            ]
            for record in page
        ],
    )  # fmt: skip
    if next_after is not None:
        output.say(f"more: add --after {next_after}")


@app.command("show")
def show(
    job_id: Annotated[int, typer.Argument(metavar="ID", help="The job's id.")],
    full: Annotated[bool, typer.Option("--full", help="Show a long payload whole.")] = False,
    config: Config = None,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Show one dead job with its error, traceback and attempts."""
    show_record(job_id, "dead", full, config, database, as_json, "dead show")


@app.command("replay")
def replay(
    job_ids: Annotated[
        list[int] | None, typer.Argument(metavar="[ID]...", help="Ids of dead jobs.")
    ] = None,
    queue: QueueFilter = None,
    task: TaskFilter = None,
    reason: Reason = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how many.")] = False,
    config: Config = None,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Make dead jobs ready again with no attempt spent: named ones, or all that match."""
    narrowed = any(value is not None for value in (queue, task, reason))
    if job_ids and narrowed:
        raise UsageFault("give ids or a filter (--queue, --task, --reason), not both")
    if not job_ids and not narrowed:
        raise UsageFault(
            "name ids, or narrow it with --queue, --task or --reason; "
            "replaying every dead job at once is refused"
        )
    with opened(settings_for(config, database).database) as engine:
        ids = list(job_ids or _matching(engine, queue, task, reason))
        if dry_run:
            would = sum(1 for one in ids if _is_dead(engine, one)) if job_ids else len(ids)
            _report(matched=len(ids), replayed=0, would=would, as_json=as_json)
            return
        if ids and not job_ids and not yes:
            _confirm(len(ids))
        replayed = sum(
            engine.replay(queue, ids[start : start + BATCH]) for start in range(0, len(ids), BATCH)
        )
    _report(matched=len(ids), replayed=replayed, would=None, as_json=as_json)
    if job_ids and replayed < len(set(ids)):
        raise CommandFailed(f"{len(set(ids)) - replayed} of these jobs were not dead")


def _page(
    engine: Engine, queue: str | None, task: str | None, reason: ReasonFilter | None,
    limit: int, after: int,
) -> list[Any]:  # fmt: skip
    from queue_core.job import Reason as Why
    from queue_core.job import State

    options: dict[str, Any] = {} if reason is None else {"reason": Why(reason.value)}
    return engine.select(State.DEAD, queue=queue, task=task, limit=limit, after=after, **options)


def _matching(
    engine: Engine, queue: str | None, task: str | None, reason: ReasonFilter | None
) -> Iterator[int]:
    after = 0
    while page := _page(engine, queue, task, reason, BATCH, after):
        yield from (record.id for record in page)
        after = page[-1].id


def _is_dead(engine: Engine, job_id: int) -> bool:
    record = engine.find(job_id)
    return record is not None and record.state.value == "dead"


def _confirm(number: int) -> None:
    if not sys.stdin.isatty():
        raise UsageFault(f"this would replay {output.counted(number, 'job')}; add --yes to do it")
    typer.confirm(f"Replay {number} dead jobs?", abort=True, err=True)


def _report(*, matched: int, replayed: int, would: int | None, as_json: bool) -> None:
    if as_json:
        fields = {"matched": matched, "replayed": replayed, "dry_run": would is not None}
        if would is not None:
            fields["would_replay"] = would
        output.emit("dead replay", **fields)
    elif would is not None:
        output.line(f"would replay {output.counted(would, 'job')}")
    else:
        output.line(f"replayed {output.counted(replayed, 'job')}")
