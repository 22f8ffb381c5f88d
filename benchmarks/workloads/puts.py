"""Workload 3: single puts, each kept through a power cut, by one and by eight producers.

herdsman's group commit beside the same statements with synchronous=FULL, once with SQLite's own
lock and once under ours, and the peers that promise as much for a put; eight producers are
compared pair by pair of rounds, since the machine's speed moves between them. Producers start at
one instant; every put is timed. No workers run, but what a keeper does for the log is done: it is
copied into the file at 4 MB, where SQLite by itself does it too. How often that was is counted
from the log's header.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import statistics
import struct
import sys
import threading
import time
from array import array
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.contenders import (
    ALWAYS,
    COMMIT,
    FULL,
    FULL_OWN_LOCK,
    HERDSMAN,
    PEERS,
    Contender,
)
from benchmarks.harness import Options, Rounds, interleave, ratios
from benchmarks.place import place
from benchmarks.tables import row, table

TITLE = "Single durable puts"
PRODUCERS = (1, 8)
HEAD_START_SECONDS = 3.0
TIMES_FULL = 2.0
SHARE_OF_TAIL = 0.1
CHECKPOINTS_MIN = 20
SHORTER = 0.4
"""Of a round's length: still more than 20 checkpoints."""


class Checkpoints(threading.Thread):
    """Count how often the log was started again: its header's first salt then grows by one.

    The sequence number beside it is of no use: each connection counts its own (SQLite file
    format, section 4.1, and what eight writers were seen to write there).
    """

    def __init__(self, log: Path) -> None:
        super().__init__(daemon=True)
        self._log = log
        self._done = threading.Event()
        self.number = 0

    def _salt(self) -> int | None:
        try:
            log = os.open(self._log, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:  # open() would ask for its times, and slow its writers down
            header = os.pread(log, 32, 0)
        finally:
            os.close(log)
        return int(struct.unpack_from(">I", header, 16)[0]) if len(header) == 32 else None

    def run(self) -> None:
        """Look now and then until told to stop."""
        first: int | None = None
        while not self._done.wait(0.02):
            now = self._salt()
            if now is not None:
                first = now if first is None else first
                self.number = max(self.number, (now - first) % 2**32)

    def stop(self) -> int:
        """Stop, and return how many there were."""
        self._done.set()
        self.join()
        return self.number


def once(options: Options, contender: Contender, producers: int) -> dict[str, Any]:
    """Run the producers, and merge what they timed."""
    seconds = options.seconds_for(contender)
    with place(contender) as here:
        here.produce("fill", 1, 10.0, 100, 1)
        checkpoints = Checkpoints(here.folder / "h.db-wal")
        checkpoints.start()
        if contender is not FULL_OWN_LOCK and contender.module == HERDSMAN.module:
            here.start(sys.executable, "-m", "benchmarks.bare", str(seconds + 60.0), "0")
        start = time.monotonic() + (1.0 if options.quick else HEAD_START_SECONDS)
        tells = [here.folder / f"tell{number}" for number in range(producers)]
        started = [here.start_producer("single", start, seconds, tell) for tell in tells]
        reports = here.gather(started)
        number = checkpoints.stop()
        here.stop_workers()
        took = array("Q")
        for tell in tells:
            took.frombytes(tell.read_bytes())
    return {
        "put_per_second": sum(report["jobs"] / report["seconds"] for report in reports),
        "fewest_of_a_producer": min(report["jobs"] for report in reports),
        "checkpoints": number,
        **measure.quantiles_ms(took),
    }


def oftener(options: Options) -> Options:
    """Return three times the rounds, each shorter: neighbours in time are compared."""
    if options.quick:
        return options
    return dataclasses.replace(
        options, rounds=3 * options.rounds, seconds=SHORTER * options.seconds
    )


def run(options: Options) -> dict[str, Any]:
    """Run all rounds, with one producer and with eight."""
    durable = [one for one in PEERS if one.kept in (COMMIT, ALWAYS)]
    found = {}
    for producers in PRODUCERS:
        told = oftener(options) if producers == 8 else options
        runs = {
            contender.name: functools.partial(once, told, contender, producers)
            for contender in options.contenders([HERDSMAN, *FULL, *durable])
            if contender.shared or producers == 1
        }
        found[str(producers)] = interleave(told, runs, sides=() if producers == 8 else [*runs])
    return {"producers": found}


def bars(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare eight producers with what was promised."""
    found: Rounds = result["producers"]["8"]
    ours = found.get(HERDSMAN.name, {}).get("median")
    made: list[dict[str, Any]] = []
    if not ours:
        return made
    checkpoints = [ours["checkpoints"]]
    for rival in FULL:
        full = found.get(rival.name, {}).get("median")
        if not full:
            continue
        pairs = list(zip(found[HERDSMAN.name]["rounds"], found[rival.name]["rounds"], strict=True))
        times = statistics.median(a["put_per_second"] / b["put_per_second"] for a, b in pairs)
        tail = statistics.median(a["p999_ms"] / b["p999_ms"] for a, b in pairs)
        if rival is not FULL_OWN_LOCK:  # its log seldom starts again: somebody always reads
            checkpoints.append(full["checkpoints"])
        made += [
            {"bar": f"8 producers, times {rival.name}", "wanted": TIMES_FULL, "found": times,
             "met": times >= TIMES_FULL},
            {"bar": f"8 producers, p99.9 as a share of that of {rival.name} (at most)",
             "wanted": SHARE_OF_TAIL, "found": tail, "met": tail <= SHARE_OF_TAIL},
        ]  # fmt: skip
    fewest = min(checkpoints)
    made.append(
        {"bar": "8 producers, checkpoints during a run under our lock",
         "wanted": CHECKPOINTS_MIN, "found": fewest, "met": fewest >= CHECKPOINTS_MIN}
    )  # fmt: skip
    return made


def render(result: dict[str, Any]) -> str:
    """Return a table for each number of producers."""
    parts = []
    for producers, found in result["producers"].items():
        rounds: Rounds = found
        times = ratios(rounds, "put_per_second")
        fields = (
            ("put_per_second", "{:,.0f}"), ("p50_ms", "{:.2f}"), ("p99_ms", "{:.2f}"),
            ("p999_ms", "{:.2f}"), ("worst_ms", "{:.1f}"), ("fewest_of_a_producer", "{:,.0f}"),
            ("checkpoints", "{:.0f}"),
        )  # fmt: skip
        lines = [
            row(name, one, *fields, last=f"{times[name]:,.1f}" if name in times else "")
            for name, one in rounds.items()
        ]
        heads = ("puts/s", "p50 ms", "p99 ms", "p99.9 ms", "worst ms", "fewest of a producer",
                 "checkpoints", "herdsman is so many times as fast")  # fmt: skip
        parts.append(table((f"{producers} producer{'s' * (producers != '1')}", *heads), lines))
    return "\n".join(parts)
