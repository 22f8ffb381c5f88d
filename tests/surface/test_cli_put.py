"""`herdsman put`: one job from the command line, many from standard input."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from queue_core import Queue
from tests.conftest import wait_until
from tests.surface.commands import ENVIRONMENT, document, herdsman


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A path for a database that is not there yet."""
    return tmp_path / "jobs.db"


def test_put_stores_one_job_with_its_options_and_prints_its_id(
    tmp_path: Path, database: Path
) -> None:
    """The id alone is on standard output, and every option reaches the job."""
    done = herdsman(
        "put", "emails", '{"to": "é"}', "-d", database, "--task", "send", "--delay", "1h",
        "--priority", "3", "--key", "k1", "--header", "trace=a=b", "--max-attempts", "2",
        cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert "created the database" in done.stderr
    with Queue(database, "emails", create=False) as queue:
        job = queue.find(1)
    assert job is not None
    assert (job.payload, job.task, job.priority, job.key) == ({"to": "é"}, "send", 3, "k1")
    assert (job.headers, job.max_attempts, job.state) == ({"trace": "a=b"}, 2, "delayed")
    assert database.stat().st_mode & 0o777 == 0o600


def test_a_duplicate_is_said_and_a_conflict_fails(tmp_path: Path, database: Path) -> None:
    """The same key gives the same id; with other data it is exit code 1."""

    def put(payload: str, *more: str) -> subprocess.CompletedProcess[str]:
        return herdsman("put", "q", payload, "-d", database, "--key", "k", *more, cwd=tmp_path)

    assert put("1").stdout == "1\n"
    again = put("1")
    assert (again.returncode, again.stdout) == (0, "1\n")
    assert "1 (duplicate)" in again.stderr
    assert document(put("1", "--json")) == {
        "schema_version": 1, "command": "put", "queue": "q", "id": 1, "duplicate": True,
    }  # fmt: skip
    conflict = put("2")
    assert (conflict.returncode, conflict.stdout) == (1, "")
    assert conflict.stderr.count("\n") == 1
    assert "held by job 1" in conflict.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["q", "{"], "the payload is not JSON"),
        (["q", "NaN"], "NaN is no JSON value"),
        (["q", "[" * 5000], "nested too deeply"),
        (["q", json.dumps("x" * 100_000), "--delay", "soon"], "is not a duration"),
        (["q", "1", "--header", "novalue"], "is not NAME=VALUE"),
        (["q", "1", "--priority", "high"], "--priority"),
        (["q", "1", "--max-attempts", "0"], "--max-attempts"),
        (["q", "-", "--key", "k"], "--key names one job"),
        (["", "1"], "a queue's name"),
        (["q\x1b[31m", "1"], "a queue's name"),
        (["q"], "payload"),
    ],
)
def test_a_wrong_call_is_one_sentence_and_exit_code_2(
    tmp_path: Path, database: Path, args: list[str], said: str
) -> None:
    """Nothing is stored, and the sentence names what is wrong."""
    done = herdsman("put", *args, "-d", database, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.startswith("herdsman: ")
    assert done.stderr.count("\n") == 1
    assert "\x1b" not in done.stderr


def test_lines_from_standard_input_become_jobs_in_order(tmp_path: Path, database: Path) -> None:
    """Several batches, blank lines skipped, an id per line."""
    lines = "".join(f'{{"n": {n}}}\n\n' for n in range(2500))
    done = herdsman("put", "q", "-", "-d", database, "--task", "t", cwd=tmp_path, stdin=lines)
    assert done.returncode == 0
    assert done.stdout.split() == [str(n) for n in range(1, 2501)]
    assert "stored 2500 jobs" in done.stderr
    with Queue(database, "q", create=False) as queue:
        assert queue.counts().ready == 2500
        last = queue.find(2500)
        assert last is not None
        assert (last.payload, last.task) == ({"n": 2499}, "t")


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (b'{"a": \n', "line 1502 is not JSON: Expecting value (column 7); nothing"),
        (b"\xff\n", "line 1502 is not UTF-8 text"),
        (b"NaN\n", "line 1502 is not JSON"),
        (b'"' + b"x" * 1_100_000 + b'"\n', "line 1502: the payload has 1100002 bytes"),
        (b'"' + b"x" * 4_300_000 + b'"\n', "line 1502 is longer than"),
        (b'"\\ud800"\n', "line 1502: the payload cannot be encoded"),
    ],
    ids=["syntax", "encoding", "nan", "large", "endless", "surrogate"],
)
def test_a_bad_line_is_named_and_nothing_of_its_batch_is_stored(
    tmp_path: Path, database: Path, bad: bytes, said: str
) -> None:
    """Exit code 1, the line's number, and how many were stored before."""
    stdin = b"".join(b"%d\n" % n for n in range(1501)) + bad + b"7\n"
    done = herdsman("put", "q", "-", "-d", database, cwd=tmp_path, stdin=stdin)
    assert done.returncode == 1
    assert said in done.stderr
    assert "nothing of its batch was stored" in done.stderr
    assert "stored 1000 jobs, then stopped; go on from line 1001" in done.stderr
    assert len(done.stdout.split()) == 1000
    with Queue(database, "q", create=False) as queue:
        assert queue.counts().ready == 1000


