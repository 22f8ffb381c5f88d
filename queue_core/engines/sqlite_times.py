"""Add up how long the write lock was waited for and held, until a transaction can store it.

A process learns how long it held the lock when the transaction is over, so what it learnt
is stored with a later one: at most once a second, for a few rows each, and never with a
transaction of its own, so that an idle process writes nothing. Kept in the database and not
in the workers' slots, because the producers are the ones that starve. A process that ends
takes what it learnt in its last second with it.

Boundary: numbers in memory; no clock, no lock, no SQL. Not for several threads at once: its file's
mutex is held.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from typing import Final

from queue_core.stats import LOCK_BOUNDS, LOCK_HOLD, LOCK_WAIT, Tally

STORE_NS: Final = 1_000_000_000
_BOUNDS_NS: Final = tuple(int(bound * 1e9) for bound in LOCK_BOUNDS)
_Key = tuple[str, str, int]  # histogram, operation, bucket; bucket -1 is the sum in nanoseconds


class LockTimes:
    """What one connection's process learnt and has not yet stored."""

    __slots__ = ("_given", "_given_ns", "_known", "_stored_ns")

    def __init__(self) -> None:
        self._known: defaultdict[_Key, int] = defaultdict(int)
        self._given: dict[_Key, int] = {}
        self._given_ns = 0
        self._stored_ns: int | None = None

    def waited(self, operation: str, took_ns: int) -> None:
        """Take in a wait for the lock, whether it was got or given up."""
        self._known[LOCK_WAIT, operation, bisect_left(_BOUNDS_NS, took_ns)] += 1
        self._known[LOCK_WAIT, operation, -1] += took_ns

    def held(self, operation: str, took_ns: int) -> None:
        """Take in a hold of the lock."""
        self._known[LOCK_HOLD, operation, bisect_left(_BOUNDS_NS, took_ns)] += 1
        self._known[LOCK_HOLD, operation, -1] += took_ns

    def give(self, tally: Tally, now_ns: int) -> None:
        """Add to a transaction's tally what is known, when it is time; then see `stored`."""
        if self._stored_ns is None:
            # The first transaction of a process may be its last: one that starved is told.
            waits = [n for at, n in self._known.items() if at[0] == LOCK_WAIT and at[2] < 0]
            self._stored_ns = now_ns - sum(waits)
        if now_ns - self._stored_ns < STORE_NS:
            return
        self._given_ns = now_ns
        for at, value in self._given.items():  # that transaction failed
            self._known[at] += value
        self._given = {}
        for (name, operation, bucket), value in self._known.items():
            # A sum is stored in whole microseconds: the rest of one stays for the next time.
            whole = value // 1000 if bucket < 0 else value
            label = f"{operation}|{'sum' if bucket < 0 else bucket}"
            tally.add(0, "", name, label, whole)
            self._given[name, operation, bucket] = whole * 1000 if bucket < 0 else whole
        for at, value in self._given.items():
            self._known[at] -= value

    def stored(self) -> None:
        """Forget what was given: its transaction is committed."""
        if self._given:
            self._given = {}
            self._stored_ns = self._given_ns
            self._known = defaultdict(int, {at: n for at, n in self._known.items() if n})
