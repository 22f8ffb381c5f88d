"""Tell the time: the wall clock for due dates, the host's monotonic clock for leases.

Wall time may jump; monotonic time counts only while the host runs, and starts
anew at every boot. So a lease is a monotonic instant together with the boot id
that gives it meaning.

Boundary: reads clocks, decides nothing.
"""

from __future__ import annotations

import os
import time
import uuid
from functools import cache
from pathlib import Path
from typing import Final, Protocol

BOOT_UNKNOWN: Final = "boot-unknown"
"""The boot id where the system tells none.

A guess from wall time minus uptime would change whenever the wall clock is
set, and leases would then look as if the host had restarted. A constant is
wrong only after a real restart, when the monotonic clock begins again near
zero: such a lease lies in the future, which whoever reads it can clamp.
"""

_BOOT_ID_PATH: Final = Path("/proc/sys/kernel/random/boot_id")
_OFFSETS_PATH: Final = Path("/proc/self/timens_offsets")
_NAMESPACE_PATHS: Final = ("/proc/self/ns/time", "/proc/self/ns/time_for_children")


class Clock(Protocol):
    """What the queue asks of time; all instants are integer microseconds."""

    def wall_us(self) -> int:
        """Return microseconds since the epoch; may jump either way."""
        ...

    def monotonic_us(self) -> int:
        """Return microseconds of the host's CLOCK_MONOTONIC; comparable between processes."""
        ...

    def boot_id(self) -> str:
        """Return a text that is the same until the host restarts."""
        ...


class SystemClock:
    """The clocks of this host, the same in every container on it."""

    __slots__ = ("_boot_id", "_offset_ns")

    def __init__(self) -> None:
        self._offset_ns = _offset_ns()
        self._boot_id = _read_boot_id()

    def wall_us(self) -> int:
        """Return microseconds since the epoch."""
        return time.time_ns() // 1_000

    def monotonic_us(self) -> int:
        """Return microseconds of CLOCK_MONOTONIC as the host itself counts them."""
        return (time.clock_gettime_ns(time.CLOCK_MONOTONIC) - self._offset_ns) // 1_000

    def boot_id(self) -> str:
        """Return the kernel's boot id, or `BOOT_UNKNOWN` on a system without one."""
        return self._boot_id


class FakeClock:
    """A clock that moves only when told to, for tests of code that uses the queue."""

    __slots__ = ("_boot_id", "_monotonic_us", "_wall_us")

    def __init__(
        self,
        *,
        wall_us: int = 1_700_000_000_000_000,
        monotonic_us: int = 1_000_000_000,
        boot_id: str = "boot-0",
    ) -> None:
        self._wall_us = wall_us
        self._monotonic_us = monotonic_us
        self._boot_id = boot_id

    def wall_us(self) -> int:
        """Return the wall time set so far, in microseconds since the epoch."""
        return self._wall_us

    def monotonic_us(self) -> int:
        """Return the monotonic time set so far, in microseconds."""
        return self._monotonic_us

    def boot_id(self) -> str:
        """Return the boot id, another one after each `reboot`."""
        return self._boot_id

    def advance(self, seconds: float) -> None:
        """Let time pass on both clocks.

        Raises:
            ValueError: `seconds` is negative; only the wall clock can go back.
        """
        if seconds < 0:
            raise ValueError(f"time cannot pass backwards by {seconds} s; use step_wall")
        self._wall_us += round(seconds * 1_000_000)
        self._monotonic_us += round(seconds * 1_000_000)

    def step_wall(self, seconds: float) -> None:
        """Set the wall clock forward or (negative) back, as NTP or an operator does."""
        self._wall_us += round(seconds * 1_000_000)

    def reboot(self) -> None:
        """Restart the host: another boot id, the monotonic clock near zero, wall time going on."""
        self._boot_id = f"boot-{uuid.uuid4()}"
        self._monotonic_us = 1_000_000


def time_namespace() -> str:
    """Return the name of this process's time namespace, "" on a system without them."""
    try:
        return os.readlink(_NAMESPACE_PATHS[0])
    except OSError:
        return ""


@cache
def _offset_ns() -> int:
    """Return what this time namespace adds to the host's CLOCK_MONOTONIC, in nanoseconds."""
    try:
        # The file tells the offsets of the namespace that children will get. After
        # unshare(CLONE_NEWTIME) that is not ours, and ours can no longer be read: the
        # process that unshares is the container's runtime, which sits on the host.
        ours, childrens = (os.readlink(path) for path in _NAMESPACE_PATHS)
        if ours != childrens:
            return 0
        text = _OFFSETS_PATH.read_text("ascii")
    except OSError:  # no such namespaces: macOS, Linux before 5.6
        return 0
    return parse_offsets(text)


def parse_offsets(text: str) -> int:
    """Return the nanoseconds on the `monotonic` line of a timens_offsets file, 0 without one.

    The seconds may be negative; the nanoseconds always add (time_namespaces(7)).
    """
    for line in text.splitlines():
        fields = line.split()
        if len(fields) == 3 and fields[0] in ("monotonic", "1"):
            return int(fields[1]) * 1_000_000_000 + int(fields[2])
    return 0


@cache
def _read_boot_id() -> str:
    try:
        return _BOOT_ID_PATH.read_text("ascii").strip() or BOOT_UNKNOWN
    except OSError:
        return BOOT_UNKNOWN
