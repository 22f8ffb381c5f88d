"""Read what processes use, and boil many numbers down to a few.

Boundary: reads /proc; starts nothing.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def tree(roots: Iterable[int]) -> list[int]:
    """Return these processes and all that descend from them."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):
                text = Path(f"/proc/{entry}/stat").read_text()
                parent = int(text.rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid not in found and Path(f"/proc/{pid}").exists():
            found.append(pid)
            waiting.extend(children.get(pid, ()))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What some processes have used since they began."""

    written_bytes: int = 0
    cpu_seconds: float = 0.0


def usage(pids: Iterable[int]) -> Usage:
    """Add up bytes sent to the disk and processor time of living processes."""
    written, ticks = 0, 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in Path(f"/proc/{pid}/io").read_text().splitlines():
                if line.startswith("write_bytes:"):
                    written += int(line.split()[1])
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # with children that ended and were waited for
    return Usage(written_bytes=written, cpu_seconds=ticks / os.sysconf("SC_CLK_TCK"))


def busy_seconds(pids: Iterable[int]) -> float:
    """Return the processor time of all living threads, to the nanosecond; `usage` has ticks."""
    total_ns = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError, ValueError):
                    text = Path(f"/proc/{pid}/task/{task}/schedstat").read_text()
                    total_ns += int(text.split()[0])
    return total_ns / 1e9


def pss_bytes(pid: int) -> int:
    """Return a process's memory, where pages it shares count by its share."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def command(pid: int) -> str:
    """Return a process's command line."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return b" ".join(words).decode(errors="replace").strip()


def percentile(values: Sequence[int], share: float) -> float:
    """Return the value below which this share of sorted `values` lies (nearest rank)."""
    return float(values[min(len(values) - 1, int(share * len(values)))])


def quantiles_ms(values_ns: Iterable[int]) -> dict[str, float]:
    """Return p50, p99, p99.9 and the worst of nanoseconds, in milliseconds."""
    values = sorted(values_ns)
    if not values:
        return {"samples": 0}
    return {
        "samples": len(values),
        "p50_ms": percentile(values, 0.5) / 1e6,
        "p99_ms": percentile(values, 0.99) / 1e6,
        "p999_ms": percentile(values, 0.999) / 1e6,
        "worst_ms": values[-1] / 1e6,
    }


def medians(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the median of each number over rounds that all have it; other values are dropped."""
    names = [name for name, value in rounds[0].items() if isinstance(value, int | float)]
    return {
        name: statistics.median(one[name] for one in rounds)
        for name in names
        if all(name in one for one in rounds)
    }
