"""Put jobs into one contender's queue, in a process of its own, and report as JSON.

    python -m benchmarks.producer benchmarks.peers.NAME fill JOBS SECONDS SIZE BATCH [KEY=VALUE]
    python -m benchmarks.producer benchmarks.peers.NAME single START SECONDS TELL
    python -m benchmarks.producer benchmarks.peers.NAME spaced JOBS PAUSE
    python -m benchmarks.producer benchmarks.peers.NAME stream START SECONDS BATCH

`fill` uses the contender's best bulk call until there are so many jobs or time is up. `single`
puts one by one from the monotonic instant START on, and writes each put's nanoseconds to the file
TELL. `spaced` pauses between puts, so that the service is idle. `stream` puts batches until time
is up.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
import time
from array import array
from pathlib import Path
from typing import Any

from benchmarks import tasks


def fill(client: Any, jobs: int, seconds: float, size: int, batch: int, more: Any) -> Any:
    """Put many by the best bulk call."""
    began = time.monotonic()
    done = 0
    while done < jobs and time.monotonic() < began + seconds:
        number = min(batch, jobs - done)
        client.put_many(list(tasks.payloads(done, number, size, **more)))
        done += number
    client.close()
    return {"jobs": done, "seconds": time.monotonic() - began}


def single(client: Any, start: float, seconds: float, tell: str) -> Any:
    """Put one by one, timing each."""
    took = array("Q")
    batches = (tasks.payloads(first, 1000) for first in itertools.count(0, 1000))
    endless = itertools.chain.from_iterable(batches)
    clock = time.perf_counter_ns
    time.sleep(max(0.0, start - time.monotonic()))
    began = clock()
    until = began + int(seconds * 1e9)
    now = began
    for payload in endless:
        before = clock()
        client.put(payload)
        now = clock()
        took.append(now - before)
        if now >= until:
            break
    Path(tell).write_bytes(took.tobytes())
    client.close()
    return {"jobs": len(took), "seconds": (now - began) / 1e9}


def spaced(client: Any, jobs: int, pause: float) -> Any:
    """Put one job at a time into an idle service, with the instant of the put in it."""
    for payload in tasks.payloads(0, jobs, at=10**15):
        time.sleep(pause)
        payload["at"] = time.monotonic_ns()
        client.put(payload)
    client.close()
    return {"jobs": jobs}


def stream(client: Any, start: float, seconds: float, batch: int) -> Any:
    """Put until time is up, one by one or in batches."""
    done = 0
    time.sleep(max(0.0, start - time.monotonic()))
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        some = list(tasks.payloads(done, batch))
        if batch == 1:
            client.put(some[0])
        else:
            client.put_many(some)
        done += batch
    client.close()
    return {"jobs": done, "seconds": time.monotonic() - began}


def main() -> None:
    """Do what the arguments say."""
    module, what, *rest = sys.argv[1:]
    client = importlib.import_module(module).Client()
    if what == "fill":
        more = {key: int(value) for key, value in (word.split("=") for word in rest[4:])}
        report = fill(client, int(rest[0]), float(rest[1]), int(rest[2]), int(rest[3]), more)
    elif what == "single":
        report = single(client, float(rest[0]), float(rest[1]), rest[2])
    elif what == "spaced":
        report = spaced(client, int(rest[0]), float(rest[1]))
    else:
        report = stream(client, float(rest[0]), float(rest[1]), int(rest[2]))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
