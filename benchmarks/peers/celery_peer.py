"""Drive Celery with its prefork worker on Redis; it has no bulk call, so puts share a producer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from celery import Celery

from benchmarks import tasks
from benchmarks.peers.programs import program

app = Celery("bench", broker=os.environ.get("BENCH_REDIS") or "redis://127.0.0.1:1/0")


@app.task(ignore_result=True)
def work(payload: Any) -> None:
    """Be the job."""
    tasks.handle(payload)


class Client:
    """Puts."""

    put = staticmethod(work.delay)

    def put_many(self, payloads: list[Any]) -> None:
        """Put many through one producer."""
        with app.producer_pool.acquire(block=True) as producer:
            for payload in payloads:
                work.apply_async((payload,), producer=producer)

    def close(self) -> None:
        """Close the connections."""
        app.close()


def commands(folder: Path, workers: int) -> list[list[str]]:
    """Return what starts the worker."""
    return [
        [program("celery"), "-A", "benchmarks.peers.celery_peer", "worker",
         "-P", "prefork", "-c", str(workers), "-l", "WARNING"],
    ]  # fmt: skip
