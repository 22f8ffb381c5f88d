"""Count finished jobs in shared memory, the same way for every contender.

Each worker process adds to a word of its own in one small mapped file, which the benchmark reads
while they work. So every queue is measured from outside, by what its handlers did, and nobody's
own idea of its speed is used. Boundary: files under the run's folder; knows no queue.
"""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

WORDS = 1024
"""Words of the board that count, and as many for time. Two living processes whose ids agree modulo
this would share a word."""
POLL_SECONDS = 0.005


def create(folder: Path) -> None:
    """Make an empty board and an empty list of stamps."""
    (folder / "board").write_bytes(bytes(2 * 8 * WORDS))
    (folder / "stamps").write_bytes(b"")


def words(folder: Path) -> memoryview:
    """Map what counts jobs; it stays mapped as long as the view lives."""
    return _mapped(folder)[:WORDS]


def busy_ns(folder: Path) -> memoryview:
    """Map what handlers that compute have spent, in nanoseconds of processor time."""
    return _mapped(folder)[WORDS:]


def _mapped(folder: Path) -> memoryview:
    with open(folder / "board", "r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 2 * 8 * WORDS)).cast("Q")


class Pen:
    """Write on the board from a handler, in whatever process it finds itself in."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pid = 0

    def _settle_in(self) -> None:
        self._words, self._busy_ns = words(self._folder), busy_ns(self._folder)
        self._at = os.getpid() % WORDS
        # next() of a counter is one step, so that threads of one process lose no count.
        self._numbers = itertools.count(self._words[self._at] + 1)
        self._stamps = os.open(self._folder / "stamps", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._pid = os.getpid()

    def count(self) -> None:
        """Count one job."""
        if self._pid != os.getpid():
            self._settle_in()
        self._words[self._at] = next(self._numbers)

    def spent(self, nanoseconds: int) -> None:
        """Add to the time spent; jobs of one process at a time only."""
        if self._pid != os.getpid():
            self._settle_in()
        self._busy_ns[self._at] += nanoseconds

    def stamp(self, *numbers: int) -> None:
        """Append a line of numbers to the stamps, in one write."""
        if self._pid != os.getpid():
            self._settle_in()
        os.write(self._stamps, (" ".join(map(str, numbers)) + "\n").encode())


def stamps(folder: Path) -> list[tuple[int, ...]]:
    """Return every line of stamps."""
    lines = (folder / "stamps").read_text().split("\n")
    return [tuple(map(int, line.split())) for line in lines if line]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What was counted between the beginning and the end of a measurement."""

    jobs: int
    seconds: float

    @property
    def jobs_per_second(self) -> float:
        """The rate; 0 when nothing was seen."""
        return self.jobs / self.seconds if self.seconds > 0 else 0.0


def watch(
    folder: Path,
    *,
    expected: int,
    seconds: float,
    start_seconds: float = 60.0,
    warm_seconds: float = 0.0,
    stall_seconds: float = 15.0,
    on_start: Callable[[], None] = lambda: None,
) -> Window:
    """Watch the board for some seconds, or until all jobs are done.

    Args:
        folder: the run's folder.
        expected: how many jobs there are.
        seconds: length of the window.
        start_seconds: how long the first job may take to come.
        warm_seconds: begin so long after the first job, when everything has started; sooner
            when half of the jobs are done.
        stall_seconds: end early when nothing moved for so long; the window ends at the last move.
        on_start: called when the first job was seen.

    Raises:
        TimeoutError: no job at all was seen.
    """
    board = words(folder)
    give_up = time.monotonic() + start_seconds
    while not (first := sum(board)):
        if time.monotonic() > give_up:
            raise TimeoutError(f"no job was done within {start_seconds:g} s")
        time.sleep(POLL_SECONDS)
    warm = time.monotonic() + warm_seconds
    while time.monotonic() < warm and sum(board) < expected / 2:
        time.sleep(POLL_SECONDS)
    on_start()
    seen = first = sum(board)
    began = moved = time.monotonic()
    while seen < expected:
        time.sleep(POLL_SECONDS)
        now = time.monotonic()
        count = sum(board)
        if count != seen:
            seen, moved = count, now
        if now - began >= seconds or now - moved >= stall_seconds:
            break
    return Window(jobs=seen - first, seconds=moved - began)
