"""Drive huey with its consumer and process workers, on SQLite or on Redis by the variant.

It has no bulk call: its `map` enqueues one by one too.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from huey import RedisHuey, SqliteHuey

from benchmarks import tasks
from benchmarks.peers.programs import program

if os.environ.get("BENCH_VARIANT") == "redis":
    huey = RedisHuey("bench", url=os.environ.get("BENCH_REDIS") or "redis://127.0.0.1:1/0")
else:
    huey = SqliteHuey("bench", filename=str(Path(os.environ.get("BENCH_FOLDER", ".")) / "huey.db"))


@huey.task()
def work(payload: Any) -> None:
    """Be the job."""
    tasks.handle(payload)


class Client:
    """Puts."""

    put = staticmethod(work)

    def put_many(self, payloads: list[Any]) -> None:
        """Put many."""
        for payload in payloads:
            work(payload)

    def close(self) -> None:
        """Close the storage's connection."""
        if hasattr(huey.storage, "close"):
            huey.storage.close()


def commands(folder: Path, workers: int) -> list[list[str]]:
    """Return what starts the consumer."""
    return [
        [program("huey_consumer"), "benchmarks.peers.huey_peer.huey",
         "-k", "process", "-w", str(workers), "-q"],
    ]  # fmt: skip
