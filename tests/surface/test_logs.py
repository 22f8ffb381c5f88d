"""Logs: one line, one write, whatever is logged and wherever it goes."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import example, given, settings
from hypothesis import strategies as st

from queue_core.retry import Done
from supervisor import logs
from supervisor.sections import LogSettings
from supervisor.telling import line_of, watched
from tests.conftest import wait_until
from tests.process.service import ENVIRONMENT, Maker, Service, services

ROOT = Path(__file__).parents[2]
log = structlog.get_logger("herdsman.test")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Leave logging as other tests expect it."""
    root = logging.getLogger()
    before, level, raising = list(root.handlers), root.level, logging.raiseExceptions
    yield
    logs.configure(sys.__stderr__)
    root.handlers[:] = before
    root.setLevel(level)
    logging.raiseExceptions = raising
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def lines(path: Path) -> list[dict[str, Any]]:
    """Parse a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Path]:
    """Send logs to a file as JSON."""
    path = tmp_path / "log"
    with path.open("a") as stream:
        logs.configure(stream, level="debug")
        yield path


def test_an_event_is_one_json_line_with_its_facts(target: Path) -> None:
    """Time in UTC, level, event, logger, then what was given."""
    log.info("config_loaded", path="/x", number=3)
    [line] = lines(target)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", line.pop("timestamp"))
    assert line == {
        "level": "info", "event": "config_loaded", "logger": "herdsman.test",
        "path": "/x", "number": 3,
    }  # fmt: skip


def test_records_of_the_standard_library_take_the_same_path(target: Path) -> None:
    """A handler's own logging is the event `message`, also when its arguments do not fit."""
    logging.getLogger("theirs").warning("hello %s", "you")
    logging.getLogger("theirs").warning("hello %s")
    logging.getLogger("theirs").warning("%d%%", "x")
    first, second, third = lines(target)
    assert (first["event"], first["message"], first["logger"]) == ("message", "hello you", "theirs")
    assert second["message"] == "hello %s"
    assert "do not fit" in third["message"]


def test_the_current_job_joins_every_line_of_its_context(target: Path) -> None:
    """Job id, queue, task and attempt come from the context, for both kinds of log."""

    class Row:
        id, run, queue, task, attempts = 7, 2, "q", "t", 0
        headers = '{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}'

    token = logs.current_job.set(Row())
    structlog.contextvars.bind_contextvars(worker="p/0")
    log.info("attempt_finished")
    logging.getLogger("theirs").info("x")
    logs.current_job.reset(token)
    log.info("attempt_finished")
    for line in lines(target)[:2]:
        assert (line["job_id"], line["run"], line["queue"], line["attempt"]) == (7, 2, "q", 1)
        assert line["worker"] == "p/0"
        assert line["trace_id"] == "0af7651916cd43dd8448eb211c80319c"
    assert "job_id" not in lines(target)[2]


def test_secrets_are_redacted_at_any_depth(target: Path) -> None:
    """Keys that name a secret never show their value."""
    log.info(
        "config_loaded", password="p1", API_TOKEN="p2", nested=[{"Authorization": "p3"}],
        deep={"a": {"client_secret": {"x": "p4"}}}, harmless="p5",
    )  # fmt: skip
    text = target.read_text()
    assert not re.search(r"p[1-4]", text)
    assert text.count("[redacted]") == 4
    assert "p5" in text


def test_an_exception_is_text_in_its_line(target: Path) -> None:
    """The traceback is one field, its end kept when it is long."""
    try:
        raise ValueError("end of it" * 2)
    except ValueError as error:
        log.exception("config_reload_failed")
        log.error("config_reload_failed", exc_info=error)
        logging.getLogger("theirs").exception("x")
    for line in lines(target):
        assert line["level"] == "error"
        assert line["exception"].endswith("ValueError: end of itend of it")


VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.binary(max_size=50),
        st.text(max_size=3000), st.characters(categories=["Cs", "Cc"]),
    ),
    lambda inner: st.lists(inner, max_size=200) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=30,
)  # fmt: skip


