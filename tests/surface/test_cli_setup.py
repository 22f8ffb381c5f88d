"""`herdsman init`, `check`, help, and how errors of any kind reach a user."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from queue_core import Queue
from queue_core.errors import DatabaseCorrupt, PayloadInvalid, QueueFull
from supervisor import settings
from supervisor.cli import errors
from tests.surface.commands import ENVIRONMENT, ROOT, document, herdsman


def test_init_writes_a_project_that_checks_clean(tmp_path: Path) -> None:
    """Configuration and handlers, private, and ready to run."""
    done = herdsman("init", "new/project", cwd=tmp_path)
    project = tmp_path / "new/project"
    assert (done.returncode, done.stdout.count("wrote")) == (0, 2)
    assert {path.name for path in project.iterdir()} == {"herdsman.toml", "handlers.py"}
    assert (project / "herdsman.toml").stat().st_mode & 0o777 == 0o600
    checked = herdsman("check", cwd=project)
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.startswith("ok: ")
    assert settings.load(project / "herdsman.toml", {}).database == str(project / "var/herdsman.db")


def test_init_never_overwrites(tmp_path: Path) -> None:
    """A file that is there is kept, and it says so."""
    (tmp_path / "herdsman.toml").write_text("mine")
    done = herdsman("init", "--json", cwd=tmp_path)
    assert document(done)["kept"] == ["herdsman.toml"]
    assert document(done)["written"] == ["handlers.py"]
    assert (tmp_path / "herdsman.toml").read_text() == "mine"


def test_the_shipped_configuration_checks_clean() -> None:
    """What is in config/ works as it is."""
    done = herdsman("check", "--config", ROOT / "config/herdsman.toml", cwd=ROOT / "config")
    assert done.returncode == 0, done.stderr


def test_check_reports_every_fault_at_once(tmp_path: Path) -> None:
    """Handlers, token file and database: all of it in one go, exit code 78."""
    (tmp_path / "broken_here.py").write_text("import no_such_module_here\n")
    (tmp_path / "var").mkdir()
    (tmp_path / "jobs.db").write_text("no database\n" * 100)
    (tmp_path / "herdsman.toml").write_text(
        'database = "jobs.db"\n[web]\nlisten = "0.0.0.0:1"\ntoken_file = "nope"\n'
        '[handlers.a]\npython = "broken_here:f"\n[handlers.b]\ncommand = ["no-such-here"]\n'
        '[pools.p]\nqueues = ["a"]\n'
    )
    done = herdsman("check", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (78, "")
    lines = done.stderr.splitlines()
    assert [line.split(":")[0] for line in lines] == ["warning", *["fault"] * 4]
    text = done.stderr
    assert "queue b is in no pool" in text
    assert "handler a: cannot import broken_here:f" in text
    assert "broken_here.py:1" in text
    assert "'no-such-here'" in text
    assert "nope: it cannot be read" in text
    assert "jobs.db" in text
    found = document(herdsman("check", "--json", cwd=tmp_path))
    assert found["ok"] is False
    assert len(found["faults"]) == 4
    assert len(found["warnings"]) == 1


def test_a_target_that_no_bucket_counts_is_told(tmp_path: Path) -> None:
    """One sentence names the queue, the nearest bound and all of them; it is no fault."""
    (tmp_path / "herdsman.toml").write_text(
        '[queues.fine]\ntarget_wait = "2.5s"\n[queues.odd]\ntarget_wait = "1m30s"\n'
        '[queues.slow]\ntarget_wait = "1d"\n[queues.quick]\ntarget_wait = "300ms"\n'
    )
    done = herdsman("check", cwd=tmp_path)
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    assert len(lines) == 3
    for line, name, shown, nearest in zip(
        lines, ("odd", "slow", "quick"), ("90s", "24h", "300ms"), ("1m", "1h", "250ms"), strict=True
    ):
        assert line.startswith(f"warning: queue {name} has target_wait {shown}, which is no bound")
        assert f"the nearest is {nearest}, all are 1ms, 5ms," in line
    assert len(document(herdsman("check", "--json", cwd=tmp_path))["warnings"]) == 3
    points = document(herdsman("doctor", "--json", cwd=tmp_path))["points"]
    told = [point for point in points if point["name"] == "configuration"]
    assert [point["status"] for point in told] == ["warn"] * 3
    assert [f"warning: {point['seen']}" for point in told] == lines


def test_check_survives_handlers_that_crash_hang_up_or_print(tmp_path: Path) -> None:
    """A module that kills its process, or floods its output, is reported and harmless."""
    config = '[handlers.a]\npython = "bad_here:f"\n'
    (tmp_path / "herdsman.toml").write_text(config)
    (tmp_path / "bad_here.py").write_text("import os\nos.abort()\n")
    done = herdsman("check", cwd=tmp_path)
    assert done.returncode == 78
    assert "was killed by signal 6" in done.stderr
    (tmp_path / "bad_here.py").write_text("import os\nos._exit(0)\n")
    assert "ended with code 0" in herdsman("check", cwd=tmp_path).stderr
    (tmp_path / "bad_here.py").write_text("print('x' * 10**7)\ndef f(payload): pass\n")
    assert herdsman("check", cwd=tmp_path).returncode == 0


def test_check_imports_as_a_worker_would(tmp_path: Path) -> None:
    """The folder of the file is on the path; the folder one happens to stand in is not."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/herdsman.toml").write_text('[handlers.a]\npython = "only_here:f"\n')
    (tmp_path / "only_here.py").write_text("def f(payload): pass\n")
    args = ("check", "--config", "conf/herdsman.toml")
    assert herdsman(*args, cwd=tmp_path).returncode == 78
    (tmp_path / "only_here.py").rename(tmp_path / "conf/only_here.py")
    assert herdsman(*args, cwd=tmp_path).returncode == 0


