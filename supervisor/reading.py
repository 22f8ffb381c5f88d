"""Read a slow source once for everybody who asks, within a deadline.

One thread reads; every other caller waits for the same answer, so that ten
dashboards cost the database no more than one. A read that hangs holds nobody
longer than the caller's own limit, and no second one is started beside it.

Boundary: knows `snapshot` and `flush` of an engine; no HTTP, no metric families.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from queue_core.stats import Snapshot

T = TypeVar("T")

CACHE_SECONDS: Final = 1.0
WAIT_SECONDS: Final = 5.0
"""Half of Prometheus's default scrape time-out of 10 s: the scrape must still be answered."""
ERROR_CHARS_MAX: Final = 300


class ReadFailed(Exception):
    """The source could not be read in time; the text says why in one sentence."""


class Readable(Protocol):
    """The part of an engine that a scrape needs."""

    def snapshot(self) -> Snapshot:
        """Read every number in one transaction."""
        ...

    def flush(self) -> None:
        """Make everything committed so far survive a power cut."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How reading went so far. `last_success_seconds` is wall time, None before the first."""

    duration_seconds: float
    last_success_seconds: float | None
    errors: int


class Reader(Generic[T]):
    """Share one call of `read`, and its answer for `cache_seconds`, among all threads."""

    def __init__(self, read: Callable[[], T], *, cache_seconds: float = CACHE_SECONDS) -> None:
        self._read = read
        self._cache_seconds = cache_seconds
        self._mutex = threading.Lock()
        self._flight: Future[T] | None = None
        self._cached: tuple[int, T] | None = None
        self._duration_seconds = 0.0
        self._last_success_seconds: float | None = None
        self._errors = 0

    @property
    def health(self) -> Health:
        """How reading went so far."""
        with self._mutex:
            return Health(
                duration_seconds=self._duration_seconds,
                last_success_seconds=self._last_success_seconds,
                errors=self._errors,
            )

    def read(self, wait_seconds: float = WAIT_SECONDS) -> T:
        """Return an answer at most `cache_seconds` old, waiting `wait_seconds` at most.

        Raises ReadFailed when the source gave none.
        """
        flight = self._join()
        if isinstance(flight, tuple):
            return flight[1]
        try:
            return flight.result(wait_seconds)
        except TimeoutError:
            with self._mutex:
                self._errors += 1
            raise ReadFailed(
                f"the database gave no answer within {wait_seconds:g} s; see `herdsman doctor`"
            ) from None

    def _join(self) -> Future[T] | tuple[int, T]:
        """Return the cached answer, or the read to wait for."""
        with self._mutex:
            if self._cached is not None:
                age_seconds = (time.monotonic_ns() - self._cached[0]) / 1e9
                if age_seconds < self._cache_seconds:
                    return self._cached
            if self._flight is None:
                self._flight = Future()
                # A daemon: a read that hangs for ever must not keep the process alive.
                threading.Thread(
                    target=self._fly, args=(self._flight,), name="herdsman-reader", daemon=True
                ).start()
            return self._flight

    def _fly(self, flight: Future[T]) -> None:
        began_ns = time.monotonic_ns()
        try:
            answer = self._read()
        except Exception as error:
            # Whatever went wrong, the waiters get a sentence and the scrape an answer.
            text = " ".join(str(error).split())[:ERROR_CHARS_MAX] or type(error).__name__
            self._land(began_ns, None)
            flight.set_exception(ReadFailed(text))
        else:
            self._land(began_ns, answer)
            flight.set_result(answer)

    def _land(self, began_ns: int, answer: T | None) -> None:
        ended_ns = time.monotonic_ns()
        with self._mutex:
            self._flight = None
            self._duration_seconds = (ended_ns - began_ns) / 1e9
            if answer is None:
                self._errors += 1
            else:
                self._cached = (ended_ns, answer)
                self._last_success_seconds = time.time_ns() / 1e9


def numbers(engine: Readable, *, cache_seconds: float = CACHE_SECONDS) -> Reader[Snapshot]:
    """Return the reader of an engine's numbers."""

    def read() -> Snapshot:
        snapshot = engine.snapshot()
        # A number once shown must not go back, not even through a power cut: what
        # was read is made durable before anybody sees it.
        engine.flush()
        return snapshot

    return Reader(read, cache_seconds=cache_seconds)