@pytest.mark.parametrize("as_json", [True, False])
@example(fields={"exception": [None]})
@settings(max_examples=60)
@given(fields=st.dictionaries(st.text(min_size=1, max_size=9), VALUES, max_size=30))
def test_any_value_makes_one_bounded_line(as_json: bool, fields: dict[str, Any]) -> None:
    """Hostile values neither raise, nor split the line, nor pass 4 KiB, nor reach a terminal."""
    out = io.StringIO()
    logs.configure(out, json=as_json)
    before = logs.lost()
    for taken in ("event", "self"):  # parameters of the method itself
        fields.pop(taken, None)
    log.info("config_loaded", **fields)
    text = out.getvalue()
    assert logs.lost() == before
    assert text.endswith("\n")
    assert text.count("\n") == 1
    assert len(text.encode()) <= logs.LINE_BYTES_MAX
    if as_json:
        assert json.loads(text)["event"]
    else:
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize(
    "fields",
    [
        {"a": "é" * 5000},
        {f"k{n}": "x" * 3000 for n in range(200)},
        {"k" * 9000: 1},
        {"a": [1] * 9**5},
    ],
    ids=["text", "fields", "key", "list"],
)  # fmt: skip
def test_a_line_is_never_longer_than_a_pipe_takes_at_once(
    as_json: bool, fields: dict[str, Any]
) -> None:
    """What is too long is cut with a mark, and the line keeps its event."""
    out = io.StringIO()
    logs.configure(out, json=as_json)
    log.info("config_loaded", **fields)
    text = out.getvalue()
    assert len(text.encode()) <= logs.LINE_BYTES_MAX
    assert text.count("\n") == 1
    assert "config_loaded" in text
    assert "cut" in text or "[1,1,1" in text or "[1, 1, 1" in text


def test_values_without_a_printable_form_are_survived(target: Path) -> None:
    """An object whose repr raises is named by its type."""

    class Hostile:
        def __repr__(self) -> str:
            raise RuntimeError

    log.info("config_loaded", value=Hostile(), others=[Hostile()])
    [line] = lines(target)
    assert line["value"] == "<Hostile: it has no printable form>"


def test_each_line_is_one_write_so_processes_do_not_mix(tmp_path: Path) -> None:
    """Four processes writing long lines into one pipe leave every line whole."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from supervisor import logs; import structlog, os\n"
        "logs.configure()\nlog = structlog.get_logger('x')\n"
        "for i in range(300): log.info('config_loaded', i=i, text=str(os.getpid()) * 600)\n"
    )
    read, write = os.pipe()
    children = [subprocess.Popen([sys.executable, "-c", code], stderr=write) for _ in range(4)]
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        got = pipe.read().splitlines()
    assert [child.wait(30) for child in children] == [0] * 4
    assert len(got) == 1200
    assert all(json.loads(line)["event"] == "config_loaded" for line in got)


def test_a_broken_pipe_is_counted_and_never_raised() -> None:
    """Logging into nothing costs the line, not the caller."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream:
        logs.configure(stream)
        before = logs.lost()
        log.info("config_loaded")
        logging.getLogger("theirs").warning("x")
        assert logs.lost() == before + 2
    log.info("config_loaded")  # the descriptor is closed now
    assert logs.lost() == before + 3


def test_levels_are_kept_and_unknown_ones_refused(target: Path) -> None:
    """Below the level nothing is written; a wrong level is one sentence."""
    with target.open("a") as stream:
        logs.configure(stream, level="warning")
        log.info("config_loaded")
        logging.getLogger("theirs").info("x")
        log.warning("config_warning")
    assert [line["event"] for line in lines(target)] == ["config_warning"]
    with pytest.raises(ValueError, match="no log level"):
        logs.configure(level="loud")


