"""Handlers: how a configured name becomes something to call, and what a call comes to."""

from __future__ import annotations

import contextvars
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from queue_core.job import Claimed, Outcome, Reason
from queue_core.retry import Done, Interrupted, Reject, Result, Retry, Snooze
from supervisor import handlers, logs, settings
from supervisor.calls import ERROR_BYTES_MAX, TRACEBACK_BYTES_MAX, python_call
from supervisor.child import JobInterrupted, SoftTimeout
from supervisor.handlers import HandlerError, Registry
from supervisor.outside import command_call, http_call

ROOT = Path(__file__).parents[2]
Load = Callable[..., Registry]


def claimed(payload: bytes = b'{"x": 1}', **changes: Any) -> Claimed:
    """Build a claimed row."""
    row: dict[str, Any] = {
        "id": 7, "run": 3, "queue": "q", "task": "t", "payload": payload, "attempts": 1,
        "max_attempts": None, "deaths": 0, "priority": 0, "key": None, "headers": None,
        "group": None, "enqueued_us": 1, "ready_us": 1, "claimed_us": 1, "expires_us": None,
    }  # fmt: skip
    return Claimed(**{**row, **changes})


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Return a function that writes a module `tasks_here` and a configuration, and loads it."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def make(code: str, config: str, **options: Any) -> Registry:
        (tmp_path / "tasks_here.py").write_text(code)
        (tmp_path / "herdsman.toml").write_text(config)
        return handlers.load(settings.load(tmp_path / "herdsman.toml", {}), **options)

    yield make
    sys.modules.pop("tasks_here", None)


def called(function: Callable[..., Any], row: Claimed | None = None, **options: Any) -> Result:
    """Call a function as a handler."""
    return python_call(function, **options)(row or claimed())


def test_a_handler_gets_the_payload_and_any_return_is_success() -> None:
    """The decoded payload goes in; what comes out does not matter."""
    seen: list[Any] = []
    assert called(seen.append) == Done()
    assert called(lambda payload: payload["x"]) == Done()
    assert seen == [{"x": 1}]


@pytest.mark.parametrize(
    "value",
    [Retry(error="again", after_seconds=3.0), Reject(error="never"), Snooze(after_seconds=9.0),
     Interrupted(error="later"), Done()],
)  # fmt: skip
def test_a_returned_result_is_the_result(value: Result) -> None:
    """A handler can say what should become of its job."""
    assert called(lambda _: value) == value


def test_a_returned_result_is_made_safe() -> None:
    """Nonsense inside a result cannot reach the database."""
    result = called(lambda _: Retry(error="x" * 9999 + "\0", after_seconds=float("nan")))
    assert isinstance(result, Retry)
    assert len(result.error) == ERROR_BYTES_MAX
    assert result.after_seconds is None
    odd: Any = ValueError("an object")
    result = called(lambda _: Reject(error=odd, reason=odd))
    assert result == Reject(error="ValueError('an object')", reason=Reason.REJECTED)


@pytest.mark.parametrize(
    "payload", [b"", b"{", b"\xff", b"[" * 100_000, b"9" * 5000, b"nul\0l"], ids=range(6)
)
def test_a_payload_that_is_no_json_is_rejected_without_a_call(payload: bytes) -> None:
    """It can never run: dead as undecodable, and the handler is not called."""
    seen: list[Any] = []
    result = called(seen.append, claimed(payload))
    assert isinstance(result, Reject)
    assert result.reason is Reason.UNDECODABLE
    assert seen == []


@pytest.mark.parametrize(
    "error",
    [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit, MemoryError, RecursionError,
     BaseException],
)  # fmt: skip
def test_any_exception_is_a_failure_of_the_job(error: type[BaseException]) -> None:
    """Even one that means to end the process only fails the job, with text and place."""

    def handler(payload: Any) -> None:
        raise error("told you")

    result = called(handler)
    assert isinstance(result, Retry)
    assert result.error == f"{error.__name__}: told you"
    assert result.outcome is Outcome.FAILED
    assert result.traceback is not None
    assert "test_handlers.py" in result.traceback
    assert "calls.py" not in result.traceback


