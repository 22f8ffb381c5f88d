"""Workload 5: jobs of 1, 10 and 100 ms, and how near that comes to ideal use of the workers.

The ideal is the same handler, called in a bare loop by as many processes. Jobs that wait (as one
that talks to a network) and jobs that compute are told apart: computing ones share two cores with
the rest of the service.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from typing import Any

from benchmarks import board, tasks
from benchmarks.contenders import HERDSMAN, Contender
from benchmarks.harness import Options, Rounds, drain, fill, interleave
from benchmarks.place import place
from benchmarks.tables import table

TITLE = "Use of the workers"
WORKERS = 2
MILLISECONDS = (1, 10, 100)
KINDS = {"wait": "waiting", "spin": "computing"}
WANTED = 0.98
IDEAL = "bare loop"


def bare_loop(options: Options, kind: str, more: dict[str, int]) -> dict[str, Any]:
    """Call the handler in a loop in as many processes."""
    with place(HERDSMAN, kind) as here:
        for _ in range(WORKERS):
            here.start(sys.executable, "-m", "benchmarks.workloads.ideal", json.dumps(more))
        window = board.watch(here.folder, expected=10**12, seconds=options.seconds / 2)
        here.stop_workers()
    return {"jobs": window.jobs, "jobs_per_second": window.jobs_per_second}


def once(options: Options, contender: Contender, kind: str, more: dict[str, int]) -> dict[str, Any]:
    """Drain jobs of one length."""
    seconds = options.seconds_for(contender) / 2
    # Twice what two workers can do at best, so that the queue is never empty.
    jobs = int(seconds * WORKERS * 2 * 1000 / more["ms"]) + 20
    with place(contender, kind) as here:
        filled = fill(here, jobs, 60.0, **more)
        return drain(here, WORKERS, filled["jobs"], seconds)


def run(options: Options) -> dict[str, Any]:
    """Run all rounds for each kind and length; peers only at 10 ms."""
    found: dict[str, Rounds] = {}
    for kind in KINDS:
        for milliseconds in (10,) if options.quick else MILLISECONDS:
            more = {"ms": milliseconds, "loops": tasks.loops_for(milliseconds / 1000)}
            runs: dict[str, Any] = {IDEAL: functools.partial(bare_loop, options, kind, more)}
            for contender in options.contenders():
                peer = contender is not HERDSMAN
                if peer and (milliseconds != 10 or contender.redis == "always"):
                    continue
                runs[contender.name] = functools.partial(once, options, contender, kind, more)
            sides = () if milliseconds == 10 else [*runs]
            found[f"{kind} {milliseconds}"] = interleave(options, runs, sides=sides)
    return {"lengths": found}


def share(found: Rounds, name: str) -> float | None:
    """Return a contender's share of the bare loop's rate."""
    if "median" not in found.get(name, {}):
        return None
    rate: float = found[name]["median"]["jobs_per_second"]
    return rate / float(found[IDEAL]["median"]["jobs_per_second"])


def bars(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare with what was promised, for both kinds of jobs of 10 ms."""
    made = []
    for kind, word in KINDS.items():
        found = share(result["lengths"][f"{kind} 10"], HERDSMAN.name)
        if found is not None:
            made.append(
                {"bar": f"share of a bare loop, {word} jobs of 10 ms", "wanted": WANTED,
                 "found": found, "met": found >= WANTED}
            )  # fmt: skip
    return made


def render(result: dict[str, Any]) -> str:
    """Return the table: a column a length."""
    names = list(dict.fromkeys(name for found in result["lengths"].values() for name in found))
    lines = []
    for name in names:
        cells = [name]
        for found in result["lengths"].values():
            part = share(found, name)
            rate = f"{found[name]['median']['jobs_per_second']:,.0f}/s, " if part else ""
            cells.append("" if part is None else f"{rate}{part:.1%}")
        lines.append(cells)
    heads = [f"{KINDS[at.split()[0]]}, {at.split()[1]} ms" for at in result["lengths"]]
    return table(("two workers", *heads), lines)


def main() -> None:
    """Be one process of the bare loop, until killed."""
    more = json.loads(sys.argv[1])
    (payload,) = tasks.payloads(0, 1, **more)
    while os.getppid() != 1:
        tasks.handle(payload)


if __name__ == "__main__":
    main()