def test_a_file_is_opened_anew_for_rotation(tmp_path: Path) -> None:
    """After a rename, reopen makes a new private file; a failure keeps the old one."""
    path = tmp_path / "herdsman.log"
    logs.configure(io.StringIO(), json=True)
    assert logs.reopen(path)
    log.info("config_loaded", n=1)
    path.rename(tmp_path / "herdsman.log.1")
    log.info("config_loaded", n=2)
    assert logs.reopen(path)
    log.info("config_loaded", n=3)
    assert not logs.reopen(tmp_path / "no" / "folder")
    assert [line["n"] for line in lines(tmp_path / "herdsman.log.1")] == [1, 2]
    after = lines(path)
    assert after[0]["n"] == 3
    assert after[1]["event"] == "logs_lost"
    assert path.stat().st_mode & 0o777 == 0o600


def log_calls(path: Path) -> Iterator[tuple[ast.Call, ast.expr]]:
    """Yield each call of a module's `log` with its event."""
    levels = {"debug", "info", "warning", "error", "critical", "exception"}
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Attribute(value=value, attr=level), args=[event, *_]):
                ours = isinstance(value, ast.Name) and value.id == "log"
                made = isinstance(value, ast.Call) and "get_logger" in ast.unparse(value.func)
                if level in levels and (ours or made):
                    yield node, event
            case ast.Call(func=ast.Name(id="tell" | "level"), args=[event, *_]):  # a bound method
                yield node, event


def faulty_events(path: Path, module: object) -> list[str]:
    """Return the calls whose event is no constant, or one that is not on the list."""
    faults = []
    for call, event in log_calls(path):
        name = event.id if isinstance(event, ast.Name) else ""
        if not name.isupper() or getattr(module, name, None) not in logs.EVENTS:
            faults.append(f"{path.name}:{call.lineno}: {ast.unparse(event)}")
    return faults


MODULES = [
    path
    for path in sorted((ROOT / "supervisor").rglob("*.py"))
    if "templates" not in path.name and "log" in path.read_text()
]


def test_every_event_that_is_logged_is_on_the_closed_list() -> None:
    """Tools that read the log meet no name they cannot know, and no entry is a leftover."""
    faults: list[str] = []
    used = {logs.MESSAGE}
    for path in MODULES:
        if not any(log_calls(path)):
            continue
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        module = importlib.import_module(name)
        faults += faulty_events(path, module)
        used |= {getattr(module, ast.unparse(event), "") for _, event in log_calls(path)}
    assert faults == []
    assert logs.EVENTS - used == set()
    assert all(re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", event) for event in logs.EVENTS)


def test_an_event_that_is_not_on_the_list_is_found(tmp_path: Path) -> None:
    """The check above sees literals, unknown constants, and sentences."""
    path = tmp_path / "module.py"
    path.write_text(
        "log.info('worker_started')\nlog.info(MADE_UP)\nlog.error(f'{x} failed')\n"
        "tell('x')\nlog.warning(RIGHT)\n"
    )

    class Module:
        MADE_UP = "made_up"
        RIGHT = "worker_started"

    assert len(faulty_events(path, Module)) == 4


def test_a_reader_that_does_not_read_costs_lines_and_not_the_caller() -> None:
    """A full pipe is waited for once, a tenth of a second; then lines are lost, and counted."""
    read, write = os.pipe()
    try:
        with os.fdopen(write, "w") as stream:
            logs.configure(stream)
            before, began = logs.lost(), time.monotonic()
            for _ in range(400):
                log.info("config_loaded", text="x" * 3000)
            assert time.monotonic() - began < 5
            assert logs.lost() > before + 300
            while len(os.read(read, 65536)) == 65536:
                pass
            lost = logs.lost()
            log.info("config_loaded", text="again")
            assert logs.lost() == lost
            assert b"again" in os.read(read, 65536)
    finally:
        os.close(read)


# ---- a real service -----------------------------------------------------------------------


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Maker]:
    """Prepare services, and end them."""
    with services(tmp_path) as maker:
        yield maker


