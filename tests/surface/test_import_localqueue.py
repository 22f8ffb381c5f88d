"""Bring in what the real localqueue wrote: every state, its errors, its keys, each job once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from localqueue import DeliveryPolicy, EnqueueItem, SimpleQueue

from queue_core import Outcome, Queue, Reason
from tests.conftest import wait_until
from tests.surface.commands import ENVIRONMENT, herdsman
from tests.surface.importing import arrived, bring, contents, payloads


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Let localqueue write a folder with two queues and a job in every state."""
    folder = tmp_path / "localqueue"
    policy = DeliveryPolicy(lease_seconds=600, max_retries=2)
    emails: SimpleQueue[Any] = SimpleQueue(str(folder), "emails", delivery=policy)
    reports: SimpleQueue[Any] = SimpleQueue(str(folder), "reports", delivery=policy)
    emails.put({"n": 1}, job_id="keyed-done")
    emails.put({"n": 2})
    emails.ack(emails.get_nowait())
    emails.ack(emails.get_nowait())
    emails.put({"n": 3}, job_id="keyed-dead")
    emails.fail(emails.get_nowait(), last_error="bad address")
    emails.put({"n": 4})
    for attempt in range(3):
        emails.nack(emails.get_nowait(), last_error=f"refused {attempt}")
    emails.put({"n": 5})
    emails.nack(emails.get_nowait(), delay=3600, last_error="try later")
    emails.put({"n": 6})
    emails.get_nowait()  # in flight
    emails.put({"n": 7}, job_id="keyed-ready")
    emails.put({"ü": "ö" * 3000})
    reports.put("other queue")
    emails.close()
    reports.close()
    return folder


def test_every_job_arrives_as_it_stood(source: Path, database: Path) -> None:
    """Ready and in flight are ready, delayed is delayed, failed is dead, keyed done is done."""
    said = bring("localqueue", source, database, "--only", "emails")
    assert (said["arrived"], said["done_left_out"], said["known_already"]) == (7, 1, 0)
    found = arrived(database, "emails")
    assert payloads(found["ready"]) == [{"n": 6}, {"n": 7}, {"ü": "ö" * 3000}]
    assert payloads(found["delayed"]) == [{"n": 5}]
    assert payloads(found["dead"]) == [{"n": 3}, {"n": 4}]
    assert payloads(found["done"]) == [{"n": 1}]
    assert arrived(database, "reports")["ready"] == []


def test_attempts_errors_and_reasons_come_along(source: Path, database: Path) -> None:
    """What a job has behind it counts here too, and is shown."""
    bring("localqueue", source, database)
    found = arrived(database, "emails")
    in_flight, keyed, _ = found["ready"]
    (delayed,) = found["delayed"]
    failed, exhausted = found["dead"]
    assert (in_flight.attempt, in_flight.max_attempts, keyed.attempt) == (2, 3, 1)
    assert (delayed.attempt, delayed.ledger[0].error) == (2, "try later")
    assert delayed.ledger[0].outcome is Outcome.FAILED
    assert (failed.reason, failed.error) == (Reason.REJECTED, "bad address")
    assert failed.headers["imported_reason"] == "explicit_permanent_failure"
    assert (exhausted.reason, exhausted.error) == (Reason.EXHAUSTED, "refused 2")
    assert exhausted.ledger[0].run == 3


def test_keys_go_on_holding(source: Path, database: Path) -> None:
    """A producer that repeats a put after the move is told of the job there is, done or dead."""
    bring("localqueue", source, database)
    with Queue[Any](database, "emails") as queue:
        for number, key in ((1, "keyed-done"), (3, "keyed-dead"), (7, "keyed-ready")):
            # The digest covers the bytes, and localqueue writes JSON with spaces.
            raw = Queue[bytes](database, "emails", serializer=Raw(), engine=queue.engine)
            assert raw.put(json.dumps({"n": number}).encode(), key=key).duplicate


class Raw:
    """Takes bytes as they are."""

    def dumps(self, payload: bytes, /) -> bytes:
        """Return them."""
        return payload

    def loads(self, data: bytes, /) -> bytes:
        """Return them."""
        return data


def test_the_source_is_never_changed(source: Path, database: Path) -> None:
    """Not a byte and not a file more, after a dry run and after a real one."""
    before = contents(source)
    bring("localqueue", source, database, "--dry-run")
    bring("localqueue", source, database)
    assert contents(source) == before


def test_a_source_that_is_open_is_read_and_not_touched(source: Path, database: Path) -> None:
    """What stands in the log alone is found; log and index file stay as they are."""
    writer: SimpleQueue[Any] = SimpleQueue(str(source), "emails")
    writer.put({"n": "in the log"})
    before = contents(source)
    assert len(before) == 3
    bring("localqueue", source, database)
    assert contents(source) == before
    assert {"n": "in the log"} in payloads(arrived(database, "emails")["ready"])
    writer.put({"n": "still working"})
    writer.close()


