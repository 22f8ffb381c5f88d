"""Call a Python handler with one claimed job, and turn whatever happens into a result.

An exception never leaves a call as an object: only its text does, so that no handler can
keep memory alive or make the worker run its code later. Working folder, umask and signal
handlers are put back after every call. Boundary: no database, no fork, no decision about
retries (`queue_core.retry`); a call without trouble costs a few microseconds.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextvars import copy_context
from typing import Any, Final, Literal, cast

import structlog

from queue_core.job import (
    ERROR_CHARS_MAX,
    MAX_ATTEMPTS_DEFAULT,
    TRACEBACK_CHARS_MAX,
    Claimed,
    Job,
    Outcome,
    Reason,
)
from queue_core.retry import Done, Interrupted, Reject, Result, Retry, Snooze
from supervisor.child import JobInterrupted, SoftTimeout
from supervisor.logs import current_job

ERROR_BYTES_MAX: Final = ERROR_CHARS_MAX
TRACEBACK_BYTES_MAX: Final = TRACEBACK_CHARS_MAX
"""In bytes no text holds more characters than are stored, so none is cut twice."""
TRACEBACK_FRAMES_MAX: Final = 40

Call = Callable[[Claimed], Result]
Errors = tuple[type[BaseException], ...]
Takes = Literal["payload", "job", "payload, job", "payload, job=job"]
"""Which arguments a Python handler takes; `job` is a `queue_core.job.Job`."""

log = structlog.get_logger("herdsman.handlers")

HANDLER_CHANGED_PROCESS: Final = "handler_changed_process"

_DONE: Final = Done()
_decode: Final = json.JSONDecoder().decode
_scan: Final[Callable[[str, int], tuple[Any, int]]] = cast("Any", json.JSONDecoder()).scan_once
# The C function under signal.getsignal: without the conversion to an enum, which costs 2 µs a
# signal, two looks a job are cheap.
_handler_of: Final[Callable[[int], Any]] = importlib.import_module("_signal").getsignal
_SIGNALS: Final = (
    int(signal.SIGTERM), int(signal.SIGQUIT), int(signal.SIGALRM), int(signal.SIGINT),
)  # fmt: skip


class Undecodable(ValueError):
    """A payload that is not JSON; the job can never run."""


def decode(payload: bytes) -> Any:
    """Return the payload's value; raises Undecodable, whose text says why."""
    try:
        text = payload.decode()
        try:
            value, end = _scan(text, 0)
        except StopIteration:  # white space in front, or no JSON
            return _decode(text)
        # What follows is white space or a fault: the slower way tells them apart.
        return value if end == len(text) else _decode(text)
    except (ValueError, RecursionError) as error:
        raise Undecodable(f"the payload is not JSON: {error_text(error)}") from None


def python_call(
    function: Callable[..., Any],
    *,
    takes: Takes = "payload",
    is_async: bool = False,
    max_attempts: int = MAX_ATTEMPTS_DEFAULT,
    retry_on: Errors = (),
    reject_on: Errors = (),
) -> Call:
    """Build the call of a Python handler.

    Args:
        function: called with the payload.
        takes: which arguments it gets.
        is_async: the function is a coroutine function; each job gets a fresh event loop.
        max_attempts: what `Job.max_attempts` says when the job has none of its own.
        retry_on: when set, any other exception rejects the job.
        reject_on: these exceptions reject the job.
    """
    target = _async_target(function) if is_async else function
    failure = failure_of(retry_on, reject_on)
    surroundings = Surroundings()
    getpid, restore, set_job = os.getpid, surroundings.restore, current_job.set

    def call(claimed: Claimed) -> Result:
        result: Result | None = None
        try:
            pid, handlers = getpid(), surroundings.signals()
            set_job(claimed)
            try:
                payload = decode(claimed.payload)
                run = copy_context().run  # what the handler binds for its logs ends with it
                if takes == "payload":
                    value = run(target, payload)
                else:
                    job = job_of(claimed, payload, max_attempts)
                    value = run(_with_job, target, takes, payload, job)
                result = _DONE if value is None else run(_judge, value)
            except BaseException as error:
                result = failure(error)
            if getpid() != pid:
                _leave_fork(result)
            set_job(None)
            restore(handlers)
        except (JobInterrupted, SoftTimeout) as late:  # it struck between the handler and here
            if result is None:
                result = failure(late)
            restore(None)
        return result

    return call


def _with_job(target: Callable[..., Any], takes: Takes, payload: Any, job: Job[Any]) -> Any:
    if takes == "job":
        return target(job)
    return target(payload, job) if takes == "payload, job" else target(payload, job=job)


def _judge(value: object) -> Result:
    """Run what a decorated function left to be awaited, and refuse what has not run at all."""
    if inspect.iscoroutine(value):
        value = asyncio.run(value)
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        raise TypeError("the handler returned a generator, whose code has not run")
    return result_of(value)


def _async_target(function: Callable[..., Any]) -> Callable[..., Any]:
    def target(*args: Any, **kwargs: Any) -> Any:
        return asyncio.run(function(*args, **kwargs))

    return target


