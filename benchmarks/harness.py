"""Share what all workloads need: options, interleaved rounds, a fill and a drain.

Boundary: knows contenders only through their places; prints progress to standard error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import board, facts, measure
from benchmarks.contenders import EVERYONE, HERDSMAN, PEERS, Contender, present
from benchmarks.place import Place

Rounds = dict[str, dict[str, Any]]
"""By contender: `median` (name → number), `rounds` (one record each), or `failed` (why)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How thorough a run is.

    `seconds` is the length of one measurement of herdsman, `peer_seconds` that of a peer.
    Of the `rounds`, a peer takes part in the first `peer_rounds`, and what only fills a plot or a
    table in the first `side_rounds`. `quick` is for trying the scripts out: its figures mean
    nothing.
    """

    rounds: int = 3
    peer_rounds: int = 3
    side_rounds: int = 3
    seconds: float = 20.0
    peer_seconds: float = 10.0
    quick: bool = False
    only: frozenset[str] = frozenset()

    def contenders(self, wanted: Sequence[Contender] = EVERYONE) -> list[Contender]:
        """Return who takes part: what is installed, and named if names were given."""
        found = present(tuple(wanted))
        return [one for one in found if not self.only or one.name in self.only]

    def seconds_for(self, contender: Contender) -> float:
        """Return the length of one measurement."""
        return self.seconds if contender.module == HERDSMAN.module else self.peer_seconds

    def fill_seconds_for(self, contender: Contender, most: float) -> float:
        """Return how long filling a queue may take; a slow peer drains what it got by then."""
        return most if contender.module == HERDSMAN.module else min(most, 2 * self.peer_seconds)


WARM_SECONDS = 2.0
"""What a service does only once, when it starts, is no part of its speed."""
QUICK = Options(rounds=1, seconds=1.0, peer_seconds=1.0, quick=True)


def say(text: str) -> None:
    """Tell of progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def interleave(
    options: Options,
    runs: dict[str, Callable[[], dict[str, Any]]],
    must: tuple[str, ...] = (HERDSMAN.name, "bare"),
    sides: Collection[str] = (),
) -> Rounds:
    """Run each once per round, in turn, so that whatever else happens meets all alike.

    `sides` are those that take part in the first `side_rounds` only. A contender that fails is
    reported as failed; only for one of ours, whose name begins as `must` says, the fault is raised.
    """
    found: Rounds = {name: {"rounds": []} for name in runs}
    peers = {one.name for one in PEERS}
    for number in range(options.rounds):
        for name, run in runs.items():
            last = min(
                options.peer_rounds if name in peers else options.rounds,
                options.side_rounds if name in sides else options.rounds,
            )
            if "failed" in found[name] or number >= last:
                continue
            try:
                record = run() | {"load": facts.load()}
            except Exception as error:
                if name.startswith(must):
                    raise
                found[name]["failed"] = f"{type(error).__name__}: {error}"[:1000]
                say(f"{name}: {found[name]['failed']}")
                continue
            found[name]["rounds"].append(record)
            numbers = ", ".join(
                f"{key} {value:,.4g}" for key, value in record.items()
                if isinstance(value, int | float)
            )  # fmt: skip
            say(f"round {number + 1}, {name}: {numbers}")
    for one in found.values():
        if one["rounds"]:
            one["median"] = measure.medians(one["rounds"])
    return found


def fill(
    place: Place, jobs: int, seconds: float, size: int = 100, batch: int = 1000, **more: int
) -> dict[str, Any]:
    """Put so many jobs by the contender's best bulk call, or as many as fit into the time."""
    words = [f"{key}={value}" for key, value in more.items()]
    return place.produce("fill", jobs, seconds, size, batch, *words)


def drain(place: Place, workers: int, jobs: int, seconds: float) -> dict[str, Any]:
    """Start workers on a full queue, and measure when all have started."""
    before = measure.Usage()

    def on_start() -> None:
        nonlocal before
        before = measure.usage(place.pids(redis=True))

    place.start_workers(workers)
    window = board.watch(
        place.folder, expected=jobs, seconds=seconds, warm_seconds=min(WARM_SECONDS, seconds / 5),
        on_start=on_start,
    )  # fmt: skip
    after = measure.usage(place.pids(redis=True))
    place.stop_workers()
    done = max(1, window.jobs)
    return {
        "jobs": window.jobs,
        "seconds": window.seconds,
        "jobs_per_second": window.jobs_per_second,
        "written_bytes_per_job": (after.written_bytes - before.written_bytes) / done,
        "cpu_us_per_job": (after.cpu_seconds - before.cpu_seconds) * 1e6 / done,
    }


def ratios(found: Rounds, field: str, ours: str = HERDSMAN.name) -> dict[str, float]:
    """Return by how much ours is larger than each other's, by medians."""
    if "median" not in found.get(ours, {}):
        return {}
    base = found[ours]["median"][field]
    return {
        name: base / one["median"][field]
        for name, one in found.items()
        if name != ours and one.get("median", {}).get(field)
    }


def best(found: Rounds, field: str, among: Sequence[Contender]) -> float | None:
    """Return the largest median among some contenders; None when none of them ran."""
    names = {one.name for one in among}
    values = [
        one["median"][field] for name, one in found.items() if name in names and "median" in one
    ]
    return max(values) if values else None
