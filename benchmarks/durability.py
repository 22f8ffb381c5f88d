"""Compare group commit with SQLite's own durable commit: the same puts, the same processes.

    python benchmarks/durability.py [--producers 8] [--seconds 3] [--rounds 5] [--json]

Group commit is what `Queue` does: puts that meet (one job each, up to 2 KB) are stored in one
transaction, COMMIT with synchronous=NORMAL under the lock, which is given back before the one
flush of the log. Its rival is the same engine with synchronous=FULL: each put has a transaction,
whose COMMIT flushes while the lock is held. Rounds are interleaved, and each figure is the median
of its rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from queue_core import Queue
from queue_core.engines.sqlite import SqliteEngine

KINDS = ("group commit", "synchronous=FULL")


def produce(database: Path, kind: str, start: float, seconds: float, tell: int) -> None:
    """Put until time is up; tell how many there were, and the longest."""
    full = kind == "synchronous=FULL"
    engine = SqliteEngine(database, durability="normal" if full else "full")
    queue: Queue[Any] = Queue(database, "jobs", engine=engine)
    queue.counts()
    if full:
        connection = engine._file._connection
        assert connection is not None
        connection.execute("PRAGMA synchronous = FULL")
    time.sleep(max(0.0, start - time.monotonic()))
    number, worst = 0, 0.0
    now = time.monotonic()
    while now < start + seconds:
        queue.put({"number": number})
        before, now = now, time.monotonic()
        worst = max(worst, now - before)
        number += 1
    os.write(tell, f"{number} {worst}\n".encode())


def measure(folder: Path, kind: str, producers: int, seconds: float) -> dict[str, float]:
    """Run one round in a new database."""
    database = folder / "h.db"
    with Queue(database, "jobs") as queue:
        queue.put("so that the file is there")
    reader, writer = os.pipe()
    start = time.monotonic() + 1.0
    pids = []
    for _ in range(producers):
        if (pid := os.fork()) == 0:
            try:
                produce(database, kind, start, seconds, writer)
            finally:
                os._exit(0)
        pids.append(pid)
    os.close(writer)
    with os.fdopen(reader) as lines:
        told = [line.split() for line in lines]
    for pid in pids:
        os.waitpid(pid, 0)
    if len(told) != producers:
        raise SystemExit(f"{producers - len(told)} producers failed")
    numbers = [int(number) for number, _ in told]
    return {
        "puts_per_second": sum(numbers) / seconds,
        "worst_put_ms": max(float(worst) for _, worst in told) * 1000,
        "fewest_of_a_producer": min(numbers),
    }


def missed(medians: dict[str, dict[str, float]]) -> list[str]:
    """Return in what group commit is not the better of the two; empty when it is in all."""
    group, full = (medians[kind] for kind in KINDS)
    found = []
    if group["puts_per_second"] <= full["puts_per_second"]:
        found.append("no more puts per second")
    if group["worst_put_ms"] >= full["worst_put_ms"]:
        found.append("no shorter worst put")
    return found


def main() -> int:
    """Run all rounds, and print; exit code 1 when group commit is not the better one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--producers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="where the databases are made")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for _ in range(given.rounds):
        for kind in KINDS:
            with tempfile.TemporaryDirectory(dir=given.folder, prefix="herdsman-bench-") as folder:
                found[kind].append(measure(Path(folder), kind, given.producers, given.seconds))
    medians = {
        kind: {name: statistics.median(round_[name] for round_ in rounds) for name in rounds[0]}
        for kind, rounds in found.items()
    }
    if given.json:
        json.dump({"producers": given.producers, "medians": medians, "rounds": found}, sys.stdout)
        print()
        return int(bool(missed(medians)))
    print(f"{given.producers} producers, median of {given.rounds} rounds of {given.seconds:g} s\n")
    print("| | puts/s | worst put, ms | fewest puts of a producer |\n|---|---:|---:|---:|")
    for kind, row in medians.items():
        print(
            f"| {kind} | {row['puts_per_second']:,.0f} | {row['worst_put_ms']:.1f} "
            f"| {row['fewest_of_a_producer']:,.0f} |"
        )
    group, full = (medians[kind] for kind in KINDS)
    print(
        f"\nGroup commit: {group['puts_per_second'] / full['puts_per_second']:.2f} times the puts, "
        f"its worst put {group['worst_put_ms'] / full['worst_put_ms']:.2f} times as long."
    )
    for what in (worse := missed(medians)):
        print(f"Missed: group commit has {what} than synchronous=FULL.")
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
