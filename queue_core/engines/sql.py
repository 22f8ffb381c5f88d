"""Load the named statements of a `.sql` file.

A statement begins with a line `-- name: some_name` and ends where the next one
begins. Comment lines below the name are its contract; they are not sent.

Boundary: text only; nothing here runs a statement.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from types import MappingProxyType

_NAME = re.compile(r"^--\s*name:\s*([a-z][a-z0-9_]*)\s*$")


def parse(text: str) -> Mapping[str, str]:
    """Split a file's text into its statements, in the order of the file.

    Raises ValueError on a name given twice and on text before the first name.
    """
    statements: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in text.splitlines():
        if match := _NAME.match(line):
            if match[1] in statements:
                raise ValueError(f"statement {match[1]} is named twice")
            current = statements[match[1]] = []
        elif line.strip() and not line.lstrip().startswith("--"):
            if current is None:
                raise ValueError(f"text before the first '-- name:' line: {line!r}")
            current.append(line)
    joined = {name: "\n".join(lines).strip().rstrip(";") for name, lines in statements.items()}
    return MappingProxyType(joined)


def load(file_name: str) -> Mapping[str, str]:
    """Return the statements of a file that ships beside this module, by name."""
    return parse(files("queue_core.engines").joinpath(file_name).read_text(encoding="utf-8"))


SQL = load("sqlite.sql")
"""The statements of the SQLite engine."""
