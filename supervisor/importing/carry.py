"""Carry jobs from a source into a database, batch by batch, each job once.

Boundary: knows neither where jobs come from nor how they are stored. Killed and run again, it
goes on where it stood: the database remembers every origin with the job itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from queue_core.upkeep import Upkeep
from supervisor.importing.arrival import Arrival, Notes, Source

BATCH: Final = 500


@dataclass(slots=True)
class Report:
    """What came in: per queue, jobs by the state they were in at home, and those known already."""

    notes: Notes
    arrived: dict[str, Counter[str]] = field(default_factory=dict)
    known: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """Jobs that came in, or would have in a dry run."""
        return sum(sum(states.values()) for states in self.arrived.values())


def carry(
    source: Source,
    upkeep: Upkeep | None,
    *,
    now_us: int,
    dry_run: bool = False,
    progress: Callable[[int], None] = lambda number: None,
) -> Report:
    """Store every job of a source; return what came in. Raises QueueError, OSError.

    With `dry_run` nothing is stored; `upkeep` None then stands for a database
    that does not exist yet.
    """
    report = Report(notes=source.notes)
    for batch in _batches(source.arrivals(now_us)):
        queue = batch[0].queue
        jobs = [arrival.job for arrival in batch]
        if upkeep is None:
            news = [True] * len(batch)
        elif dry_run:
            known = upkeep.imported([job.origin for job in jobs])
            news = [job.origin not in known for job in jobs]
        else:
            news = [not stored.duplicate for stored in upkeep.import_jobs(queue, jobs)]
        states = report.arrived.setdefault(queue, Counter())
        for arrival, new in zip(batch, news, strict=True):
            if new:
                states[arrival.was] += 1
            else:
                report.known[queue] += 1
        progress(len(batch))
    return report


def _batches(arrivals: Iterator[Arrival]) -> Iterator[list[Arrival]]:
    """Cut arrivals into runs of one queue, in their order, each of at most BATCH."""
    held: list[Arrival] = []
    while chunk := list(islice(arrivals, BATCH)):
        for arrival in chunk:
            if held and (held[0].queue != arrival.queue or len(held) == BATCH):
                yield held
                held = []
            held.append(arrival)
    if held:
        yield held
