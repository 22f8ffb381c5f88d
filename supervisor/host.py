"""Ask the host about the place a database lies in: room, clocks, who holds it.

Boundary: single questions, each with an answer where the system tells none; nothing is judged.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Final

from queue_core.lockfile import InstanceLock

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_LOCK_BYTES_MAX: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What is free where a file lies, for this user; inodes None where there is no limit."""

    free_bytes: int
    total_bytes: int
    free_inodes: int | None


def room(path: Path) -> Room | None:
    """Return the room on the filesystem of the nearest folder that exists; None if unknown."""
    for folder in (path, *path.parents):
        with contextlib.suppress(OSError):
            found = os.statvfs(folder)
            return Room(
                free_bytes=found.f_bavail * found.f_frsize,
                total_bytes=found.f_blocks * found.f_frsize,
                free_inodes=found.f_favail if found.f_files else None,
            )
    return None


def held_instances(database: str) -> list[str]:
    """Return the names of the supervisors that hold this database now, sorted."""
    if "://" in database:
        return []
    path = Path(database).resolve()
    found = []
    for lock in path.parent.glob(f"{escape(path.name)}.*.lock"):
        with contextlib.suppress(OSError):
            if InstanceLock.is_held(lock):
                found.append(lock.name.removeprefix(f"{path.name}.").removesuffix(".lock"))
    return sorted(found)


def clock_step_seconds(database: str, instance: str, start_ticks: int) -> float | None:
    """Return by how much the wall clock was set since a supervisor started; None if unknown.

    The kernel counts its age by a clock that nobody sets, the lock file holds the wall time of
    its start. The lock is taken some seconds after the start, so small numbers mean nothing.
    """
    path = Path(f"{Path(database).resolve()}.{instance}.lock")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            started = json.loads(os.read(fd, _LOCK_BYTES_MAX))["started"]
        finally:
            os.close(fd)
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / _TICKS
        return float(time.time() - age - started)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
