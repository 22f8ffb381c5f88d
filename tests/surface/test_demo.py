"""The demonstration proves what it shows, and fails when the proof does."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from supervisor.cli import demo as module
from tests.conftest import wait_until
from tests.process.tree import alive
from tests.surface.commands import ENVIRONMENT, document, herdsman

if TYPE_CHECKING:
    from supervisor.demo.service import Service

pytestmark = pytest.mark.xdist_group("demo")  # each takes the first free port from 9464 on


@contextlib.contextmanager
def demo(cwd: Path, *args: object) -> Iterator[subprocess.Popen[str]]:
    """Start a demonstration in a session of its own, and leave nothing of it behind."""
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "supervisor", "demo", *map(str, args)],
        cwd=cwd, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            for pid in session(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def session(leader: int) -> list[int]:
    """Return the living processes of a session."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader and alive(int(name)):
                found.append(int(name))
    return found


def proven(facts: dict[str, Any], files: int) -> None:
    """Check every number of the document."""
    assert facts["files"] == files
    assert facts["jobs_done"] == files
    assert facts["outputs_verified"] == files
    assert (facts["jobs_lost"], facts["jobs_dead"], facts["outputs_wrong"]) == (0, 0, [])
    assert facts["workers_killed"] >= 1
    assert facts["worker_restarts"] >= 1
    assert facts["metrics_equal_database"] is True
    assert facts["ok"] is True


def test_the_demonstration_proves_itself_again_and_again(tmp_path: Path) -> None:
    """Every file is accounted for, with a killed worker; a second run starts afresh."""
    for _ in range(2):
        finished = herdsman("demo", "--folder", "here", "--files", 60, "--json", cwd=tmp_path)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        proven(document(finished), 60)
    assert len(list((tmp_path / "here" / "out").rglob("*.z"))) == 60
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "here").rglob("*")} == {0}


def test_a_person_gets_a_table_and_progress(tmp_path: Path) -> None:
    """The table is data, progress and address are messages."""
    finished = herdsman("demo", "--folder", "here", "--files", 40, cwd=tmp_path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    shown = {line[:38].strip(): line[38:].strip() for line in finished.stdout.splitlines()}
    assert shown["every file is accounted for"] == ""
    values = " ".join(finished.stdout.split())
    assert "files 40" in values
    assert "jobs done 40" in values
    assert "jobs lost 0" in values
    assert "metrics equal the database yes" in values
    assert "dashboard: http://127.0.0.1:" in finished.stderr
    assert "40 of 40 done" in finished.stderr


def test_the_count_of_the_bar_is_whole_on_a_terminal_of_80_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also when the note of the kill has come beside it."""
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal, os.fdopen(master, "rb", buffering=0) as screen:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setenv("TERM", "xterm")
        story = module._Story(killed=[1])
        service = cast("Service", SimpleNamespace(restarts=1))
        with module._progress(2450) as show:
            show(2449, story, service)
        terminal.close()
        written = b""
        with contextlib.suppress(OSError):  # how a terminal says that there is no more
            while part := screen.read(65_536):
                written += part
    shown = written.decode()
    assert "2449/2450" in re.sub("\x1b[^m]*m", "", shown)
    assert "1 killed, 1 restarted" in shown


def test_a_folder_with_something_else_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    """2, and nothing of it is touched."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "thesis.txt").write_text("mine")
    finished = herdsman("demo", "--folder", "here", "--files", 5, cwd=tmp_path)
    assert finished.returncode == 2
    assert finished.stderr == (
        f"herdsman: {tmp_path}/here holds something else; name an empty or new --folder\n"
    )
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["thesis.txt"]


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    """One sentence."""
    (tmp_path / "here").write_text("mine")
    finished = herdsman("demo", "--folder", "here", "--files", 5, cwd=tmp_path)
    assert finished.returncode == 2
    assert len(finished.stderr.splitlines()) == 1
    assert (tmp_path / "here").read_text() == "mine"


def test_an_output_that_is_tampered_with_fails_the_demonstration(tmp_path: Path) -> None:
    """1, and the file is named: what is verified is the output itself, not what jobs say."""
    stop = threading.Event()
    junk = b"0" * 64 + b"\nnot the file"

    def tamper() -> None:
        """Change one output as soon as there is one, and anew when its job wrote it again.

        The demonstration kills a worker, and the job that it ran may be just this one.
        """
        mine: Path | None = None
        while not stop.is_set():
            for path in [mine] if mine else list((tmp_path / "here" / "out").rglob("*.z")):
                with contextlib.suppress(OSError):
                    if path.read_bytes() != junk:
                        path.write_bytes(junk)
                    mine = path
                    break

    thread = threading.Thread(target=tamper)
    thread.start()
    try:
        finished = herdsman("demo", "--folder", "here", "--files", 60, "--json", cwd=tmp_path)
    finally:
        stop.set()
        thread.join()
    facts = document(finished)
    assert finished.returncode == 1
    assert facts["ok"] is False
    assert facts["outputs_verified"] == 59
    assert facts["jobs_done"] == 60
    assert len(facts["outputs_wrong"]) == 1


def test_a_demonstration_that_runs_is_not_disturbed_and_stays_up_when_told(
    tmp_path: Path,
) -> None:
    """73 for a second one in the folder; Ctrl-C ends the first, exit code 0, nothing left."""
    with demo(tmp_path, "--folder", "here", "--files", 30, "--keep-running", "--json") as process:
        assert process.stdout is not None
        facts = json.loads(process.stdout.readline())
        proven(facts, 30)
        with urllib.request.urlopen(facts["dashboard"] + "readyz", timeout=5) as answer:
            assert answer.status == 200
        second = herdsman("demo", "--folder", "here", "--files", 5, cwd=tmp_path)
        assert second.returncode == 73
        assert len(second.stderr.splitlines()) == 1
        with urllib.request.urlopen(facts["dashboard"] + "readyz", timeout=5) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        wait_until(lambda: session(process.pid) == [])


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
def test_a_demonstration_that_is_ended_leaves_no_service_behind(
    tmp_path: Path, signum: signal.Signals
) -> None:
    """Whatever ends it: its supervisor goes too, and with it the workers."""
    with demo(tmp_path, "--folder", "here", "--files", 30, "--keep-running", "--json") as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["ok"]
        process.send_signal(signum)
        process.wait(30)
        wait_until(lambda: session(process.pid) == [], what="nobody is left")