def _leave_fork(result: Result) -> None:
    """End a process that the handler forked and that came back: it is not the worker."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0 if isinstance(result, Done) else 1)


def result_of(value: object) -> Result:
    """Map what a handler returned: a result record is itself, anything else is success."""
    match value:
        case Retry(outcome=Outcome.FAILED | Outcome.TIMED_OUT):
            return Retry(
                error=cut(value.error, ERROR_BYTES_MAX),
                traceback=_cut_or_none(value.traceback),
                after_seconds=_seconds(value.after_seconds),
                outcome=value.outcome,
            )
        case Reject():
            return Reject(
                error=cut(value.error, ERROR_BYTES_MAX),
                traceback=_cut_or_none(value.traceback),
                reason=value.reason if isinstance(value.reason, Reason) else Reason.REJECTED,
            )
        case Snooze():
            return Snooze(after_seconds=_seconds(value.after_seconds) or 0.0)
        case Interrupted():
            return Interrupted(error=cut(value.error, ERROR_BYTES_MAX))
        case _:
            return _DONE


def failure_of(retry_on: Errors = (), reject_on: Errors = ()) -> Callable[[BaseException], Result]:
    """Build the map from an exception to a result."""

    def failure(error: BaseException) -> Result:
        if isinstance(error, JobInterrupted):
            return Interrupted(error="the worker was told to stop while the job ran")
        if isinstance(error, Undecodable):
            return Reject(error=cut(str(error), ERROR_BYTES_MAX), reason=Reason.UNDECODABLE)
        text, trace = error_text(error), traceback_text(error)
        if isinstance(error, SoftTimeout):
            return Retry(
                error="the job ran past its soft_timeout", traceback=trace,
                outcome=Outcome.TIMED_OUT,
            )  # fmt: skip
        if isinstance(error, reject_on) or (retry_on and not isinstance(error, retry_on)):
            return Reject(error=text, traceback=trace)
        return Retry(error=text, traceback=trace)

    return failure


def error_text(error: BaseException) -> str:
    """Return "ValueError: text", at most 2 KB, even of an exception that cannot be shown."""
    kind = type(error).__name__
    try:
        text = str(error)
    except BaseException as second:
        if isinstance(second, JobInterrupted | SoftTimeout):
            raise
        text = "its text cannot be shown"
    return cut(f"{kind}: {text}" if text else kind, ERROR_BYTES_MAX)


def traceback_text(error: BaseException) -> str:
    """Return the traceback without our own frames, the last 16 KB of it."""
    try:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__,):
            trace = trace.tb_next
        lines = traceback.format_exception(type(error), error, trace, limit=-TRACEBACK_FRAMES_MAX)
        return cut("".join(lines), TRACEBACK_BYTES_MAX, keep_end=True)
    except (JobInterrupted, SoftTimeout):
        raise
    except BaseException as second:
        return f"the traceback cannot be shown ({type(second).__name__})"


def cut(value: object, bytes_max: int, *, keep_end: bool = False) -> str:
    """Return text that fits `bytes_max` and can be stored: no lone surrogates, no NUL."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    # Each character is at least a byte, so nothing that fits is lost by slicing first.
    text = text[-bytes_max:] if keep_end else text[:bytes_max]
    data = text.replace("\0", "\\0").encode(errors="backslashreplace")
    if len(data) > bytes_max:
        data = data[-bytes_max:] if keep_end else data[:bytes_max]
    return data.decode(errors="ignore")


def _cut_or_none(value: str | None) -> str | None:
    return None if value is None else cut(value, TRACEBACK_BYTES_MAX, keep_end=True)


def _seconds(value: object) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and value == value:
        return min(max(float(value), 0.0), 365 * 86_400.0)
    return None


def job_of(claimed: Claimed, payload: Any, max_attempts: int) -> Job[Any]:
    """Build the job as the handler sees it; headers that do not decode are left out."""
    headers: Mapping[str, Any] = {}
    if claimed.headers:
        try:
            found = _decode(claimed.headers)
            headers = found if isinstance(found, dict) else {}
        except (ValueError, RecursionError):
            headers = {}
    return Job(
        id=claimed.id, run=claimed.run, queue=claimed.queue, task=claimed.task, payload=payload,
        attempt=claimed.attempts + 1, max_attempts=claimed.max_attempts or max_attempts,
        priority=claimed.priority, key=claimed.key, headers=headers, group=claimed.group,
        enqueued_us=claimed.enqueued_us, claimed_us=claimed.claimed_us,
        expires_us=claimed.expires_us, payload_bytes=claimed.payload,
    )  # fmt: skip


class Surroundings:
    """What a handler may change for the whole process, and what is put back after it."""

    __slots__ = ("_folder_fd", "_umask")

    def __init__(self) -> None:
        # A descriptor, not a path: it still leads back when the folder was moved.
        self._folder_fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._umask = os.umask(0o077)
        os.umask(self._umask)

    def signals(self) -> tuple[Any, ...]:
        """Return the handlers of the signals the worker lives by."""
        get, (term, quit_, alarm, interrupt) = _handler_of, _SIGNALS
        return get(term), get(quit_), get(alarm), get(interrupt)

    def restore(self, before: tuple[Any, ...] | None) -> None:
        """Put working folder and umask back, and signal handlers when one changed."""
        try:
            os.fchdir(self._folder_fd)
        except OSError as error:
            log.warning(HANDLER_CHANGED_PROCESS, what="folder", error=error.strerror)
        os.umask(self._umask)
        if before is not None and self.signals() != before:
            for number, handler in zip(_SIGNALS, before, strict=True):
                if handler is not None and _handler_of(number) != handler:
                    signal.signal(number, handler)
            log.warning(HANDLER_CHANGED_PROCESS, what="signal handlers")
