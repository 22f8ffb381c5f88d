"""Run the benchmarks: `python -m benchmarks [--only 1,4] [--quick]`.

Each workload runs herdsman and what people would use instead in turn, on this machine, and
replaces its part of `benchmarks/results/`. Exit code 1 says that a bar was missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path

from benchmarks import facts, report
from benchmarks.contenders import EVERYONE, HERDSMAN_FULL, absent
from benchmarks.harness import QUICK, Options, say


def options(given: argparse.Namespace) -> Options:
    """Return the options the arguments ask for."""
    base = QUICK if given.quick else Options()
    changes = {
        name: value
        for name in ("rounds", "seconds", "peer_seconds")
        if (value := getattr(given, name)) is not None
    }
    only = frozenset(given.contenders.split("/")) if given.contenders else frozenset()
    return dataclasses.replace(base, only=only, **changes)


def main() -> int:
    """Run what is asked for, and store it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", default=",".join(report.WORKLOADS), help="workloads, 1,4,idle")
    parser.add_argument("--quick", action="store_true", help="try it; figures mean nothing")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float, help="length of a measurement of herdsman")
    parser.add_argument("--peer-seconds", type=float, help="length of a measurement of a peer")
    parser.add_argument("--contenders", help="names with slashes between; default all")
    parser.add_argument("--results", type=Path, help="folder; a quick run defaults to a new one")
    given = parser.parse_args()
    chosen = given.only.split(",")
    if unknown := [key for key in chosen if key not in report.WORKLOADS]:
        parser.error(f"no workload {', '.join(unknown)}; there are {', '.join(report.WORKLOADS)}")
    wanted = options(given)
    if unknown := sorted(wanted.only - {one.name for one in (*EVERYONE, HERDSMAN_FULL)}):
        names = " / ".join(one.name for one in EVERYONE)
        parser.error(f"no contender {', '.join(unknown)}; there are {names}")
    folder = given.results or report.RESULTS
    if wanted.quick and given.results is None:
        folder = Path(tempfile.mkdtemp(prefix="herdsman-bench-results-"))
    for who, why in absent().items():
        say(f"{who} does not take part: {why}")
    results = report.load(folder)
    for key in chosen:
        workload = report.module(key)
        say(f"{key}. {workload.TITLE}")
        about = {"machine": facts.machine(), "load": facts.load(), "absent": absent()}
        told = dataclasses.asdict(wanted) | {"only": sorted(wanted.only)}
        results[key] = about | {"options": told, "result": workload.run(wanted)}
        report.save(results, folder)
    missed = [bar for key, bar in report.bars(results) if key in chosen and not bar["met"]]
    for bar in missed:
        say(f"missed: {bar['bar']}: wanted {bar['wanted']:g}, found {bar['found']:.3g}")
    say(f"results are in {folder}")
    return int(bool(missed) and not wanted.quick)


if __name__ == "__main__":
    sys.exit(main())
