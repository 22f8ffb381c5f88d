"""Workload 5: jobs of 1, 10 and 100 ms, and how near that comes to ideal use of the workers.

The ideal is the same handler, called in a bare loop by as many processes. Jobs that wait (as one
that talks to a network) and jobs that compute are told apart: computing ones share two cores with
the rest of the service. The bar is a matter of two per cent, and the rates of computing jobs that
are measured a minute apart differ by ten; so for it both sides live at once and work in turn, a few
seconds each, and the processor time that handlers got is compared. How fast waiting jobs end does
not depend on the machine's speed, and a stop costs ours a second of small claims: their bar goes by
the rates of whole rounds.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from typing import Any

from benchmarks import board, harness, slices, tasks
from benchmarks.contenders import HERDSMAN, Contender
from benchmarks.harness import Options, Rounds, drain, fill, interleave
from benchmarks.place import Place, place
from benchmarks.tables import table

TITLE = "Use of the workers"
WORKERS = 2
MILLISECONDS = (1, 10, 100)
KINDS = {"wait": "waiting", "spin": "computing"}
WANTED = 0.98
PAIRS = 15
MEASURES = {"jobs": "by jobs done", "busy": "by processor time in handlers"}
IDEAL = "bare loop"


def start_bare(here: Place, more: dict[str, int]) -> None:
    """Start the processes of the bare loop."""
    for _ in range(WORKERS):
        here.start(sys.executable, "-m", "benchmarks.workloads.ideal", json.dumps(more))


def bare_loop(options: Options, kind: str, more: dict[str, int]) -> dict[str, Any]:
    """Call the handler in a loop in as many processes."""
    with place(HERDSMAN, kind) as here:
        start_bare(here, more)
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


def in_turn(options: Options, kind: str, more: dict[str, int]) -> dict[str, Any]:
    """Compare ours with the bare loop in short slices."""
    pairs = 2 if options.quick else PAIRS
    seconds = pairs * (slices.SLICE_SECONDS + slices.SETTLE_SECONDS)
    jobs = int((seconds + options.seconds) * WORKERS * 2 * 1000 / more["ms"])
    with place(HERDSMAN, kind) as ours, place(HERDSMAN, kind) as bare:
        fill(ours, jobs, 60.0, **more)
        ours.start_workers(WORKERS)
        board.watch(ours.folder, expected=jobs, seconds=harness.WARM_SECONDS)
        start_bare(bare, more)
        board.watch(bare.folder, expected=10**12, seconds=0.5)
        try:
            return slices.compare(ours, bare, pairs)
        finally:
            for side in (ours, bare):  # so that they can be ended politely
                slices.send(side, signal.SIGCONT)


def run(options: Options) -> dict[str, Any]:
    """Run all rounds for each kind and length; peers only at 10 ms."""
    found: dict[str, Rounds] = {}
    turns: dict[str, Any] = {}
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
            if milliseconds == 10 and HERDSMAN.name in runs:
                turns[kind] = in_turn(options, kind, more)
                for by, pairs in turns[kind].items():
                    harness.say(f"in turn, {kind}, {by}: {pairs['median']:.4f}")
    return {"lengths": found, "in_turn": turns}


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
        busy = result.get("in_turn", {}).get(kind, {}).get("busy")
        found = busy["median"] if busy else share(result["lengths"][f"{kind} 10"], HERDSMAN.name)
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
    turns = [
        [f"{KINDS[kind]} jobs of 10 ms, {words}",
         *(f"{at:.1%}" for at in (one[by]["median"], *one[by]["quartiles"]))]
        for kind, one in result.get("in_turn", {}).items()
        for by, words in MEASURES.items() if by in one
    ]  # fmt: skip
    beside = table(("in turn with the bare loop", "median", "quartile", "quartile"), turns)
    return table(("two workers", *heads), lines) + "\n\n" + beside


def main() -> None:
    """Be one process of the bare loop, until killed."""
    more = json.loads(sys.argv[1])
    (payload,) = tasks.payloads(0, 1, **more)
    while os.getppid() != 1:
        tasks.handle(payload)


if __name__ == "__main__":
    main()
