"""Write every event as one line, in one write, whatever its source.

structlog events and standard-library log records go through the same steps: context,
redaction, size cap, one line. Logging never raises into its caller: what cannot be written
is counted in `lost`. Boundary: knows no queue; the current job is read through a context
variable that the worker sets.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import select
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol, TextIO

import structlog

from supervisor import traceparent
from supervisor.lastlines import LastLines

LINE_BYTES_MAX: Final = 4096
"""Longest line, newline included: a pipe takes this much in one piece (PIPE_BUF on Linux)."""
CUT: Final = "…[cut]"
REDACTED: Final = "[redacted]"
DEPTH_MAX: Final = 5
ITEMS_MAX: Final = 100

MESSAGE: Final = "message"
LOGS_LOST: Final = "logs_lost"

EVENTS: Final = frozenset({
    MESSAGE,  # a record of the standard library; its text is under `message`
    LOGS_LOST,  # a line, or the log file, could not be written
    # the supervisor
    "supervisor_started", "supervisor_ready", "supervisor_draining", "supervisor_stopped",
    "supervisor_gave_up", "supervisor_trouble", "signal_received", "signal_refused", "host_slept",
    "reload_started", "reload_finished", "reload_failed", "restart_failed",
    # its processes
    "worker_started", "worker_exited", "worker_start_failed", "worker_signalled",
    "worker_recycled", "process_failed", "process_stacks", "process_status",
    "process_unkillable", "strangers_reaped",
    "pool_crash_loop", "pool_parked", "pool_recovered",
    "pool_drained", "pool_resumed", "pool_restarted",
    # jobs
    "attempt_finished", "job_retries", "job_died", "claim_stale",
    "handlers_unusable", "handler_changed_process", "database_trouble",
    # the keeper
    "jobs_handed_back", "jobs_recovered", "leases_reaped", "jobs_pruned", "upkeep_failed",
    # the web
    "web_listening", "web_not_started", "web_stopped",
})  # fmt: skip
"""The closed list of event names: what tools that read the log may rely on."""

STUCK_SECONDS: Final = 0.1
"""Wait for a reader that does not read; after that lines are dropped until it does again."""

_HEAD: Final = frozenset({"timestamp", "level", "event", "logger"})
_SECRET: Final = re.compile(r"password|passwd|token|secret|authorization|api_?key", re.IGNORECASE)
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


class RunningJob(Protocol):
    """What the log needs of the job that runs now."""

    @property
    def id(self) -> int:
        """The job's number."""
        ...

    @property
    def run(self) -> int:
        """The number of this claim."""
        ...

    @property
    def queue(self) -> str:
        """The queue's name."""
        ...

    @property
    def task(self) -> str:
        """The task's name."""
        ...

    @property
    def attempts(self) -> int:
        """Attempts charged before this one."""
        ...

    @property
    def headers(self) -> str | None:
        """The headers as stored; a `traceparent` in them names the job's trace."""
        ...


current_job: ContextVar[RunningJob | None] = ContextVar("herdsman_job", default=None)
"""The job that runs in this context; its id, queue, task, attempt and trace join every line."""


class _Sink:
    """Where lines go: a descriptor, or a stream that has none (a test's)."""

    def __init__(self) -> None:
        self.fd: int | None = 2
        self.stream: TextIO | None = None
        self.owned = False
        self.path: Path | None = None
        self.lost = 0
        self.kept: LastLines | None = None
        self._stuck = False

    def aim(self, fd: int | None, stream: TextIO | None, *, owned: bool) -> None:
        old, was_owned = self.fd, self.owned
        if was_owned and owned and old is not None and fd is not None:
            # In one step: another thread may be writing, and never meets a closed number.
            os.dup2(fd, old, inheritable=False)
            os.close(fd)
            return
        self.fd, self.stream, self.owned = fd, stream, owned
        if was_owned and old is not None and old != fd:
            with contextlib.suppress(OSError):
                os.close(old)

    def write(self, line: bytes) -> None:
        if self.kept is not None:
            self.kept.write(line)
        try:
            if self.fd is not None:
                # One write: lines of processes that share the descriptor do not interleave.
                if not self._takes(self.fd) or os.write(self.fd, line) != len(line):
                    self.lost += 1
            elif self.stream is not None:
                self.stream.write(line.decode(errors="replace"))
                self.stream.flush()
        except (OSError, ValueError):  # EPIPE, ENOSPC, EAGAIN, or a closed stream
            self.lost += 1

    def _takes(self, fd: int) -> bool:
        """Whether a line can be written without waiting; a full pipe would stop the worker.

        A pipe is writable when it has room for PIPE_BUF bytes, and no line is longer.
        """
        waiter = select.poll()
        waiter.register(fd, select.POLLOUT)
        ready = bool(waiter.poll(0 if self._stuck else STUCK_SECONDS * 1000))
        self._stuck = not ready
        return ready


