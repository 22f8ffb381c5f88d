"""Show what every process does, and hurt none by it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from supervisor import stacks
from tests.conftest import wait_until
from tests.process.conftest import HostMaker
from tests.process.tree import Host, alive

ASKED = 8_000
"""One in a thousand to eight thousand was fatal where the stacks were written in C."""


def show(tree: Host) -> dict[str, str]:
    """Ask for the stacks of all, and return them by process."""
    before = len(tree.events("process_stacks"))
    tree.send(signal.SIGUSR2)
    number = 1 + len(tree.slots())
    wait_until(lambda: len(tree.events("process_stacks")) == before + number)
    return {one["process"]: one["stacks"] for one in tree.events("process_stacks")[before:]}


def started_on(tree: Host, line: str) -> int:
    """Put a job, and return the pid of the worker that runs it."""
    (job,) = tree.put(line)
    return int(wait_until(lambda: tree.running(job)).pid)


def test_usr2_shows_stacks_even_of_a_job_that_never_comes_back(host: HostMaker) -> None:
    """Its dump is written by C code, which asks no lock; the others' by their interpreters."""
    tree = host(pools=[["a", 1, {}]]).started()
    started_on(tree, "stick")
    found = show(tree)
    assert found.keys() == {"supervisor", "a/0", "keeper"}
    assert "in act" in found["a/0"]
    assert "in on_ask" not in found["a/0"]
    assert "in on_ask" in found["keeper"]
    assert "in main" in found["keeper"]
    assert "in _on_signal" in found["supervisor"]
    assert tree.output() == "", "a stack was written beside the log"
    status = {one["process"]: one for one in tree.events("process_status")}
    assert status["a/0"]["state"] == "RUN"
    assert len(tree.workers()) == 1


def test_who_is_asked_again_shows_where_it_is_now(host: HostMaker) -> None:
    """What was written before is not shown again."""
    tree = host(pools=[["a", 1, {}]]).started()
    (job,) = tree.put("until gate")
    wait_until(lambda: tree.running(job))
    assert "in _until" in show(tree)["a/0"]
    (tree.folder / "gate").touch()
    wait_until(lambda: tree.names("done") == [job])
    found = show(tree)["a/0"]
    assert "in main" in found
    assert "in _until" not in found


def test_a_stopped_process_does_not_keep_the_others_from_being_shown(host: HostMaker) -> None:
    """Its line says that there are none, not what it wrote before; it answers when it goes on."""
    tree = host(pools=[["a", 1, {}]]).started()
    pid = started_on(tree, "until gate")
    (slot,) = [one for one in tree.slots() if one.pid == pid]
    assert "in _until" in show(tree)["a/0"]
    before = stacks.size(slot.stack_path)
    os.kill(pid, signal.SIGSTOP)
    found = show(tree)
    assert found["a/0"].startswith("it wrote none")
    assert "in main" in found["keeper"]
    os.kill(pid, signal.SIGCONT)
    assert wait_until(lambda: stacks.answer(slot.stack_path, before))
    written = Path(slot.stack_path).read_text()[before:]
    assert written.count("most recent call first") == written.count(stacks.BEGIN.decode()) == 1
    (tree.folder / "gate").touch()
    assert tree.stop() == 0


def test_one_that_is_stuck_holds_up_nobody_however_often_one_asks(host: HostMaker) -> None:
    """The others are shown at once, and it is when its time has come, not ever later."""
    tree = host(pools=[["a", 1, {}]]).started()
    started_on(tree, "stick")
    shown: list[str] = []

    def stuck_is_shown() -> bool:
        tree.send(signal.SIGUSR2)
        shown[:] = [one["process"] for one in tree.events("process_stacks")]
        return "a/0" in shown

    wait_until(stuck_is_shown, poll_seconds=0.05)
    assert shown.index("keeper") < shown.index("a/0")
    assert shown.count("keeper") > 1
    assert "in act" in tree.events("process_stacks")[shown.index("a/0")]["stacks"]


def test_an_answer_is_shown_when_it_is_whole(tmp_path: Path) -> None:
    """None of one that is being written, nor the rest of one that was begun before."""
    path = tmp_path / "stacks"
    begin, end = stacks.BEGIN.decode(), stacks.END.decode()
    path.write_text(f"{begin}old\n")
    before = stacks.size(str(path))
    for more, shown in (
        (f"rest of old\n{end}", None),
        (f"{begin}half", None),
        (f" whole\n{end}", "half whole"),
        (f"{begin}next\n", "half whole"),
    ):
        path.write_text(path.read_text() + more)
        assert stacks.answer(str(path), before) == shown


def test_a_death_is_told_with_what_was_written_as_it_died(tmp_path: Path) -> None:
    """Not with an answer from before; and a fault in the midst of an abort hides no line of it."""
    path = tmp_path / "stacks"
    asked = f"{stacks.BEGIN.decode()}asked\n{stacks.END.decode()}"
    path.write_text(asked)
    assert stacks.read(str(path)) == ""
    died = "Fatal Python error: Aborted\n\n  File here\n  File Fatal Python error: Segmentation"
    path.write_text(asked + died)
    assert stacks.read(str(path)) == died


def test_a_file_that_got_the_number_of_the_stacks_is_not_written_to(tmp_path: Path) -> None:
    """A job that closes everything and opens its own file keeps what it has there."""
    mine = tmp_path / "mine"
    content = b"x" * (stacks.STACK_FILE_BYTES_MAX + 1)
    mine.write_bytes(content)
    if (pid := os.fork()) == 0:
        code = 1
        try:
            writer = stacks.Writer()
            writer.open(str(tmp_path / "stacks"))
            os.dup2(os.open(mine, os.O_RDWR), writer._fd)
            writer.on_ask(signal.SIGUSR2, None)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert mine.read_bytes() == content


def test_a_job_that_gave_the_signal_its_fatal_meaning_back_lives(host: HostMaker) -> None:
    """It is not asked; as it waits, its stack is written in C."""
    tree = host(pools=[["a", 1, {}]]).started()
    started_on(tree, "deaf_to_questions")
    assert "in _deaf_to_questions" in show(tree)["a/0"]
    (tree.folder / "gate").touch()
    wait_until(lambda: tree.names("done") == [1])
    assert tree.stop() == 0


def test_a_busy_worker_survives_thousands_of_questions(host: HostMaker) -> None:
    """It answers between two steps of the interpreter; its file stays small."""
    tree = host(pools=[["a", 1, {}]]).started()
    pid = started_on(tree, "babble gate")
    (slot,) = [one for one in tree.slots() if one.pid == pid]
    for _ in range(ASKED):
        os.kill(pid, stacks.ASK)
        time.sleep(0.0002)  # apart, so that the kernel does not merge them
    (tree.folder / "gate").touch()
    wait_until(lambda: tree.names("done") == [1])
    assert alive(pid)
    assert 0 < Path(slot.stack_path).stat().st_size < 2 * stacks.STACK_FILE_BYTES_MAX
    assert tree.stop() == 0
