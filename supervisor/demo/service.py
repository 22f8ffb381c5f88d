"""Run the supervisor of the demonstration as a process of its own, and look into it.

Boundary: speaks to the service as an operator does: its configuration file,
its slots, its web address, signals.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Final

from supervisor.linux import die_with_parent
from supervisor.slot import Kind, Slot, SlotState
from supervisor.slots import SlotTable, find_slots

PORT: Final = 9464
PORTS_TRIED: Final = 50
START_SECONDS: Final = 60.0
STOP_SECONDS: Final = 40.0
QUEUE: Final = "files"

_CONFIG: Final = """\
# Written by `herdsman demo`; every key is explained in the project's config/herdsman.toml.
database = "herdsman.db"

[web]
listen = "127.0.0.1:{port}"

[logs]
file = "herdsman.log"
format = "json"

[handlers.{queue}]
python = "supervisor.demo.job:compress"
timeout = "30s"

[pools.default]
processes = {processes}
"""


class ServiceFailed(Exception):
    """The service did not do what was asked of it; the text says what and where to look."""


class Service:
    """The supervisor process of the demonstration."""

    def __init__(self, folder: Path, processes: int) -> None:
        self.folder = folder
        self.database = folder / "herdsman.db"
        self.port = free_port()
        self.restarts_seen = 0
        config = folder / "herdsman.toml"
        config.touch(mode=0o600)
        config.write_text(_CONFIG.format(port=self.port, queue=QUEUE, processes=processes))
        self._table: SlotTable | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-m", "supervisor", "run", "--config", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            # A demonstration that is killed takes its service along. We have one thread here.
            preexec_fn=lambda: die_with_parent(signal.SIGTERM),
        )

    @property
    def address(self) -> str:
        """Where the dashboard is."""
        return f"http://127.0.0.1:{self.port}/"

    def wait_ready(self) -> None:
        """Wait until workers are ready; raises ServiceFailed with the service's own words."""
        self._until(self._is_ready, START_SECONDS, "become ready")

    def _is_ready(self) -> bool:
        """Whether it answers: itself, and not another service that has taken our port."""
        if self._table is None:
            path = find_slots(self.database, "main")
            table = None if path is None else SlotTable.attach(path)
            if table is None or table.supervisor_pid != self._process.pid:
                return False
            self._table = table
        listens = any(one.kind is Kind.WEB and one.ready_ns for one in self._table.live())
        return listens and self.get("readyz") is not None

    def _until(self, fact: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not fact():
            code = self._process.poll()
            if code is not None:
                said = self._process.stderr.read() if self._process.stderr else b""
                words = "; ".join(said.decode(errors="replace").split("\n")).strip("; ")
                raise ServiceFailed(
                    f"the service left with exit code {code}: {words or 'see herdsman.log'}"
                )
            if time.monotonic() > deadline:
                raise ServiceFailed(
                    f"the service did not {what} within {seconds:g} s; "
                    f"see {self.folder / 'herdsman.log'}"
                )
            time.sleep(0.02)

    def get(self, path: str) -> str | None:
        """Return what the service answers with 200 under a path, else None."""
        try:
            with urllib.request.urlopen(self.address + path, timeout=5) as answer:  # noqa: S310
                text: str = answer.read().decode()
                return text
        except OSError:
            return None

    def workers(self) -> list[Slot]:
        """Return the records of the live workers."""
        table = self._table
        return [] if table is None else [s for s in table.live() if s.kind is Kind.WORKER]

    @property
    def restarts(self) -> int:
        """How many workers had to be started again."""
        if self._table is None:
            return 0
        pools = [p for name, p in self._table.pools.items() if name == "default"]
        return sum(pool.restarts for pool in pools)

    def kill_a_worker(self) -> int | None:
        """Send SIGKILL to a worker in the middle of a job; return the id of that job.

        The worker is stopped first, so that the job cannot end between look and kill.
        """
        for slot in self.workers():
            pid = slot.pid
            if slot.state is not SlotState.RUN or not pid:
                continue
            os.kill(pid, signal.SIGSTOP)
            batch = slot.batch()
            if slot.state is SlotState.RUN and batch is not None and batch.running is not None:
                os.kill(pid, signal.SIGKILL)
                return int(batch.claims[batch.running][0])
            os.kill(pid, signal.SIGCONT)
        return None

    def wait(self) -> int:
        """Wait until the service ends by itself or by Ctrl-C; return its exit code."""
        return self._process.wait()

    def stop(self) -> int:
        """Let the service drain and end; return its exit code."""
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait(5)
        if self._table is not None:
            self._table.close()
            self._table = None
        return code


def free_port() -> int:
    """Return the first port from 9464 on that nobody listens on."""
    for port in range(PORT, PORT + PORTS_TRIED):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ServiceFailed(f"no port from {PORT} to {PORT + PORTS_TRIED - 1} is free")


def is_running(database: Path) -> bool:
    """Whether a supervisor serves this database already."""
    from queue_core.lockfile import InstanceLock

    return InstanceLock.is_held(Path(f"{database}.main.lock"))
