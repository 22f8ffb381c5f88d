"""Set the scene for puts that meet: a lock in our hand, and children that put when told to."""

from __future__ import annotations

import json
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from queue_core import Queue, QueueError
from queue_core.clock import SystemClock
from queue_core.engines import sqlite_log
from queue_core.engines.sqlite_board import Board, Posted
from queue_core.lockfile import FileLock
from tests.conftest import wait_until

QUEUE = "jobs"
Fork = Callable[[Callable[[], object]], int]
Results = list[dict[str, Any]]


class Stage:
    """One database, a lock in our hand, and children that open it and put when told to."""

    def __init__(self, database: Path, fork: Fork) -> None:
        self.database = database
        self._fork = fork
        self._reader, self._writer = os.pipe()
        self._opened_reader, self._opened_writer = os.pipe()
        self._go_reader, self._go_writer = os.pipe()
        self._waiting = 0
        self.board = Board(Path(f"{database}.bells"), SystemClock())
        self._lock = FileLock(Path(f"{database}.lock"))
        Queue[str](database, QUEUE).put("first")

    @contextmanager
    def locked(self, number: int | None = None) -> Iterator[list[Posted]]:
        """Hold the lock, let the children put, and wait until so many, or all, are on the board."""
        self.opened()
        number = self._waiting if number is None else number
        assert self._lock.acquire(5.0)
        try:
            self.let_go()
            yield self.waits(number)
        finally:
            self._lock.release()

    def opened(self) -> None:
        """Wait until the children have opened the database, for which they need the lock."""
        for _ in range(self._waiting):
            assert os.read(self._opened_reader, 1) == b"o"

    def let_go(self) -> None:
        """Let the children put."""
        os.write(self._go_writer, b"g" * self._waiting)
        self._waiting = 0

    def child(
        self,
        payload: str,
        before: Callable[[], object] = lambda: None,
        during: Callable[[Queue[Any]], object] = lambda _: None,
        **options: Any,
    ) -> int:
        """Put in a child, which tells what came of it.

        `before` is called before it opens the database, `during` with its queue before it puts.
        """

        def work() -> None:
            before()
            more = {
                name: options.pop(name) for name in ("lock_timeout_seconds",) if name in options
            }
            queue: Queue[Any] = Queue(self.database, options.pop("queue", QUEUE), **more)
            queue.counts()
            os.write(self._opened_writer, b"o")
            assert os.read(self._go_reader, 1) == b"g"
            told: dict[str, Any] = {"payload": payload}
            flushes: list[int] = []
            sync_data = sqlite_log.sync_data

            def counted(descriptor: int) -> None:
                sync_data(descriptor)
                flushes.append(descriptor)

            sqlite_log.sync_data = counted
            during(queue)
            try:
                job_id = queue.put(payload, **options)
                told |= {"id": int(job_id), "duplicate": job_id.duplicate}
            except QueueError as error:
                told["error"] = type(error).__name__
            told["flushes"] = len(flushes)
            told["held"] = queue.engine._file._lock.held  # type: ignore[attr-defined]
            os.write(self._writer, json.dumps(told).encode() + b"\n")

        self._waiting += 1
        return self._fork(work)

    def waits(self, number: int) -> list[Posted]:
        """Wait until so many requests are on the board, and return them."""
        wait_until(lambda: len(self.posted()) >= number, what=f"{number} wait at the board")
        return self.posted()

    def posted(self) -> list[Posted]:
        """Return what is on the board, also if it was not there a moment ago."""
        self.board._absent_until_us = 0
        return self.board.posted()

    def told(self) -> Results:
        """Return what children told."""
        os.close(self._writer)
        with os.fdopen(self._reader) as lines:
            told = [json.loads(line) for line in lines]
        assert not any(one["held"] for one in told), "a put left with the lock"
        return told

    def stored(self) -> Counter[str]:
        """Return how often each payload is stored."""
        with closing(sqlite3.connect(self.database)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            rows = connection.execute(
                "SELECT coalesce(job.payload, body.payload) FROM job LEFT JOIN body USING (id)"
            ).fetchall()
        return Counter(json.loads(text) for (text,) in rows)

    def batches(self) -> int:
        """Return how many transactions stored puts of several processes."""
        with closing(sqlite3.connect(self.database)) as connection:
            row = connection.execute("SELECT value FROM stat WHERE name = 'put_batch'").fetchone()
        return int(row[0]) if row else 0


def right(stage: Stage, told: Results) -> None:
    """Assert that each told put is stored once under its id, and that depth counts all rows."""
    stored = stage.stored()
    assert all(number == 1 for number in stored.values())
    queue: Queue[str] = Queue(stage.database, QUEUE)
    for one in told:
        if "id" in one:
            job = queue.find(one["id"])
            assert job is not None
            assert job.payload == one["payload"]
    assert queue.counts().ready == stored.total()
