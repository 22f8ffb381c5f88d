"""Fight a short kill campaign: 30 processes die at random, and no job is lost or done wrongly.

The long one is `make campaign`.
"""

from __future__ import annotations

import os
import random
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from queue_core import Queue
from tests.campaign import numbers
from tests.campaign.accounts import Books
from tests.campaign.arenas import Arena, Library, Supervised
from tests.campaign.kills import run
from tests.campaign.roles import write
from tests.conftest import wait_until

SEED = os.environ.get("CAMPAIGN_SEED")


@pytest.mark.parametrize(
    ("arena", "kills", "pause_seconds"), [(Supervised, 15, 0.15), (Library, 15, 0.04)]
)
def test_every_job_survives_kills_at_random(
    tmp_path: Path, arena: Callable[..., Arena], kills: int, pause_seconds: float
) -> None:
    """Each returned put is done or dead as its handler decided; counters and file are right."""
    seed = int(SEED) if SEED else random.randrange(2**32)
    report = run(arena(tmp_path / "arena", random.Random(seed)), kills, pause_seconds)
    assert report.faults == [], f"CAMPAIGN_SEED={seed}"
    assert sum(report.kills.values()) >= kills
    assert report.jobs > kills
    assert report.scrapes > 5
    assert report.stale > 0 or arena is Supervised, "no lost lease: the fence was not tried"


@pytest.fixture
def books(tmp_path: Path) -> Callable[[], list[str]]:
    """Return a function that holds one done and one dead job against their notes."""
    database = tmp_path / "books.db"
    with Queue(database, "work") as queue:
        for serial, do in (("a", "ok"), ("b", "reject")):
            id_ = queue.put({"n": serial, "do": do})
            write(tmp_path, "puts", id_, serial, do)
        for decided in ("ok", "reject"):
            job = queue.get(timeout=0)
            assert job is not None
            write(tmp_path, "notes", "begin", job.id, job.run, 1, 1)
            write(tmp_path, "notes", "verdict", job.id, job.run, decided, 1, 1)
            if decided == "ok":
                queue.ack(job)
            else:
                queue.fail(job)
            write(tmp_path, "notes", "settled", job.id, job.run, decided, 1, 1)
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE mine (n TEXT)")
    return lambda: list(Books(tmp_path, database).faults(unnoted_max=0))


def test_accounts_that_agree_have_no_fault(books: Callable[[], list[str]], tmp_path: Path) -> None:
    """What was decided stands; a line that a kill has cut is none, and harms not the next."""
    assert books() == []
    with (tmp_path / "notes").open("a") as notes:
        notes.write("\nverdict 1")
    write(tmp_path, "notes", "stale", 1, 1, 1, 1)
    assert books() == []
    assert Books(tmp_path, tmp_path / "books.db").notes.stale == 1


@pytest.mark.parametrize(
    ("tampering", "fault"),
    [
        ("DELETE FROM done", "which is lost"),
        ("UPDATE done SET run = 2", "was acked"),
        ("UPDATE dead SET reason = 'exhausted'", "by run 1"),
        ("DELETE FROM attempt", "stands as None"),
        ("UPDATE stat SET value = value + 1 WHERE label = 'done'", "counters say"),
        ("INSERT INTO mine VALUES ('c')", "stand and fall"),
    ],
)
def test_accounts_that_disagree_are_found_out(
    books: Callable[[], list[str]], tmp_path: Path, tampering: str, fault: str
) -> None:
    """A campaign whose accounts find nothing wrong anywhere would prove nothing."""
    with closing(sqlite3.connect(tmp_path / "books.db")) as connection:
        connection.execute(tampering)
        connection.commit()
    assert any(fault in found for found in books())


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("puts 99 z ok", "which is lost"),
        ("notes begin 1 1 1 1", "begun twice"),
        ("notes settled 1 1 ok 1 1", "settled twice"),
        ("notes settled 1 2 ok 1 1", "was acked"),
    ],
)
def test_notes_that_disagree_are_found_out(
    books: Callable[[], list[str]], tmp_path: Path, line: str, fault: str
) -> None:
    """A claim that two have settled, or begun, is told by their notes alone."""
    write(tmp_path, *line.split())
    assert any(fault in found for found in books())


def numbers_of(folder: Path) -> list[str]:
    """Scrape the books to the end, and hold the numbers against rows and notes."""
    (folder / numbers.ENOUGH).touch()
    numbers.watch(folder, folder / "books.db")
    found = Books(folder, folder / "books.db")
    return list(numbers.faults(found, numbers.Scrapes.read(folder), Counter(consumer=1)))


def test_numbers_that_agree_have_no_fault(books: Callable[[], list[str]], tmp_path: Path) -> None:
    """What operators are shown is what rows and notes say."""
    assert numbers_of(tmp_path) == []


@pytest.mark.parametrize(
    ("tampering", "fault"),
    [
        ("name = 'jobs_enqueued_total'", "jobs_enqueued_total shows 4, the rows give 2"),
        ("name = 'attempts_started_total'", "attempts_started_total shows 4"),
        ("name = 'attempts_finished_total' AND label = 'succeeded'", "the notes allow 1 to 1"),
        ("name = 'dead_letters_total'", "dead letters by rejected: 3 shown"),
        ("name = 'queue_wait_seconds' AND label LIKE '|%'", "queue_wait_seconds_count shows"),
        ("name = 'queue_jobs' AND label = 'done'", "queue_jobs of done shows 3"),
    ],
)
def test_numbers_that_disagree_are_found_out(
    books: Callable[[], list[str]], tmp_path: Path, tampering: str, fault: str
) -> None:
    """A counter that counts a thing twice is told from the rows, and from the notes."""
    with closing(sqlite3.connect(tmp_path / "books.db")) as connection:
        assert connection.execute(f"UPDATE stat SET value = value + 2 WHERE {tampering}").rowcount
        connection.commit()
    assert any(fault in found for found in numbers_of(tmp_path))


def test_a_number_that_goes_back_is_found_out(
    books: Callable[[], list[str]], tmp_path: Path
) -> None:
    """Between any two scrapes, however it stands in the end."""
    watcher = threading.Thread(target=numbers.watch, args=(tmp_path, tmp_path / "books.db"))
    with closing(sqlite3.connect(tmp_path / "books.db")) as connection:
        value = "UPDATE stat SET value = value {} 1 WHERE name = 'jobs_enqueued_total'"
        connection.execute(value.format("+"))
        connection.commit()
        watcher.start()
        wait_until(lambda: (tmp_path / numbers.FOUND).exists(), what="it has been seen")
        connection.execute(value.format("-"))
        connection.commit()
    (tmp_path / numbers.ENOUGH).touch()
    watcher.join(20)
    (fallen,) = numbers.Scrapes.read(tmp_path).fallen
    assert "jobs_enqueued_total" in fallen
    assert "was 3.0 and is 2.0" in fallen
