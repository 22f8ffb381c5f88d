"""Show queues and workers as they change: `herdsman top`.

Boundary: reads a snapshot and the shared records now and then; draws on a terminal, and prints
one frame elsewhere.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from supervisor.cli import output
from supervisor.cli.context import Config, Database, Json, opened, settings_for
from supervisor.cli.errors import UsageFault, printable
from supervisor.cli.workers import COLUMNS, Instance, shown, worker_rows

if TYPE_CHECKING:
    from queue_core.engine import Engine
    from supervisor.closeup import Tree
    from supervisor.settings import Settings

EVERY_SECONDS_MIN: Final = 0.2
STATES: Final = ("ready", "delayed", "claimed", "done", "dead")
QUEUE_COLUMNS: Final = ("queue", *STATES, "in/s", "out/s", "oldest ready", "note")
ROWS_MAX: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """What one look saw. `counts` are jobs that came in and that ended, by queue."""

    taken_us: int
    queues: list[dict[str, Any]]
    workers: list[dict[str, Any]]
    running: bool
    counts: dict[str, tuple[int, int]]


def top(
    every: Annotated[
        str, typer.Option("--every", "-n", metavar="DURATION", help="Between two looks.")
    ] = "1s",
    once: Annotated[bool, typer.Option("--once", help="Print one frame and leave.")] = False,
    config: Config = None,
    database: Database = None,
    instance: Instance = None,
    as_json: Json = False,
) -> None:
    """Watch queues and workers until Ctrl-C; one frame where there is no terminal."""
    from supervisor import durations

    settings = settings_for(config, database)
    if instance is not None:
        settings = settings.model_copy(update={"instance": instance})
    try:
        pause = max(EVERY_SECONDS_MIN, durations.seconds(every))
    except ValueError as error:
        raise UsageFault(f"--every {every}: {error}") from error
    with opened(settings.database) as engine:
        if as_json or once or not sys.stdout.isatty():
            _print(settings, _look(engine, settings, None), as_json)
        else:
            _watch(engine, settings, pause)


def _look(engine: Engine, settings: Settings, before: _Frame | None) -> _Frame:
    from queue_core import stats
    from supervisor import closeup

    snapshot = engine.snapshot()
    counts: dict[str, list[int]] = {queue.name: [0, 0] for queue in snapshot.queues}
    for (name, queue, _, _), value in snapshot.counters.items():
        if name in (stats.ENQUEUED, stats.JOBS_FINISHED) and queue in counts:
            counts[queue][name == stats.JOBS_FINISHED] += value
    queues = []
    for facts in snapshot.queues:
        came, ended = counts[facts.name]
        old = before.counts.get(facts.name, (came, ended)) if before else (came, ended)
        seconds = (snapshot.taken_us - before.taken_us) / 1e6 if before else 0.0
        queues.append({
            "queue": facts.name,
            **{state: facts.depth.get(state, 0) for state in STATES},
            "in_per_second": round((came - old[0]) / seconds, 1) if seconds > 0 else None,
            "out_per_second": round((ended - old[1]) / seconds, 1) if seconds > 0 else None,
            "oldest_ready_age_seconds": round(facts.oldest_ready_age_seconds, 3),
            "paused": facts.paused,
        })  # fmt: skip
    tree: Tree | None = closeup.look(settings.database, settings.instance)
    return _Frame(
        taken_us=snapshot.taken_us,
        queues=queues,
        workers=[] if tree is None else list(worker_rows(tree, {})),
        running=tree is not None,
        counts={name: (came, ended) for name, (came, ended) in counts.items()},
    )


def _queue_cells(row: dict[str, Any]) -> list[object]:
    age = row["oldest_ready_age_seconds"]
    return [
        row["queue"], *(row[state] for state in STATES),
        row["in_per_second"], row["out_per_second"],
        output.span(age) if row["ready"] else None, "paused" if row["paused"] else None,
    ]  # fmt: skip


def _print(settings: Settings, frame: _Frame, as_json: bool) -> None:
    if as_json:
        output.emit(
            "top",
            taken_at=output.instant(frame.taken_us), instance=settings.instance,
            running=frame.running, queues=frame.queues, workers=frame.workers,
        )  # fmt: skip
        return
    output.table(QUEUE_COLUMNS, [_queue_cells(row) for row in frame.queues])
    output.line("")
    if frame.running:
        output.table(COLUMNS, [shown(row) for row in frame.workers])
    else:
        output.line(f"no supervisor {settings.instance} runs")


def _watch(engine: Engine, settings: Settings, pause: float) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    frame = _look(engine, settings, None)
    try:
        with Live(auto_refresh=False, screen=True) as live:
            while True:
                state = "running" if frame.running else "not running"
                title = f"{settings.database}  supervisor {settings.instance} {state}"
                live.update(
                    Group(
                        Text(printable(title)),
                        _drawn(QUEUE_COLUMNS, [_queue_cells(row) for row in frame.queues]),
                        _drawn(COLUMNS, [shown(row) for row in frame.workers]),
                    ),
                    refresh=True,
                )
                time.sleep(pause)
                frame = _look(engine, settings, frame)
    except KeyboardInterrupt:
        return  # how one leaves it


def _drawn(columns: tuple[str, ...], rows: list[list[object]]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, min_width=len(name))  # what is left over is cut off at the right
    for row in rows[:ROWS_MAX]:
        cells = ("-" if cell is None or cell == "" else str(cell) for cell in row)
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table
