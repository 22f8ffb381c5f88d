"""Show that supervisors forked by a template leave nothing behind, and get their own answers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.process import template
from tests.process.conftest import HostMaker
from tests.process.service import services
from tests.process.tree import alive


def pidfds() -> int:
    """Count the descriptors of this process that watch another."""
    links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link) == "anon_inode:[pidfd]" for link in links if link.is_symlink())


def is_there(pid: int) -> bool:
    """Whether a process exists, be it a zombie."""
    return Path(f"/proc/{pid}").exists()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, template.Template]]:
    """Templates of this test alone; they are ended with it."""
    own: dict[str, template.Template] = {}
    with monkeypatch.context() as patch:
        patch.setattr(template, "_made", own)
        yield own
        template.end_all()


def test_a_late_answer_is_nobody_elses(made: dict[str, template.Template], host: HostMaker) -> None:
    """A template that was not in time is asked no more, and what it forks then is killed.

    It would answer the question before; and nobody was told the number of that copy.
    """
    folder = host().folder
    environ = {**os.environ, "PYTHONPATH": str(template.ROOT)}
    slow = template.template("host")
    slow._ours.settimeout(1e-6)
    reader, writer = os.pipe()
    with open(reader, "rb") as output:
        with open(writer, "wb") as out, pytest.raises(TimeoutError):
            slow.start(folder, folder=template.ROOT, environ=environ, out=out.fileno())
        os.set_blocking(reader, False)
        wait_until(lambda: output.read() == b"", what="nobody is left to write")
    assert made == {}


def test_a_host_started_anew_leaves_nothing_of_its_earlier_start(host: HostMaker) -> None:
    """The first tree still runs when it is cleaned up; the second found its database taken."""
    before = pidfds()
    tree = host().started()
    first = tree.pid
    workers = list(tree.workers().values())
    assert tree.start().wait() != 0
    tree.clean()
    if there := is_there(first):
        os.kill(first, signal.SIGKILL)
    assert (there, pidfds()) == (False, before)
    wait_until(lambda: not any(map(alive, workers)), what="its workers have ended")


def test_a_service_started_anew_leaves_nothing_of_its_earlier_start(tmp_path: Path) -> None:
    """Likewise; no zombie stays with the template."""
    before = pidfds()
    with services(tmp_path) as make:
        tree = make().started()
        first = tree.pid
        assert tree.start().wait() == 73
    assert (is_there(first), pidfds()) == (False, before)
