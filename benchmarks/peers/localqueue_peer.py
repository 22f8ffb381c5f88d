"""Drive localqueue: one process a worker, each with its own `Worker`; relaxed, or durable."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from localqueue import DurabilityMode, SimpleQueue, Worker


def queue() -> Any:
    """Open the queue."""
    durable = os.environ.get("BENCH_VARIANT") == "durable"
    return SimpleQueue(
        str(Path(os.environ["BENCH_FOLDER"]) / "local"),
        durability=DurabilityMode.DURABLE if durable else DurabilityMode.RELAXED,
    )


class Client:
    """Puts."""

    def __init__(self) -> None:
        self._queue = queue()
        self.put = self._queue.put
        self.put_many = self._queue.put_many

    def close(self) -> None:
        """Close the queue."""
        self._queue.close()


def commands(folder: Path, workers: int) -> list[list[str]]:
    """Return what starts the workers."""
    return [[sys.executable, "-m", "benchmarks.peers.localqueue_peer"]] * workers


def main() -> None:
    """Be a worker."""
    from benchmarks.tasks import handle

    Worker(queue(), lambda job: handle(job.data)).run()


if __name__ == "__main__":
    main()
