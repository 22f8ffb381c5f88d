"""Be a process whose system calls are watched: do one operation after another, and tell of each.

    python -m tests.fault.traced DATABASE REPORT

REPORT is a file; a line is appended to it in one write when an operation has returned: what was
done, the job it was done to, and how much of the log was in use then. At the end the process
kills itself, so that the log stays as it is.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from queue_core import Queue
from queue_core.engines.sqlite import SqliteEngine

PUTS = 50
LOG_HEADER_BYTES = 32


def main(database: str, report: str) -> None:
    """Do every kind of operation."""
    descriptor = os.open(report, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    engine = SqliteEngine(database)
    queue: Queue[Any] = Queue(database, "jobs", engine=engine)

    def tell(what: str, id_: int = 0) -> None:
        end = LOG_HEADER_BYTES + engine._file.log_bytes()
        os.write(descriptor, f"{what} {id_} {end}\n".encode())

    def take() -> Any:
        job = queue.get(timeout=0)
        assert job is not None
        tell("claim", job.id)
        return job

    tell("put", queue.put("the first, in a new file"))
    for number in range(PUTS):
        large = "x" * 5000 if number % 10 == 0 else ""
        tell("put", queue.put(f"{number}{large}", key=f"key {number}"))
    tell("put", queue.put_many(["several", "at once"])[-1])
    tell("duplicate", queue.put("1", key="key 1"))
    with queue.transaction() as tx:
        id_ = queue.put("beside rows of my own", tx=tx)
    tell("put", id_)
    take()
    job = take()
    queue.extend(job, 30)
    tell("extend", job.id)
    queue.ack(job)
    tell("ack", job.id)
    job = take()
    queue.nack(job, error="again", delay=3600)
    tell("nack", job.id)
    job = take()
    queue.release(job)
    tell("release", job.id)
    for last in ("replay", "discard"):
        job = take()
        queue.fail(job, error="never")
        tell("fail", job.id)
        getattr(queue, last)(job.id)
        tell(last, job.id)
    queue.cancel(id_)
    tell("cancel", id_)
    queue.pause()
    tell("configure")
    engine.checkpoint()
    tell("checkpoint")
    tell("put", queue.put("into a log that begins anew"))
    lazy: Queue[Any] = Queue(database, "lazy", engine=SqliteEngine(database, flush_finishes=False))
    tell("put", lazy.put("for a worker with a keeper"))
    found = lazy.get(timeout=0)
    assert found is not None
    tell("claim", found.id)
    lazy.ack(found)
    tell("turn", found.id)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
