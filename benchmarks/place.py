"""Give one contender a place of its own: a folder, a Redis if it needs one, producers, workers.

Everything is removed and ended when the place is left. Boundary: starts and ends processes, each
by its own id; measures nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import board, measure
from benchmarks.contenders import HERDSMAN, Contender

ROOT = Path(__file__).resolve().parents[1]
STOP_SECONDS = 30.0
PEER_STOP_SECONDS = 3.0
"""All is measured by then; who wants to finish a backlog first is not waited for."""


class Place:
    """Where a contender runs once."""

    def __init__(
        self, contender: Contender, folder: Path, task: str, redis: tuple[int, int] | None
    ) -> None:
        self.contender = contender
        self.folder = folder
        self.redis_pid, redis_port = redis or (0, 0)
        self.environment: Mapping[str, str] = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("HERDSMAN", "BENCH"))},
            "PYTHONPATH": str(ROOT),
            "BENCH_FOLDER": str(folder),
            "BENCH_TASK": task,
            "BENCH_VARIANT": contender.variant,
            "BENCH_REDIS": f"redis://127.0.0.1:{redis_port}/0" if redis_port else "",
        }
        self._log = open(folder / "log", "ab")  # noqa: SIM115 - closed by `close`
        self._started: list[subprocess.Popen[bytes]] = []
        self.workers: list[subprocess.Popen[bytes]] = []

    def _start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command, env=self.environment, cwd=self.folder, stderr=self._log,
            stdin=subprocess.DEVNULL, start_new_session=True, **options,
        )  # fmt: skip
        self._started.append(process)
        return process

    def produce(self, *arguments: object) -> dict[str, Any]:
        """Run one producer to its end, and return what it reports."""
        (report,) = self.gather([self.start_producer(*arguments)])
        return report

    def start_producer(self, *arguments: object) -> subprocess.Popen[bytes]:
        """Start `benchmarks.producer` with arguments."""
        module = f"benchmarks.peers.{self.contender.module}"
        command = [sys.executable, "-m", "benchmarks.producer", module, *map(str, arguments)]
        return self._start(command, stdout=subprocess.PIPE)

    def gather(self, producers: Sequence[subprocess.Popen[bytes]]) -> list[dict[str, Any]]:
        """Wait for producers, and return what each reports."""
        reports = []
        for producer in producers:
            out, _ = producer.communicate(timeout=600)
            if producer.returncode:
                raise RuntimeError(f"{self.contender.name}: a producer failed\n{self.log()}")
            reports.append(json.loads(out))
        return reports

    def start_workers(self, workers: int) -> None:
        """Start the contender's own workers."""
        here = {name: os.environ.get(name) for name in self.environment if name.startswith("BENCH")}
        os.environ.update({k: v for k, v in self.environment.items() if k.startswith("BENCH")})
        try:
            module = importlib.import_module(f"benchmarks.peers.{self.contender.module}")
            commands = module.commands(self.folder, workers)
        finally:
            for name, value in here.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        self.workers = [self._start(command, stdout=self._log) for command in commands]

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a program of the benchmark itself, counted among the workers."""
        process = self._start(command, stdout=self._log)
        self.workers.append(process)
        return process

    def stop_workers(self) -> None:
        """Tell the workers to stop, and see that they do."""
        ours = self.contender.module == HERDSMAN.module
        for process in self.workers:
            end(process, STOP_SECONDS if ours else PEER_STOP_SECONDS)
        self.workers = []

    def pids(self, *, redis: bool = False) -> list[int]:
        """Return the workers and all that descend from them, with the Redis if it is asked for."""
        roots = [process.pid for process in self.workers]
        return measure.tree([*roots, self.redis_pid] if redis and self.redis_pid else roots)

    def log(self) -> str:
        """Return the last lines the processes wrote."""
        return (self.folder / "log").read_text(errors="replace")[-3000:]

    def close(self) -> None:
        """End what is left."""
        for process in reversed(self._started):
            end(process)
            if process.stdout:
                process.stdout.close()
        self._log.close()


def end(process: subprocess.Popen[bytes], seconds: float = STOP_SECONDS) -> None:
    """End a process by its id: politely, then not."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # what it left in the session we gave it


def free_port() -> int:
    """Return a loopback port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def redis_server(folder: Path, kind: str) -> Iterator[tuple[int, int]]:
    """Run a Redis in a folder of its own, as it comes or with appendfsync always: pid and port."""
    port = free_port()
    data = folder / "redis"
    data.mkdir(mode=0o700)
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(data)]
    if kind == "always":
        command += ["--appendonly", "yes", "--appendfsync", "always"]
    with open(folder / "redis.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 10
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError(f"redis-server does not start: see {folder / 'redis.log'}")
            time.sleep(0.02)
        yield process.pid, port
    finally:
        end(process)


@contextmanager
def place(contender: Contender, task: str = "nothing") -> Iterator[Place]:
    """Open a place for one run, and leave nothing of it behind."""
    base = os.environ.get("BENCH_BASE") or None
    folder = Path(tempfile.mkdtemp(prefix="herdsman-bench-", dir=base))
    try:
        with contextlib.ExitStack() as stack:
            redis = None
            if contender.redis:
                redis = stack.enter_context(redis_server(folder, contender.redis))
            board.create(folder)
            made = Place(contender, folder, task, redis)
            stack.callback(made.close)
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)
