"""Bad input and a bad host: one clear sentence, the documented exit code, and nothing lost."""

from __future__ import annotations

import contextlib
import json
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from queue_core import Queue, State
from supervisor.slot import Kind
from tests.conftest import wait_until
from tests.process.service import ENVIRONMENT, Maker, command, copied, sentence, services


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Maker]:
    """Return a function that prepares a service; it is ended at the end."""
    with services(tmp_path) as make:
        yield make


# ---- what `run` refuses ---------------------------------------------------------------------


def test_an_unknown_key_is_refused_with_its_line_and_a_suggestion(service: Maker) -> None:
    """78; nothing was made."""
    tree = service(extra="\n[queues.work]\nmax_dept = 3\n")
    refused = copied("run", "-c", tree.config, cwd=tree.folder)
    line = 1 + tree.config.read_text().splitlines().index("max_dept = 3")
    assert refused.returncode == 78
    assert sentence(refused) == (
        f"herdsman: {tree.config}:{line}: unknown key queues.work.max_dept; "
        'did you mean "max_depth"?'
    )
    assert not tree.database.exists()


def test_a_handler_that_does_not_import_is_refused_with_the_line_that_failed(
    service: Maker,
) -> None:
    """78, from a process that is thrown away; jobs that wait are not touched."""
    tree = service()
    job_id = tree.queue().put("nothing")
    module = tree.folder / "service_handlers.py"
    text = module.read_text()
    module.write_text("import no_such_module\n" + text)
    refused = copied("run", "-c", tree.config, cwd=tree.folder)
    assert refused.returncode == 78
    told = sentence(refused)
    assert told.startswith("herdsman: handler work: cannot import service_handlers:work: ")
    assert f"(at {module}:1); install no_such_module" in told
    assert tree.state(job_id) is State.READY

    module.write_text(text)
    tree.started()
    wait_until(lambda: tree.done(job_id))


def test_a_service_whose_workers_never_boot_is_not_ready_and_leaves(service: Maker) -> None:
    """It is not up for ever without doing anything; probe, log and exit code say so."""
    tree = service(web=True)
    tree.change(policy__BACKOFF_BASE_SECONDS=0.2)
    tree.teach('if "HERDSMAN_INSTANCE_UUID" in os.environ:\n    raise ImportError("not here")\n')
    tree.start()
    code, text = wait_until(lambda: (page := tree.get("readyz"))[0] and page)
    assert code == 503
    assert "pool default is without a ready worker: " in text
    assert "not here" in text
    assert tree.wait() == 78
    (event,) = tree.events("supervisor_gave_up")
    assert "not here" in event["notes"]["default"]
    assert 5 <= sum(one["process"] == "default/0" for one in tree.events("worker_started")) <= 6


def test_a_file_that_is_no_database_is_refused_and_left_alone(service: Maker) -> None:
    """69, from `run` and from `put`."""
    tree = service()
    tree.database.parent.mkdir()
    tree.database.write_bytes(b"these are my notes, keep them\n" * 300)
    for arguments in (["run"], ["put", "work", "1"]):
        refused = copied(*arguments, "-c", tree.config, cwd=tree.folder)
        assert refused.returncode == 69
        assert f"{tree.database} is not a database" in sentence(refused)
        assert "restore a backup, or name another file" in sentence(refused)
    assert tree.database.read_bytes() == b"these are my notes, keep them\n" * 300


def test_another_programs_database_is_refused_and_left_alone(service: Maker) -> None:
    """69: SQLite, and not ours."""
    tree = service()
    tree.database.parent.mkdir()
    with contextlib.closing(sqlite3.connect(tree.database)) as connection:
        connection.execute("CREATE TABLE mine (x)")
    before = tree.database.read_bytes()
    refused = copied("run", "-c", tree.config, cwd=tree.folder)
    assert refused.returncode == 69
    assert "is a SQLite database of another program; name another file" in sentence(refused)
    assert tree.database.read_bytes() == before


