"""Let two sides work in turn, a few seconds each, while both live: a machine's drift meets both.

Whoever is not at work is stopped, as a whole tree of processes. So each has the machine to itself,
and they are three seconds apart instead of a minute, in which a virtual machine's speed moves by
more than what is to be measured. Whoever kills the benchmark with KILL leaves both sides stopped.
Boundary: signals and counts only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import time
from dataclasses import dataclass
from typing import Any

from benchmarks import board
from benchmarks.place import Place

SLICE_SECONDS = 2.0
SETTLE_SECONDS = 1.0
"""What a side needs until it works as if it had not been stopped: a job's standstill is taken
for slowness, what is behind it is handed back, and claims are small for a while."""


@dataclass(frozen=True, slots=True)
class Slice:
    """What a side did: jobs in a second, and seconds of processor time in its handlers."""

    jobs: float
    busy: float


def work(place: Place) -> Slice:
    """Let a stopped side work for a slice."""
    words, busy_ns = board.words(place.folder), board.busy_ns(place.folder)
    send(place, signal.SIGCONT)
    time.sleep(SETTLE_SECONDS)
    first, first_ns, began = sum(words), sum(busy_ns), time.monotonic()
    time.sleep(SLICE_SECONDS)
    jobs, busy, seconds = sum(words) - first, sum(busy_ns) - first_ns, time.monotonic() - began
    send(place, signal.SIGSTOP)
    return Slice(jobs / seconds, busy / 1e9 / seconds)


def compare(ours: Place, other: Place, pairs: int) -> dict[str, Any]:
    """Return what part of the other's work ours does, pair by pair, and medians.

    `jobs` by jobs done. `busy` by the processor time that handlers that compute got: how much
    they do with it is the machine's affair, whose cores are faster at one moment than at another.
    Both are at work when this is called, and are stopped when it returns.
    """
    for place in (ours, other):
        send(place, signal.SIGSTOP)
    found: dict[str, list[float]] = {"jobs": [], "busy": []}
    for number in range(pairs):
        # Who goes first changes, for a drift within a pair.
        order = (ours, other) if number % 2 else (other, ours)
        done = {place: work(place) for place in order}
        found["jobs"].append(done[ours].jobs / done[other].jobs)
        if done[other].busy:
            found["busy"].append(done[ours].busy / done[other].busy)
    return {name: summed(shares) for name, shares in found.items() if shares}


def summed(pairs: list[float]) -> dict[str, Any]:
    """Return pairs with their quartiles."""
    first, median, third = statistics.quantiles(pairs, n=4)
    return {"median": median, "quartiles": [first, third], "pairs": pairs}


def send(place: Place, number: signal.Signals) -> None:
    """Send a signal to each process of a side, also to those that came since."""
    for pid in place.pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
