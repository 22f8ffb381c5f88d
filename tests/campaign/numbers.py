"""Scrape a database all through a campaign, and hold the numbers against rows and notes.

The scrapes go through the registry that `/metrics/database` serves, in a process of their own:
its threads must not be in a process that forks.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from queue_core import open_engine
from supervisor.catalogue import Expected
from supervisor.metrics import Registries, render
from supervisor.reading import numbers
from tests.campaign.accounts import Books
from tests.surface.truth import Samples, fell, recounted, shown, total

ENOUGH = "enough"
FOUND = "scrapes"
PAUSE_SECONDS = 0.05


@dataclass(frozen=True)
class Scrapes:
    """What was seen: how many scrapes gave numbers, what went back, and the last of all."""

    number: int
    fallen: list[str]
    last: Samples

    @classmethod
    def read(cls, folder: Path) -> Scrapes:
        """Read what `watch` has left behind."""
        number, fallen, last = json.loads((folder / FOUND).read_text())
        samples = {(name, frozenset(labels.items())): value for name, labels, value in last}
        return cls(number, fallen, samples)


def watch(folder: Path, database: Path) -> None:
    """Scrape until a file says that everybody is gone, then once more; write down what is seen."""
    number = 0
    fallen: list[str] = []
    before: Samples = {}
    with closing(open_engine(database, create=False)) as engine:
        reader = numbers(engine, cache_seconds=0.0)
        promised = Expected(queues=("work",), pairs=(("work", "work"),))
        registries = Registries(reader, promised, look=None, version="", engine="sqlite")
        over = False
        while not over or not number:
            over = (folder / ENOUGH).exists()
            body, _ = render(registries.database, None)
            samples = {
                (sample.name, frozenset(sample.labels.items())): sample.value
                for family in text_string_to_metric_families(body.decode())
                for sample in family.samples
            }
            if not samples["herdsman_database_up", frozenset()]:
                over = False  # too busy to be read in time; no number was shown
                continue
            number += 1
            fallen += [f"{at} was {old} and is {new}" for at, old, new in fell(before, samples)]
            before = samples
            _write(folder, number, fallen, samples)
            time.sleep(PAUSE_SECONDS)


def _write(folder: Path, number: int, fallen: list[str], samples: Samples) -> None:
    last = [(name, dict(labels), value) for (name, labels), value in samples.items()]
    part = folder / f"{FOUND}.part"
    part.write_text(json.dumps((number, fallen, last)))
    part.rename(folder / FOUND)


def faults(books: Books, scrapes: Scrapes, killed: Counter[str]) -> Iterator[str]:
    """Yield every way in which the numbers are not those of the rows, or cannot be by the notes."""
    yield from (f"a number went back: {what}" for what in scrapes.fallen)
    wanted = recounted(books.database)
    for name, number in shown(scrapes.last, wanted).items():
        if number != wanted[name]:
            yield f"{name} shows {number}, the rows give {wanted[name]}"
    places = Counter(place for _, place, *_ in books.ends.values())
    reasons = Counter(how for _, place, how, _ in books.ends.values() if place == "dead")
    for state in ("ready", "delayed", "claimed", "done", "dead", "cancelled"):
        if (number := total(scrapes.last, "queue_jobs", state=state)) != places[state]:
            yield f"queue_jobs of {state} shows {number}, the rows give {places[state]}"
    for reason in ("exhausted", "rejected", "poison", "expired", "undecodable", "invalid"):
        number = total(scrapes.last, "dead_letters_total", reason=reason)
        if number != reasons[reason]:
            yield f"dead letters by {reason}: {number} shown, the rows give {reasons[reason]}"
    for name, least, number, most in _bounds(books, scrapes.last, killed):
        if not least <= number <= most:
            yield f"{name} shows {number}, the notes allow {least} to {most}"


def _bounds(
    books: Books, samples: Samples, killed: Counter[str]
) -> Iterator[tuple[str, int, int, float]]:
    """Yield a number, and the least and the most that the notes allow.

    A note is written after the fact, so each kill can leave one fact without its note.
    """
    notes = books.notes
    noted = {id_ for id_, *_ in notes.puts}
    keyed = {id_ for id_, end in books.ends.items() if "key" in end[3]}
    yield ("jobs_enqueued_total", len(noted), total(samples, "jobs_enqueued_total"),
           len(books.ends))  # fmt: skip
    yield ("jobs_rejected_total of duplicates", len(keyed & noted),
           total(samples, "jobs_rejected_total", reason="duplicate"), len(keyed))  # fmt: skip
    settled, decided = Counter(notes.settled.values()), Counter(notes.verdicts.values())
    for outcome, word in (("succeeded", "ok"), ("failed", "fail"), ("rejected", "reject")):
        number = total(samples, "attempts_finished_total", outcome=outcome)
        yield f"attempts_finished_total of {outcome}", settled[word], number, decided[word]
    started = total(samples, "attempts_started_total")
    yield "attempts_started_total", len(notes.begun), started, started
    yield "claims_total", started, total(samples, "claims_total"), float("inf")
    if killed["consumer"]:
        most = notes.stale + killed["consumer"]
        yield "stale_claims_total", notes.stale, total(samples, "stale_claims_total"), most
