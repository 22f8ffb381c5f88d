"""Measure an idle service: no live job, nothing to prune, no scrape.

    python -m benchmarks.idle [--seconds 60] [--json]

The database and its log must stay as they are, no process may send a byte to the disk, and all
together may use 0.5 % of one core. Exits 1 when one of these does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import board, measure
from benchmarks.contenders import HERDSMAN
from benchmarks.harness import fill
from benchmarks.place import place

CPU_SHARE_MAX = 0.005
SETTLE_SECONDS = 3.0


def files(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return size, time of change and content of the database and its log."""
    return {
        path.name: (path.stat().st_size, path.stat().st_mtime_ns, path.read_bytes())
        for path in (folder / "h.db", folder / "h.db-wal")
        if path.exists()
    }


def measured(seconds: float) -> dict[str, Any]:
    """Let a service do some jobs, then watch it do nothing."""
    with place(HERDSMAN) as here:
        jobs = fill(here, 1000, 10.0)["jobs"]
        here.start_workers(2)
        board.watch(here.folder, expected=jobs, seconds=30.0, stall_seconds=5.0)
        time.sleep(SETTLE_SECONDS)  # the last flush and checkpoint
        pids = here.pids()
        kept, before, busy = files(here.folder), measure.usage(pids), measure.busy_seconds(pids)
        time.sleep(seconds)
        busy = measure.busy_seconds(pids) - busy
        after, now = measure.usage(pids), files(here.folder)
        same = sorted(pids) == sorted(here.pids())
        here.stop_workers()
    return {
        "seconds": seconds,
        "processes": len(pids),
        "same_processes": same,
        "files_unchanged": kept == now and bool(kept),
        "written_bytes": after.written_bytes - before.written_bytes,
        "cpu_share": busy / seconds,
    }


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = measured(given.seconds)
    if given.json:
        print(json.dumps(found))
    else:
        print(
            f"{found['processes']} processes, {found['seconds']:g} s: "
            f"{found['written_bytes']} bytes written, database and log "
            f"{'unchanged' if found['files_unchanged'] else 'CHANGED'}, "
            f"{found['cpu_share']:.3%} of a core (at most {CPU_SHARE_MAX:.1%})"
        )
    good = (
        found["files_unchanged"]
        and found["same_processes"]
        and found["written_bytes"] == 0
        and found["cpu_share"] <= CPU_SHARE_MAX
    )
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
