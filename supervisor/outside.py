"""Call a command or an HTTP endpoint with one claimed job, and turn the answer into a result.

Boundary: one child process or one request per call, ended before the call returns. No
shell, no database, no retry policy; the time limit comes from the handler's settings.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import os
import selectors
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from queue_core.job import Claimed, Outcome, Reason
from queue_core.retry import Done, Reject, Result, Retry
from supervisor.calls import (
    ERROR_BYTES_MAX,
    Call,
    Surroundings,
    Undecodable,
    cut,
    decode,
    error_text,
    failure_of,
)
from supervisor.linux import start_time, stat_of
from supervisor.logs import current_job

EXIT_RETRY: Final = 75
"""EX_TEMPFAIL of sysexits.h: the command asks for another attempt."""
EXIT_REJECT: Final = 65
"""EX_DATAERR of sysexits.h: the payload can never be processed."""
TAIL_BYTES: Final = 2 * 1024
RETRY_AFTER_SECONDS_MAX: Final = 86_400.0
"""Longest Retry-After honoured: a day; more is a mistake of the endpoint."""
RETRY_STATUSES: Final = frozenset({408, 425, 429})
KILL_WAIT_SECONDS: Final = 5.0
_READ_BYTES: Final = 65_536


def command_call(argv: Sequence[str], *, timeout_seconds: float) -> Call:
    """Build the call of a command: payload on its standard input, result by exit code.

    0 is done, 65 rejects, 75 and any other code retry with the last 2 KB of its standard
    error. Its standard output is dropped. What it started in its process group is killed with
    it when time is up or the job is interrupted.
    """
    failure = failure_of()
    surroundings = Surroundings()

    def call(claimed: Claimed) -> Result:
        current_job.set(claimed)
        try:
            decode(claimed.payload)
            return _run(argv, claimed, timeout_seconds)
        except BaseException as error:
            return failure(error)
        finally:
            current_job.set(None)
            surroundings.restore(None)

    return call


def _run(argv: Sequence[str], claimed: Claimed, timeout_seconds: float) -> Result:
    deadline = time.monotonic() + timeout_seconds
    leader = os.getpgrp() == os.getpid()
    # A worker leads a group of its own, which the supervisor kills as a whole when the worker
    # dies: the command stays in it. Anyone else gives the command a group to be killed by.
    process = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env={**os.environ, **_facts(claimed)}, process_group=None if leader else 0,
    )  # fmt: skip
    try:
        tail = _talk(process, claimed.payload, deadline)
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(max(0.0, deadline - time.monotonic()))
            return _by_exit_code(code, tail)
        return Retry(
            error=f"{argv[0]} ran past its limit of {timeout_seconds:g} s and was killed",
            traceback=tail or None, outcome=Outcome.TIMED_OUT,
        )  # fmt: skip
    finally:
        if process.returncode is None:
            _kill(process, leader)
        for pipe in (process.stdin, process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _by_exit_code(code: int, tail: str) -> Result:
    if code == 0:
        return Done()
    if code < 0:
        return Retry(error=f"killed by {_signal_name(-code)}", traceback=tail or None)
    last = tail.strip().rsplit("\n", 1)[-1]
    text = cut(f"exit code {code}: {last}" if last else f"exit code {code}", ERROR_BYTES_MAX)
    if code == EXIT_REJECT:
        return Reject(error=text, traceback=tail or None)
    return Retry(error=text, traceback=tail or None)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _talk(process: subprocess.Popen[bytes], payload: bytes, deadline: float) -> str:
    """Feed the payload and keep the end of what is complained, until both pipes are done."""
    assert process.stdin is not None
    assert process.stderr is not None
    left, tail = memoryview(payload), b""
    with selectors.DefaultSelector() as selector:
        for pipe, event in (
            (process.stdin, selectors.EVENT_WRITE), (process.stderr, selectors.EVENT_READ),
        ):  # fmt: skip
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, event)
        while selector.get_map() and (wait := deadline - time.monotonic()) > 0:
            # A grandchild may keep the pipe open after the command has ended: look at both.
            for key, _ in selector.select(min(wait, 0.05 if process.stdin.closed else wait)):
                pipe = _pipe(key.fileobj)
                if pipe is process.stdin:
                    left = left[_feed(pipe, left) :]
                    if not left:
                        selector.unregister(pipe)
                        with contextlib.suppress(OSError):
                            pipe.close()
                elif data := os.read(pipe.fileno(), _READ_BYTES):
                    tail = (tail + data)[-TAIL_BYTES:]
                else:
                    selector.unregister(pipe)
            if process.stdin.closed and process.poll() is not None:
                tail = (tail + _rest(process.stderr))[-TAIL_BYTES:]
                break
    return cut(tail.decode(errors="replace"), TAIL_BYTES * 3, keep_end=True)


def _pipe(fileobj: Any) -> IO[bytes]:
    return fileobj  # type: ignore[no-any-return]


def _feed(pipe: IO[bytes], left: memoryview) -> int:
    try:
        return os.write(pipe.fileno(), left[:_READ_BYTES])
    except BlockingIOError:
        return 0
    except OSError:  # a command need not read its input
        return len(left)


def _rest(pipe: IO[bytes]) -> bytes:
    tail = b""
    with contextlib.suppress(OSError):
        for _ in range(64):  # more than a full pipe holds
            data = os.read(pipe.fileno(), _READ_BYTES)
            if not data:
                break
            tail = (tail + data)[-TAIL_BYTES:]
    return tail


def _kill(process: subprocess.Popen[bytes], leader: bool) -> None:
    """Kill the command and everything it started that is still in the process group."""
    if leader:
        born = start_time(process.pid) or 2**63  # gone: nobody is younger
        for _ in range(10):  # again, because what is killed may just have forked
            younger = [pid for pid, birth in _group_mates() if birth >= born]
            for pid in younger:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not younger or younger == [process.pid]:
                break
    else:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_WAIT_SECONDS)


def _group_mates() -> Iterator[tuple[int, int]]:
    """Yield (pid, start time in ticks) of the other processes of our group."""
    own, group = os.getpid(), os.getpgrp()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != own:
            fields = stat_of(entry.name)
            if fields and int(fields[2]) == group and fields[0] != b"Z":
                yield int(entry.name), int(fields[19])


def _facts(claimed: Claimed) -> Mapping[str, str]:
    """What a command learns of its job beside the payload."""
    return {
        "HERDSMAN_JOB_ID": str(claimed.id),
        "HERDSMAN_RUN": str(claimed.run),
        "HERDSMAN_QUEUE": claimed.queue,
        "HERDSMAN_TASK": claimed.task,
        "HERDSMAN_ATTEMPT": str(claimed.attempts + 1),
    }


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Following a redirect would turn the POST into a GET: report it instead."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def http_call(url: str, *, timeout_seconds: float) -> Call:
    """Build the call of an endpoint: POST the payload as JSON, result by status.

    2xx is done; 4xx rejects, save 408, 425 and 429; everything else retries, after the
    answer's Retry-After when it has one.
    """
    failure = failure_of()
    opener = urllib.request.build_opener(_NoRedirects)

    def call(claimed: Claimed) -> Result:
        current_job.set(claimed)
        try:
            decode(claimed.payload)
            return _post(opener, url, claimed, timeout_seconds)
        except BaseException as error:
            return failure(error)
        finally:
            current_job.set(None)

    return call


def _post(
    opener: urllib.request.OpenerDirector, url: str, claimed: Claimed, timeout_seconds: float
) -> Result:
    request = urllib.request.Request(  # noqa: S310 - settings admit http and https only
        url, data=claimed.payload, method="POST",
        headers={
            "Content-Type": "application/json",
            "User-Agent": "herdsman",
            "Idempotency-Key": f"herdsman-{claimed.id}",
            "X-Herdsman-Job-Id": str(claimed.id),
            "X-Herdsman-Attempt": str(claimed.attempts + 1),
        },
    )  # fmt: skip
    try:
        with opener.open(request, timeout=timeout_seconds):
            return Done()
    except urllib.error.HTTPError as answer:
        with answer:
            return _by_status(answer)
    except (TimeoutError, urllib.error.URLError, http.client.HTTPException, OSError) as error:
        reason = getattr(error, "reason", error)
        late = isinstance(reason, TimeoutError)
        what = (
            f"no answer within {timeout_seconds:g} s"
            if late
            else error_text(reason if isinstance(reason, BaseException) else error)
        )
        return Retry(
            error=cut(f"{url}: {what}", ERROR_BYTES_MAX),
            outcome=Outcome.TIMED_OUT if late else Outcome.FAILED,
        )


def _by_status(answer: urllib.error.HTTPError) -> Result:
    body = b""
    with contextlib.suppress(OSError, http.client.HTTPException):
        body = answer.read(TAIL_BYTES)
    text = cut(f"HTTP {answer.code}: {body.decode(errors='replace').strip()}", ERROR_BYTES_MAX)
    if 400 <= answer.code < 500 and answer.code not in RETRY_STATUSES:
        return Reject(error=text, reason=Reason.REJECTED)
    return Retry(error=text, after_seconds=_retry_after(answer.headers.get("Retry-After")))


def _retry_after(text: str | None) -> float | None:
    """Read Retry-After: a number of seconds, or a date; None when it is neither."""
    if not text:
        return None
    try:
        delay = (
            float(text)
            if text.strip().isdigit()
            else (email.utils.parsedate_to_datetime(text).timestamp() - time.time())
        )
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(delay, 0.0), RETRY_AFTER_SECONDS_MAX)


__all__ = ["Undecodable", "command_call", "http_call"]
