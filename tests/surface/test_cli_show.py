"""`herdsman status`, `jobs` and `dead`: what operators see, and what they may change."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from queue_core import Queue
from queue_core.lockfile import InstanceLock
from tests.surface.commands import ENVIRONMENT, document, herdsman


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue[Any]]:
    """A queue `emails` in `jobs.db`, opened in this process too."""
    with Queue(tmp_path / "jobs.db", "emails") as opened:
        yield opened


def kill(queue: Queue[Any], payload: Any, *, error: str = "no", task: str | None = None) -> int:
    """Make a dead job."""
    job_id = queue.put(payload, priority=9, task=task)
    job = queue.get(timeout=5)
    assert job is not None
    assert job.id == job_id
    queue.fail(job, error=error)
    return int(job_id)


def show(tmp_path: Path, *args: object) -> Any:
    """Run a command on the database."""
    return herdsman(*args, "-d", tmp_path / "jobs.db", cwd=tmp_path)


def test_status_counts_every_queue(tmp_path: Path, queue: Queue[Any]) -> None:
    """Depth per state, age of the oldest ready job, totals, and the sum."""
    queue.put_many([1, 2])
    queue.put(3, delay=60)
    kill(queue, 4)
    with Queue(tmp_path / "jobs.db", "other") as other:
        other.put(5)
        other.pause()
    found = document(show(tmp_path, "status", "--json"))
    emails, other_row = found["queues"]
    assert (emails["queue"], emails["ready"], emails["delayed"], emails["dead"]) == (
        "emails", 2, 1, 1,
    )  # fmt: skip
    assert emails["jobs_enqueued_total"] == 4
    assert emails["dead_letters_total"] == 1
    assert emails["oldest_ready_age_seconds"] >= 0
    assert other_row["paused"] is True
    assert (found["totals"]["ready"], found["totals"]["dead"]) == (3, 1)
    assert found["supervisor"] == {"running": False, "instances": []}
    assert found["database_bytes"] > 0
    text = show(tmp_path, "status").stdout.splitlines()
    assert text[1].split() == ["supervisor", "not", "running"]
    assert text[3].split()[:4] == ["queue", "ready", "delayed", "claimed"]
    assert text[4].split()[:6] == ["emails", "2", "1", "0", "0", "1"]
    assert text[5].split()[-1] == "paused"
    assert text[6].split()[:2] == ["all", "3"]


def test_status_sees_which_supervisors_hold_the_database(tmp_path: Path, queue: Queue[Any]) -> None:
    """Only a lock that is held counts, not the file it leaves."""
    queue.put(1)
    lock = InstanceLock.take(tmp_path / "jobs.db.blue.lock", {})
    assert lock is not None
    assert document(show(tmp_path, "status", "--json"))["supervisor"] == {
        "running": True, "instances": ["blue"],
    }  # fmt: skip
    lock.close()
    assert not document(show(tmp_path, "status", "--json"))["supervisor"]["running"]


@pytest.mark.parametrize("args", [["status"], ["jobs", "list"], ["dead", "list"]])
def test_looking_at_a_missing_database_does_not_create_it(tmp_path: Path, args: list[str]) -> None:
    """Exit code 69, one sentence, and still no file."""
    done = show(tmp_path, *args)
    assert (done.returncode, done.stdout) == (69, "")
    assert "does not exist" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_database_is_told(tmp_path: Path) -> None:
    """Exit code 69 and one sentence; the file is left alone."""
    (tmp_path / "jobs.db").write_text("not a database at all\n" * 100)
    done = show(tmp_path, "status")
    assert done.returncode == 69
    assert done.stderr.count("\n") == 1
    assert (tmp_path / "jobs.db").read_text().startswith("not a database")


def test_jobs_are_listed_by_id_page_by_page(tmp_path: Path, queue: Queue[Any]) -> None:
    """Live jobs of all states merge into one order; filters narrow, `after` goes on."""
    queue.put(1)
    queue.put(2, delay=99)
    queue.put_many([3, 4], task="t")
    kill(queue, 5)

    def ids(*args: object) -> tuple[list[int], int | None]:
        found = document(show(tmp_path, "jobs", "list", "--json", *args))
        return [job["id"] for job in found["jobs"]], found["next_after"]

    assert ids() == ([1, 2, 3, 4], None)
    assert ids("-n", 3) == ([1, 2, 3], 3)
    assert ids("-n", 3, "--after", 3) == ([4], None)
    assert ids("--state", "delayed") == ([2], None)
    assert ids("--state", "all", "-n", 5) == ([1, 2, 3, 4, 5], None)
    assert ids("--task", "t", "--queue", "emails") == ([3, 4], None)
    assert ids("--queue", "none") == ([], None)
    text = show(tmp_path, "jobs", "list", "-n", 2)
    assert [line.split()[0] for line in text.stdout.splitlines()] == ["id", "1", "2"]
    assert "due 20" in text.stdout
    assert "--after 2" in text.stderr


def test_a_job_is_shown_with_payload_and_ledger(tmp_path: Path, queue: Queue[Any]) -> None:
    """Error, attempts and payload in text and JSON; a long payload is cut unless asked for."""
    job_id = kill(queue, {"x": "y" * 5000}, error="told you")
    text = show(tmp_path, "jobs", "show", job_id)
    facts = dict(line.split(maxsplit=1) for line in text.stdout.splitlines()[:4])
    assert facts == {"id": "1", "queue": "emails", "state": "dead (rejected)", "attempts": "1"}
    assert "told you" in text.stdout
    assert "add --full" in text.stderr
    assert text.stdout.splitlines()[-1].split()[-2:] == ["told", "you"]
    assert '{"x":"yyy' in text.stdout
    assert "y" * 3000 not in text.stdout
    assert "y" * 5000 in show(tmp_path, "jobs", "show", job_id, "--full").stdout
    job = document(show(tmp_path, "dead", "show", job_id, "--json", "--full"))["job"]
    assert job["payload"] == {"x": "y" * 5000}
    assert (job["state"], job["reason"], job["error"]) == ("dead", "rejected", "told you")
    assert [line["outcome"] for line in job["ledger"]] == ["rejected"]
    cut = document(show(tmp_path, "jobs", "show", job_id, "--json"))["job"]
    assert (cut["payload"], cut["payload_cut"], len(cut["payload_text"])) == (None, True, 2048)


def test_a_job_that_is_not_there_or_not_dead_is_told(tmp_path: Path, queue: Queue[Any]) -> None:
    """Exit code 1 and one sentence."""
    queue.put(1)
    missing = show(tmp_path, "jobs", "show", 77)
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "there is no job 77" in missing.stderr
    alive = show(tmp_path, "dead", "show", 1)
    assert alive.returncode == 1
    assert "job 1 is not dead but ready" in alive.stderr


def test_hostile_jobs_cannot_steer_a_terminal(tmp_path: Path, queue: Queue[Any]) -> None:
    """Escape sequences of payload, error and headers are shown, not sent."""
    evil = "\x1b]0;owned\x07\x1b[31m[bold]\u202e\x9b"
    job_id = kill(queue, evil, error=evil)
    for args in (["jobs", "show", job_id], ["dead", "list"], ["jobs", "list", "-s", "dead"]):
        out = show(tmp_path, *args).stdout
        assert not set("\x1b\x07\x9b\u202e") & set(out)
        on_terminal = in_terminal(tmp_path, *args)
        assert "\x1b]0" not in on_terminal
        assert "\x9b" not in on_terminal
        assert "\u202e" not in on_terminal
    assert "[bold]" in in_terminal(tmp_path, "dead", "list")


def in_terminal(tmp_path: Path, *args: object, columns: int = 200) -> str:
    """Run a command with standard output on a terminal, and return what reached it."""
    master, slave = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "supervisor", *map(str, args), "-d", "jobs.db"],
            cwd=tmp_path,
            env={**ENVIRONMENT, "TERM": "xterm", "NO_COLOR": "1", "COLUMNS": str(columns)},
            stdin=subprocess.DEVNULL, stdout=slave, stderr=subprocess.PIPE,
        )  # fmt: skip
    finally:
        os.close(slave)
    data = b""
    try:
        while part := os.read(master, 65536):
            data += part
    except OSError:  # a terminal without a writer ends like this
        pass
    finally:
        os.close(master)
        process.communicate(timeout=30)
    assert process.returncode == 0
    return data.decode()


def test_tables_are_drawn_on_a_terminal_only(tmp_path: Path, queue: Queue[Any]) -> None:
    """A rule under the heads on a terminal, plain aligned text in a pipe."""
    queue.put(1)
    assert "─" in in_terminal(tmp_path, "status")
    assert "─" not in show(tmp_path, "status").stdout


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_no_value_is_cut_off_on_a_narrow_terminal(
    tmp_path: Path, queue: Queue[Any], columns: int
) -> None:
    """Where the headings do not fit beside each other they stand one under the other."""
    queue.put(1)
    kill(queue, 2)
    shown = re.sub("\x1b[^m]*m", "", in_terminal(tmp_path, "queues", "list", columns=columns))
    for name in ("queue", "ready", "delayed", "claimed", "done", "dead", "cancelled", "parked"):
        assert name in shown
    assert ("─" in shown) == (columns > 40)
    assert all(len(text) <= columns for text in shown.splitlines())


def test_dead_jobs_are_filtered_and_replayed(tmp_path: Path, queue: Queue[Any]) -> None:
    """A filter is counted first, needs --yes, and replays what it matched and no more."""
    first, second = kill(queue, 1, task="a"), kill(queue, 2, task="b")
    third = kill(queue, 3, task="b")
    listed = document(show(tmp_path, "dead", "list", "--task", "b", "--json"))
    assert [job["id"] for job in listed["jobs"]] == [second, third]
    assert document(show(tmp_path, "dead", "list", "-r", "poison", "--json"))["jobs"] == []
    dry = show(tmp_path, "dead", "replay", "--task", "b", "--dry-run")
    assert (dry.returncode, dry.stdout) == (0, "would replay 2 jobs\n")
    asked = show(tmp_path, "dead", "replay", "--task", "b")
    assert (asked.returncode, asked.stdout) == (2, "")
    assert "would replay 2 jobs; add --yes" in asked.stderr
    assert queue.counts().dead == 3
    done = show(tmp_path, "dead", "replay", "--task", "b", "--yes", "--json")
    assert document(done) == {
        "schema_version": 1, "command": "dead replay", "matched": 2, "replayed": 2,
        "dry_run": False,
    }  # fmt: skip
    assert [job.id for job in queue.jobs("dead")] == [first]


def test_named_jobs_are_replayed_and_those_not_dead_are_told(
    tmp_path: Path, queue: Queue[Any]
) -> None:
    """Ids need no --yes; one that is not dead makes it exit code 1."""
    first = kill(queue, 1)
    alive = int(queue.put(2))
    done = show(tmp_path, "dead", "replay", first, alive)
    assert (done.returncode, done.stdout) == (1, "replayed 1 job\n")
    assert "1 of these jobs were not dead" in done.stderr
    assert queue.counts().ready == 2


@pytest.mark.parametrize("args", [["--yes"], ["--dry-run"], ["1", "--queue", "emails"]])
def test_an_empty_or_doubled_filter_is_refused(
    tmp_path: Path, queue: Queue[Any], args: list[str]
) -> None:
    """Replaying everything by accident is not possible."""
    kill(queue, 1)
    done = show(tmp_path, "dead", "replay", *args)
    assert (done.returncode, done.stdout) == (2, "")
    assert queue.counts().dead == 1