def test_a_database_of_a_newer_schema_is_refused_and_left_alone(service: Maker) -> None:
    """69; upgrade is what comes next, and the job is still there."""
    tree = service()
    queue: Queue[Any] = Queue(tree.database, "work")
    job_id = queue.put("nothing")
    queue.close()
    with contextlib.closing(sqlite3.connect(tree.database)) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        connection.execute("PRAGMA user_version = 99")
    for arguments in (["run"], ["put", "work", "1"], ["status"]):
        refused = copied(*arguments, "-c", tree.config, cwd=tree.folder)
        assert refused.returncode == 69
        assert sentence(refused) == (
            f"herdsman: {tree.database} has schema 99 and this herdsman knows {version}; "
            "upgrade herdsman"
        )
    with contextlib.closing(sqlite3.connect(tree.database)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    assert tree.state(job_id) is State.READY


def test_a_second_supervisor_is_refused_and_the_first_is_named(service: Maker) -> None:
    """73; the first works on, and another instance is welcome."""
    tree = service().started()
    refused = command("run", "-c", tree.config, cwd=tree.folder)
    assert refused.returncode == 73
    assert f"{tree.database} is already served by process {tree.pid} (" in sentence(refused)
    assert sentence(refused).endswith("; stop it, or give this one another --instance")
    link = tree.folder / "link.db"
    link.symlink_to(tree.database)
    refused = copied("run", "-c", tree.config, "-d", link, cwd=tree.folder)
    assert refused.returncode == 73, "a link leads to the same database"
    assert f"{tree.database} is already served" in sentence(refused)
    job_id = tree.queue().put("nothing")
    wait_until(lambda: tree.done(job_id))
    assert tree.stop() == 0


@pytest.mark.parametrize("name", ["file", "file/data"])
def test_a_folder_that_cannot_be_made_is_told(service: Maker, name: str) -> None:
    """69: a file is in the way of the database's folder."""
    tree = service()
    (tree.folder / "file").write_text("mine")
    database = tree.folder / name / "herdsman.db"
    for arguments in (["run"], ["put", "work", "1"]):
        refused = copied(*arguments, "-d", database, "-c", tree.config, cwd=tree.folder)
        assert refused.returncode == 69, refused.stderr
        assert str(tree.folder / "file") in sentence(refused)
        assert "; check " in sentence(refused)
    assert (tree.folder / "file").read_text() == "mine"


def test_an_address_without_an_engine_is_told(service: Maker) -> None:
    """69, and no folder is made of its name."""
    tree = service()
    for arguments in (["run"], ["put", "work", "1"]):
        refused = copied(*arguments, "-d", "postgresql://host/jobs", "-c", tree.config,
                         cwd=tree.folder)  # fmt: skip
        assert refused.returncode == 69
        assert "no PostgreSQL engine; name a file instead" in sentence(refused)
    assert not any(path.is_dir() for path in tree.folder.iterdir())


def test_run_without_any_handler_says_so_at_its_start(service: Maker) -> None:
    """`--database` alone reads no file, not even the one that lies here."""
    tree = service()
    run = [sys.executable, "-P", "-m", "supervisor", "run", "-d", tree.database]
    env = {**ENVIRONMENT, "HERDSMAN__WEB__LISTEN": "off"}
    with subprocess.Popen(run, cwd=tree.folder, env=env, stderr=subprocess.PIPE) as process:
        try:
            assert process.stderr is not None
            said = process.stderr.readline().decode()
        finally:
            process.terminate()
            process.communicate(timeout=20)
    assert said == (
        "herdsman: no handlers (no configuration file was read): "
        "jobs will wait until --config names some\n"
    )


# ---- what the service survives --------------------------------------------------------------


class Raw:
    """Store bytes as they are."""

    def dumps(self, payload: bytes) -> bytes:
        """Return them."""
        return payload

    def loads(self, data: bytes) -> bytes:
        """Return them."""
        return data


def test_a_payload_that_is_no_json_is_a_dead_letter_with_its_bytes(service: Maker) -> None:
    """Undecodable at once, on the first attempt; the worker goes on."""
    tree = service().started()
    workers = tree.workers()
    raw = tree.queue(serializer=Raw())
    bad = {raw.put(data): data for data in (b"\xff{", b"", b"{" * 100_000)}
    good = tree.queue().put("nothing")
    wait_until(lambda: tree.done(good))
    for job_id, data in bad.items():
        wait_until(lambda at=job_id: tree.state(at) is State.DEAD)
        job = tree.job(job_id)
        assert (job.reason, job.payload_bytes) == ("undecodable", data)
        assert job.error is not None
        assert job.error.startswith("the payload is not JSON: ")
        assert tree.runs()[job_id] == 0
    assert tree.workers() == workers


def test_a_taken_port_stops_no_job_and_is_told(service: Maker) -> None:
    """The log and the pool's note say why; the page comes up once the port is free."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        tree = service(listen=listen).started()
        job_id = tree.queue().put("nothing")
        wait_until(lambda: tree.done(job_id))
        told = wait_until(lambda: tree.events("web_not_started"))[0]["why"]
        assert told.startswith(f"cannot listen on {listen}: ")
        assert told.endswith("; stop what holds it, or change web.listen")
        assert tree.pid_of(Kind.WEB) == 0
        assert tree.get("readyz") == (0, "")
    wait_until(lambda: tree.get("readyz")[0] == 200)
    assert tree.output() == ""


def test_a_foreign_lock_on_the_database_delays_and_loses_nothing(service: Maker) -> None:
    """A worker killed meanwhile is replaced; its job and one that fell due start at the end."""
    tree = service(web=True)
    tree.change(keeper__LOCK_SECONDS=0.8)
    tree.started()
    queue = tree.queue()
    wait_until(lambda: tree.get("livez")[0] == 200)
    keeper = tree.pid_of(Kind.KEEPER)
    job_id = queue.put("once wait never")
    due_id = queue.put("nothing", delay=1.5)
    wait_until(lambda: tree.running(job_id))
    starts = len(tree.events("worker_started"))
    with contextlib.closing(sqlite3.connect(tree.database, timeout=20)) as foreign:
        foreign.isolation_level = None
        foreign.execute("BEGIN EXCLUSIVE")
        until = time.monotonic() + 3  # longer than the keeper's patience with the lock
        tree.kill_running(job_id)
        wait_until(lambda: len(tree.events("worker_started")) > starts, timeout_seconds=3)
        assert tree.get("livez")[0] == 200
        wait_until(lambda: tree.events("upkeep_failed"))
        wait_until(lambda: time.monotonic() > until)
        assert (tree.state(job_id), tree.state(due_id)) == (State.CLAIMED, State.DELAYED)
        foreign.execute("COMMIT")
        released_us = time.time_ns() // 1000
    wait_until(lambda: tree.done(job_id, due_id))
    assert tree.outcomes(job_id) == ["crashed", "succeeded"]
    for one in (job_id, due_id):
        assert tree.job(one).ledger[-1].started_us - released_us < 1_000_000
    assert tree.pid_of(Kind.KEEPER) == keeper
    assert tree.stop() == 0


# ---- a small disk ---------------------------------------------------------------------------

NAMESPACE = """
import subprocess, sys, time
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m,mode=700", "small", sys.argv[1]], check=True)
print("ready", flush=True)
time.sleep(600)
"""

FILL = """
import json, sys
from queue_core import DatabaseFull, Queue
queue, ids, told = Queue(sys.argv[1], "work", lock_timeout_seconds=20), [], ""
for _ in range(2000):
    try:
        ids.append(queue.put("nothing" + " " * 12000))
    except DatabaseFull as error:
        told = str(error)
        break
print(json.dumps([ids, told]))
"""

STATES = """
import json, sys
from queue_core import Queue
queue = Queue(sys.argv[1], "work")
found = [queue.find(job_id) for job_id in json.loads(sys.argv[2])]
print(json.dumps([job and job.state for job in found]))
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, Path, tuple[str, ...]]]:
    """Mount a disk of 3 MB; give its path, the same seen from here, and how to enter."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with subprocess.Popen(
        ["unshare", "-rm", "--propagation", "private", sys.executable, "-c", NAMESPACE, disk],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stderr is not None
            if holder.stdout.readline() != "ready\n":
                pytest.skip(f"the kernel lets us mount nothing: {holder.stderr.read().strip()}")
            enter = ("nsenter", "-t", str(holder.pid), "-U", "-m", "--preserve-credentials")
            yield disk, Path(f"/proc/{holder.pid}/root{disk}"), enter
        finally:
            holder.kill()


def inside(enter: tuple[str, ...], code: str, *args: object) -> Any:
    """Run a script where the disk is mounted, and return what it printed."""
    done = subprocess.run(
        [*enter, sys.executable, "-P", "-c", code, *map(str, args)],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_full_disk_is_told_and_every_accepted_job_is_done_when_there_is_room(
    service: Maker, small_disk: tuple[Path, Path, tuple[str, ...]]
) -> None:
    """Producer and command get a sentence; the service stays up, and goes on by itself."""
    disk, seen, enter = small_disk
    tree = service(database=disk / "herdsman.db")
    tree.prefix = enter
    tree.started()
    (seen / "ballast").write_bytes(b"\0" * 1_500_000)
    supervisor, keeper = tree.pid, tree.pid_of(Kind.KEEPER)

    ids, told = inside(enter, FILL, tree.database)
    assert told == f"{tree.database}: the disk is full; free space, then try again"
    assert len(ids) > 10
    refused = command(
        "put", "work", json.dumps(" " * 50_000), "-c", tree.config, cwd=tree.folder, prefix=enter
    )
    assert refused.returncode == 69
    assert sentence(refused) == f"herdsman: {told}"

    assert tree.process is not None
    assert tree.process.poll() is None
    (seen / "ballast").unlink()
    wait_until(lambda: set(inside(enter, STATES, tree.database, json.dumps(ids))) == {"done"})
    assert [tree.runs("end")[job_id] for job_id in ids] == [1] * len(ids)
    assert tree.pid_of(Kind.KEEPER) == keeper
    assert tree.pid == supervisor
    assert tree.stop() == 0


def test_a_folder_that_cannot_be_written_is_told(
    service: Maker, small_disk: tuple[Path, Path, tuple[str, ...]]
) -> None:
    """69: a disk mounted read-only, which even root cannot write."""
    disk, _, enter = small_disk
    tree = service(database=disk / "herdsman.db")
    subprocess.run([*enter, "mount", "-o", "remount,ro", disk], check=True)
    for arguments in (["run"], ["put", "work", "1"]):
        refused = command(*arguments, "-c", tree.config, cwd=tree.folder, prefix=enter)
        assert refused.returncode == 69, refused.stderr
        assert str(tree.database) in sentence(refused)
        assert "cannot be written by this user; check its owner" in sentence(refused)
