"""Beside the nine: an idle service, by `benchmarks/idle.py`, once and for a minute."""

from __future__ import annotations

from typing import Any

from benchmarks import idle
from benchmarks.harness import Options, say
from benchmarks.tables import table

TITLE = "An idle service"
SECONDS = 60.0


def run(options: Options) -> dict[str, Any]:
    """Watch an idle service."""
    found = idle.measured(3.0 if options.quick else SECONDS)
    say(f"idle: {found}")
    return found


def bars(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare with what was promised."""
    written, share = result["written_bytes"], result["cpu_share"]
    return [
        {"bar": "bytes written while idle (at most)", "wanted": 0, "found": written,
         "met": written == 0 and result["files_unchanged"]},
        {"bar": "share of a core while idle (at most)", "wanted": idle.CPU_SHARE_MAX,
         "found": share, "met": share <= idle.CPU_SHARE_MAX},
    ]  # fmt: skip


def render(result: dict[str, Any]) -> str:
    """Return the table."""
    cells = [
        f"{result['processes']} processes, {result['seconds']:g} s",
        f"{result['written_bytes']:,}",
        "yes" if result["files_unchanged"] else "no",
        f"{result['cpu_share']:.3%}",
    ]
    heads = ("", "bytes written", "database and log unchanged", "share of a core")
    return table(heads, [cells])
