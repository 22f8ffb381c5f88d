"""List and show jobs: `herdsman jobs`.

Boundary: pages by id through `Engine.select` and `Engine.find`; changes nothing.
"""

from __future__ import annotations

import json
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
from supervisor.cli.errors import CommandFailed

if TYPE_CHECKING:
    from queue_core.job import Attempt, Record

SHOWN_BYTES_MAX: Final = 2048

app = typer.Typer(help="List and show jobs.", no_args_is_help=True)


class StateFilter(StrEnum):
    """The states a list can be narrowed to; `live` is ready, delayed and claimed."""

    LIVE = "live"
    ALL = "all"
    READY = "ready"
    DELAYED = "delayed"
    CLAIMED = "claimed"
    DONE = "done"
    DEAD = "dead"
    CANCELLED = "cancelled"


_GROUPS: Final = {
    StateFilter.LIVE: ("ready", "delayed", "claimed"),
    StateFilter.ALL: ("ready", "delayed", "claimed", "done", "dead", "cancelled"),
}


@app.command("list")
def list_jobs(
    state: Annotated[
        StateFilter, typer.Option("--state", "-s", help="Only jobs in this state.")
    ] = StateFilter.LIVE,
    queue: QueueFilter = None,
    task: TaskFilter = None,
    limit: Limit = 50,
    after: After = 0,
    config: Config = None,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """List jobs by id, one page at a time."""
    from queue_core.job import State

    with opened(settings_for(config, database).database) as engine:
        # A page of each state, merged: any job past the last id of the page is in none of them.
        found = [
            record
            for name in _GROUPS.get(state, (state.value,))
            for record in engine.select(
                State(name), queue=queue, task=task, limit=limit + 1, after=after
            )
        ]
    found.sort(key=lambda record: record.id)
    page = found[:limit]
    next_after = page[-1].id if len(found) > limit else None
    if as_json:
        output.emit("jobs list", jobs=[brief(record) for record in page], next_after=next_after)
        return
    output.table(
        ["id", "queue", "task", "state", "attempts", "priority", "enqueued", "note"],
        [
            [
                record.id, record.queue, record.task, record.state.value, attempts(record),
                record.priority, output.instant(record.enqueued_us), _note(record),
            ]
            for record in page
        ],
    )  # fmt: skip
    if next_after is not None:
        output.say(f"more: add --after {next_after}")


def _note(record: Record) -> str | None:
    match record.state.value:
        case "delayed":
            return f"due {output.instant(record.due_us)}"
        case "claimed":
            return record.worker
        case "dead":
            return f"{record.reason.value if record.reason else ''}: {record.error or ''}"
    return None


@app.command("show")
def show(
    job_id: Annotated[int, typer.Argument(metavar="ID", help="The job's id.")],
    full: Annotated[bool, typer.Option("--full", help="Show a long payload whole.")] = False,
    config: Config = None,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Show one job in whatever state, with its payload and its attempts."""
    show_record(job_id, None, full, config, database, as_json, "jobs show")


def show_record(
    job_id: int, state: str | None, full: bool, config: Any, database: Any, as_json: bool, name: str
) -> None:
    """Print one job, which must be in `state` when that is given; raises CommandFailed."""
    with opened(settings_for(config, database).database) as engine:
        record = engine.find(job_id)
    if record is None:
        raise CommandFailed(f"there is no job {job_id}; finished jobs are pruned in time")
    if state is not None and record.state.value != state:
        raise CommandFailed(
            f"job {job_id} is not {state} but {record.state.value}; see 'herdsman jobs show'"
        )
    if as_json:
        output.emit(name, job=complete(record, full=full))
        return
    _print(record, full)


def _print(record: Record, full: bool) -> None:
    output.facts({
        "id": record.id,
        "queue": record.queue,
        "task": record.task if record.task != record.queue else None,
        "state": record.state.value + (f" ({record.reason.value})" if record.reason else ""),
        "attempts": attempts(record),
        "worker deaths": record.deaths or None,
        "priority": record.priority or None,
        "key": record.key,
        "group": record.group,
        "headers": record.headers,
        "worker": record.worker,
        "enqueued": output.instant(record.enqueued_us),
        "due": output.instant(record.due_us) if record.state.value == "delayed" else None,
        "claimed": output.instant(record.claimed_us),
        "finished": output.instant(record.finished_us),
        "expires": output.instant(record.expires_us),
        "error": record.error,
    })  # fmt: skip
    text, cut = payload_text(record.payload, full)
    output.line("payload")
    output.block(text)
    if cut:
        output.say(f"the payload is cut: it has {len(record.payload)} bytes; add --full")
    if record.traceback:
        output.line("traceback")
        output.block(record.traceback)
    if record.ledger:
        output.line("")
        output.table(
            ["run", "started", "took", "outcome", "cause", "worker", "error"],
            [
                [
                    line.run, output.instant(line.started_us),
                    output.span(max(0, line.finished_us - line.started_us) / 1e6),
                    line.outcome.value, line.cause, line.worker, line.error,
                ]
                for line in record.ledger
            ],
        )  # fmt: skip


def attempts(record: Record) -> str:
    """Return "2/5", or "2" when the handler's own limit applies."""
    most = f"/{record.max_attempts}" if record.max_attempts is not None else ""
    return f"{record.attempts}{most}"


def payload_text(payload: bytes, full: bool) -> tuple[str, bool]:
    """Return a payload for people, and whether it was cut."""
    shown = payload if full else payload[:SHOWN_BYTES_MAX]
    return shown.decode("utf-8", "replace"), len(shown) < len(payload)


def brief(record: Record) -> dict[str, Any]:
    """Return what a list says of a job."""
    return {
        "id": record.id,
        "queue": record.queue,
        "task": record.task,
        "state": record.state.value,
        "priority": record.priority,
        "attempts": record.attempts,
        "max_attempts": record.max_attempts,
        "worker_deaths": record.deaths,
        "key": record.key,
        "enqueued_at": output.instant(record.enqueued_us),
        "due_at": output.instant(record.due_us),
        "claimed_at": output.instant(record.claimed_us),
        "finished_at": output.instant(record.finished_us),
        "worker": record.worker,
        "reason": record.reason.value if record.reason else None,
        "error": record.error,
        "payload_bytes": len(record.payload),
    }


def complete(record: Record, *, full: bool) -> dict[str, Any]:
    """Return everything of a job; `payload` is null when it was cut or is no JSON."""
    text, cut = payload_text(record.payload, full)
    payload = _value(text) if not cut else None
    return {
        **brief(record),
        "run": record.run,
        "group": record.group,
        "headers": _value(record.headers) if record.headers else {},
        "ready_at": output.instant(record.ready_us),
        "expires_at": output.instant(record.expires_us),
        "traceback": record.traceback,
        "payload": payload,
        "payload_text": text,
        "payload_cut": cut,
        "ledger": [_attempt(line) for line in record.ledger],
    }


def _attempt(line: Attempt) -> dict[str, Any]:
    return {
        "run": line.run,
        "started_at": output.instant(line.started_us),
        "finished_at": output.instant(line.finished_us),
        "outcome": line.outcome.value,
        "cause": line.cause,
        "worker": line.worker,
        "error": line.error,
    }


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
