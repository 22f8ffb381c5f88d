"""Write Markdown tables.

Boundary: text from numbers; reads and measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

WIDTH_MAX = 120


def table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table whose first column is text and whose others are numbers."""
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *lines)) + "\n"


def row(
    name: str, one: Mapping[str, Any], *fields: tuple[str, str], last: str | None = None
) -> list[str]:
    """Return a contender's cells: each field of its median in its format, or why it has none."""
    cells = [name]
    if "median" not in one:
        why = str(one.get("failed", "not measured")).splitlines()[0]
        cells += [why[:WIDTH_MAX], *[""] * (len(fields) - 1)]
    else:
        for field, form in fields:
            value = one["median"].get(field)
            cells.append("" if value is None else form.format(value))
    return cells if last is None else [*cells, last]