def test_configured_exceptions_decide_between_retry_and_reject() -> None:
    """reject_on wins; with retry_on set, everything else rejects."""

    def handler(payload: Any) -> None:
        raise ConnectionResetError("gone")

    assert isinstance(called(handler, reject_on=(OSError,)), Reject)
    assert isinstance(called(handler, retry_on=(ConnectionError,)), Retry)
    assert isinstance(called(handler, retry_on=(KeyError,)), Reject)
    both = called(handler, retry_on=(OSError,), reject_on=(ConnectionError,))
    assert isinstance(both, Reject)


def test_the_runtimes_own_exceptions_mean_what_they_mean() -> None:
    """A drain gives the job back; a soft timeout is a timed-out attempt."""

    def interrupted(payload: Any) -> None:
        raise JobInterrupted

    def late(payload: Any) -> None:
        raise SoftTimeout

    assert isinstance(called(interrupted, retry_on=(KeyError,)), Interrupted)
    result = called(late, reject_on=(BaseException,))
    assert isinstance(result, Retry)
    assert result.outcome is Outcome.TIMED_OUT


def test_hostile_exceptions_are_survived() -> None:
    """Text that raises, is huge, or cannot be encoded still yields a bounded, storable text."""

    class Unshowable(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def unshowable(payload: Any) -> None:
        raise Unshowable

    def huge(payload: Any) -> None:
        raise ValueError("é\ud800" * 500_000)

    def deep(payload: Any) -> None:
        deep(payload)

    assert getattr(called(unshowable), "error", "") == "Unshowable: its text cannot be shown"
    for function in (huge, deep):
        result = called(function)
        assert isinstance(result, Retry)
        assert len(result.error.encode()) <= ERROR_BYTES_MAX
        assert result.traceback is not None
        assert len(result.traceback.encode()) <= TRACEBACK_BYTES_MAX


def test_no_exception_object_outlives_the_call() -> None:
    """Only text leaves: the handler's locals are free when the call is over."""

    class Big:
        pass

    refs: list[weakref.ref[Big]] = []

    def handler(payload: Any) -> None:
        local = Big()
        refs.append(weakref.ref(local))
        raise ValueError("x")

    result = called(handler)
    gc.collect()
    assert isinstance(result, Retry)
    assert refs[0]() is None


def test_what_a_handler_changed_for_the_process_is_put_back(tmp_path: Path) -> None:
    """Working folder, umask and signal handlers are the worker's own again."""
    here, mask = os.getcwd(), os.umask(0o027)
    before = signal.getsignal(signal.SIGTERM)

    def handler(payload: Any) -> None:
        os.chdir(tmp_path)
        os.umask(0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    try:
        assert called(handler) == Done()
        assert os.getcwd() == here
        assert os.umask(0o027) == 0o027
        assert signal.getsignal(signal.SIGTERM) == before
    finally:
        os.umask(mask)
        signal.signal(signal.SIGTERM, before)


def test_context_variables_of_a_job_end_with_it() -> None:
    """What one job binds is not seen by the next, and its own facts are there for its logs."""
    variable = contextvars.ContextVar("variable", default="unset")
    seen = []

    def handler(payload: Any) -> None:
        seen.append((variable.get(), logs.current_job.get()))
        variable.set("set")

    call = python_call(handler)
    row = claimed()
    assert [call(row), call(row)] == [Done(), Done()]
    assert seen == [("unset", row), ("unset", row)]
    assert logs.current_job.get() is None


def test_a_process_the_handler_forked_never_becomes_a_second_worker(tmp_path: Path) -> None:
    """A child that comes back, or raises, ends there; only the worker returns a result."""
    mark = tmp_path / "returned"

    def handler(payload: Any) -> None:
        if os.fork() == 0:
            raise ValueError("in the child")
        _, status = os.wait()
        assert os.waitstatus_to_exitcode(status) == 1

    result = called(handler)
    with mark.open("a") as file:
        file.write("once\n")
    assert result == Done()
    assert mark.read_text() == "once\n"


def test_async_handlers_run_in_a_loop_of_their_own(load: Load) -> None:
    """A coroutine function is awaited, and the soft timeout reaches it."""
    registry = load(
        "import asyncio\nseen = []\n"
        "async def work(payload, job):\n    await asyncio.sleep(0)\n"
        "    seen.append((payload, job.attempt))\n"
        "class Callable:\n    async def __call__(self, payload): raise KeyError('k')\n"
        "instance = Callable()\n"
        "import functools\npartial = functools.partial(work, job=instance)\n"
        "instance.attempt = 9\n",
        '[handlers.c]\npython = "tasks_here:partial"\n'
        '[handlers.a]\npython = "tasks_here:work"\n[handlers.b]\npython = "tasks_here:instance"\n',
    )
    assert registry.get("a").call(claimed()) == Done()
    assert registry.get("c").call(claimed()) == Done()
    assert sys.modules["tasks_here"].seen == [({"x": 1}, 2), ({"x": 1}, 2)]
    assert getattr(registry.get("b").call(claimed()), "error", "") == "KeyError: 'k'"


def test_nothing_that_has_not_run_counts_as_done() -> None:
    """A coroutine from a decorated function is awaited; a generator fails the job."""
    seen = []

    async def work(payload: Any) -> Result:
        seen.append(payload)
        return Snooze(after_seconds=1)

    assert called(lambda payload: work(payload)) == Snooze(after_seconds=1)
    assert seen == [{"x": 1}]
    result = called(lambda payload: (n for n in payload))
    assert isinstance(result, Retry)
    assert "has not run" in result.error


@pytest.mark.parametrize(
    ("signature", "shown"),
    [
        ("payload", "payload={'x': 1}"),
        ("payload, job", "payload={'x': 1} job=7"),
        ("payload, anything", "payload={'x': 1} anything=7"),
        ("payload, retries=3", "payload={'x': 1} retries=3"),
        ("payload, retries=3, job=None", "payload={'x': 1} retries=3 job=7"),
        ("payload, *, job", "payload={'x': 1} job=7"),
        ("job", "job=7"),
        ("*args", "args=({'x': 1},)"),
        ("payload=None", "payload={'x': 1}"),
        ("payload, **job", "payload={'x': 1} job={}"),
    ],
)
def test_the_signature_says_what_a_handler_takes(load: Load, signature: str, shown: str) -> None:
    """The payload always, the job when there is a place for it."""
    registry = load(
        f"seen = []\ndef f({signature}):\n"
        "    seen.append(' '.join(f'{k}={getattr(v, \"id\", v)}' for k, v in locals().items()))\n",
        '[handlers.t]\npython = "tasks_here:f"\n',
    )
    assert registry.get("t").call(claimed()) == Done()
    assert sys.modules["tasks_here"].seen == [shown]


def test_the_job_a_handler_gets_says_it_all(load: Load) -> None:
    """Attempt, limits, headers and times are there; bad headers are left out, not fatal."""
    registry = load(
        "seen = []\ndef f(payload, job): seen.append(job)\n",
        '[handlers.t]\npython = "tasks_here:f"\nmax_attempts = 8\n',
    )
    call = registry.get("t").call
    call(claimed(headers='{"trace": "1"}', key="k"))
    call(claimed(headers="{", max_attempts=2))
    first, second = sys.modules["tasks_here"].seen
    assert (first.id, first.run, first.attempt, first.max_attempts) == (7, 3, 2, 8)
    assert (first.headers, first.key, first.payload) == ({"trace": "1"}, "k", {"x": 1})
    assert (second.headers, second.max_attempts) == ({}, 2)


def test_every_handler_that_cannot_be_loaded_is_named_with_its_reason(
    load: Load, tmp_path: Path
) -> None:
    """One sentence each, all at once, with the line that failed; never a traceback."""
    (tmp_path / "broken_here.py").write_text("x = 1\nimport no_such_thing\n")
    (tmp_path / "syntax_here.py").write_text("def f(:\n")
    (tmp_path / "exits_here.py").write_text("import sys\n\nsys.exit('bye')\n")
    with pytest.raises(HandlerError) as caught:
        load(
            "def gen(p): yield\ndef none(): pass\ndef three(a, b, c): pass\nvalue = 3\n"
            "def fine(p): pass\n",
            "\n".join(
                f"[handlers.{name}]\n{target}"
                for name, target in {
                    "missing": 'python = "not_installed_here.tasks:f"',
                    "broken": 'python = "broken_here:f"',
                    "syntax": 'python = "syntax_here:f"',
                    "exits": 'python = "exits_here:f"',
                    "absent": 'python = "tasks_here:g.h"',
                    "gen": 'python = "tasks_here:gen"',
                    "none": 'python = "tasks_here:none"',
                    "three": 'python = "tasks_here:three"',
                    "value": 'python = "tasks_here:value"',
                    "fine": 'python = "tasks_here:fine"',
                    "odd": 'python = "tasks_here:fine"\nretry_on = ["NoSuchError"]',
                    "odder": 'python = "tasks_here:fine"\nreject_on = ["json.dumps"]',
                    "command": 'command = ["no-such-command-here"]',
                }.items()
            ),
        )
    said = {str(f.where): str(f) for f in caught.value.faults}
    assert len(said) == 12
    assert "handler fine" not in said
    assert all("\n" not in text and "Traceback" not in text for text in said.values())
    assert "install not_installed_here" in said["handler missing"]
    assert "(at " + str(tmp_path / "broken_here.py:2") + ")" in said["handler broken"]
    assert "install no_such_thing" in said["handler broken"]
    assert "syntax_here.py:1" in said["handler syntax"]
    assert "SystemExit: bye" in said["handler exits"]
    assert "exits_here.py:3" in said["handler exits"]
    assert "tasks_here has no g" in said["handler absent"]
    assert "generator" in said["handler gen"]
    assert "take (payload) or (payload, job)" in said["handler none"]
    assert "three(a, b, c)" in said["handler three"]
    assert "is no function but int" in said["handler value"]
    assert "retry_on names NoSuchError" in said["handler odd"]
    assert "is no exception" in said["handler odder"]
    assert "'no-such-command-here'" in said["handler command"]


def test_only_the_wanted_tasks_are_imported(load: Load) -> None:
    """A pool of other queues does not pay for, or fail by, a handler it never runs."""
    registry = load(
        "def f(p): pass\n",
        '[handlers.a]\npython = "tasks_here:f"\n[handlers.b]\npython = "no_such_module:f"\n',
        only=["a"],
    )
    assert registry.tasks == {"a"}


# --- commands ---


def command(script: str, timeout_seconds: float = 30.0, **changes: Any) -> Result:
    """Run a shell script as a command handler."""
    return command_call(["sh", "-c", script], timeout_seconds=timeout_seconds)(claimed(**changes))


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("exit 0", Done()),
        ("echo bad >&2; exit 65", Reject(error="exit code 65: bad", traceback="bad\n")),
        ("exit 75", Retry(error="exit code 75")),
        ("echo a >&2; echo b >&2; exit 1", Retry(error="exit code 1: b", traceback="a\nb\n")),
        ("kill -9 $$", Retry(error="killed by SIGKILL")),
    ],
)  # fmt: skip
def test_the_exit_code_of_a_command_is_the_result(script: str, expected: Result) -> None:
    """0 done, 65 reject, anything else retry with the end of its complaints."""
    assert command(script) == expected


