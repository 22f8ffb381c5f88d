"""Print documents, tables and messages: JSON on demand, tables on terminals, plain text else.

Boundary: standard output carries data, standard error messages. What comes out of a job is
hostile: nothing of it is printed that could steer a terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from supervisor.cli.errors import OutputClosed, printable

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA_VERSION: Final = 1
"""Version of every JSON document; it grows when a key changes its meaning or goes away."""
CELL_CHARS_MAX: Final = 120
WIDTH_MAX: Final = 10_000
"""Columns of a terminal that holds every table of ours; to measure how wide one must be."""


def emit(command: str, **fields: Any) -> None:
    """Print the one JSON document of a command."""
    whole = {"schema_version": SCHEMA_VERSION, "command": command, **fields}
    line(json.dumps(whole, ensure_ascii=False, default=str), raw=True)


def line(text: str, *, raw: bool = False) -> None:
    """Print one line of data; raises OutputClosed when nobody reads it any more."""
    data = text.encode("utf-8", "backslashreplace").decode() if raw else printable(text)
    try:
        # Flushed: a reader at the other end of a pipe waits for it while we go on running.
        print(data, flush=True)
    except BrokenPipeError:
        raise OutputClosed from None


def lines(texts: Sequence[str]) -> None:
    """Print lines of data at once and let them out, so that a reader sees them as they come."""
    line("\n".join(texts), raw=True)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise OutputClosed from None


def block(text: str) -> None:
    """Print a text of several lines, indented."""
    for part in text.splitlines():
        line(f"  {part}")


def say(text: str) -> None:
    """Print a message on standard error."""
    print(printable(text), file=sys.stderr)


def facts(pairs: Mapping[str, object]) -> None:
    """Print names and values, one pair a line; None values are left out."""
    shown = {name: value for name, value in pairs.items() if value is not None}
    width = max((len(name) for name in shown), default=0)
    for name, value in shown.items():
        line(f"{name:<{width}}  {value}")


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table: drawn on a terminal, aligned text elsewhere. Numbers stand to the right.

    On a terminal too narrow for the headings each row becomes a block of its own.
    """
    if not rows:
        say("nothing to show")
    cells = [[_cell(value) for value in row] for row in rows]
    right = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(columns))]
    if sys.stdout.isatty():
        _drawn(columns, cells, right)
        return
    widths = [
        max(len(name), *(len(row[i]) for row in cells)) if cells else len(name)
        for i, name in enumerate(columns)
    ]
    for row in [list(columns), *cells]:
        parts = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        line("  ".join(parts).rstrip())


def _drawn(columns: Sequence[str], cells: Sequence[Sequence[str]], right: Sequence[bool]) -> None:
    from rich.console import Console
    from rich.measure import Measurement

    console = Console()
    unbounded = console.options.update(max_width=WIDTH_MAX)
    # Words may be folded, headings not: what does not fit would be cut off, and nobody would see
    # that it is missing.
    for padding, must_fit in ((1, cells), (0, cells), (0, ())):
        needed = Measurement.get(console, unbounded, _grid(columns, must_fit, right, padding))
        if needed.minimum <= console.width:
            console.print(_grid(columns, cells, right, padding))
            return
    for row in cells:
        facts(dict(zip(columns, row, strict=True)))
        line("")


def _grid(
    columns: Sequence[str], cells: Sequence[Sequence[str]], right: Sequence[bool], padding: int
) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, padding))
    for name, to_right in zip(columns, right, strict=True):
        grid.add_column(
            name,
            justify="right" if to_right else "left",
            overflow="fold",
            min_width=len(name),
        )
    for row in cells:
        grid.add_row(*(Text(cell) for cell in row))  # Text: no markup of ours in their data
    return grid


def _cell(value: object) -> str:
    text = "-" if value is None or value == "" else printable(" ".join(str(value).split()))
    return text if len(text) <= CELL_CHARS_MAX else text[: CELL_CHARS_MAX - 1] + "…"


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def instant(us: int | None) -> str | None:
    """Return microseconds since the epoch as ISO 8601 in UTC."""
    if us is None:
        return None
    try:
        return (
            datetime.fromtimestamp(us / 1_000_000, UTC).isoformat(timespec="milliseconds")[:-6]
            + "Z"
        )
    except (ValueError, OverflowError, OSError):
        return f"{us} us"


def counted(number: int, noun: str) -> str:
    """Return a number of things: "1 job", "2 jobs"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def span(seconds: float) -> str:
    """Return a duration for people: "0.4 s", "12 s", "3 min", "2.5 h", "4.0 d"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} d"


def size(number: int) -> str:
    """Return a number of bytes for people, in powers of ten."""
    value, unit = float(number), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
