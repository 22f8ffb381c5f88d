"""Hold the facts that `why` looks at, the findings it makes of them, and the words for both.

Boundary: records and words; what is found is `why`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from queue_core.stats import QueueFacts
from supervisor.closeup import Tree
from supervisor.host import Room

NOTE_CHARS_MAX: Final = 300
LOG_BYTES_LARGE: Final = 64 * 1024 * 1024
"""Four times the size at which any writer copies the log: somebody keeps it from being copied."""
FREE_BYTES_LOW: Final = 512 * 1024 * 1024
FREE_BYTES_OUT: Final = 32 * 1024 * 1024
FREE_INODES_LOW: Final = 1000
CLOCK_STEP_SECONDS: Final = 30.0


class Level(IntEnum):
    """How bad it is; a NOTE is as it should be, and makes no exit code."""

    DOWN = 0
    BROKEN = 1
    LOOK = 2
    NOTE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that does not work. `code` is stable, `about` names the thing."""

    level: Level
    code: str
    about: str
    what: str
    next: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Why the database could not be read. `kind` is the name of the error's class."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Jobs of one queue and task that share a fate. `more`: there are at least so many."""

    queue: str
    task: str
    number: int
    more: bool = False
    reason: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delayed:
    """A queue in which every job waits for its time."""

    queue: str
    number: int
    next_seconds: float
    retries: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that is looked at. Without a configuration `pools` and `tasks` are None.

    `instances` hold the database's locks, `trees` are those that could be looked into.
    `orphans` are ready jobs no handler is configured for, `dead` those that died within the hour.
    """

    database: str
    instance: str = "main"
    instances: tuple[str, ...] = ()
    trees: tuple[Tree, ...] = ()
    clock_steps: Mapping[str, float] = field(default_factory=dict)
    fault: Fault | None = None
    answered_seconds: float = 0.0
    queues: tuple[QueueFacts, ...] = ()
    log_bytes: int = 0
    room: Room | None = None
    pools: Mapping[str, tuple[str, ...] | None] | None = None
    web: bool = False
    targets: Mapping[str, float] = field(default_factory=dict)
    orphans: tuple[Group, ...] = ()
    dead: tuple[Group, ...] = ()
    delayed: tuple[Delayed, ...] = ()


# ---- words ----------------------------------------------------------------------------


def span(seconds: float) -> str:
    """Return a duration for people."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86_400:.0f} d"


def ordinal(number: int) -> str:
    """Return "1st", "2nd", "3rd", "4th" and so on."""
    if 10 <= number % 100 <= 20:
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"


def brief(text: str) -> str:
    """Return a text on one bounded line."""
    flat = " ".join(text.split())
    return flat if len(flat) <= NOTE_CHARS_MAX else flat[: NOTE_CHARS_MAX - 1] + "…"


def jobs_are(number: int, verb: str, more: bool = False) -> str:
    """Return "1 job waits", "no jobs wait", "at least 9 jobs wait"."""
    if number == 1 and not more:
        one = {"wait": "waits", "are still running": "is still running"}.get(verb, verb)
        return f"1 job {one}"
    return f"{'at least ' if more else ''}{number or 'no'} jobs {verb}"


def key(name: str) -> str:
    """Return a name as a key of TOML."""
    return name if name.replace("_", "").replace("-", "").isalnum() else f'"{name}"'
