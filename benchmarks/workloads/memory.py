"""Workload 8: memory of a service that waits, as PSS (a shared page counts by its share)."""

from __future__ import annotations

import collections
import functools
import http.client
import time
from pathlib import Path
from typing import Any

from benchmarks import board, measure
from benchmarks.contenders import HERDSMAN, Contender
from benchmarks.harness import Options, fill, interleave
from benchmarks.peers.herdsman_peer import web_address
from benchmarks.place import place
from benchmarks.tables import row, table

TITLE = "Memory of an idle service with two workers"
JOBS = 1000
SETTLE_SECONDS = 3.0
WEB_SECONDS = 10.0
WORKER_MB_MAX = 20.0
TOTAL_MB_MAX = 90.0
MB = 1e6


def role(command: str) -> str:
    """Name what a process of ours is, by its title."""
    for word in ("keeper", "web"):
        if word in command.split():
            return word
    return "worker" if "/" in command.split()[-1] and "supervisor" not in command else "supervisor"


def scrape(folder: Path) -> None:
    """Ask the service for its metrics once, so that everything a scrape needs is loaded."""
    deadline = time.monotonic() + WEB_SECONDS
    while True:
        connection = http.client.HTTPConnection(web_address(folder), timeout=WEB_SECONDS)
        try:
            connection.request("GET", "/metrics")
            connection.getresponse().read()
            return
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        finally:
            connection.close()


def once(options: Options, contender: Contender) -> dict[str, Any]:
    """Let the service work, wait, and weigh it."""
    with place(contender) as here:
        jobs = fill(here, min(JOBS, contender.jobs_per_second * 5), 10.0)["jobs"]
        here.start_workers(2)
        board.watch(here.folder, expected=jobs, seconds=30.0, stall_seconds=5.0)
        if contender is HERDSMAN:
            scrape(here.folder)
        time.sleep(0.5 if options.quick else SETTLE_SECONDS)
        pids = here.pids()
        weights = {pid: measure.pss_bytes(pid) / MB for pid in pids}
        found: dict[str, Any] = {"total_mb": sum(weights.values()), "processes": len(pids)}
        if contender is HERDSMAN:
            groups = collections.defaultdict(list)
            for pid, weight in weights.items():
                groups[role(measure.command(pid))].append(weight)
            found |= {f"{name}_mb": max(values) for name, values in groups.items()}
        here.stop_workers()
    return found


def run(options: Options) -> dict[str, Any]:
    """Run all rounds; Redis itself is not weighed."""
    runs = {
        contender.name: functools.partial(once, options, contender)
        for contender in options.contenders()
        if contender.redis != "always" and contender.variant != "durable"
    }
    return {"contenders": interleave(options, runs)}


def bars(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare with what was promised."""
    ours = result["contenders"][HERDSMAN.name]["median"]
    return [
        {"bar": "idle worker, MB of PSS (at most)", "wanted": WORKER_MB_MAX,
         "found": ours["worker_mb"], "met": ours["worker_mb"] < WORKER_MB_MAX},
        {"bar": "whole service with 2 workers, MB of PSS (at most)", "wanted": TOTAL_MB_MAX,
         "found": ours["total_mb"], "met": ours["total_mb"] < TOTAL_MB_MAX},
    ]  # fmt: skip


def render(result: dict[str, Any]) -> str:
    """Return the table."""
    fields = (
        ("total_mb", "{:.1f}"), ("processes", "{:.0f}"), ("supervisor_mb", "{:.1f}"),
        ("keeper_mb", "{:.1f}"), ("web_mb", "{:.1f}"), ("worker_mb", "{:.1f}"),
    )  # fmt: skip
    heads = ("", "all, MB", "processes", "supervisor", "keeper", "web", "largest worker")
    found = result["contenders"]
    return table(heads, [row(name, one, *fields) for name, one in found.items()])
