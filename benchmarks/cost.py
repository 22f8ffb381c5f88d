"""Measure whether an operation's cost grows with what is stored.

    python benchmarks/cost.py [--large 1000000] [--rounds 40] [--json]

Three databases: a thousand ready jobs; a million; and a thousand beside a million done jobs and
a hundred thousand delayed ones of high priority. Each round does every operation some times on
each of them in turn, so that whatever else the machine does meets all alike. Nothing is flushed:
the disk's own time would hide the difference that is looked for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from queue_core import Queue
from queue_core.engine import ClaimRequest
from queue_core.engines.sqlite import SqliteEngine
from queue_core.job import Outcome, Settlement, State

PER_ROUND = 25
RATIO_MAX = 1.3
HOUR_US = 3_600_000_000

NUMBERS = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :number)"
READY = f"""
{NUMBERS}
INSERT INTO job (id, queue, state, seq, task, enqueued_us, ready_us, payload)
SELECT :first + i, 1, 'ready', :first + i, 'jobs', :now, :now, CAST('{{"number": 1}}' AS BLOB)
FROM n
"""
DELAYED = f"""
{NUMBERS}
INSERT INTO job (id, queue, state, priority, task, enqueued_us, due_us, payload)
SELECT :first + i, 1, 'delayed', 100, 'jobs', :now, :now + {HOUR_US} + i, CAST('1' AS BLOB) FROM n
"""
DONE = f"""
{NUMBERS}
INSERT INTO done (id, queue, outcome, priority, run, attempts, deaths, task, enqueued_us, ready_us,
    claimed_us, started_us, finished_us, worker, payload)
SELECT :first + i, 1, 'succeeded', 0, 1, 1, 0, 'jobs', :now, :now, :now, :now, :now + i, 'w/0',
    CAST('1' AS BLOB) FROM n
"""


class Store:
    """A database with so many jobs, and what is measured on it."""

    def __init__(self, path: Path, *, ready: int, done: int = 0, delayed: int = 0) -> None:
        self.engine = SqliteEngine(path, durability="normal", flush_finishes=False)
        self.queue: Queue[Any] = Queue(path, "jobs", engine=self.engine)
        self.queue.put({"number": 0})
        first = 1
        for statement, state, number in (
            (READY, "ready", ready - 1),
            (DONE, "done", done),
            (DELAYED, "delayed", delayed),
        ):
            if number:
                self._fill(statement, state, first, number)
                first += number
        self.engine.checkpoint()
        self.holder = self.queue._hold()

    def _fill(self, statement: str, state: str, first: int, number: int) -> None:
        with self.queue.transaction() as tx:
            tx.execute(statement, {"number": number, "first": first, "now": self.engine.now_us()})
            tx.execute(
                "INSERT INTO stat VALUES (1, '', 'queue_jobs', ?, ?)"
                " ON CONFLICT DO UPDATE SET value = value + excluded.value",
                (state, number),
            )
            tx.execute("UPDATE stat SET value = value + ? WHERE name = 'sequence'", (number,))

    def round(self, took: dict[str, list[float]]) -> None:
        """Do every operation some times; as many jobs are there afterwards as before."""

        def timed(name: str, work: Callable[[], Any]) -> Any:
            before = time.perf_counter_ns()
            result = work()
            took[name].append((time.perf_counter_ns() - before) / 1000)
            return result

        request = ClaimRequest(queues=["jobs"], limit=1, lease_us=HOUR_US)
        for _ in range(PER_ROUND):
            timed("put", lambda: self.queue.put({"number": 1}))
            (row,) = timed("claim", lambda: self.engine.claim(request, holder=self.holder))
            done = Settlement(
                claim=row.claim, to=State.DONE, outcome=Outcome.SUCCEEDED, started_us=row.claimed_us
            )
            timed("ack", lambda done=done: self.engine.finish([done]))
            timed("counts", self.queue.counts)
            timed("snapshot", self.engine.snapshot)


def main() -> int:
    """Fill, measure, print; exit code 1 when a cost grew."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--large", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--folder", type=Path, default=None, help="where the databases are made")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    small, large, delayed = 1000, given.large, given.large // 10
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="herdsman-bench-") as folder:
        stores = {
            f"{small:,} ready": Store(Path(folder) / "small.db", ready=small),
            f"{large:,} ready": Store(Path(folder) / "large.db", ready=large),
            f"{small:,} ready, {large:,} done, {delayed:,} delayed": Store(
                Path(folder) / "beside.db", ready=small, done=large, delayed=delayed
            ),
        }
        took: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in stores}
        for number in range(given.rounds + 1):
            for name, store in stores.items():
                # The first round warms the caches.
                store.round(took[name] if number else defaultdict(list))
            for store in stores.values():
                store.engine.checkpoint()
        for store in stores.values():
            store.engine.close()
    medians = {
        name: {operation: statistics.median(values) for operation, values in found.items()}
        for name, found in took.items()
    }
    base = next(iter(medians.values()))
    ratios = {
        name: {operation: value / base[operation] for operation, value in found.items()}
        for name, found in medians.items()
    }
    worst = max(value for found in ratios.values() for value in found.values())
    if given.json:
        json.dump({"medians_us": medians, "ratios": ratios, "worst_ratio": worst}, sys.stdout)
        print()
    else:
        print(f"Median of {given.rounds * PER_ROUND} times each, in microseconds (ratio)\n")
        print("| stored | " + " | ".join(base) + " |\n|---" + "|---:" * len(base) + "|")
        for name, found in medians.items():
            cells = (f"{found[one]:.0f} ({ratios[name][one]:.2f})" for one in base)
            print(f"| {name} | " + " | ".join(cells) + " |")
        print(f"\nWorst ratio {worst:.2f}; at most {RATIO_MAX} is wanted.")
    return int(worst > RATIO_MAX)


if __name__ == "__main__":
    sys.exit(main())
