"""Print one scrape: what `/metrics` would answer now, also where nothing is served.

Boundary: parse, read, print; the numbers are `supervisor.metrics`'.
"""

from __future__ import annotations

from typing import Annotated, Final

import typer

from supervisor.cli import output
from supervisor.cli.context import Config, Database, Json, settings_for

EXIT_UNAVAILABLE: Final = 69


def metrics(
    config: Config = None,
    database: Database = None,
    json: Json = False,
    openmetrics: Annotated[
        bool, typer.Option("--openmetrics", help="Print OpenMetrics instead of Prometheus text.")
    ] = False,
) -> None:
    """Print one scrape of all metrics; exit 69 when the database could not be read.

    Workers are included when a supervisor of this database runs on this host.
    """
    from queue_core import open_engine
    from supervisor import catalogue
    from supervisor.metrics import Registries, render, version
    from supervisor.processes import attach_living, read_processes
    from supervisor.reading import ReadFailed, numbers

    settings = settings_for(config, database)
    reader = numbers(open_engine(settings.database, create=False))
    failure: str | None = None
    try:
        reader.read()  # what is printed below comes from this read: it is kept for a second
    except ReadFailed as failed:
        failure = str(failed)
    table = attach_living(settings.database, settings.instance)
    registries = Registries(
        reader,
        catalogue.expected(settings),
        look=None if table is None else lambda: read_processes(table),
        version=version(),
        engine="postgresql" if "://" in settings.database else "sqlite",
    )
    if json:
        samples = [
            {"name": sample.name, "labels": sample.labels, "value": sample.value}
            for family in registries.everything.collect()
            for sample in family.samples
        ]
        output.emit("metrics", samples=samples)
    else:
        accept = "application/openmetrics-text; version=1.0.0" if openmetrics else None
        body, _ = render(registries.everything, accept)
        output.line(body.decode().rstrip("\n"), raw=True)
    if failure is not None:
        output.say(f"the database could not be read: {failure}")
        raise typer.Exit(EXIT_UNAVAILABLE)
