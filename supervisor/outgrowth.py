"""Find what a worker has started, and how much memory that uses.

Boundary: reads /proc and judges nothing. What left a worker's group and lost its parent too is
found by no look from here, and dies with the supervisor.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Final

from supervisor.linux import children, proportional_bytes

_PROCESSES_MAX: Final = 64
"""Looked at per worker: a handler's fork bomb must not hold the supervisor up."""


def adopted_by_group() -> dict[int, list[int]]:
    """Return our own children by the process group they are in, but for the leaders.

    What a worker's child leaves behind becomes ours (we are a subreaper), in the worker's group.
    """
    found: dict[int, list[int]] = {}
    with contextlib.suppress(OSError):
        for pid in children():
            with contextlib.suppress(OSError):
                group = os.getpgid(pid)
                if group != pid:
                    found.setdefault(group, []).append(pid)
    return found


def started_bytes(pid: int, adopted: Iterable[int] = ()) -> int:
    """Return the memory of everything below a process, and of what it left to us; in bytes.

    Without what they share with others: a handler that forks doubles nothing by that.
    """
    left, seen = [*_below(pid), *adopted], {pid}
    total = 0
    while left and len(seen) <= _PROCESSES_MAX:
        one = left.pop()
        if one not in seen:
            seen.add(one)
            total += proportional_bytes(one)
            left += _below(one)
    return total


def _below(pid: int) -> list[int]:
    try:
        return children(pid)
    except OSError:
        return []
