"""Drive RQ with its pool of workers, each of which forks for every job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from redis import Redis
from rq import Queue

from benchmarks import tasks
from benchmarks.peers.programs import program


def work(payload: Any) -> None:
    """Be the job."""
    tasks.handle(payload)


class Client:
    """Puts."""

    def __init__(self) -> None:
        self._queue = Queue("bench", connection=Redis.from_url(os.environ["BENCH_REDIS"]))

    def put(self, payload: Any) -> None:
        """Put one."""
        self._queue.enqueue(work, payload)

    def put_many(self, payloads: list[Any]) -> None:
        """Put many by its bulk call."""
        self._queue.enqueue_many([Queue.prepare_data(work, (payload,)) for payload in payloads])

    def close(self) -> None:
        """Close the connection."""
        self._queue.connection.close()


def commands(folder: Path, workers: int) -> list[list[str]]:
    """Return what starts the pool."""
    url = os.environ["BENCH_REDIS"]
    return [[program("rq"), "worker-pool", "bench", "-n", str(workers), "-u", url, "-q"]]
