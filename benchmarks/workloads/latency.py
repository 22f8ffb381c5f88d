"""Workload 4: from a put to its handler, on an idle service with two workers.

Jobs come one at a time with pauses between, so that every one meets sleeping workers. The time
counts from before `put` is called, so the flush of a durable put is part of it.
"""

from __future__ import annotations

import functools
from typing import Any

from benchmarks import board, measure
from benchmarks.contenders import HERDSMAN, Contender
from benchmarks.harness import Options, Rounds, interleave
from benchmarks.place import place
from benchmarks.tables import row, table

TITLE = "Put to handler on an idle service"
PAUSE_SECONDS = 0.01
PEER_JOBS = 100
WARM_UP = 20
P50_MS_MAX = 1.0
P99_MS_MAX = 5.0


def once(options: Options, contender: Contender) -> dict[str, Any]:
    """Put jobs one at a time, and read the handlers' stamps."""
    seconds = options.seconds_for(contender)
    jobs = int(seconds / PAUSE_SECONDS) if contender is HERDSMAN else PEER_JOBS
    jobs = min(jobs, 50) if options.quick else jobs
    with place(contender, "stamp") as here:
        here.produce("spaced", WARM_UP, 0.0)
        here.start_workers(2)
        board.watch(here.folder, expected=WARM_UP, seconds=60.0, stall_seconds=5.0)
        warm = len(board.stamps(here.folder))
        producer = here.start_producer("spaced", jobs, PAUSE_SECONDS)
        here.gather([producer])
        board.watch(here.folder, expected=WARM_UP + jobs, seconds=30.0, stall_seconds=12.0)
        here.stop_workers()
        took = [line[1] for line in board.stamps(here.folder)[warm:]]
    return {"lost": jobs - len(took), **measure.quantiles_ms(took)}


def run(options: Options) -> dict[str, Any]:
    """Run all rounds."""
    runs = {
        contender.name: functools.partial(once, options, contender)
        for contender in options.contenders()
        if contender.shared
    }
    return {"contenders": interleave(options, runs)}


def bars(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare with what was promised."""
    ours = result["contenders"][HERDSMAN.name]["median"]
    return [
        {"bar": "put to handler, p50 in ms (at most)", "wanted": P50_MS_MAX,
         "found": ours["p50_ms"], "met": ours["p50_ms"] < P50_MS_MAX},
        {"bar": "put to handler, p99 in ms (at most)", "wanted": P99_MS_MAX,
         "found": ours["p99_ms"], "met": ours["p99_ms"] < P99_MS_MAX},
    ]  # fmt: skip


def render(result: dict[str, Any]) -> str:
    """Return the table."""
    found: Rounds = result["contenders"]
    fields = (
        ("p50_ms", "{:.2f}"), ("p99_ms", "{:.2f}"), ("p999_ms", "{:.2f}"), ("worst_ms", "{:.1f}"),
        ("samples", "{:,.0f}"),
    )  # fmt: skip
    heads = ("", "p50 ms", "p99 ms", "p99.9 ms", "worst ms", "jobs in a round")
    return table(heads, [row(name, one, *fields) for name, one in found.items()])
