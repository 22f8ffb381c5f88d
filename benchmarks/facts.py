"""Say on what machine, and with which versions, figures were measured.

Boundary: reads the host; measures nothing.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sqlite3
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

PACKAGES = (
    "litequeue", "localqueue", "huey", "persist-queue", "celery", "rq", "dramatiq", "redis",
)  # fmt: skip


def machine() -> dict[str, Any]:
    """Return the facts that a reader needs to judge a figure."""
    folder = os.environ.get("BENCH_BASE") or tempfile.gettempdir()
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "filesystem": _filesystem(Path(folder)),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "redis": _redis(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def load() -> float:
    """Return how many processes wanted a processor, averaged over the last minute."""
    return os.getloadavg()[0]


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _filesystem(folder: Path) -> str:
    best = ("", "unknown")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split()
        if folder.resolve().is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, kind)
    return best[1]


def _redis() -> str:
    if not (program := shutil.which("redis-server")):
        return ""
    out = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    return out.partition("v=")[2].split(" ")[0]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