def log_to(service: Service, text: str) -> None:
    """Replace a service's logging options."""
    old = 'file = "service.log"\nformat = "json"\n'
    config = service.config.read_text()
    assert old in config
    service.config.write_text(config.replace(old, text))


@pytest.mark.parametrize("how", ["closed", "full"])
def test_a_reader_that_goes_away_stops_no_job(make: Maker, how: str) -> None:
    """With nobody at the other end of standard error, jobs run, fail, die and are retried."""
    service = make(processes=2, max_attempts=2)
    log_to(service, 'format = "json"\nattempts = "info"\n')
    read, write = os.pipe()
    if how == "closed":
        os.close(read)
    else:
        os.set_blocking(write, False)
        with contextlib.suppress(BlockingIOError):
            while os.write(write, b"x" * 4096):
                pass
        os.set_blocking(write, True)
    service.process = subprocess.Popen(
        [sys.executable, "-P", "-m", "supervisor", "run", "-c", service.config],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=write,
        cwd=service.folder, env=ENVIRONMENT, start_new_session=True,
    )  # fmt: skip
    service._started.append(service.process)
    os.close(write)
    queue = service.queue()
    good = queue.put_many(["nothing"] * 30)
    bad = queue.put("raise")
    killed = queue.put("once die")
    wait_until(lambda: service.done(*good, killed), what="the jobs are done")
    wait_until(lambda: service.state(bad) == "dead", what="the failing job is dead")
    assert service.stop() == 0
    if how == "full":
        os.close(read)


def test_each_attempt_has_one_line_when_that_is_wanted(make: Maker) -> None:
    """A success, a failure and a death each tell wait, duration, outcome, and whose they are."""
    service = make(processes=1)
    log_to(service, 'file = "service.log"\nformat = "json"\nattempts = "info"\n')
    queue = service.queue()
    service.started()
    trace = "0af7651916cd43dd8448eb211c80319c"
    good = queue.put("nothing", headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"})
    bad = queue.put("once raise")
    killed = queue.put("once die")
    wait_until(lambda: service.done(good, bad, killed))
    service.stop()
    lines = service.events("attempt_finished")
    assert sorted((line["job_id"], line["attempt"], line["outcome"]) for line in lines) == [
        (good, 1, "succeeded"),
        (bad, 1, "failed"), (bad, 2, "succeeded"),
        (killed, 1, "crashed"), (killed, 2, "succeeded"),
    ]  # fmt: skip
    for line in lines:
        assert (line["queue"], line["task"], line["level"]) == ("work", "work", "info")
        assert line["wait_seconds"] >= 0
        assert line["duration_seconds"] >= 0
        if line["outcome"] != "crashed":
            assert line["worker"] == "default/0"
            assert line["cpu_seconds"] >= 0
            assert line["peak_rss_bytes"] > 1_000_000
    [first] = [line for line in lines if line["job_id"] == good]
    assert first["trace_id"] == trace
    [failed] = [line for line in lines if line["outcome"] == "failed"]
    assert failed["error"] == "ValueError: as the payload wished"
    [retry] = service.events("job_retries")
    assert (retry["worker"], retry["job_id"]) == ("default/0", bad)


@pytest.mark.parametrize(
    ("attempts", "level", "wanted"),
    [
        ("off", "debug", False),
        ("info", "info", True),
        ("info", "warning", False),
        ("debug", "info", False),
        ("debug", "debug", True),
    ],
)
def test_attempts_that_are_not_told_cost_nothing(attempts: str, level: str, wanted: bool) -> None:
    """Off, or below the log's level, the worker calls its handler with nothing around it."""
    tell = line_of(LogSettings(attempts=attempts, level=level))  # type: ignore[arg-type]
    assert (tell is not None) == wanted

    def call(handler: object, row: object) -> Done:
        return Done()

    around = watched(call, tell=tell, spans=None, now_us=int, steady_ns=int)
    assert (around is not call) == wanted
