"""Read and write the shared record of one pool.

Boundary: the record only. The supervisor writes it, metrics and `why` read it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from supervisor.record import NAME_BYTES_MAX, Record, word

POOL_WORDS: Final = 128
NOTE_BYTES_MAX: Final = 256


class Wish(IntEnum):
    """What an operator can ask for a whole pool; the low byte of `Pool.wish`."""

    DRAIN = 1
    RESUME = 2
    RESTART = 3


class Pool(Record):
    """The record of one pool, written by the supervisor, save `wish`, and read by metrics."""

    __slots__ = ()

    processes = word(1, "Processes configured.")
    restarts = word(2, "Processes started in place of one that ended.")
    backoff_until_ns = word(3, "Monotonic time before which nothing is started; 0 is none.")
    crash_loop = word(4, "1 while the pool is in a crash loop.")
    parked = word(5, "1 when the supervisor gave the pool up, and only probes it.")
    failures = word(6, "Unexpected ends in a row.")
    active = word(8, "1 while the configuration names the pool.")
    ready = word(9, "Processes that are READY now.")
    live = word(10, "Processes that are alive now.")
    wish = word(11, "An operator's request: a number that grows, and in its low byte a `Wish`.")
    granted = word(12, "The request the supervisor has taken note of; equal to `wish` when done.")
    drained = word(13, "1 while an operator has taken the pool out of work.")
    lease_failures = word(14, "Renewals of its leases that failed; the keeper writes it.")

    @property
    def name(self) -> str:
        """Name of the pool; those of the keeper and of `web` begin with `@`."""
        return self.text(0, 32, NAME_BYTES_MAX)

    @name.setter
    def name(self, text: str) -> None:
        self.set_text(0, 32, NAME_BYTES_MAX, text)

    @property
    def note(self) -> str:
        """Last error of a process of this pool."""
        return self.text(7, 64, NOTE_BYTES_MAX)

    @note.setter
    def note(self, text: str) -> None:
        self.set_text(7, 64, NOTE_BYTES_MAX, text)

    def count_exit(self, cause: int) -> None:
        """Add one to the exits of a cause, a code of `policy.CAUSES`."""
        self._w[16 + cause] += 1

    def exits(self, cause: int) -> int:
        """Return how many processes ended by that cause."""
        return self._w[16 + cause]
