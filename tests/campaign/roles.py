"""Be a producer or a worker that writes down, outside the database, what it was told.

Every line goes to a file opened for appending, in one write: what a killed process had
written stays, and lines of several processes do not mix. A kill can still cut a line where it
crosses a page of the file, so each begins with a line break and ends with a mark. A line is
written after the fact it tells: a put's after `put` returned, a verdict's after it was decided,
a settlement's after the ack returned.
"""

from __future__ import annotations

import os
import random
import runpy
import time
from pathlib import Path
from typing import Any

from queue_core import Queue, QueueBusy, StaleClaim

HANDLERS = '''
"""Do what a payload says, and write down what was begun and decided."""
import os
import time
from pathlib import Path

from queue_core import Reject, Retry

FOLDER = Path(__file__).parent
NOTES = os.open(FOLDER / "notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def note(*words):
    """Append a line in one write."""
    line = " ".join(map(str, words)) + f" {os.getpid()} {time.monotonic_ns()}"
    os.write(NOTES, f"\\n{line} .\\n".encode())


def verdict(payload, attempt):
    """Return how this attempt is to end: it follows from the payload alone."""
    if payload["do"] == "fail":
        return "fail" if attempt <= payload["times"] else "ok"
    return {"ok": "ok", "reject": "reject", "exhaust": "fail"}[payload["do"]]


def decide(payload, job):
    """Begin, work a little, and decide."""
    note("begin", job.id, job.run)
    if payload["ms"]:
        time.sleep(payload["ms"] / 1000)
    decided = verdict(payload, job.attempt)
    note("verdict", job.id, job.run, decided)
    return decided


def work(payload, job):
    """Be the handler of the supervised workers."""
    decided = decide(payload, job)
    if decided == "fail":
        return Retry(error="as told")
    if decided == "reject":
        return Reject(error="as told")
    return None
'''

WHOLE = "."
"""The last word of a line that was not cut."""
BATCH_MAX = 5
BACKLOG_MAX = 150
ATTEMPTS_OF_EXHAUST = 3
LINGER_SECONDS = 0.6
"""How long a job is held that a frozen consumer has lost: that one comes back meanwhile, and
must not settle what is another's now. Shorter than the lease."""


def write(folder: Path, name: str, *words: object) -> None:
    """Append a line to one of the files."""
    descriptor = os.open(folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, ("\n" + " ".join(map(str, words)) + f" {WHOLE}\n").encode())
    os.close(descriptor)


def payload(chance: random.Random, do: str, serial: str, **more: Any) -> dict[str, Any]:
    """Return a job's data: a serial that no other job has, and what its handler is to do."""
    slow = chance.random() < 0.1
    return {
        "n": serial,
        "do": do,
        "times": chance.randint(1, 2),
        "ms": chance.uniform(1, 30) if slow else 0,
        "fill": "x" * (chance.randint(2000, 9000) if chance.random() < 0.1 else 0),
        **more,
    }


def produce(folder: Path, database: Path, queue_name: str, seed: int) -> None:
    """Put jobs in every way until killed; note each id when `put` has returned it."""
    chance = random.Random(seed)
    queue: Queue[Any] = Queue(database, queue_name)
    serial = 0
    while True:
        way = chance.choices(["put", "many", "key", "tx", "delay"], [40, 15, 20, 10, 15])[0]
        number = chance.randint(2, BATCH_MAX) if way == "many" else 1
        do = chance.choices(["ok", "fail", "reject", "exhaust"], [75, 13, 6, 6])[0]
        jobs = []
        for _ in range(number):
            serial += 1
            more = {way: 1} if way in ("tx", "key") else {}
            jobs.append(payload(chance, do, f"{seed}-{serial}", **more))
        spent = ATTEMPTS_OF_EXHAUST if do == "exhaust" else None
        try:
            ids = _put(queue, way, jobs, spent, chance)
        except QueueBusy:
            continue
        for id_, job in zip(ids, jobs, strict=True):
            write(folder, "puts", id_, job["n"], job["do"])
        while queue.counts().live > BACKLOG_MAX:
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 0.004))


def _put(
    queue: Queue[Any],
    way: str,
    jobs: list[dict[str, Any]],
    attempts: int | None,
    chance: random.Random,
) -> list[int]:
    if way == "tx":
        with queue.transaction() as tx:
            tx.execute("INSERT INTO mine (n) VALUES (?)", (jobs[0]["n"],))
            return [queue.put(jobs[0], tx=tx, max_attempts=attempts)]
    if way == "key":
        first = queue.put(jobs[0], key=jobs[0]["n"], max_attempts=attempts)
        again = queue.put(jobs[0], key=jobs[0]["n"], max_attempts=attempts)
        assert first == again
        assert again.duplicate
        return [first]
    delay = chance.uniform(0.001, 0.1) if way == "delay" else 0
    return list(
        queue.put_many(jobs, delay=delay, priority=chance.randint(0, 2), max_attempts=attempts)
    )


def consume(folder: Path, database: Path, queue_name: str) -> None:
    """Get, decide and settle through the library until killed; note each settled claim.

    Once a batch it lingers over a job that a frozen consumer has lost.
    """
    handlers = runpy.run_path(str(folder / "service_handlers.py"))
    queue: Queue[Any] = Queue(database, queue_name, lease_seconds=1.0, max_attempts=100,
                              backoff=lambda attempt: 0.02 * attempt)  # fmt: skip
    while True:
        lingered = False
        for job in queue.get_many(3, timeout=0.5):
            decided = handlers["decide"](job.payload, job)
            if job.attempt > 1 and not lingered and _had_frozen(folder, job.id, job.run - 1):
                lingered = True
                time.sleep(LINGER_SECONDS)
            try:
                if decided == "ok":
                    queue.ack(job)
                elif decided == "fail":
                    queue.nack(job, error="as told")
                else:
                    queue.fail(job, error="as told")
            except StaleClaim:
                handlers["note"]("stale", job.id, job.run)
            else:
                handlers["note"]("settled", job.id, job.run, decided)


def _had_frozen(folder: Path, id_: int, run: int) -> bool:
    frozen = folder / "frozen"
    return frozen.exists() and f"\n{id_} {run} {WHOLE}\n" in frozen.read_text()
