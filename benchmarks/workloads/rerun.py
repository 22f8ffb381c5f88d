"""Workload 9: a worker is killed with SIGKILL in the middle of a job; when does the job run again?

Each round puts one job after the other; the handler says in which process it runs, the benchmark
kills that process, and waits for the job's second beginning.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from typing import Any

from benchmarks import board, measure
from benchmarks.contenders import HERDSMAN, Contender
from benchmarks.harness import Options, fill, interleave
from benchmarks.place import Place, place
from benchmarks.tables import row, table

TITLE = "Rerun after kill -9"
KILLS = 10
PEER_KILLS = 1
GIVE_UP_SECONDS = 20.0
JOB_SECONDS = 120
BETWEEN_SECONDS = 2.0


def begun(here: Place, number: int) -> tuple[int, ...] | None:
    """Wait for the `number`th beginning (from 0); None when it does not come."""
    deadline = time.monotonic() + GIVE_UP_SECONDS
    while time.monotonic() < deadline:
        lines = board.stamps(here.folder)
        if len(lines) > number:
            return lines[number]
        time.sleep(0.001)
    return None


def once(options: Options, contender: Contender) -> dict[str, Any]:
    """Kill, and wait for the rerun, some times."""
    kills = PEER_KILLS if contender is not HERDSMAN else 2 if options.quick else KILLS
    took_ns, never = [], 0
    with place(contender, "victim") as here:
        here.start_workers(2)
        for number in range(kills):
            fill(here, 1, 10.0, 100, 1, round=number, stay=JOB_SECONDS)
            first = begun(here, 0)
            if first is None:
                raise TimeoutError("the job did not begin")
            killed_ns = time.monotonic_ns()
            os.kill(first[2], signal.SIGKILL)
            second = begun(here, 1)
            if second is None:
                never += 1
            else:
                took_ns.append(second[1] - killed_ns)
            time.sleep(0.2 if options.quick else BETWEEN_SECONDS)  # no crash loop
            (here.folder / "stamps").write_bytes(b"")
        survivors = here.pids()
        if contender is not HERDSMAN:
            for pid in survivors:  # a worker inside the long job need not be waited for
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        here.stop_workers()
    return {"not_within_20_s": never, **measure.quantiles_ms(took_ns)}


def run(options: Options) -> dict[str, Any]:
    """Run all rounds; each peer once a round."""
    runs = {
        contender.name: functools.partial(once, options, contender)
        for contender in options.contenders()
        if contender.shared and contender.redis != "always" and contender.variant != "durable"
    }
    return {"contenders": interleave(options, runs)}


def bars(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare with what was promised: within a second."""
    ours = result["contenders"][HERDSMAN.name]["median"]
    worst = ours.get("worst_ms", float("inf"))
    met = worst < 1000 and not ours["not_within_20_s"]
    return [
        {"bar": "rerun after kill -9, worst in ms (at most)", "wanted": 1000.0, "found": worst,
         "met": met},
    ]  # fmt: skip


def render(result: dict[str, Any]) -> str:
    """Return the table."""
    fields = (
        ("p50_ms", "{:,.0f}"), ("worst_ms", "{:,.0f}"), ("samples", "{:.0f}"),
        ("not_within_20_s", "{:.0f}"),
    )  # fmt: skip
    heads = ("", "median ms", "worst ms", "reruns in a round", "not within 20 s")
    found = result["contenders"]
    return table(heads, [row(name, one, *fields) for name, one in found.items()])
