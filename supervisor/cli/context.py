"""Give commands what most of them need: their common options, the settings, the database.

Boundary: options and opening; prints nothing. Imports of weight happen inside the functions,
so that `herdsman --help` stays quick.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from queue_core.engine import Engine
    from supervisor.settings import Settings

Config = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", metavar="PATH", show_default=False,
        help="Configuration file; else HERDSMAN_CONFIG, herdsman.toml, config/herdsman.toml.",
    ),
]  # fmt: skip
Database = Annotated[
    str | None,
    typer.Option(
        "--database", "-d", metavar="PATH", show_default=False,
        help="Database to use; no configuration is needed then.",
    ),
]  # fmt: skip
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
QueueFilter = Annotated[
    str | None, typer.Option("--queue", "-q", metavar="NAME", help="Only this queue.")
]
TaskFilter = Annotated[
    str | None, typer.Option("--task", "-t", metavar="NAME", help="Only this task.")
]
Limit = Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="Most rows to show.")]
After = Annotated[
    int, typer.Option("--after", min=0, metavar="ID", help="Only jobs with a larger id.")
]


def settings_for(config: Path | None, database: str | None) -> Settings:
    """Return the settings; with a database and no --config, no file is read.

    Raises SettingsError.
    """
    from supervisor import settings

    if database is None:
        return settings.load(config)
    named = settings.without_file(database)
    if config is None:
        return named
    return settings.load(config).model_copy(update={"database": named.database})


@contextmanager
def opened(database: str, *, create: bool = False) -> Iterator[Engine]:
    """Open the engine of a database for one command and close it; raises DatabaseError."""
    from queue_core import open_engine

    engine = open_engine(database, create=create, via="cli")
    try:
        yield engine
    finally:
        engine.close()
