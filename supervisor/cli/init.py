"""Write a commented configuration and sample handlers: `herdsman init`.

Boundary: creates files, never changes one that is there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from supervisor.cli import output
from supervisor.cli.context import Json


def init(
    folder: Annotated[Path, typer.Argument(help="Where to write; created when needed.")] = Path(),
    as_json: Json = False,
) -> None:
    """Write a commented herdsman.toml and sample handlers; never overwrites."""
    from supervisor.cli import templates

    texts = {
        "herdsman.toml": templates.config(database="var/herdsman.db", module="handlers"),
        "handlers.py": templates.HANDLERS,
    }
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    written: list[str] = []
    kept: list[str] = []
    for name, text in texts.items():
        path = folder / name
        (written if _write(path, text) else kept).append(str(path))
    if as_json:
        output.emit("init", written=written, kept=kept)
        return
    for path_text in written:
        output.line(f"wrote {path_text}")
    for path_text in kept:
        output.line(f"kept {path_text}, which was there before")
    where = "" if folder == Path() else f"cd {folder} && "
    output.say(f"Next: {where}herdsman check && herdsman run")


def _write(path: Path, text: str) -> bool:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return False
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)
    return True
