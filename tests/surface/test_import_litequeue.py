"""Bring in what the real litequeue wrote: every state, each message once, the file untouched."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import litequeue
import pytest

from queue_core import Queue, Reason
from tests.surface.commands import herdsman
from tests.surface.importing import arrived, bring, contents, payloads


def closed(queue: Any) -> None:
    """Close a queue of any version."""
    queue.close() if hasattr(queue, "close") else queue.conn.close()


def fence(message: Any) -> dict[str, Any]:
    """Return the claim id that versions from 0.12 on want."""
    return {"claim_id": message.claim_id} if hasattr(message, "claim_id") else {}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Let litequeue write a file with a message in every state."""
    path = tmp_path / "lite" / "queue.db"
    path.parent.mkdir()
    queue = litequeue.LiteQueue(str(path))
    for text in ("done", "failed", "in flight", "plain text", '{"n": 1}', "ü" * 3000):
        queue.put(text)
    message = queue.pop()
    queue.done(message.message_id, **fence(message))
    message = queue.pop()
    queue.mark_failed(message.message_id, **fence(message))
    queue.pop()
    closed(queue)
    return path


def test_every_message_arrives_as_it_stood(source: Path, database: Path) -> None:
    """Ready and locked are ready, in order; failed is dead; done without a key stays behind."""
    said = bring("litequeue", source, database, "--queue", "lite")
    assert (said["arrived"], said["done_left_out"]) == (5, 1)
    found = arrived(database, "lite")
    assert payloads(found["ready"]) == ["in flight", "plain text", '{"n": 1}', "ü" * 3000]
    assert [job.attempt for job in found["ready"]] == [2, 1, 1, 1]
    (dead,) = found["dead"]
    assert (dead.payload, dead.reason) == ("failed", Reason.REJECTED)
    assert dead.headers["imported_from"] == "litequeue"
    with closing(sqlite3.connect(source)) as raw:
        put_ns = raw.execute("SELECT in_time FROM Queue WHERE data = 'failed'").fetchone()[0]
    assert dead.enqueued_us == put_ns // 1000


def test_texts_can_be_taken_for_json(source: Path, database: Path) -> None:
    """With --json-payloads a document becomes the payload; a text that is none is named."""
    said = bring("litequeue", source, database, "--json-payloads", code=1)
    assert (said["arrived"], said["unreadable"]) == (1, 4)
    assert payloads(arrived(database, "default")["ready"]) == [{"n": 1}]


def test_the_file_is_never_changed_and_nothing_comes_twice(source: Path, database: Path) -> None:
    """A dry run, a run and another: the bytes stay, and the second run finds all known."""
    before = contents(source)
    told = bring("litequeue", source, database, "--dry-run")
    assert not database.exists()
    done = bring("litequeue", source, database)
    again = bring("litequeue", source, database)
    assert contents(source) == before
    assert told["queues"] == done["queues"]
    assert (again["arrived"], again["known_already"]) == (0, 5)
    assert len(arrived(database, "default")["ready"]) == 4


def test_a_file_that_is_open_is_read_and_not_touched(source: Path, database: Path) -> None:
    """Messages that stand in the log alone come along; the writer goes on undisturbed."""
    writer = litequeue.LiteQueue(str(source))
    writer.put("in the log")
    before = contents(source)
    bring("litequeue", source, database)
    assert contents(source) == before
    assert "in the log" in payloads(arrived(database, "default")["ready"])
    writer.put("still working")
    closed(writer)


NEWER = """
CREATE TABLE "Queue" (
    "data" TEXT NOT NULL, "message_id" TEXT NOT NULL, "status" INTEGER NOT NULL,
    "in_time" INTEGER NOT NULL, "lock_time" INTEGER, "done_time" INTEGER,
    "idempotency_key" TEXT, "claim_id" INTEGER NOT NULL DEFAULT 0);
INSERT INTO "Queue" VALUES
    ('done', 'm1', 2, 1700000000000000000, 1700000001000000000, 1700000002000000000, 'k1', 1),
    ('failed', 'm2', 3, 1700000000000000000, 1700000001000000000, 1700000002000000000, NULL, 3),
    ('held', 'm3', 1, 1700000000000000000, 1700000001000000000, NULL, '', 2),
    ('ready', 'm4', 0, 1700000000000000000, NULL, NULL, 'k4', 0),
    ('strange', 'm5', 9, 1700000000000000000, NULL, NULL, NULL, 0);
PRAGMA user_version = 3;
"""


def test_keys_and_claims_of_newer_versions_come_along(tmp_path: Path, database: Path) -> None:
    """Keys hold on, those of done messages too; claims are charged; an empty key is noted."""
    path = tmp_path / "newer.db"
    with closing(sqlite3.connect(path)) as raw:
        raw.executescript(NEWER)
    said = bring("litequeue", path, database, code=1)  # one status is unknown
    assert (said["arrived"], said["unreadable"], said["keys_dropped"]) == (4, 1, 1)
    found = arrived(database, "default")
    assert [(job.payload, job.attempt) for job in found["ready"]] == [("held", 3), ("ready", 1)]
    assert payloads(found["done"]) == ["done"]
    assert found["dead"][0].attempt == 4
    with Queue[str](database) as queue:
        assert queue.put("ready", key="k4").duplicate
        assert queue.put("done", key="k1").duplicate


def test_an_old_file_may_hold_queues_under_other_names(tmp_path: Path, database: Path) -> None:
    """The table is named; a wrong name is answered with those there are."""
    path = tmp_path / "named.db"
    if "queue_name" not in litequeue.LiteQueue.__init__.__annotations__:
        with closing(sqlite3.connect(path)) as raw:
            raw.executescript(NEWER.replace('"Queue"', '"mails [x]"'))
    else:
        queue = litequeue.LiteQueue(str(path), queue_name="mails x")
        queue.put("m")
        closed(queue)
    done = herdsman("import", "litequeue", path, "-d", database, cwd=tmp_path)
    assert done.returncode == 1
    assert "those of its kind are mails" in done.stderr
    name = done.stderr.split("those of its kind are ")[1].strip()
    assert bring("litequeue", path, database, "--table", name)["arrived"] == 1


@pytest.mark.parametrize("data", [b"", b"no database" * 500, None])
def test_what_is_no_litequeue_is_one_sentence(
    tmp_path: Path, database: Path, data: bytes | None
) -> None:
    """An empty file, another kind of file, none at all: a sentence and an exit code."""
    path = tmp_path / "wrong.db"
    if data is not None:
        path.write_bytes(data)
    done = herdsman("import", "litequeue", path, "-d", database, cwd=tmp_path)
    assert done.returncode in {1, 2, 69}
    assert done.stderr.count("\n") == 1
