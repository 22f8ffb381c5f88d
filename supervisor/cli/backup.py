"""Copy a database while it is in use: `herdsman backup`.

Boundary: parse and print; the copy, its check and its mode 0600 are the engine's.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from supervisor.cli import output
from supervisor.cli.context import Config, Database, Json, opened, settings_for
from supervisor.cli.errors import CommandFailed


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The copy; a file not yet there.")],
    config: Config = None,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Copy the database to a new file, of one moment, while everybody goes on using it.

    The copy is checked and flushed before it gets its name, and only its owner can read it. A
    file that exists is never written over: put the date into the name. To restore one, stop the
    service and put the copy in the place of the database, without its -wal and -shm files.
    """
    from queue_core.upkeep import Upkeep

    settings = settings_for(config, database)
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C does: leave no half of a copy
        signal.signal(number, signal.default_int_handler)
    with opened(settings.database) as engine:
        if not isinstance(engine, Upkeep):
            raise CommandFailed("this engine has no backup of its own; use its server's tools")
        done = engine.backup(file)
    if as_json:
        output.emit("backup", path=str(done.path), size_bytes=done.size_bytes)
        return
    output.line(f"{done.path} ({output.size(done.size_bytes)})")
