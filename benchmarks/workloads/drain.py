"""Workload 1: drain a backlog of no-op jobs, with one, two and four workers.

Each contender's queue is filled by its best bulk call, then its workers start, and what their
handlers count is the measure. "With the enqueue" adds the time that the fill took. Beside it the
bare limit: the same storage work with as many processes and nothing else.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from benchmarks import board
from benchmarks.contenders import HERDSMAN, ON_REDIS, SQLITE, Contender
from benchmarks.harness import Options, Rounds, best, drain, fill, interleave, ratios
from benchmarks.place import place
from benchmarks.tables import row, table

TITLE = "Drain of no-op jobs"
WORKERS = (1, 2, 4)
QUICK_JOBS = 5_000
FILL_SECONDS_MAX = 60.0
BARE_JOBS_PER_SECOND = 65_000
OURS_AT_TWO = "herdsman, 2 workers"
BARE = "bare limit, 2 processes"
TIMES_BEST_PEER = 10.0
SHARE_OF_BARE = 0.5


def once(options: Options, contender: Contender, workers: int) -> dict[str, Any]:
    """Fill, then drain."""
    seconds = options.seconds_for(contender)
    fill_seconds = options.fill_seconds_for(contender, FILL_SECONDS_MAX)
    share = min(1.0, (workers + 1) / 3)  # `jobs_per_second` is what two workers do
    wanted = int(contender.jobs_per_second * seconds * 1.3 * share)
    wanted = QUICK_JOBS if options.quick else wanted
    with place(contender) as here:
        filled = fill(here, wanted, seconds if options.quick else fill_seconds)
        found = drain(here, workers, filled["jobs"], seconds)
    put_rate = filled["jobs"] / filled["seconds"]
    both = 1 / (1 / put_rate + 1 / found["jobs_per_second"]) if found["jobs_per_second"] else 0.0
    return found | {"put_per_second": put_rate, "with_enqueue_per_second": both}


def bare(options: Options, processes: int) -> dict[str, Any]:
    """Drain a queue of ours by the bare statements."""
    wanted = QUICK_JOBS if options.quick else int(BARE_JOBS_PER_SECOND * options.seconds)
    with place(HERDSMAN) as here:
        filled = fill(here, wanted, FILL_SECONDS_MAX)
        command = (sys.executable, "-m", "benchmarks.bare", str(options.seconds), str(processes))
        here.start(*command)
        window = board.watch(here.folder, expected=filled["jobs"], seconds=options.seconds,
                             stall_seconds=2.0)  # fmt: skip
        here.stop_workers()
    return {
        "jobs": window.jobs, "seconds": window.seconds, "jobs_per_second": window.jobs_per_second,
    }  # fmt: skip


def run(options: Options) -> dict[str, Any]:
    """Run all rounds."""
    runs, counts = {}, (2,) if options.quick else WORKERS
    sides = []
    for contender in options.contenders():
        for workers in counts if contender is HERDSMAN else (2,):
            name = f"{contender.name}, {workers} worker{'s' * (workers > 1)}"
            name = name if contender is HERDSMAN else contender.name
            runs[name] = functools.partial(once, options, contender, workers)
            sides += [name] if workers != 2 else []
    for processes in counts:
        name = f"bare limit, {processes} process{'es' * (processes > 1)}"
        runs[name] = functools.partial(bare, options, processes)
        sides += [name] if processes != 2 else []
    return {"contenders": interleave(options, runs, sides=sides)}


def bars(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare with what was promised."""
    found: Rounds = result["contenders"]
    ours = found[OURS_AT_TWO]["median"]["jobs_per_second"]
    made = []
    for kind, among in (("SQLite", SQLITE), ("Redis", ON_REDIS)):
        if rival := best(found, "jobs_per_second", among):
            made.append(
                {"bar": f"times the best {kind} peer, 2 workers", "wanted": TIMES_BEST_PEER,
                 "found": ours / rival, "met": ours >= TIMES_BEST_PEER * rival}
            )  # fmt: skip
    limit = found[BARE]["median"]["jobs_per_second"]
    made.append(
        {"bar": "share of the bare limit, 2 workers", "wanted": SHARE_OF_BARE,
         "found": ours / limit, "met": ours >= SHARE_OF_BARE * limit}
    )  # fmt: skip
    return made


def render(result: dict[str, Any]) -> str:
    """Return the table."""
    found: Rounds = result["contenders"]
    times = ratios(found, "jobs_per_second", OURS_AT_TWO)
    lines = [
        row(
            name, one,
            ("jobs_per_second", "{:,.0f}"), ("with_enqueue_per_second", "{:,.0f}"),
            ("put_per_second", "{:,.0f}"), ("written_bytes_per_job", "{:,.0f}"),
            ("cpu_us_per_job", "{:,.0f}"),
            last=f"{times[name]:,.1f}" if name in times else "",
        )
        for name, one in found.items()
    ]  # fmt: skip
    heads = ("jobs/s", "jobs/s with the enqueue", "bulk puts/s", "bytes written per job",
             "processor µs per job", "herdsman (2 workers) is so many times as fast")  # fmt: skip
    return table(("", *heads), lines)