def test_the_json_document_of_many_says_how_far_it_came(tmp_path: Path, database: Path) -> None:
    """One document with the ids, and the error when it stopped."""
    done = herdsman("put", "q", "-", "-d", database, "--json", cwd=tmp_path, stdin="1\n2\n")
    assert document(done) == {
        "schema_version": 1, "command": "put", "queue": "q", "stored": 2, "ids": [1, 2],
        "lines_unsure": None, "error": None,
    }  # fmt: skip
    done = herdsman("put", "q", "-", "-d", database, "--json", cwd=tmp_path, stdin="1\nx\n")
    assert done.returncode == 1
    found = document(done)
    assert (found["stored"], found["ids"], found["lines_unsure"]) == (0, [], None)
    assert "line 2 is not JSON" in found["error"]


def test_ctrl_c_while_reading_says_how_many_are_stored(tmp_path: Path, database: Path) -> None:
    """Interrupted while it waits for more input: exit code 130, no traceback."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "supervisor", "put", "q", "-", "-d", str(database)],
        cwd=tmp_path, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(b"1\n" * 1000)
    process.stdin.flush()

    assert process.stdout is not None
    ids = [int(process.stdout.readline()) for _ in range(1000)]
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=30)
    assert (process.returncode, rest) == (130, b"")
    assert ids == list(range(1, 1001))
    assert err.decode().splitlines() == [
        "stored 1000 jobs, then stopped; go on from line 1001", f"created the database {database}",
        "herdsman: interrupted",
    ]  # fmt: skip


STRUCK = """
import os, signal, sys
from queue_core.engines import sqlite_enqueue, sqlite_log

batches, enqueue, sync = 0, sqlite_enqueue.enqueue, sqlite_log.sync_data

def counted(*args):
    global batches
    batches += 1
    if batches == 2 and sys.argv[1] == "interrupted":
        os.kill(os.getpid(), signal.SIGINT)
    return enqueue(*args)

def synced(descriptor):
    if batches == 2 and sys.argv[1] == "unflushed":
        raise OSError(5, "Input/output error")
    return sync(descriptor)

sqlite_enqueue.enqueue, sqlite_log.sync_data = counted, synced
from supervisor.cli import main