def test_a_command_gets_the_payload_and_the_jobs_facts(tmp_path: Path) -> None:
    """Standard input holds the payload whole, the environment the rest."""
    payload = json.dumps({"x": "y" * 300_000}).encode()
    out = tmp_path / "out"
    script = f"cat > {out}; echo $HERDSMAN_JOB_ID $HERDSMAN_QUEUE $HERDSMAN_ATTEMPT >&2; exit 1"
    assert command(script, payload=payload) == Retry(
        error="exit code 1: 7 q 2", traceback="7 q 2\n"
    )
    assert out.read_bytes() == payload


def test_a_command_that_floods_or_ignores_its_pipes_is_bounded() -> None:
    """Only the end of the complaints is kept; unread input is no failure."""
    result = command("head -c 5000000 /dev/zero | tr '\\0' x >&2; echo end >&2; exit 1")
    assert isinstance(result, Retry)
    assert result.traceback is not None
    assert result.traceback.endswith("end\n")
    assert len(result.traceback) <= 6 * 1024
    assert command("exit 0", payload=b'"' + b"x" * 500_000 + b'"') == Done()


def test_a_command_is_over_when_it_ends_even_if_its_child_holds_the_pipe() -> None:
    """A daemon left behind does not keep the job running."""
    began = time.monotonic()
    assert command("sleep 5 & exit 0") == Done()
    assert time.monotonic() - began < 4


