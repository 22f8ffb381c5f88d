"""`herdsman top`: one frame in a pipe, a picture that changes on a terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from queue_core import Queue
from tests.surface.commands import ENVIRONMENT, document, herdsman


def test_a_pipe_gets_one_frame(tmp_path: Path) -> None:
    """Queues with their depth, and that nobody works on them."""
    with Queue[Any](tmp_path / "jobs.db", "emails") as queue:
        queue.put_many([1, 2])
        queue.pause()
    found = document(herdsman("top", "--json", "-d", "jobs.db", cwd=tmp_path))
    (row,) = found["queues"]
    assert (row["queue"], row["ready"], row["paused"]) == ("emails", 2, True)
    assert (found["running"], found["workers"]) == (False, [])
    text = herdsman("top", "-d", "jobs.db", cwd=tmp_path)
    assert text.returncode == 0
    assert text.stdout.splitlines()[1].split()[:2] == ["emails", "2"]
    assert text.stdout.splitlines()[-1] == "no supervisor main runs"
    assert herdsman("top", "--every", "soon", "-d", "jobs.db", cwd=tmp_path).returncode == 2


def test_a_narrow_terminal_keeps_the_first_columns_readable(tmp_path: Path) -> None:
    """What does not fit is cut off at the right, as other programs of this kind do it."""
    with Queue[Any](tmp_path / "jobs.db", "emails") as queue:
        queue.put(1)
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "supervisor", "top", "-d", "jobs.db"],
        cwd=tmp_path, env={**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "40"},
        stdin=slave, stdout=slave, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(slave)
    try:
        shown = seen(master, "emai")
        for heading in ("queue", "ready", "delayed", "claimed"):
            assert heading in shown
    finally:
        process.kill()
        process.wait(10)
        os.close(master)


def test_a_terminal_sees_changes_until_ctrl_c(tmp_path: Path) -> None:
    """The picture is drawn anew, hostile names do not steer it, and leaving it is no failure."""
    with Queue[Any](tmp_path / "jobs.db", "emails") as queue:
        queue.put(1)
        master, slave = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "supervisor", "top", "-d", "jobs.db", "--every", "0.2s"],
            cwd=tmp_path, env={**ENVIRONMENT, "TERM": "xterm"}, stdin=slave, stdout=slave,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        os.close(slave)
        try:
            assert "emails" in seen(master, "emails")
            with Queue[Any](tmp_path / "jobs.db", "invoices") as other:
                other.put(1)
            assert "invoices" in seen(master, "invoices")
            process.send_signal(signal.SIGINT)
            seen(master, "\x1b[?1049l")
            _, error = process.communicate(timeout=20)
            assert (process.returncode, error) == (0, b"")
        finally:
            process.kill()
            process.wait(10)
            os.close(master)


def seen(master: int, word: str) -> str:
    """Read what is drawn until a word appears, at most 20 s."""
    text = ""
    deadline = time.monotonic() + 20
    while word not in text and time.monotonic() < deadline:
        if select.select([master], [], [], 0.2)[0]:
            try:
                text += os.read(master, 65536).decode(errors="replace")
            except OSError:
                break
    return text
