"""Measure the bare limit: the storage's work of a drain, and nothing else.

    BENCH_FOLDER=… python -m benchmarks.bare SECONDS PROCESSES

So many processes settle and claim in batches of 256, with the engine's own statements, lock,
ledger and histogram rows; one more flushes the log every 100 ms and checkpoints it at 4 MB, as
the keeper does (with 0 processes that is all). There is no JSON, no handler, no record per job
and no supervision.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import time
from pathlib import Path

from benchmarks.board import WORDS, words
from queue_core.engines.sql import load
from queue_core.engines.sqlite_log import Log
from queue_core.lockfile import FileLock

SQL = load("sqlite.sql")
BATCH = 256
FLUSH_SECONDS = 0.1
CHECKPOINT_BYTES = 4 * 1024 * 1024
LOCK_SECONDS = 30.0
WAIT_BUCKETS = 3
"""Histogram rows that a batch of one task touches besides its sum: few, its jobs are alike."""


def connect(path: Path) -> sqlite3.Connection:
    """Open the database as the engine does."""
    connection = sqlite3.connect(path, isolation_level=None, cached_statements=256)
    for name in ("busy_timeout", "synchronous", "no_autocheckpoint"):
        connection.execute(SQL[f"pragma_{name}"])
    return connection


def numbers(queue: int, task: str, settled: int, claimed: int) -> list[tuple[object, ...]]:
    """Return the counter and histogram rows that a turn of plain successes adds to."""
    rows: list[tuple[object, ...]] = [
        (queue, "", "queue_jobs", "ready", -claimed),
        (queue, "", "queue_jobs", "claimed", claimed - settled),
        (queue, "", "queue_jobs", "done", settled),
        (queue, task, "claims_total", "", claimed),
        (queue, task, "attempts_started_total", "", settled),
        (queue, task, "attempts_finished_total", "succeeded", settled),
        (queue, task, "jobs_finished_total", "succeeded", settled),
        (queue, task, "job_attempts", "|0", settled),
        (queue, task, "job_attempts", "|sum", settled),
    ]
    for name, series in (
        ("queue_wait_seconds", ""), ("attempt_duration_seconds", "ok"), ("job_latency_seconds", ""),
    ):  # fmt: skip
        rows += [(queue, task, name, f"{series}|{n}", settled) for n in range(WAIT_BUCKETS)]
        rows.append((queue, task, name, f"{series}|sum", settled))
    for name in ("lock_wait_seconds", "lock_hold_seconds"):
        rows += [(0, "", name, "claim|1", 1), (0, "", name, "claim|sum", 100)]
    return rows


def work(path: Path, seconds: float, at: int) -> None:
    """Settle and claim until time is up or nothing is left."""
    connection = connect(path)
    lock = FileLock(Path(f"{path}.lock"))
    board = words(path.parent)
    claims: list[tuple[int, int]] = []
    ids = "[]"
    queue, task = 0, "bench"
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        now_us = time.time_ns() // 1000
        started = ",".join([f'"{id_}":{now_us}' for id_, _ in claims])
        if not lock.acquire(LOCK_SECONDS):
            raise SystemExit("the lock did not come free")
        connection.execute(SQL["begin_write"])
        if claims:
            connection.execute(
                SQL["finish_plain"],
                {"run": 1, "now": now_us, "worker": "bare", "started": f"{{{started}}}"},
            )
            connection.execute(SQL["finish_removes"], {"ids": ids})
        waiting = connection.execute(SQL["claim_queues"], {"holder": 0}).fetchall()
        ((queue, _),) = waiting or [(0, "")]
        parameters = {"queue": queue, "name": task, "limit": BATCH, "holder": at + 1,
                      "now": now_us, "started": 0,
                      "lease": time.monotonic_ns() // 1000 + 60_000_000}  # fmt: skip
        rows = connection.execute(SQL["claim_rows"], parameters).fetchall()
        ids = parameters["ids"] = json.dumps([row[0] for row in rows])
        connection.execute(SQL["claim_jobs"], parameters)
        connection.executemany(SQL["stat_add"], numbers(queue, task, len(claims), len(rows)))
        connection.execute(SQL["commit"])
        lock.release()
        board[at] += len(claims)
        claims = [row[:2] for row in rows]
        if not rows:
            break
    connection.close()


def keep(path: Path, seconds: float) -> None:
    """Flush the log every 100 ms, and copy it into the file when it has grown."""
    connection = connect(path)
    connection.execute("SELECT count(*) FROM queue").fetchone()
    lock = FileLock(Path(f"{path}.lock"))
    log, used = os.open(f"{path}-wal", os.O_RDONLY), Log(Path(f"{path}-wal"))
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(FLUSH_SECONDS)
        os.fdatasync(log)
        if used.used_bytes() >= CHECKPOINT_BYTES and lock.acquire(LOCK_SECONDS):
            connection.execute(SQL["pragma_checkpoint"]).fetchone()
            lock.release()
    os.close(log)
    connection.close()


def main() -> None:
    """Fork the processes, wait for all."""
    seconds, processes = float(sys.argv[1]), int(sys.argv[2])
    path = Path(os.environ["BENCH_FOLDER"]) / "h.db"
    pids = []
    for at in range(processes + 1):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                if at < processes:
                    work(path, seconds, at % WORDS)
                else:
                    keep(path, seconds)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids))


if __name__ == "__main__":
    main()
