"""Drive litequeue: one process a worker, each in a loop of pop and done."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from litequeue import LiteQueue

IDLE_SECONDS = 0.01
BUSY_SECONDS = 60.0


def queue() -> Any:
    """Open the queue; the time-out only keeps a contended process from failing."""
    return LiteQueue(Path(os.environ["BENCH_FOLDER"]) / "lite.db", timeout=BUSY_SECONDS)


class Client:
    """Puts; many share a transaction."""

    def __init__(self) -> None:
        self._queue = queue()

    def put(self, payload: Any) -> None:
        """Put one."""
        self._queue.put(json.dumps(payload))

    def put_many(self, payloads: list[Any]) -> None:
        """Put many in one transaction."""
        with self._queue.transaction(mode="IMMEDIATE"):
            for payload in payloads:
                self._queue.put(json.dumps(payload))

    def close(self) -> None:
        """Close the queue."""
        self._queue.close()


def commands(folder: Path, workers: int) -> list[list[str]]:
    """Return what starts the workers."""
    return [[sys.executable, "-m", "benchmarks.peers.litequeue_peer"]] * workers


def main() -> None:
    """Be a worker."""
    from benchmarks.tasks import handle

    mine = queue()
    while True:
        message = mine.pop()
        if message is None:
            time.sleep(IDLE_SECONDS)
            continue
        handle(json.loads(message.data))
        mine.done(message.message_id)


if __name__ == "__main__":
    main()