_sink: Final = _Sink()
_render: Callable[[dict[str, Any]], bytes]


def lost() -> int:
    """Return how many lines this process could not write."""
    return _sink.lost


def configure(
    stream: TextIO | None = None, *, json: bool | None = None, level: str = "info"
) -> None:
    """Send all logs of this process to `stream` (None: standard error).

    `json` None means console lines on a terminal and JSON lines elsewhere. Safe to call
    again, also after a fork. Raises ValueError for an unknown level.
    """
    if level not in _LEVELS:
        raise ValueError(f"{level!r} is no log level; use {', '.join(_LEVELS)}")
    stream = sys.stderr if stream is None else stream
    try:
        fd: int | None = stream.fileno()
        terminal = stream.isatty()
    except (OSError, ValueError, AttributeError):
        fd, terminal = None, False
    _sink.aim(fd, stream, owned=False)
    global _render
    as_json = not terminal if json is None else json
    _render = _json_line if as_json else _console_renderer(terminal)
    structlog.configure(
        processors=[_process],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=_Logger,
        cache_logger_on_first_use=False,  # else a second configure() would change nothing
    )
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, _Handler)]:
        root.removeHandler(handler)
    root.addHandler(_Handler())
    root.setLevel(_LEVELS[level])
    logging.raiseExceptions = False


def reopen(path: Path) -> bool:
    """Send logs to the end of `path` from now on, opened anew (created 0600).

    For log rotation. When it cannot be opened, the old target stays and False returns.
    """
    try:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        structlog.get_logger("herdsman.logs").error(LOGS_LOST, path=str(path), error=error.strerror)
        return False
    _sink.aim(fd, None, owned=True)
    _sink.path = path
    return True


def reopen_again() -> None:
    """Open the log file of this process anew, if it has one: it may have been rotated."""
    if _sink.owned and _sink.path is not None:
        reopen(_sink.path)


def keep_last(path: str) -> None:
    """Keep this process's last lines in `path` as well, for those who ask why it died.

    A process that cannot works without; those it forks keep theirs out of the file.
    """
    with contextlib.suppress(OSError):
        _sink.kept = LastLines(path)
        os.register_at_fork(after_in_child=_sink.kept.close)


class _Logger:
    """The end of structlog's chain: its methods get the finished line."""

    def __init__(self, name: str = "herdsman") -> None:
        self.name = name

    def msg(self, line: bytes) -> None:
        _sink.write(line)

    debug = info = warning = error = critical = exception = log = msg


class _Handler(logging.Handler):
    """Bring records of the standard library onto the same path."""

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = {"event": MESSAGE}
        try:
            fields["message"] = record.getMessage()
        except Exception as error:
            fields["message"] = (
                f"{record.msg!r:.200} (arguments do not fit: {type(error).__name__})"
            )
        if record.exc_info:
            fields["exc_info"] = record.exc_info
        _sink.write(_line(record.name, record.levelname.lower(), fields))

    def handleError(self, record: logging.LogRecord) -> None:
        _sink.lost += 1


def _process(logger: Any, method: str, fields: MutableMapping[str, Any]) -> bytes:
    level = "error" if method == "exception" else method
    return _line(getattr(logger, "name", "herdsman"), level, dict(fields))


# structlog hands a processor's bytes to the logger as its only argument.


