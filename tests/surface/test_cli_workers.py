"""`herdsman workers`: list, restart, drain and resume, and how the request travels."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisor import asking, slots
from supervisor.linux import start_time
from supervisor.pool import Wish
from supervisor.slots import Kind, SlotTable, find_slots, slots_path
from tests.conftest import wait_until
from tests.process.service import Maker, Service, services
from tests.surface.commands import document, herdsman


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Maker]:
    """Return a function that prepares a service; it is ended at the end."""
    with services(tmp_path) as make:
        yield make


def workers(tree: Service, *args: object, code: int = 0) -> dict[str, Any]:
    """Run a command and return its document."""
    done = herdsman("workers", *args, "--json", cwd=tree.folder)
    assert done.returncode == code, done.stderr
    return document(done)


def listed(tree: Service) -> dict[str, dict[str, Any]]:
    """Return the listed workers by name."""
    return {row["name"]: row for row in workers(tree, "list")["workers"]}


def test_the_list_shows_what_each_worker_does_and_how_the_last_one_ended(service: Maker) -> None:
    """Job and task of the busy one, the signal that killed the one before, restarts of the pool."""
    tree = service(processes=2).started()
    first = tree.workers()["default/1"]
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: tree.workers().get("default/1", first) != first)
    job = int(tree.queue().put("wait go"))
    slot = wait_until(lambda: tree.running(job))
    found = workers(tree, "list")
    rows = {row["name"]: row for row in found["workers"]}
    busy = rows[slot.name]
    idle = next(row for row in rows.values() if row["name"] != slot.name)
    assert (busy["state"], busy["job"], busy["task"], busy["pid"]) == (
        "busy", job, "work", slot.pid,
    )  # fmt: skip
    assert busy["timeout_seconds"] == pytest.approx(60, abs=1)
    assert (idle["state"], idle["job"]) == ("idle", None)
    assert rows["default/1"]["last_death"]["signal"] == signal.SIGKILL
    assert rows["default/0"]["last_death"] is None
    pools = {row["pool"]: row for row in found["pools"]}
    assert (pools["default"]["restarts"], pools["default"]["state"]) == (1, "working")
    assert found["supervisor_pid"] == tree.pid
    text = herdsman("workers", "list", cwd=tree.folder).stdout
    assert "signal 9, " in text
    tree.make("go")
    wait_until(lambda: tree.done(job))


def test_one_worker_is_replaced_once_its_job_is_done(service: Maker) -> None:
    """The others go on, the successor is there first, and the job is neither lost nor charged."""
    tree = service(processes=2).started()
    job = int(tree.queue().put("wait go"))
    slot = wait_until(lambda: tree.running(job))
    name, old = slot.name, tree.workers()
    assert workers(tree, "restart", name)["number"] == 1
    wait_until(lambda: [e for e in tree.events("worker_recycled") if e["process"] == name])
    assert tree.running(job), "it was interrupted"
    tree.make("go")
    wait_until(lambda: tree.done(job) and old[name] not in {s.pid for s in tree.slots()})
    assert (tree.outcomes(job), tree.job(job).run) == (["succeeded"], 1)
    new = tree.workers()
    assert new[name] != old[name]
    assert {k: v for k, v in new.items() if k != name} == {
        k: v for k, v in old.items() if k != name
    }
    lines = [e["event"] for e in tree.events("worker_started") + tree.events("worker_exited")]
    assert lines.count("worker_exited") == 1


def test_a_whole_pool_is_replaced_one_at_a_time_and_never_shrinks(service: Maker) -> None:
    """A small pool starts each successor before its worker leaves; `--wait` sees the end."""
    tree = service(processes=2).started()
    old = tree.workers()
    found = workers(tree, "restart", "--all", "--wait", "20s")
    assert (found["number"], found["done"]) == (2, True)
    assert not set(tree.workers().values()) & set(old.values())
    left = {e["process"]: e["timestamp"] for e in tree.events("worker_exited")}
    came = {e["process"]: e["timestamp"] for e in tree.events("worker_started")}  # the last of each
    assert sorted(left) == ["default/0", "default/1"]
    assert all(came[name] < left[name] for name in left), "the pool shrank"
    one, other = sorted(
        (slot for slot in tree.slots() if slot.kind is Kind.WORKER), key=lambda slot: slot.boot_ns
    )
    assert other.boot_ns >= one.ready_ns, "both were replaced at once"


def test_a_drained_pool_finishes_its_job_and_rests_until_it_is_resumed(service: Maker) -> None:
    """Nothing is claimed meanwhile, not by a reload either, and everyone is told."""
    tree = service(processes=1, web=True).started()
    queue = tree.queue()
    job = int(queue.put("wait go"))
    wait_until(lambda: tree.running(job))
    assert workers(tree, "drain")["number"] == 1
    assert listed(tree)["default/0"]["state"] == "draining"
    tree.make("go")
    later = int(queue.put("nothing"))
    wait_until(lambda: tree.done(job) and not tree.workers())
    assert tree.outcomes(job) == ["succeeded"]
    tree.send(signal.SIGHUP)
    wait_until(lambda: tree.events("reload_finished"), what="a drained pool holds no reload up")
    assert (tree.state(later), tree.workers()) == ("ready", {})
    assert listed(tree)["default/0"]["state"] == "drained"
    wait_until(lambda: tree.get("readyz")[0] == 503, what="the new web answers")
    assert "drained by an operator" in tree.get("readyz")[1]
    assert "drained by an operator" in herdsman("why", cwd=tree.folder).stdout
    refused = herdsman("workers", "restart", "--all", cwd=tree.folder)
    assert refused.returncode == 1
    assert "workers resume" in refused.stderr
    assert workers(tree, "resume", "--pool", "default", "--wait", "20s")["done"] is True
    wait_until(lambda: tree.done(later))
    assert tree.stop() == 0


def test_a_pool_in_back_off_is_tried_at_once_when_it_is_restarted(service: Maker) -> None:
    """Whoever has mended the handlers does not sit the back-off out."""
    tree = service(processes=1).started()
    handlers = tree.folder / "service_handlers.py"
    sound = handlers.read_text()
    handlers.write_text("import nothing_of_that_name\n")
    os.kill(tree.workers()["default/0"], signal.SIGKILL)
    wait_until(lambda: len(tree.events("worker_exited")) >= 4, what="a back-off of two seconds")
    handlers.write_text(sound)
    began = len(tree.events("worker_started"))
    with contextlib.closing(asking.attach(str(tree.database), "main")) as table:
        asking.ask_pool(table, table.pools["default"], Wish.RESTART)
    wait_until(lambda: len(tree.events("worker_started")) > began, timeout_seconds=1)
    wait_until(tree.workers)


def test_a_restart_that_cannot_boot_leaves_the_old_worker_and_is_given_up(service: Maker) -> None:
    """Better the old process than none; the failure is in the log."""
    tree = service(processes=1).started()
    (tree.folder / "service_handlers.py").write_text("import nothing_of_that_name\n")
    old = tree.workers()
    late = herdsman("workers", "restart", "default/0", "--wait", "0.5s", cwd=tree.folder)
    assert late.returncode == 1
    assert "not done within --wait" in late.stderr
    wait_until(lambda: tree.events("restart_failed"))
    assert tree.workers() == old
    assert tree.done(int(tree.queue().put("nothing"))) or wait_until(lambda: tree.rows()["done"])


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["list"], 1, "no supervisor main runs on"),
        (["drain"], 1, "start it with `herdsman run`"),
        (["restart"], 2, "name one worker, or --pool NAME, or --all"),
        (["restart", "a/0", "--all"], 2, "name one worker"),
    ],
)
def test_without_a_supervisor_or_a_name_one_sentence_says_so(
    tmp_path: Path, args: list[str], code: int, words: str
) -> None:
    """No request is left behind for whoever comes next."""
    done = herdsman("workers", *args, "-d", tmp_path / "jobs.db", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


# ---- how a request travels ----------------------------------------------------------------

UUID = "00000000-0000-4000-8000-000000000000"
LISTENER = """
import os, signal, time
signal.signal(signal.SIGWINCH, lambda *_: os._exit(7))
print("up", flush=True)
time.sleep(60)
"""


def test_a_process_that_has_the_supervisors_number_by_now_is_not_signalled(tmp_path: Path) -> None:
    """The start time decides, not the pid."""
    database = tmp_path / "jobs.db"
    stranger = subprocess.Popen([sys.executable, "-c", LISTENER], stdout=subprocess.PIPE)
    assert stranger.stdout is not None
    assert stranger.stdout.readline() == b"up\n"
    table = SlotTable.create(
        slots_path(database, "main"), instance_uuid=UUID, pools=["a"], capacity=2
    )  # fmt: skip
    try:
        table._words[slots._H_PID] = stranger.pid
        assert table.supervisor_pid == stranger.pid
        assert table.supervisor_start_time not in (0, start_time(stranger.pid))
        with pytest.raises(asking.NotAsked, match="no supervisor main runs"):
            asking.attach(str(database), "main")
        with pytest.raises(asking.NotAsked, match="just ended"):
            asking.ask_pool(table, table.pools["a"], Wish.DRAIN)
        assert stranger.poll() is None
    finally:
        table.unlink()
        table.close()
        stranger.kill()
        stranger.wait(10)
        stranger.stdout.close()


def test_a_supervisor_that_does_not_answer_is_told_within_the_deadline(tmp_path: Path) -> None:
    """A stopped supervisor must not hang the command."""
    table = SlotTable.create(
        slots_path(tmp_path / "jobs.db"), instance_uuid=UUID, pools=["a"], capacity=2
    )  # fmt: skip
    try:  # this process is its supervisor, and ignores SIGWINCH
        with pytest.raises(asking.NotAsked, match=r"did not take note of it within 0\.1 s"):
            asking.ask_pool(table, table.pools["a"], Wish.DRAIN, 0.1)
    finally:
        table.unlink()
        table.close()


def test_a_wish_for_a_process_that_has_died_means_nobody_else(service: Maker) -> None:
    """The record names the process by its epoch; its next owner starts without a wish."""
    tree = service(processes=1).started()
    path = find_slots(tree.database, "main")
    assert path is not None
    table = SlotTable.attach(path)
    slot = next(one for one in table.live() if one.kind is Kind.WORKER)
    slot.wish = slot.epoch + 1
    os.kill(tree.pid, signal.SIGWINCH)
    job = int(tree.queue().put("nothing"))
    wait_until(lambda: tree.done(job))
    table.close()
    assert tree.events("worker_recycled") == []
    assert [e["signal"] for e in tree.events("signal_received")] == [], "WINCH is no command"
