"""Workload 2: produce and consume at once, two workers and one producer.

One producer puts for as long as the measurement lasts, one by one and then in batches of a
hundred, while two workers consume: what both reach together.
"""

from __future__ import annotations

import functools
import time
from typing import Any

from benchmarks import board
from benchmarks.contenders import HERDSMAN, Contender
from benchmarks.harness import Options, Rounds, interleave, ratios
from benchmarks.place import place
from benchmarks.tables import row, table

TITLE = "Produce and consume at once"
BATCHES = (1, 100)
HEAD_START_SECONDS = 1.0
NEVER = 10**12


def once(options: Options, contender: Contender, batch: int) -> dict[str, Any]:
    """Run workers and a producer side by side, and count what is handled meanwhile."""
    seconds = options.seconds_for(contender)
    with place(contender) as here:
        here.produce("fill", 10, 10.0, 100, 10)
        here.start_workers(2)
        board.watch(here.folder, expected=10, seconds=30.0, stall_seconds=2.0)
        start = time.monotonic() + HEAD_START_SECONDS
        producer = here.start_producer("stream", start, seconds, batch)
        time.sleep(max(0.0, start - time.monotonic()))
        began, counted = time.monotonic(), sum(board.words(here.folder))
        time.sleep(seconds)
        done, took = sum(board.words(here.folder)) - counted, time.monotonic() - began
        (report,) = here.gather([producer])
        here.stop_workers()
    return {
        "jobs": done,
        "jobs_per_second": done / took,
        "put_per_second": report["jobs"] / report["seconds"],
    }


def run(options: Options) -> dict[str, Any]:
    """Run all rounds, single puts and batches."""
    found = {}
    for batch in BATCHES[-1:] if options.quick else BATCHES:
        runs = {
            contender.name: functools.partial(once, options, contender, batch)
            for contender in options.contenders()
            if contender.shared and (contender is HERDSMAN or contender.redis != "always")
        }
        found[str(batch)] = interleave(options, runs)
    return {"batches": found}


def bars(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Promise nothing here."""
    return []


def render(result: dict[str, Any]) -> str:
    """Return a table for each size of batch."""
    parts = []
    for batch, found in result["batches"].items():
        rounds: Rounds = found
        times = ratios(rounds, "jobs_per_second")
        lines = [
            row(name, one, ("jobs_per_second", "{:,.0f}"), ("put_per_second", "{:,.0f}"),
                last=f"{times[name]:,.1f}" if name in times else "")
            for name, one in rounds.items()
        ]  # fmt: skip
        what = "Single puts" if batch == "1" else f"Batches of {batch}"
        heads = (what, "jobs/s handled", "puts/s", "herdsman is so many times as fast")
        parts.append(table(heads, lines))
    return "\n".join(parts)
