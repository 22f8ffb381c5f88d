"""Workload 6: a backlog of a thousand, a hundred thousand, a million, ten million jobs.

What an operation costs at each size, beside a small queue measured in the same minutes, by
`benchmarks/cost.py`; and what a scrape costs with 50 queues, by `benchmarks/scrape.py`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import Options, say
from benchmarks.place import ROOT
from benchmarks.tables import table

TITLE = "Backlog"
SIZES = (100_000, 1_000_000, 10_000_000)
SCRAPE_JOBS = 1_000_000
RATIO_MAX = 1.3
SCRAPE_MS_MAX = 50.0
TIMEOUT_SECONDS = 3600.0


def script(name: str, *arguments: str) -> str:
    """Run a script beside us, and return what it prints; its exit code is its own verdict."""
    base = os.environ.get("BENCH_BASE")
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).parents[1] / name), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **({"TMPDIR": base} if base else {})},
        stdout=subprocess.PIPE, text=True, check=False, timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    if not ran.stdout.strip():
        raise RuntimeError(f"{name} printed nothing and ended with {ran.returncode}")
    return ran.stdout


def run(options: Options) -> dict[str, Any]:
    """Measure each size, then the scrape."""
    sizes = (5_000,) if options.quick else SIZES
    found = {}
    for size in sizes:
        rounds = "2" if options.quick else "40"
        found[str(size)] = json.loads(
            script("cost.py", "--large", str(size), "--rounds", rounds, "--json")
        )
        say(f"backlog of {size:,}: worst ratio {found[str(size)]['worst_ratio']:.2f}")
    jobs, queues = (5_000, 5) if options.quick else (SCRAPE_JOBS, 50)
    text = script("scrape.py", "--jobs", str(jobs), "--queues", str(queues))
    scrape = {
        match[1].strip(): float(match[2])
        for match in re.finditer(r"^(.+?)\s+median\s+([\d.]+) ms", text, re.MULTILINE)
    }
    return {"sizes": found, "scrape_ms": scrape, "scrape_jobs": jobs, "scrape_queues": queues}


def costs(result: dict[str, Any]) -> dict[int, dict[str, float]]:
    """Return microseconds by size and operation; the thousand is of the largest one's run."""
    made: dict[int, dict[str, float]] = {}
    for size, found in result["sizes"].items():
        names = list(found["medians_us"])
        made[1000] = found["medians_us"][names[0]]
        made[int(size)] = found["medians_us"][names[1]]
    return dict(sorted(made.items()))


def bars(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare the largest size with what was promised."""
    size, found = max(result["sizes"].items(), key=lambda item: int(item[0]))
    claims = [ratio["claim"] for ratio in found["ratios"].values()]
    snapshot = max(one["snapshot"] for one in found["medians_us"].values()) / 1000
    made = [
        {"bar": f"claim at {int(size):,} jobs, times that at 1,000 (at most)", "wanted": RATIO_MAX,
         "found": max(claims), "met": max(claims) <= RATIO_MAX},
        {"bar": f"snapshot for a scrape at {int(size):,} jobs, ms (at most)",
         "wanted": SCRAPE_MS_MAX, "found": snapshot, "met": snapshot <= SCRAPE_MS_MAX},
    ]  # fmt: skip
    if result["scrape_ms"]:
        worst = max(result["scrape_ms"].values())
        made.append(
            {"bar": f"scrape with {result['scrape_queues']} queues, ms (at most)",
             "wanted": SCRAPE_MS_MAX, "found": worst, "met": worst <= SCRAPE_MS_MAX}
        )  # fmt: skip
    return made


def render(result: dict[str, Any]) -> str:
    """Return the tables."""
    by_size = costs(result)
    operations = list(next(iter(by_size.values())))
    lines = [
        [f"{size:,}", *(f"{found[name]:,.0f}" for name in operations)]
        for size, found in by_size.items()
    ]
    parts = [table(("jobs waiting", *(f"{name}, µs" for name in operations)), lines)]
    ratio = [
        [f"{int(size):,}: {name}", *(f"{one[operation]:.2f}" for operation in operations)]
        for size, found in result["sizes"].items()
        for name, one in list(found["ratios"].items())[1:]
    ]
    heads = ("times the cost beside 1,000 ready", *operations)
    parts.append(table(heads, ratio))
    scrape = [[name, f"{value:.1f}"] for name, value in result["scrape_ms"].items()]
    heads = (f"{result['scrape_jobs']:,} jobs in {result['scrape_queues']} queues", "median ms")
    parts.append(table(heads, scrape))
    return "\n".join(parts)
