"""Gather what every page shows from the database and the slots.

Boundary: reads through `reading` and `processes`, hands out plain documents; no
HTTP. The database is opened at the first read, so that a broken one is an
answer ("down") and not a server that does not start.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from queue_core.job import Reason, Record, State
from queue_core.stats import Snapshot
from supervisor.catalogue import Expected
from supervisor.metrics import Registries, version
from supervisor.processes import ProcessFacts
from supervisor.reading import CACHE_SECONDS, Reader, ReadFailed, numbers
from supervisor.web.status import document, readiness

DEAD_SHOWN: Final = 10
PAGE_WAIT_SECONDS: Final = 3.0
READY_WAIT_SECONDS: Final = 2.0
"""A database that takes longer to answer a small read is not ready for jobs."""


class Source(Protocol):
    """The part of an engine that the web needs."""

    def snapshot(self) -> Snapshot:
        """Read every number in one transaction."""
        ...

    def flush(self) -> None:
        """Make everything committed so far survive a power cut."""
        ...

    def select(
        self,
        state: State,
        *,
        queue: str | None = None,
        task: str | None = None,
        reason: Reason | None = None,
        limit: int = 100,
        after: int = 0,
        newest: bool = False,
    ) -> list[Record]:
        """Return one page of jobs in a state."""
        ...


class Opener:
    """An engine that is opened when it is first used, and again after that failed."""

    def __init__(self, open_source: Callable[[], Source]) -> None:
        self._open = open_source
        self._mutex = threading.Lock()
        self._source: Source | None = None

    @property
    def source(self) -> Source:
        """The open engine; raises what opening it raised."""
        with self._mutex:
            if self._source is None:
                self._source = self._open()
            return self._source

    def snapshot(self) -> Snapshot:
        """Read every number in one transaction."""
        return self.source.snapshot()

    def flush(self) -> None:
        """Make everything committed so far survive a power cut."""
        self.source.flush()

    def latest_dead(self) -> tuple[Record, ...]:
        """Return the dead letters that died last, newest first."""
        return tuple(self.source.select(State.DEAD, limit=DEAD_SHOWN, newest=True))


class Sources:
    """Everything the routes ask for. Threads: any."""

    def __init__(
        self,
        opener: Opener,
        expected: Expected,
        look: Callable[[], ProcessFacts] | None,
        *,
        instance: str = "main",
        engine: str = "sqlite",
        cache_seconds: float = CACHE_SECONDS,
    ) -> None:
        self._numbers = numbers(opener, cache_seconds=cache_seconds)
        self._dead = Reader(opener.latest_dead, cache_seconds=cache_seconds)
        self._expected = expected
        self.look = look
        self._about = {"version": version(), "instance": instance, "engine": engine}
        self.registries = Registries(
            self._numbers, expected, look=look, version=version(), engine=engine
        )

    def document(self) -> dict[str, Any]:
        """Return the status document as of now."""
        snapshot: Snapshot | None = None
        dead: tuple[Record, ...] = ()
        error: str | None = None
        try:
            snapshot = self._numbers.read(PAGE_WAIT_SECONDS)
            dead = self._dead.read(PAGE_WAIT_SECONDS)
        except ReadFailed as failed:
            error = str(failed)
        return document(
            snapshot=snapshot,
            error=error,
            facts=self.look() if self.look else None,
            dead=dead,
            expected=self._expected,
            now_seconds=time.time_ns() / 1e9,
            about=self._about,
        )

    def not_ready(self) -> list[str]:
        """Return why new jobs would not be run now; empty when they would."""
        error: str | None = None
        try:
            self._numbers.read(READY_WAIT_SECONDS)
        except ReadFailed as failed:
            error = str(failed)
        return [*readiness(self.look() if self.look else None, error)]
