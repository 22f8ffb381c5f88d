"""Take in the jobs of another queue: `herdsman import`.

Boundary: options and words; `supervisor.importing` does the work.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from supervisor.cli import output
from supervisor.cli.context import Config, Database, Json, opened, settings_for
from supervisor.cli.errors import CommandFailed, UsageFault

if TYPE_CHECKING:
    from supervisor.importing.arrival import Source
    from supervisor.importing.carry import Report

app = typer.Typer(
    help="Bring the jobs of another queue in; the source is only read. Stop its workers first.",
    no_args_is_help=True,
)

STATES = ("ready", "delayed", "in flight", "failed", "done")

To = Annotated[
    str | None,
    typer.Option("--queue", "-q", metavar="NAME", help="Queue to bring them into; else its own."),
]
Only = Annotated[
    str | None, typer.Option("--only", metavar="NAME", help="Take only this queue of the source.")
]
Task = Annotated[
    str | None,
    typer.Option("--task", "-t", metavar="NAME", help="Their task; else the queue."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would come in; store nothing.")]


@app.command("tiny-queue")
def tiny_queue(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with its .ndjson files.")],
    queue: To = None,
    only: Only = None,
    task: Task = None,
    dry_run: DryRun = False,
    config: Config = None,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Bring in the pending, in-flight and dead jobs of tiny-queue.

    Run it again after an interruption: no job comes twice. Keys are the jobs' ids.
    """
    from supervisor.importing.tiny_queue import TinyQueueFolder

    _must_be(folder, folder.is_dir(), "folder")
    source = TinyQueueFolder(folder, only=only, queue=queue, task=task)
    _run(source, folder, dry_run, config, database, as_json)


@app.command("litequeue")
def litequeue(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Its SQLite file.")],
    queue: Annotated[
        str, typer.Option("--queue", "-q", metavar="NAME", help="Queue to bring them into.")
    ] = "default",
    table: Annotated[
        str, typer.Option("--table", metavar="NAME", help="Table of the queue, in old versions.")
    ] = "Queue",
    json_payloads: Annotated[
        bool,
        typer.Option("--json-payloads", help="Take each text for the JSON document it holds."),
    ] = False,
    task: Task = None,
    dry_run: DryRun = False,
    config: Config = None,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Bring in the messages of litequeue: ready, locked, failed, and done ones that hold a key.

    Run it again after an interruption: no job comes twice.
    """
    from supervisor.importing.litequeue import LiteQueueFile

    _must_be(file, file.is_file(), "file")
    source = LiteQueueFile(file, queue=queue, task=task, table=table, json_payloads=json_payloads)
    _run(source, file, dry_run, config, database, as_json)


@app.command("localqueue")
def localqueue(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of its localqueue.db.")],
    queue: To = None,
    only: Only = None,
    task: Task = None,
    dry_run: DryRun = False,
    config: Config = None,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Bring in the messages of localqueue: ready, leased, failed, and acked ones with a job_id.

    Run it again after an interruption: no job comes twice.
    """
    from supervisor.importing.localqueue import LocalQueueFolder

    _must_be(folder, (folder / "localqueue.db").is_file() or folder.is_file(), "localqueue folder")
    source = LocalQueueFolder(folder, only=only, queue=queue, task=task)
    _run(source, folder, dry_run, config, database, as_json)


def _must_be(path: Path, is_it: bool, what: str) -> None:
    if not is_it:
        raise UsageFault(f"{path} is no {what}; name one that exists")


def _run(
    source: Source,
    path: Path,
    dry_run: bool,
    config: Path | None,
    database: str | None,
    as_json: bool,
) -> None:
    from queue_core.clock import SystemClock
    from queue_core.upkeep import Upkeep
    from supervisor.importing.carry import carry

    settings = settings_for(config, database)
    now_us = SystemClock().wall_us()
    if dry_run and "://" not in settings.database and not Path(settings.database).exists():
        report = carry(source, None, now_us=now_us, dry_run=True)
    else:
        with opened(settings.database, create=not dry_run) as engine:
            if not isinstance(engine, Upkeep):
                raise CommandFailed("this kind of database takes no imports; name a file")
            progress = _Progress()
            report = carry(
                source, engine, now_us=now_us, dry_run=dry_run, progress=progress.advance
            )
            progress.end()
    _tell(source.kind, path, report, dry_run, as_json)


class _Progress:
    """Count on a terminal's standard error; say nothing elsewhere."""

    def __init__(self) -> None:
        self._total = 0
        self._shown = sys.stderr.isatty()

    def advance(self, number: int) -> None:
        self._total += number
        if self._shown:
            print(f"\r{self._total} jobs read", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._shown and self._total:
            print(file=sys.stderr)


def _tell(kind: str, path: Path, report: Report, dry_run: bool, as_json: bool) -> None:
    queues = [
        {
            "queue": queue,
            **{state.replace(" ", "_"): states[state] for state in STATES},
            "known_already": report.known[queue],
        }
        for queue, states in sorted(report.arrived.items())
    ]
    notes = report.notes
    if as_json:
        output.emit(
            "import",
            source={"kind": kind, "path": str(path)},
            dry_run=dry_run,
            arrived=report.total,
            known_already=sum(report.known.values()),
            unreadable=notes.unreadable,
            keys_dropped=notes.keys_dropped,
            done_left_out=notes.done_without_key,
            queues=queues,
            notes=notes.sentences,
        )
    else:
        columns = ["queue", *STATES, "known already"]
        output.table(columns, [list(row.values()) for row in queues])
    for sentence in notes.sentences:
        output.say(sentence)
    verb = "would come in" if dry_run else "came in"
    came = output.counted(report.total, "job")
    output.say(f"{came} {verb}, {sum(report.known.values())} were here already")
    if notes.unreadable:
        raise CommandFailed(
            f"{notes.unreadable} entries of {path} could not be read; everything else {verb}"
        )