main(sys.argv[2:])
"""


def make(database: Path) -> Path:
    """Make a database, so that a command writes nothing but jobs."""
    with Queue(database, "q") as queue:
        queue.counts()
    return database


def struck(how: str, database: Path, *args: object) -> subprocess.CompletedProcess[str]:
    """Put 2,500 lines by a command that is struck while it stores the second thousand."""
    arguments = ["put", "q", "-", "-d", str(make(database)), *map(str, args)]
    return subprocess.run(
        [sys.executable, "-P", "-c", STRUCK, how, *arguments],
        cwd=database.parent, env=ENVIRONMENT, input="1\n" * 2500, text=True,
        capture_output=True, timeout=60, check=False,
    )  # fmt: skip


def stored_in(database: Path) -> int:
    """Count the jobs."""
    with Queue(database, "q", create=False) as queue:
        return queue.counts().ready


def test_ctrl_c_while_a_batch_is_stored_names_the_line_to_go_on_from(
    tmp_path: Path, database: Path
) -> None:
    """A batch that is stored all the same is counted, and its ids are printed."""
    done = struck("interrupted", database)
    assert (done.returncode, stored_in(database)) == (130, 2000)
    assert done.stdout.split() == [str(number) for number in range(1, 2001)]
    assert "stored 2000 jobs, then stopped; go on from line 2001" in done.stderr

    found = document(struck("interrupted", tmp_path / "other.db", "--json"))
    assert (found["stored"], len(found["ids"]), found["lines_unsure"]) == (2000, 2000, None)


def test_lines_that_may_be_stored_or_not_are_named(tmp_path: Path, database: Path) -> None:
    """After a failed flush nobody knows what a power cut leaves: no line to go on from is told."""
    done = struck("unflushed", database)
    assert (done.returncode, stored_in(database)) == (69, 2000)
    assert len(done.stdout.split()) == 1000
    assert (
        "stored 1000 jobs, then stopped; lines 1001 to 2000 may be stored too: "
        "look before you put them again\n"
    ) in done.stderr

    found = document(struck("unflushed", tmp_path / "other.db", "--json"))
    assert (found["stored"], len(found["ids"])) == (1000, 1000)
    assert found["lines_unsure"] == [1001, 2000]


def has_open(pid: int, path: str) -> bool:
    """Whether a process has a file open."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(link) == path:
                return True
    return False


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("q", "-"), "stored 0 jobs, then stopped; line 2 may be stored too: look before"),
        (("q", "1"), "the job may be stored: look before you put it again"),
        (("q", "1", "-k", "a"), "the job may be stored: put it again, with the same key"),
    ],
)
def test_ctrl_c_while_another_holds_the_lock_ends_it_at_once(
    tmp_path: Path, database: Path, words: tuple[str, ...], told: str
) -> None:
    """A single job may be taken along by who holds the lock: it is named as unsure."""
    with open(f"{make(database)}.lock", "rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "supervisor", "put", *words, "-d", str(database)],
            cwd=tmp_path, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write("\n1\n")
        process.stdin.close()
        process.stdin = None
        wait_until(lambda: has_open(process.pid, f"{database}.lock"), what="it comes to the lock")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)  # the lock's own deadline is 30 seconds
    assert (process.returncode, out) == (130, "")
    assert told in err


def test_a_progress_bar_is_drawn_on_a_terminal_and_the_ids_stay_apart(
    tmp_path: Path, database: Path
) -> None:
    """With standard error on a terminal the bar goes there, the ids to standard output."""
    source = tmp_path / "lines"
    source.write_text("1\n" * 1500)
    master, slave = pty.openpty()
    with source.open() as stdin:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "supervisor", "put", "q", "-", "-d", str(database)],
            cwd=tmp_path, env={**ENVIRONMENT, "TERM": "xterm"}, stdin=stdin,
            stdout=subprocess.PIPE, stderr=slave,
        )  # fmt: skip
    os.close(slave)
    assert process.stdout is not None
    ids = process.stdout.read().split()
    process.stdout.close()
    shown = b""
    try:
        while part := os.read(master, 65536):
            shown += part
    except OSError:  # a terminal without a writer ends like this
        pass
    finally:
        os.close(master)
    assert process.wait(30) == 0
    assert ids == [b"%d" % n for n in range(1, 1501)]
    assert "━" in shown.decode()
    assert b"stored 1500 jobs" in shown


def test_a_reader_that_leaves_ends_it_quietly(tmp_path: Path, database: Path) -> None:
    """When the pipe is closed behind it, there is no traceback and no complaint."""
    lines = "".join(f"{n}\n" for n in range(20_000))  # more ids than a pipe holds
    put = piped_to_head(tmp_path, lines, "put", "q", "-", "-d", database)
    assert put == (1, b"1\n")  # not all was stored
    code, head = piped_to_head(tmp_path, "", "jobs", "list", "-n", 4000, "-d", database)
    assert code == 0
    assert head.split() == [
        b"id", b"queue", b"task", b"state", b"attempts", b"priority", b"enqueued", b"note",
    ]  # fmt: skip


def piped_to_head(tmp_path: Path, stdin: str, *args: object) -> tuple[int, bytes]:
    """Run a command, read one line of its output, close the pipe; return its exit code too."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "supervisor", *map(str, args)], cwd=tmp_path,
        env={**ENVIRONMENT, "PYTHONUNBUFFERED": "1"}, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write(stdin.encode())
    process.stdin.close()
    first = process.stdout.readline()
    process.stdout.close()
    complaints = process.stderr.read()
    process.stderr.close()
    code = process.wait(30)
    assert b"Traceback" not in complaints
    assert b"Broken pipe" not in complaints
    return code, first
