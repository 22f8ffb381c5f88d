"""The process that tries handlers before a start: its answers, and that nothing outlives it."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from supervisor import apart
from tests.conftest import wait_until
from tests.process.service import Maker, services
from tests.process.tree import alive

SPAWNS = """
note("spawned", os.getpid(), subprocess.Popen(["sleep", "600"]).pid)
wait("go")
"""
"""What a module may do as it is imported."""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Maker]:
    """Return a function that prepares a service; it is ended at the end."""
    with services(tmp_path) as make:
        yield make


def _exits() -> apart.Answer:
    os._exit(3)


def _dies() -> apart.Answer:
    faulthandler.disable()
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0, "it lives"


def _hangs() -> apart.Answer:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGALRM])
    time.sleep(600)
    return 0, "at last"


def _answers_late() -> apart.Answer:
    time.sleep(0.2)
    return 7, "heard"


def _raises() -> apart.Answer:
    raise ImportError("no such module")


@pytest.mark.parametrize(
    ("function", "code", "words"),
    [
        (lambda: (78, "a handler is wrong"), 78, "a handler is wrong"),
        (_exits, 70, "left with exit code 3"),
        (_dies, 70, "died of SIGSEGV"),
        (_hangs, 70, "took longer than 0.5 s"),
        (_raises, 70, "failed: ImportError: no such module"),
    ],
)
def test_a_check_always_has_an_answer(
    function: Callable[[], apart.Answer], code: int, words: str
) -> None:
    """Whatever the function does; and no child is left."""
    began = time.monotonic()
    found, text = apart.run_apart(function, 0.5)
    assert (found, words in text) == (code, True), text
    assert time.monotonic() - began < 3
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_an_answer_given_just_before_the_end_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a look at the pipe and one at the process there is time to write and to leave."""
    real = apart._leaves

    def late(pid: int, seconds: float) -> bool:
        return real(pid, max(seconds, 2.0))

    monkeypatch.setattr(apart, "_leaves", late)
    monkeypatch.setattr(apart, "LOOK_SECONDS", 0.0)
    assert apart.run_apart(_answers_late, 20) == (7, "heard")


def test_a_fork_of_the_check_neither_delays_its_answer_nor_outlives_it(tmp_path: Path) -> None:
    """It holds the pipe open, and dies with the group."""
    path = tmp_path / "pid"

    def function() -> apart.Answer:
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
            os._exit(0)
        path.write_text(str(pid))
        return 0, ""

    began = time.monotonic()
    assert apart.run_apart(function, 20) == (0, "")
    assert time.monotonic() - began < 5
    wait_until(lambda: not alive(int(path.read_text())))


def test_what_handlers_start_as_they_are_tried_ends_with_the_check(service: Maker) -> None:
    """When the check is over, and when the supervisor is killed in the middle of it."""
    tree = service()
    with (tree.folder / "service_handlers.py").open("a") as file:
        file.write(SPAWNS)
    tree.start()
    ((_, program),) = wait_until(lambda: tree.notes("spawned"))
    assert alive(int(program))
    tree.send(signal.SIGKILL)
    tree.wait()
    wait_until(lambda: tree.all_processes() == [], timeout_seconds=5)

    tree.make("go")
    tree.started()
    _, (_, tried), (worker, kept) = tree.notes("spawned")
    assert not alive(int(tried))
    assert alive(int(kept)), "a worker's own program is the worker's"
    assert int(worker) in tree.workers().values()
    assert tree.stop() == 0
    assert not alive(int(kept))
