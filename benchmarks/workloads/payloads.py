"""Workload 7: payloads of 1 KB, 100 KB and 1 MB: bulk puts, then a drain by two workers."""

from __future__ import annotations

import functools
from typing import Any

from benchmarks.contenders import HERDSMAN, Contender
from benchmarks.harness import Options, Rounds, drain, fill, interleave, ratios
from benchmarks.place import place
from benchmarks.tables import row, table

TITLE = "Large payloads"
SIZES = {1_000: "1 KB", 100_000: "100 KB", 1_000_000: "1 MB"}
BATCH_BYTES = 4_000_000
BYTES_MAX = 1_500_000_000
FILL_SECONDS_MAX = 15.0


def once(options: Options, contender: Contender, size: int) -> dict[str, Any]:
    """Fill with large payloads, then drain."""
    seconds = options.seconds_for(contender)
    bytes_max = 5_000_000 if options.quick else BYTES_MAX
    jobs = min(bytes_max // size, int(contender.jobs_per_second * seconds * 1.3))
    batch = max(1, min(1000, BATCH_BYTES // size))
    with place(contender) as here:
        most = options.fill_seconds_for(contender, FILL_SECONDS_MAX)
        filled = fill(here, jobs, most, size, batch)
        found = drain(here, 2, filled["jobs"], seconds)
    put = filled["jobs"] / filled["seconds"]
    return found | {"put_per_second": put, "mb_per_second": found["jobs_per_second"] * size / 1e6}


def run(options: Options) -> dict[str, Any]:
    """Run all rounds for each size."""
    found = {}
    for size in (100_000,) if options.quick else SIZES:
        runs = {
            contender.name: functools.partial(once, options, contender, size)
            for contender in options.contenders()
            if contender is HERDSMAN or contender.redis != "always"
        }
        found[str(size)] = interleave(options, runs)
    return {"sizes": found}


def bars(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Promise nothing here."""
    return []


def render(result: dict[str, Any]) -> str:
    """Return a table for each size."""
    parts = []
    for size, found in result["sizes"].items():
        rounds: Rounds = found
        times = ratios(rounds, "jobs_per_second")
        fields = (
            ("jobs_per_second", "{:,.0f}"), ("mb_per_second", "{:,.1f}"),
            ("put_per_second", "{:,.0f}"), ("written_bytes_per_job", "{:,.0f}"),
        )  # fmt: skip
        lines = [
            row(name, one, *fields, last=f"{times[name]:,.1f}" if name in times else "")
            for name, one in rounds.items()
        ]
        heads = (SIZES[int(size)], "jobs/s", "MB/s", "bulk puts/s",
                 "bytes written per job", "herdsman is so many times as fast")  # fmt: skip
        parts.append(table(heads, lines))
    return "\n".join(parts)