def test_a_dry_run_tells_and_stores_nothing(source: Path, database: Path) -> None:
    """It says the same numbers as the run that follows, and makes no database."""
    told = bring("localqueue", source, database, "--dry-run")
    assert not database.exists()
    done = bring("localqueue", source, database)
    assert told["queues"] == done["queues"]
    again = bring("localqueue", source, database, "--dry-run")
    assert (again["arrived"], again["known_already"]) == (0, told["arrived"])


def test_a_second_run_brings_only_what_is_new(source: Path, database: Path) -> None:
    """Nothing comes twice, also what was run here meanwhile; what was put there since does."""
    first = bring("localqueue", source, database)
    with Queue[Any](database, "emails") as queue:
        for job in queue.get_many(10):
            queue.ack(job)
    late: SimpleQueue[Any] = SimpleQueue(str(source), "emails")
    late.put({"n": "late"})
    late.close()
    second = bring("localqueue", source, database)
    assert (second["arrived"], second["known_already"]) == (1, first["arrived"])
    assert payloads(arrived(database, "emails")["ready"]) == [{"n": "late"}]


def test_a_moved_source_is_recognised(source: Path, database: Path) -> None:
    """What a job is called for ever does not depend on where its folder lies."""
    first = bring("localqueue", source, database)
    moved = source.rename(source.with_name("elsewhere"))
    again = bring("localqueue", moved, database)
    assert (again["arrived"], again["known_already"]) == (0, first["arrived"])


def test_an_import_that_was_killed_goes_on(tmp_path: Path, database: Path) -> None:
    """SIGKILL in the middle, again and again: in the end every job is here once."""
    folder = tmp_path / "many"
    writer: SimpleQueue[Any] = SimpleQueue(str(folder), "many")
    number = 4000
    writer.put_many([EnqueueItem(data=n, job_id=f"id-{n}") for n in range(number)])
    writer.close()
    before = contents(folder)
    kills = 0
    for wanted in (1, 1000, 2000):
        process = subprocess.Popen(
            [sys.executable, "-m", "supervisor", "import", "localqueue", folder, "-d", database],
            env=ENVIRONMENT | {"TMPDIR": str(tmp_path)},  # where the killed leave their copy
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

        def far_enough(wanted: int = wanted, process: Any = process) -> bool:
            return process.poll() is not None or stored(database) >= wanted

        wait_until(far_enough, poll_seconds=0.01)
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
    said = bring("localqueue", folder, database)
    assert said["arrived"] + said["known_already"] == number
    assert kills >= 2
    assert contents(folder) == before
    found = arrived(database, "many")
    assert payloads(found["ready"]) == list(range(number))


def stored(database: Path) -> int:
    """Return how many jobs are there so far."""
    if not database.exists():
        return 0
    with Queue[Any](database, "many") as queue:
        return queue.counts().ready


def test_a_queue_can_be_renamed(source: Path, database: Path) -> None:
    """With --queue and --task the jobs go where they are wanted."""
    bring("localqueue", source, database, "--only", "reports", "--queue", "new", "--task", "t")
    (job,) = arrived(database, "new")["ready"]
    assert (job.payload, job.task) == ("other queue", "t")
    assert job.headers == {"imported_from": "localqueue", "imported_id": "9"}


def test_a_key_held_by_other_data_is_one_sentence(source: Path, database: Path) -> None:
    """The import says which key, and into which queue it could go; it stores nothing half."""
    with Queue[Any](database, "emails") as queue:
        queue.put("other data", key="keyed-ready")
    done = herdsman(
        "import", "localqueue", source, "--only", "emails", "-d", database, cwd=database.parent
    )
    assert done.returncode == 1
    assert "keyed-ready" in done.stderr
    assert "import into another queue" in done.stderr
    assert payloads(arrived(database, "emails")["ready"]) == ["other data"]


@pytest.mark.parametrize("make", [
    lambda path: path.mkdir(),
    lambda path: (path.mkdir(), (path / "localqueue.db").write_bytes(b"no database" * 1000)),
    lambda path: (path.mkdir(), (path / "localqueue.db").touch()),
    lambda path: None,
])  # fmt: skip
def test_what_is_no_localqueue_is_one_sentence(tmp_path: Path, database: Path, make: Any) -> None:
    """An empty folder, a file of something else, none at all: a sentence and an exit code."""
    path = tmp_path / "wrong"
    make(path)
    done = herdsman("import", "localqueue", path, "-d", database, cwd=tmp_path)
    assert done.returncode in {1, 2, 69}
    assert done.stderr.count("\n") == 1