def test_check_leaves_a_missing_database_missing(tmp_path: Path) -> None:
    """Looking creates nothing; an existing one is opened."""
    (tmp_path / "herdsman.toml").write_text('database = "jobs.db"\n')
    assert herdsman("check", cwd=tmp_path).returncode == 0
    assert not (tmp_path / "jobs.db").exists()
    Queue(tmp_path / "jobs.db", "q").put(1)
    assert herdsman("check", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["check"], "herdsman init"),
        (["status"], "herdsman init"),
        (["put", "q", "1"], "herdsman init"),
        (["status", "--config", "nope.toml"], "nope.toml: it cannot be read"),
    ],
)
def test_a_missing_configuration_is_exit_code_78(
    tmp_path: Path, args: list[str], said: str
) -> None:
    """One sentence that says how to get one."""
    done = herdsman(*args, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (78, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_every_fault_of_a_file_is_a_line(tmp_path: Path) -> None:
    """Commands that need the configuration tell all that is wrong with it."""
    (tmp_path / "herdsman.toml").write_text('databse = "x"\n[pools.p]\nprocesses = "many"\n')
    done = herdsman("status", cwd=tmp_path)
    assert done.returncode == 78
    assert len(done.stderr.splitlines()) == 2
    assert 'herdsman.toml:1: unknown key databse; did you mean "database"?' in done.stderr
    assert "herdsman.toml:3: pools.p.processes = 'many' is not a whole number" in done.stderr


def test_the_environment_and_the_flag_choose_the_configuration(tmp_path: Path) -> None:
    """HERDSMAN_CONFIG is used, the flag beats it, and a variable beats the file."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.toml").write_text(f'database = "{name}.db"\n')
    herdsman("put", "q", "1", cwd=tmp_path, HERDSMAN_CONFIG="a.toml")
    herdsman("put", "q", "1", "-c", "b.toml", cwd=tmp_path, HERDSMAN_CONFIG="a.toml")
    herdsman(
        "put", "q", "1", "-c", "b.toml", cwd=tmp_path, HERDSMAN__DATABASE="deep/c.db",
    )  # fmt: skip
    for name in ("a.db", "b.db", "deep/c.db"):
        assert (tmp_path / name).exists(), name


@pytest.mark.parametrize(
    "args",
    [["nope"], ["jobs", "nope"], ["status", "--nope"], ["jobs", "list", "-n", "0"], ["jobs"]],
)
def test_a_wrong_call_is_exit_code_2(tmp_path: Path, args: list[str]) -> None:
    """One sentence that says where help is."""
    done = herdsman(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("herdsman: ")
    assert "--help'" in done.stderr


def test_help_is_quick_to_build() -> None:
    """Listing the commands loads no validator, no database, no web server."""
    code = (
        "import sys\nfrom supervisor.cli.app import command\ncommand()\n"
        "heavy = {'pydantic', 'structlog', 'sqlite3', 'queue_core.queue', 'uvicorn', 'starlette',"
        " 'prometheus_client', 'multiprocessing', 'asyncio', 'jinja2'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True,
        timeout=60,
    )  # fmt: skip
    assert done.stdout == "[]\n"


def test_every_command_has_help(tmp_path: Path) -> None:
    """All of them answer --help, and each of its options says what it does."""
    done = herdsman("--help", cwd=tmp_path)
    assert done.returncode == 0
    for name in ("init", "check", "run", "demo", "put", "status", "jobs", "dead", "metrics"):
        assert f" {name} " in done.stdout
    assert herdsman("dead", "replay", "--help", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageFault("x"), 2),
        (errors.CommandFailed("x"), 1),
        (KeyboardInterrupt(), 130),
        (PermissionError(13, "Permission denied", "/x"), 1),
        (ZeroDivisionError("division"), 1),
        (RuntimeError("two\nlines"), 1),
        (errors.UsageFault("two\nlines"), 2),
        (errors.CommandFailed("two\nlines"), 1),
        (PermissionError(13, "Permission denied", "two\nlines"), 1),
        (DatabaseCorrupt("two\nlines"), 69),
        (PayloadInvalid("two\nlines"), 2),
        (QueueFull("two\nlines"), 1),
    ],
)
def test_any_exception_has_a_code_and_one_sentence(error: BaseException, code: int) -> None:
    """Even one that nobody foresaw."""
    explained = errors.explain(error)
    assert explained.code == code
    assert "\n" not in explained.text


def test_database_errors_have_their_own_code() -> None:
    """A queue's own refusals are 1 or 2; what ails the database is 69."""
    from queue_core import errors as queue

    assert errors.explain(queue.DatabaseCorrupt("x")).code == 69
    assert errors.explain(queue.QueueBusy("x")).code == 69
    assert errors.explain(queue.PayloadTooLarge("x")).code == 2
    assert errors.explain(queue.QueueFull("x")).code == 1
    assert errors.explain(queue.JobNotFound("x")).code == 1


@pytest.mark.parametrize(
    "args",
    [
        ["status", "-d", "two\nlines.db"],
        ["put", "q", "1", "-d", "file\nname/jobs.db"],
        ["run", "-d", "file\nname/jobs.db"],
        ["check", "-c", "two\nlines.toml"],
        ["init", "file\nname"],
        ["demo", "--folder", "file\nname"],
        ["import", "tiny-queue", "two\nlines", "-d", "jobs.db"],
        ["backup", "file\nname/copy.db", "-d", "jobs.db"],
    ],
    ids=lambda args: args[0],
)
def test_a_line_feed_in_a_path_does_not_break_the_sentence(tmp_path: Path, args: list[str]) -> None:
    """One line, whatever it quotes, so that who reads a log by lines is not misled."""
    (tmp_path / "file\nname").touch()
    with Queue[int](tmp_path / "jobs.db", "q") as queue:
        queue.put(1)
    done = herdsman(*args, cwd=tmp_path)
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("closed", [(1,), (0, 1, 2), (2,)])
def test_closed_standard_streams_neither_fail_a_command_nor_get_its_files_written(
    tmp_path: Path, closed: tuple[int, ...]
) -> None:
    """A service manager may start it so: no traceback, and no file gets the number of a stream."""
    ask = f"import os; [os.close(fd) for fd in {closed}]; os.execv({sys.executable!r}, "
    command = [sys.executable, "-P", "-m", "supervisor"]
    for args, code in ((["put", "q", "1"], 0), (["status"], 0), (["status", "-d", "no.db"], 69)):
        named = args if "-d" in args else [*args, "-d", "jobs.db"]
        done = subprocess.run(
            [sys.executable, "-c", ask + f"{[*command, *named]!r})"],
            cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
    with Queue[int](tmp_path / "jobs.db", "q", create=False) as queue:
        assert queue.counts().ready == 1
    assert (tmp_path / "jobs.db.lock").read_bytes() == b""


@pytest.mark.parametrize("closed", [(1,), (0, 1, 2)])
def test_streams_that_stand_in_for_closed_ones_are_inherited(
    tmp_path: Path, closed: tuple[int, ...]
) -> None:
    """What is executed later finds them too: its first file must not become its output."""
    look = "import os; n = [os.path.exists(f'/proc/self/fd/{fd}') for fd in range(3)]; "
    look += "open('seen', 'w').write(str(n))"
    ask = (
        f"import os; [os.close(fd) for fd in {closed}]; from supervisor import cli; "
        f"cli._open_standard_streams(); os.execv({sys.executable!r}, "
        f"{[sys.executable, '-c', look]!r})"
    )
    subprocess.run(
        [sys.executable, "-P", "-c", ask], cwd=tmp_path, env=ENVIRONMENT, capture_output=True,
        check=True, timeout=60,
    )  # fmt: skip
    assert (tmp_path / "seen").read_text() == "[True, True, True]"


def test_a_database_that_is_none_is_a_fault_of_the_configuration(tmp_path: Path) -> None:
    """It names the file once, and says once what to do."""
    (tmp_path / "jobs.db").write_bytes(b"x" * 200)
    (tmp_path / "herdsman.toml").write_text('database = "jobs.db"\n')
    done = herdsman("check", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr.count("jobs.db") == 1
    assert done.stderr.endswith("; restore a backup, or name another file\n")


def test_a_service_on_a_terminal_logs_json_lines_when_told_to(tmp_path: Path) -> None:
    """People get lines of their own there; a program that reads a terminal asks with --json."""
    (tmp_path / "herdsman.toml").write_text('database = "jobs.db"\n[web]\nlisten = "off"\n')
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "supervisor", "run", "--json"],
        cwd=tmp_path, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stderr=slave,
    )  # fmt: skip
    os.close(slave)
    try:
        shown = until(master, b"supervisor_ready")
        process.send_signal(signal.SIGTERM)
        shown += until(master, b"supervisor_stopped")
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait(10)
        os.close(master)
    lines = [line for line in shown.decode().splitlines() if "supervisor_" in line]
    assert json.loads(lines[0])["event"] == "supervisor_started"


def until(screen: int, word: bytes) -> bytes:
    """Read a terminal until a word came; fails after 20 s, or when nobody writes any more."""
    shown = b""
    while word not in shown:
        assert select.select([screen], [], [], 20.0)[0], shown
        shown += os.read(screen, 65_536)
    return shown


def test_debug_shows_the_traceback_and_the_sentence(tmp_path: Path) -> None:
    """Asked for, and only then."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "supervisor", "--debug", "status", "-d", "none.db"],
        cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 69
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("herdsman: ")
