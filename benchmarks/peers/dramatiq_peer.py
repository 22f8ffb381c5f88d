"""Drive Dramatiq on Redis: its own program with so many processes of eight threads, its default."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from benchmarks import tasks
from benchmarks.peers.programs import program

broker = RedisBroker(url=os.environ.get("BENCH_REDIS") or "redis://127.0.0.1:1/0")
dramatiq.set_broker(broker)


@dramatiq.actor
def work(payload: Any) -> None:
    """Be the job."""
    tasks.handle(payload)


class Client:
    """Puts; its group enqueues one by one too."""

    put = staticmethod(work.send)

    def put_many(self, payloads: list[Any]) -> None:
        """Put many."""
        for payload in payloads:
            work.send(payload)

    def close(self) -> None:
        """Close the broker."""
        broker.close()


def commands(folder: Path, workers: int) -> list[list[str]]:
    """Return what starts the workers."""
    return [[program("dramatiq"), "benchmarks.peers.dramatiq_peer", "-p", str(workers)]]
