"""List the commands of `herdsman`.

Boundary: names and help only; each command lives in a module of its own.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from supervisor.cli import (
    backup,
    chaos,
    check,
    dead,
    demo,
    doctor,
    import_,
    init,
    jobs,
    metrics,
    put,
    queues,
    run,
    status,
    top,
    why,
    workers,
)

app = typer.Typer(
    name="herdsman",
    help="Durable background jobs on one file, kept running by a supervisor you can see into.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        try:
            number = metadata.version("herdsman")
        except metadata.PackageNotFoundError:
            number = "(not installed)"
        typer.echo(f"herdsman {number}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks of unexpected errors.")
    ] = False,
) -> None:
    """Durable background jobs on one file, kept running by a supervisor you can see into.

    Exit codes: 0 clean, 1 failed check or job, 2 usage, 69 database unavailable, 70 gave up,
    73 another supervisor holds this database, 75 jobs were killed at the deadline,
    78 configuration.
    """


SET_UP: Final = "Set up and run"
JOBS: Final = "Jobs"
LOOK: Final = "Look"
MEND: Final = "Keep it working"

app.command("init", rich_help_panel=SET_UP)(init.init)
app.command("check", rich_help_panel=SET_UP)(check.check)
app.command("run", rich_help_panel=SET_UP)(run.run)
app.command("demo", rich_help_panel=SET_UP)(demo.demo)
app.command("put", rich_help_panel=JOBS)(put.put)
app.add_typer(jobs.app, name="jobs", rich_help_panel=JOBS)
app.add_typer(dead.app, name="dead", rich_help_panel=JOBS)
app.add_typer(import_.app, name="import", rich_help_panel=JOBS)
app.command("status", rich_help_panel=LOOK)(status.status)
app.command("top", rich_help_panel=LOOK)(top.top)
app.command("why", rich_help_panel=LOOK)(why.why)
app.command("metrics", rich_help_panel=LOOK)(metrics.metrics)
app.add_typer(workers.app, name="workers", rich_help_panel=MEND)
app.add_typer(queues.app, name="queues", rich_help_panel=MEND)
app.command("backup", rich_help_panel=MEND)(backup.backup)
app.command("doctor", rich_help_panel=MEND)(doctor.doctor)
app.command("chaos", rich_help_panel=MEND)(chaos.chaos)


def command() -> Any:
    """Return the command that parses a whole command line."""
    return typer.main.get_command(app)
