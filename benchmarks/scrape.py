"""Measure a scrape of a large database: 50 queues and a million jobs.

    python benchmarks/scrape.py [--queues 50] [--jobs 1000000] [--folder /tmp/x] [--rounds 20]

Fills a database through the library, with every outcome in every queue, then serves scrapes
from it as `web` does, without the second for which an answer is kept. Prints what each step
takes, the median, the worst and the processor time (which other load on the machine changes
least): the read of the snapshot and its flush, and the whole scrape
in the plain format and in OpenMetrics, which is what Prometheus asks for. Exits 1 when the
median of a whole scrape is over `--limit` milliseconds.

Figures of one machine are evidence for a choice; compare them as ratios within one run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from queue_core import Queue, open_engine
from supervisor.catalogue import Expected
from supervisor.metrics import Registries, render
from supervisor.reading import numbers

BATCH = 2_000
OPENMETRICS = "application/openmetrics-text;version=1.0.0"


def fill(database: Path, queues: int, jobs: int) -> None:
    """Put the jobs, a tenth of them delayed, and run some of each queue to every end."""
    engine = open_engine(database, durability="normal")
    for number in range(queues):
        name = f"queue-{number:02d}"
        queue: Queue[dict[str, int]] = Queue(database, name, engine=engine)
        for batch in range(0, jobs // queues, BATCH):
            size = min(BATCH, jobs // queues - batch)
            late = batch // BATCH % 10 == 9
            queue.put_many([{"n": n} for n in range(size)], delay=3600 if late else 0)
            if engine.checkpoint_due():
                engine.checkpoint()
        queue.put({"n": 0}, priority=1)
        for _ in range(4):
            done, retried, rejected = (queue.get(timeout=0) for _ in range(3))
            if not (done and retried and rejected):
                raise SystemExit(f"{name} has too few jobs; give --jobs more")
            queue.ack(done)
            queue.nack(retried, error="ValueError: again", delay=3600)
            queue.fail(rejected, error="KeyError: never")
    engine.checkpoint()
    engine.close()


def measure(what: str, work: Callable[[], object], rounds: int) -> float:
    """Run `work` some times, print how long it took, and return the median in milliseconds."""
    work()
    took = []
    used_ns = time.process_time_ns()
    for _ in range(rounds):
        began_ns = time.perf_counter_ns()
        work()
        took.append((time.perf_counter_ns() - began_ns) / 1e6)
    used = (time.process_time_ns() - used_ns) / rounds / 1e6
    median = statistics.median(took)
    print(
        f"{what:<20} median {median:7.2f} ms, worst {max(took):7.2f} ms, processor {used:6.2f} ms"
    )
    return median


def main() -> int:
    """Fill, measure, judge."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--queues", type=int, default=50)
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--limit", type=float, default=50.0, help="milliseconds")
    parser.add_argument("--folder", type=Path, help="keep and reuse the database there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        database = (options.folder or Path(temporary)) / "herdsman.db"
        if not database.exists():
            began = time.perf_counter()
            fill(database, options.queues, options.jobs)
            print(f"filled in {time.perf_counter() - began:.1f} s")
        engine = open_engine(database, create=False)
        names = tuple(f"queue-{number:02d}" for number in range(options.queues))
        expected = Expected(queues=names, pairs=tuple((name, name) for name in names))
        registries = Registries(
            numbers(engine, cache_seconds=0.0), expected, look=None, version="0", engine="sqlite"
        )
        body, _ = render(registries.everything, None)
        samples = sum(not line.startswith("#") for line in body.decode().splitlines())
        print(
            f"{samples} samples, {len(body) / 1024:.0f} KiB, "
            f"{database.stat().st_size / 2**20:.0f} MiB database"
        )
        measure("snapshot", engine.snapshot, options.rounds)
        measure("flush", engine.flush, options.rounds)
        scrapes = {
            "scrape, plain": lambda: render(registries.everything, None),
            "scrape, OpenMetrics": lambda: render(registries.everything, OPENMETRICS),
        }
        medians = [measure(what, work, options.rounds) for what, work in scrapes.items()]
        engine.close()
    return int(max(medians) > options.limit)


if __name__ == "__main__":
    sys.exit(main())
