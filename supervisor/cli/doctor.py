"""Examine host, database and configuration: `herdsman doctor`.

Boundary: parse and print; the points are `supervisor.doctor`'s.
"""

from __future__ import annotations

from typing import Annotated

import typer

from supervisor.cli import output
from supervisor.cli.context import Config, Database, Json, settings_for
from supervisor.cli.workers import Instance


def doctor(
    recount: Annotated[
        bool, typer.Option("--recount", help="Compare the counters with the rows; reads them all.")
    ] = False,
    mend: Annotated[
        bool, typer.Option("--mend", help="Recount, and correct counters that are wrong.")
    ] = False,
    config: Config = None,
    database: Database = None,
    instance: Instance = None,
    as_json: Json = False,
) -> None:
    """Examine host, database and configuration, and say what is, or will be, trouble.

    Exit code 1 if a point fails; warnings leave it at 0.
    """
    from supervisor import doctor as medicine
    from supervisor.points import Status

    settings = settings_for(config, database)
    if instance is not None:
        settings = settings.model_copy(update={"instance": instance})
    points = medicine.examine(settings, recount=recount, mend=mend)
    failed = [point for point in points if point.status is Status.FAIL]
    if as_json:
        output.emit(
            "doctor",
            ok=not failed,
            points=[
                {
                    "name": point.name, "status": str(point.status),
                    "seen": point.seen, "next": point.next or None,
                }
                for point in points
            ],
        )  # fmt: skip
    else:
        width = max(len(point.name) for point in points)
        for point in points:
            output.line(f"{point.status!s:<4}  {point.name:<{width}}  {point.seen}")
            if point.next and point.status is not Status.OK:
                output.line(f"{'':<4}  {'':<{width}}  next: {point.next}")
    if failed:
        raise typer.Exit(1)
