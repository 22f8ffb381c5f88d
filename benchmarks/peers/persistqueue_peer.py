"""Drive persist-queue's SQLiteAckQueue: one process, a thread a worker.

Its queue belongs to one process: opening it in a second gives the first one's jobs out again.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

from persistqueue import SQLiteAckQueue


def queue() -> Any:
    """Open the queue."""
    warnings.simplefilter("ignore")
    path = str(Path(os.environ["BENCH_FOLDER"]) / "persist")
    return SQLiteAckQueue(path, multithreading=True)


class Client:
    """Puts; it has no bulk call."""

    def __init__(self) -> None:
        self._queue = queue()
        self.put = self._queue.put

    def put_many(self, payloads: list[Any]) -> None:
        """Put many."""
        for payload in payloads:
            self._queue.put(payload)

    def close(self) -> None:
        """Close the queue."""
        self._queue.close()


def commands(folder: Path, workers: int) -> list[list[str]]:
    """Return what starts the worker process."""
    return [[sys.executable, "-m", "benchmarks.peers.persistqueue_peer", str(workers)]]


def main() -> None:
    """Be all workers."""
    from benchmarks.tasks import handle

    mine = queue()

    def work() -> None:
        while True:
            item = mine.get(raw=True)
            handle(item["data"])
            mine.ack(item)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(int(sys.argv[1]))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
