"""Be the job, for every contender alike: `handle` gets the payload, does its work, counts itself.

`BENCH_TASK` says which work, `BENCH_FOLDER` where the board is. Payloads are 100 bytes of JSON
unless a workload says otherwise. Boundary: knows no queue.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.board import Pen, stamps

FOLDER = Path(os.environ.get("BENCH_FOLDER", "."))
_pen = Pen(FOLDER)
_FIRST = 10_000_000
"""Numbers start here, so that all have as many digits and all payloads the same length."""


def payloads(first: int, number: int, size: int = 100, **more: Any) -> Iterator[dict[str, Any]]:
    """Make payloads that are `size` bytes as compact JSON."""
    empty = {"n": _FIRST, **more, "pad": ""}
    length = len("".join(f'"{key}":{value},' for key, value in empty.items()))
    pad = "x" * max(0, size - length - 3)  # two quotes and two braces more, one comma less
    for n in range(_FIRST + first, _FIRST + first + number):
        yield {"n": n, **more, "pad": pad}


def nothing(payload: dict[str, Any]) -> None:
    """Do nothing, and count."""
    _pen.count()


def stamp(payload: dict[str, Any]) -> None:
    """Write down how long after its put the job began, in nanoseconds."""
    now_ns = time.monotonic_ns()
    _pen.stamp(payload["n"], now_ns - payload["at"])
    _pen.count()


def wait(payload: dict[str, Any]) -> None:
    """Wait as a job that talks to a network does."""
    time.sleep(payload["ms"] / 1000)
    _pen.count()


def spin(payload: dict[str, Any]) -> None:
    """Compute as a job that has something to compute does."""
    began_ns = time.thread_time_ns()
    sum(range(payload["loops"]))
    _pen.spent(time.thread_time_ns() - began_ns)
    _pen.count()


def victim(payload: dict[str, Any]) -> None:
    """Write down when it began and in which process; the first time, stay until killed."""
    before = any(line[0] == payload["n"] for line in stamps(FOLDER))
    _pen.stamp(payload["n"], time.monotonic_ns(), os.getpid())
    if not before:
        time.sleep(payload["stay"])
    _pen.count()


handle = {"nothing": nothing, "stamp": stamp, "wait": wait, "spin": spin, "victim": victim}[
    os.environ.get("BENCH_TASK", "nothing")
]


def loops_for(seconds: float) -> int:
    """Return how many loops of `spin` take so long on this machine, by the best of ten tries."""
    tried = 200_000
    best = min(_timed(tried) for _ in range(10))
    return max(1, int(tried * seconds / best))


def _timed(loops: int) -> float:
    began = time.perf_counter()
    sum(range(loops))
    return time.perf_counter() - began
