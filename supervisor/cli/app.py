"""List the commands of `herdsman`.

Boundary: names and help only; each command lives in a module of its own.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from supervisor.cli import (
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
    run,
    status,
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


app.command("init")(init.init)
app.command("check")(check.check)
app.command("run")(run.run)
app.command("demo")(demo.demo)
app.command("put")(put.put)
app.command("status")(status.status)
app.add_typer(jobs.app, name="jobs")
app.add_typer(dead.app, name="dead")
app.command("doctor")(doctor.doctor)
app.command("why")(why.why)
app.add_typer(workers.app, name="workers")
app.command("chaos")(chaos.chaos)
app.command("metrics")(metrics.metrics)
app.add_typer(import_.app, name="import")


def command() -> Any:
    """Return the command that parses a whole command line."""
    return typer.main.get_command(app)
