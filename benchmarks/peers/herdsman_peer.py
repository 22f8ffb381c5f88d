"""Drive herdsman: `herdsman run` with a pool of so many processes, and puts through the library.

Variant "full" puts through the same engine with SQLite's own durable commit instead of group
commit, as a rival in the measurement of single puts; "full, own lock" also leaves out our lock and
lets SQLite wait and checkpoint as it does by itself: what people who open a file in WAL mode get.
"""

from __future__ import annotations

import os
import socket
import sys
import tomllib
from pathlib import Path
from typing import Any

from queue_core import Queue
from queue_core.engines.sqlite import SqliteEngine

CONFIG = """\
database = "h.db"
[web]
listen = "127.0.0.1:{port}"
[handlers.bench]
python = "benchmarks.tasks:handle"
[pools.default]
processes = {workers}
"""


class Client:
    """Puts."""

    def __init__(self) -> None:
        path = Path(os.environ["BENCH_FOLDER"]) / "h.db"
        variant = os.environ.get("BENCH_VARIANT", "")
        own_lock = variant == "full, own lock"
        engine = SqliteEngine(
            path,
            durability="normal" if variant else "full",
            lock="off" if own_lock else "flock",
            unsafe_sqlite=own_lock,
        )
        self._queue: Queue[Any] = Queue(path, "bench", engine=engine)
        self._queue.counts()
        if variant:
            connection = engine._file._connection
            assert connection is not None
            connection.execute("PRAGMA synchronous = FULL")
        if own_lock:
            connection.execute("PRAGMA wal_autocheckpoint = 1000")  # SQLite's default
        self.put = self._queue.put
        self.put_many = self._queue.put_many

    def close(self) -> None:
        """Close the queue."""
        self._queue.engine.close()


def commands(folder: Path, workers: int) -> list[list[str]]:
    """Return what starts the service."""
    config = folder / "herdsman.toml"
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    config.write_text(CONFIG.format(workers=workers, port=port))
    return [[sys.executable, "-m", "supervisor", "run", "--config", str(config)]]


def web_address(folder: Path) -> str:
    """Return the host and port at which the service of a folder serves its pages."""
    settings = tomllib.loads((folder / "herdsman.toml").read_text())
    return str(settings["web"]["listen"])
