"""Run the benchmarks: `python -m benchmarks [--only 1,4] [--hour | --quick]`.

Each workload runs herdsman and what people would use instead in turn, on this machine, and
replaces its part of `benchmarks/results/`. Exit code 1 says that a bar was missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
import tempfile
from pathlib import Path

from benchmarks import facts, report
from benchmarks.contenders import EVERYONE, FULL, absent
from benchmarks.harness import QUICK, Options, say

HOUR = Options(rounds=3, peer_rounds=1, side_rounds=1, peer_seconds=4.0)
HOUR_ROUNDS = {"1": (3, 2), "2": (2, 1), "5": (2, 1), "7": (1, 1), "9": (1, 1)}
"""Rounds of ours and of the peers where `--hour` has others: three wherever something is promised
of a rate or a latency, and two of the peers where it is promised in comparison with them."""


def options(given: argparse.Namespace, key: str) -> Options:
    """Return the options the arguments ask for, for one workload."""
    base = QUICK if given.quick else Options()
    if given.hour:
        rounds, peer_rounds = HOUR_ROUNDS.get(key, (HOUR.rounds, HOUR.peer_rounds))
        base = dataclasses.replace(HOUR, rounds=rounds, peer_rounds=peer_rounds)
    changes = {
        name: value
        for name in ("rounds", "peer_rounds", "side_rounds", "seconds", "peer_seconds")
        if (value := getattr(given, name)) is not None
    }
    only = frozenset(given.contenders.split("/")) if given.contenders else frozenset()
    return dataclasses.replace(base, only=only, **changes)


def main() -> int:
    """Run what is asked for, and store it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", default=",".join(report.WORKLOADS), help="workloads, 1,4,idle")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--quick", action="store_true", help="try it; figures mean nothing")
    length.add_argument("--hour", action="store_true", help="all in an hour; else it takes three")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--peer-rounds", type=int, help="rounds in which peers take part")
    parser.add_argument("--side-rounds", type=int, help="rounds of what nothing is promised about")
    parser.add_argument("--seconds", type=float, help="length of a measurement of herdsman")
    parser.add_argument("--peer-seconds", type=float, help="length of a measurement of a peer")
    parser.add_argument("--contenders", help="names with slashes between; default all")
    parser.add_argument("--results", type=Path, help="folder; a quick run defaults to a new one")
    given = parser.parse_args()
    # Else what a place has started would outlive us.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    chosen = given.only.split(",")
    if unknown := [key for key in chosen if key not in report.WORKLOADS]:
        parser.error(f"no workload {', '.join(unknown)}; there are {', '.join(report.WORKLOADS)}")
    first = options(given, chosen[0])
    if unknown := sorted(first.only - {one.name for one in (*EVERYONE, *FULL)}):
        names = " / ".join(one.name for one in EVERYONE)
        parser.error(f"no contender {', '.join(unknown)}; there are {names}")
    folder = given.results or report.RESULTS
    if first.quick and given.results is None:
        folder = Path(tempfile.mkdtemp(prefix="herdsman-bench-results-"))
    for who, why in absent().items():
        say(f"{who} does not take part: {why}")
    results = report.load(folder)
    for key in chosen:
        workload, wanted = report.module(key), options(given, key)
        say(f"{key}. {workload.TITLE}")
        about = {"machine": facts.machine(), "load": facts.load(), "absent": absent()}
        told = dataclasses.asdict(wanted) | {"only": sorted(wanted.only)}
        results[key] = about | {"options": told, "result": workload.run(wanted)}
        report.save(results, folder)
    missed = [bar for key, bar in report.bars(results) if key in chosen and not bar["met"]]
    for bar in missed:
        say(f"missed: {bar['bar']}: wanted {bar['wanted']:g}, found {bar['found']:.3g}")
    say(f"results are in {folder}")
    return int(bool(missed) and not first.quick)


if __name__ == "__main__":
    sys.exit(main())