def test_a_command_past_its_limit_is_killed_with_all_it_started(tmp_path: Path) -> None:
    """As a worker (leader of its process group) and elsewhere, nothing survives."""
    script = "(sleep 61.25 &) ; sleep 61.25 & echo working >&2; sleep 61.25"
    result = command(script, timeout_seconds=0.5)
    assert isinstance(result, Retry)
    assert result.outcome is Outcome.TIMED_OUT
    assert result.traceback == "working\n"
    code = (
        "import os, sys, json\nsys.path[:0] = json.loads(sys.argv[1])\n"
        "from queue_core.job import Claimed\nfrom supervisor.outside import command_call\n"
        f"row = eval({repr(claimed())!r}, {{'Claimed': Claimed}})\n"
        "assert os.getpgrp() == os.getpid()\n"
        f"print(command_call(['sh', '-c', {script!r}], timeout_seconds=0.5)(row).outcome)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([str(ROOT)])], start_new_session=True,
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.stdout == "timed_out\n", done.stderr
    assert not [p for p in sleepers() if "61.25" in p]


def sleepers() -> list[str]:
    """Return the command lines of all processes."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_text().replace("\0", " "))
        except OSError:
            continue
    return [line for line in lines if line.startswith("sleep")]


def test_an_interrupted_command_is_killed_and_its_job_given_back(tmp_path: Path) -> None:
    """The exception of a drain that strikes while the command runs ends both."""

    def on_alarm(*_: object) -> None:
        raise JobInterrupted

    old = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        assert isinstance(command("sleep 62.25"), Interrupted)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert not [p for p in sleepers() if "62.25" in p]


def test_a_command_that_vanished_is_a_failure_of_the_job() -> None:
    """It may be back after a deploy: retried, in one sentence."""
    result = command_call(["/no/such/thing"], timeout_seconds=5)(claimed())
    assert isinstance(result, Retry)
    assert "No such file" in result.error


# --- endpoints ---


@pytest.fixture
def endpoint() -> Iterator[tuple[str, list[tuple[str, bytes, str]]]]:
    """Serve answers by path: /STATUS, /STATUS/RETRY-AFTER, /slow."""
    seen: list[tuple[str, bytes, str]] = []
    free = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            seen.append((self.path, body, self.headers["Idempotency-Key"]))
            parts = self.path.strip("/").split("/")
            if parts[0] == "slow":
                free.wait(10)
                return
            self.send_response(int(parts[0]))
            if len(parts) > 1:
                self.send_header("Retry-After", parts[1].replace("_", " "))
            self.send_header("Location", "/200")
            self.end_headers()
            self.wfile.write(b"the answer")

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", seen
    free.set()
    server.shutdown()
    thread.join(10)
    server.server_close()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/200", Done()),
        ("/204", Done()),
        ("/404", Reject(error="HTTP 404: the answer")),
        ("/429/7", Retry(error="HTTP 429: the answer", after_seconds=7.0)),
        ("/408", Retry(error="HTTP 408: the answer")),
        ("/302", Retry(error="HTTP 302: the answer")),
        ("/500", Retry(error="HTTP 500: the answer")),
        ("/503/99999999", Retry(error="HTTP 503: the answer", after_seconds=86400.0)),
        (
            "/503/Sun,_06_Nov_1994_08:49:37_GMT",
            Retry(error="HTTP 503: the answer", after_seconds=0.0),
        ),
        ("/503/soon", Retry(error="HTTP 503: the answer")),
    ],
)  # fmt: skip
def test_the_status_of_an_answer_is_the_result(
    endpoint: tuple[str, list[tuple[str, bytes, str]]], path: str, expected: Result
) -> None:
    """2xx done, 4xx reject but for three, the rest retry when the endpoint says."""
    url, seen = endpoint
    assert http_call(url + path, timeout_seconds=10)(claimed()) == expected
    assert seen == [(path, b'{"x": 1}', "herdsman-7")]


def test_an_endpoint_that_does_not_answer_is_timed_out(
    endpoint: tuple[str, list[tuple[str, bytes, str]]],
) -> None:
    """Silence until the limit is a timed-out attempt; a closed port is a failed one."""
    result = http_call(endpoint[0] + "/slow", timeout_seconds=0.3)(claimed())
    assert isinstance(result, Retry)
    assert result.outcome is Outcome.TIMED_OUT
    refused = http_call("http://127.0.0.1:1/", timeout_seconds=5)(claimed())
    assert isinstance(refused, Retry)
    assert "Connection refused" in refused.error
