"""Storm a process with signals whose handlers raise: no lock stays held, nothing stays open.

A handler strikes wherever Python lets it, hundreds of times a second, while the main thread puts,
claims, settles and waits, alone, beside other processes, and beside other threads.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from queue_core import Queue, StaleClaim
from tests.fault.checks import is_whole, lock_is_free
from tests.fault.conftest import Fork, exit_codes

SIGNALS = (signal.SIGALRM, signal.SIGINT, signal.SIGQUIT)
STORM_SECONDS = 2.5
STRIKES_MIN = 30


class Struck(BaseException):
    """What the handlers raise."""


class Storm:
    """The receiving end: raises while an operation runs, and counts."""

    def __init__(self) -> None:
        self.inside = False
        self.struck = 0
        self.done: Counter[str] = Counter()
        for signum in SIGNALS:
            signal.signal(signum, self.strike)

    def strike(self, _signum: int, _frame: object) -> None:
        """Be the handler."""
        if self.inside:
            self.struck += 1
            raise Struck

    def attempt(self, work: Callable[[], object], depth: int = 3) -> None:
        """Do something that may be struck; several deep, as a handler may strike in a handler."""
        try:
            self.inside = True
            if depth:
                self.attempt(work, depth - 1)
            else:
                work()
        except (Struck, StaleClaim):
            pass
        finally:
            self.inside = False


def _operations(queue: Queue[Any], chance: random.Random) -> list[Callable[[], object]]:
    def settle_one() -> None:
        for job in queue.get_many(3):
            chance.choice([queue.ack, queue.nack, queue.fail, queue.release])(job)

    def beside() -> None:
        with queue.transaction() as tx:
            tx.execute("UPDATE queue SET paused = paused")
            queue.put("beside", tx=tx)

    return [
        lambda: queue.put("alone"),
        lambda: queue.put_many(["several", "at once"]),
        settle_one,
        lambda: queue.get(timeout=0.01),
        beside,
        queue.counts,
    ]


def _suffer(database: Path, told: int, go_on: int, threads: int) -> None:
    """Work under the storm until its end, then wait to be looked at, then work in peace."""
    # A handler that strikes at the very edge of a transaction() block leaves the cleaning to the
    # collection of its frames; the test runner's own hook would keep them, and the lock, alive.
    sys.unraisablehook = lambda _unraisable: None
    chance = random.Random(os.getpid())
    queue: Queue[Any] = Queue(database, "jobs", lease_seconds=0.2)
    operations = _operations(queue, chance)
    queue.put("the first")
    over = threading.Event()

    def in_a_thread() -> None:
        while not over.is_set():
            queue.put("by a thread")
            with suppress(StaleClaim):
                if job := queue.get(timeout=0):
                    queue.ack(job)

    helpers = [threading.Thread(target=in_a_thread) for _ in range(threads)]
    for helper in helpers:
        helper.start()
    storm = Storm()
    os.write(told, b"ready\n")
    end = time.monotonic() + STORM_SECONDS
    while time.monotonic() < end:
        storm.attempt(chance.choice(operations))
    over.set()
    for helper in helpers:
        helper.join(20)
        assert not helper.is_alive(), "a thread waits for what nobody gives back"
    os.write(told, f"over {storm.struck}\n".encode())
    os.read(go_on, 1)
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    later = threading.Thread(target=lambda: queue.put("by another thread"))
    later.start()
    later.join(10)
    assert not later.is_alive(), "the connection is held by nobody who will give it back"
    queue.put("in peace")
    queue.close()


def _strike(pid: int, seconds: float) -> None:
    """Send signals to a process at random moments."""
    chance = random.Random(pid)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(ProcessLookupError):
            os.kill(pid, chance.choice(SIGNALS))
        time.sleep(chance.uniform(0.0001, 0.004))


def _crowd(database: Path, seconds: float) -> None:
    """Be another process that wants the lock all the time."""
    queue: Queue[Any] = Queue(database, "crowd")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        queue.put_many(["crowd"] * 20)


@pytest.mark.parametrize(
    ("processes", "threads"),
    [(0, 0), (2, 0), (0, 2), (1, 1)],
    ids=["alone", "beside processes", "beside threads", "beside both"],
)
def test_a_storm_of_signals_leaves_no_lock_and_no_transaction(
    database: Path, fork: Fork, processes: int, threads: int
) -> None:
    """While the stormed process lives on idly, others get the lock at once; the store is whole."""
    with Queue(database, "jobs") as queue:
        queue.put("so that the file is there")
    told, tell = os.pipe()
    wait, go_on = os.pipe()
    victim = fork(lambda: _suffer(database, tell, wait, threads))
    os.close(tell)
    with os.fdopen(told) as lines:
        assert lines.readline() == "ready\n"
        others = [fork(lambda: _crowd(database, STORM_SECONDS)) for _ in range(processes)]
        others.append(fork(lambda: _strike(victim, STORM_SECONDS + 0.5)))
        over = lines.readline().split()
        assert over[:1] == ["over"], "the stormed process broke"
    assert exit_codes(others) == [0] * len(others)
    assert lock_is_free(database)
    with Queue(database, "jobs", lock_timeout_seconds=1.0) as queue:
        queue.put("by another process, at once")
    os.write(go_on, b"1")
    assert exit_codes([victim]) == [0]
    assert int(over[1]) >= STRIKES_MIN
    assert is_whole(database)
