"""Logs: one line, one write, whatever is logged and wherever it goes."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor import logs

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

    token = logs.current_job.set(Row())
    structlog.contextvars.bind_contextvars(worker="p/0")
    log.info("attempt_finished")
    logging.getLogger("theirs").info("x")
    logs.current_job.reset(token)
    log.info("attempt_finished")
    for line in lines(target)[:2]:
        assert (line["job_id"], line["run"], line["queue"], line["attempt"]) == (7, 2, "q", 1)
        assert line["worker"] == "p/0"
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
@settings(max_examples=60)
@given(fields=st.dictionaries(st.text(min_size=1, max_size=9), VALUES, max_size=30))
def test_any_value_makes_one_bounded_line(as_json: bool, fields: dict[str, Any]) -> None:
    """Hostile values neither raise, nor split the line, nor pass 4 KiB, nor reach a terminal."""
    out = io.StringIO()
    logs.configure(out, json=as_json)
    before = logs.lost()
    fields.pop("event", None)
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


def test_event_names_are_a_closed_list_of_plain_words() -> None:
    """Names are snake_case; others join by registering."""
    logs.register("worker_started")
    assert "worker_started" in logs.EVENTS
    for name in ("Bad", "two words", "", "a__b", "x-y"):
        with pytest.raises(ValueError, match="event name"):
            logs.register(name)