def _line(name: str, level: str, fields: dict[str, Any]) -> bytes:
    """Build one finished line; never raises."""
    try:
        event = str(fields.pop("event", MESSAGE))
        whole: dict[str, Any] = {
            "timestamp": _now(), "level": level, "event": event, "logger": name,
        }  # fmt: skip
        whole.update(structlog.contextvars.get_contextvars())
        job = current_job.get()
        if job is not None:
            whole.update(
                job_id=job.id, run=job.run, queue=job.queue, task=job.task,
                attempt=job.attempts + 1,
            )  # fmt: skip
            if (trace := traceparent.of_headers(job.headers)) is not None:
                whole["trace_id"] = trace.trace_id
        exc_info = fields.pop("exc_info", None)
        if "exception" in fields:  # the key of a traceback, which has lines of its own
            fields["exception_"] = fields.pop("exception")
        whole.update({k: v for k, v in fields.items() if k not in _HEAD})
        if exc_info:
            whole["exception"] = _exception(exc_info)
        return _render({key: _clean(key, value, 0) for key, value in whole.items()})
    except Exception as error:
        _sink.lost += 1
        kind = type(error).__name__
        return f'{{"event":"{LOGS_LOST}","level":"error","error":"{kind}"}}\n'.encode()


def _now() -> str:
    return datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="microseconds")[:-6] + "Z"


def _exception(exc_info: Any) -> str:
    if isinstance(exc_info, BaseException):
        exc_info = (type(exc_info), exc_info, exc_info.__traceback__)
    elif not isinstance(exc_info, tuple):
        exc_info = sys.exc_info()
    if exc_info[0] is None:
        return ""
    return "".join(traceback.format_exception(*exc_info, limit=-20)).rstrip()


def _clean(key: object, value: Any, depth: int) -> Any:
    """Redact secrets and turn everything into plain JSON values, bounded in depth and number."""
    if isinstance(key, str) and _SECRET.search(key):
        return REDACTED
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no number for it
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)
    if depth < DEPTH_MAX:
        if isinstance(value, Mapping):
            items = list(value.items())[:ITEMS_MAX]
            return {str(name): _clean(name, item, depth + 1) for name, item in items}
        if isinstance(value, list | tuple | set | frozenset):
            return [_clean(None, item, depth + 1) for item in list(value)[:ITEMS_MAX]]
    try:
        return str(value) if isinstance(value, Path) else repr(value)
    except Exception:
        return f"<{type(value).__name__}: it has no printable form>"


def _json_line(fields: dict[str, Any]) -> bytes:
    for longest in _lengths():
        line = json.dumps(
            {k: _shorten(v, longest) for k, v in fields.items()} if longest else fields,
            ensure_ascii=False, default=repr, separators=(",", ":"),
        )  # fmt: skip
        data = line.encode(errors="backslashreplace") + b"\n"
        if len(data) <= LINE_BYTES_MAX:
            return data
    head = {k: str(fields.get(k))[:200] for k in ("timestamp", "level", "event", "logger")}
    return json.dumps({**head, "cut": True}).encode() + b"\n"


def _lengths() -> Iterator[int]:
    yield 0
    yield from (2048, 1024, 512, 256, 128, 64)


def _shorten(value: Any, longest: int) -> Any:
    """Cut a long value to text with a mark; the end of a traceback tells more than its start."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
    if len(text) <= longest:
        return value
    if text.startswith("Traceback"):
        return CUT + text[-longest:]
    return text[:longest] + CUT


def _console_renderer(colors: bool) -> Callable[[dict[str, Any]], bytes]:
    console = structlog.dev.ConsoleRenderer(
        colors=colors and not os.environ.get("NO_COLOR"),
        exception_formatter=structlog.dev.plain_traceback,
        pad_event_to=0,
    )

    def render(fields: dict[str, Any]) -> bytes:
        trace = str(fields.pop("exception", None) or "")
        if "stack" in fields:  # the renderer would print it raw
            fields["stack_info"] = fields.pop("stack")
        # Values may come from payloads: no terminal escape of theirs reaches the terminal.
        safe = {
            _CONTROL.sub("·", k): _CONTROL.sub("·", v) if isinstance(v, str) else v
            for k, v in fields.items()
        }
        text = str(console(None, "", safe))
        if trace:
            text += "\n" + "\n".join(_CONTROL.sub("·", line) for line in trace.splitlines())
        data = text.encode(errors="backslashreplace")
        if len(data) >= LINE_BYTES_MAX:
            mark = CUT.encode()
            data = data[: LINE_BYTES_MAX - 1 - len(mark)].decode(errors="ignore").encode() + mark
        return data + b"\n"

    return render


_render = _json_line
