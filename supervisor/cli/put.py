"""Put jobs into a queue: one from the command line, many from standard input.

Boundary: reads and checks JSON, calls `Queue.put` and `put_many`, prints ids.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final

import typer

from supervisor.cli import output
from supervisor.cli.context import Config, Database, Json, opened, settings_for
from supervisor.cli.errors import CommandFailed, OutputClosed, UsageFault

if TYPE_CHECKING:
    from queue_core import JobId, Queue

BATCH_JOBS: Final = 1000
BATCH_BYTES_MAX: Final = 8 * 1024 * 1024
"""A batch ends at this many bytes too: jobs of a megabyte must not fill the memory."""
LINE_BYTES_MAX: Final = 4 * 1024 * 1024
"""Longest line read; a payload is at most 1 MiB, spaces and escapes may make it longer."""


def put(
    queue: Annotated[str, typer.Argument(help="Name of the queue.", show_default=False)],
    payload: Annotated[
        str,
        typer.Argument(help="The payload as JSON; - reads one per line from standard input."),
    ],
    task: Annotated[
        str | None, typer.Option("--task", "-t", help="Task, when it is not the queue's name.")
    ] = None,
    delay: Annotated[
        str | None, typer.Option("--delay", help='Run it that much later: "5s", "1h".')
    ] = None,
    priority: Annotated[int, typer.Option("--priority", "-p", help="Larger goes first.")] = 0,
    key: Annotated[
        str | None, typer.Option("--key", "-k", help="Idempotency key: stored once.")
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option("--header", metavar="K=V", help="Header; may be repeated.")
    ] = None,
    max_attempts: Annotated[
        int | None, typer.Option("--max-attempts", min=1, help="Attempts until it is dead.")
    ] = None,
    config: Config = None,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Put a job into a queue and print its id."""
    from queue_core import Queue

    options: dict[str, Any] = {
        "task": task,
        "delay": _delay_seconds(delay),
        "priority": priority,
        "headers": dict(_header(text) for text in header or ()) or None,
        "max_attempts": max_attempts,
    }
    if payload == "-" and key is not None:
        raise UsageFault("--key names one job; give it with a payload, not with -")
    value = None if payload == "-" else _parse(payload)
    path = settings_for(config, database).database
    new = "://" not in path and not Path(path).exists()
    try:
        with opened(path, create=True) as engine:
            jobs: Queue[Any] = Queue(path, queue, engine=engine)
            if payload == "-":
                _put_lines(jobs, options, as_json)
            else:
                _put_one(jobs, value, key, options, as_json)
    finally:
        if new and Path(path).exists():
            output.say(f"created the database {path}")


def _put_one(
    queue: Queue[Any], value: Any, key: str | None, options: dict[str, Any], as_json: bool
) -> None:
    try:
        job_id = queue.put(value, key=key, **options)
    except KeyboardInterrupt:
        again = "put it again, with the same key" if key else "look before you put it again"
        output.say(f"the job may be stored: {again}")
        raise
    if as_json:
        output.emit("put", queue=queue.name, id=int(job_id), duplicate=job_id.duplicate)
        return
    output.line(str(int(job_id)))
    if job_id.duplicate:
        output.say(f"{int(job_id)} (duplicate): a job with this key was there, nothing was stored")


def _delay_seconds(text: str | None) -> float:
    from supervisor import durations

    try:
        return durations.seconds(text) if text is not None else 0.0
    except ValueError as error:
        raise UsageFault(f"--delay: {error}") from None


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageFault(f"--header {text!r} is not NAME=VALUE")
    return name, value


def _parse(text: str) -> Any:
    try:
        return _loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageFault(
            f"the payload is not JSON: {_reason(error)}; a text needs quotes, as in '\"hello\"'"
        ) from None


def _loads(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _reason(error: BaseException) -> str:
    match error:
        case RecursionError():
            return "it is nested too deeply"
        case json.JSONDecodeError():
            line = f"line {error.lineno}, " if error.lineno > 1 else ""
            return f"{error.msg} ({line}column {error.colno})"
    return str(error)


@dataclass(kw_only=True)
class _Batch:
    """Payloads read and not stored yet, with the lines they came from."""

    payloads: list[Any] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    size_bytes: int = 0

    @property
    def full(self) -> bool:
        return len(self.payloads) >= BATCH_JOBS or self.size_bytes >= BATCH_BYTES_MAX


@dataclass(kw_only=True)
class _Stored:
    """What has been stored so far."""

    ids: list[int] = field(default_factory=list)
    number: int = 0
    next_line: int = 1
    unsure: tuple[int, int] | None = None
    """The first and the last line of a batch of which nobody knows whether it is stored."""

    @property
    def advice(self) -> str:
        """What to do about the lines that are not counted."""
        if self.unsure is None:
            return f"go on from line {self.next_line}"
        first, last = self.unsure
        lines = f"line {first}" if first == last else f"lines {first} to {last}"
        return f"{lines} may be stored too: look before you put them again"


def _put_lines(queue: Queue[Any], options: dict[str, Any], as_json: bool) -> None:
    """Store standard input batch by batch; on a fault say how far it came."""
    stored = _Stored()
    fault: str | None = None
    try:
        with _progress() as advance:
            for batch in _batches(sys.stdin.buffer, advance):
                _store(queue, batch, options, stored, as_json)
    except OutputClosed:
        fault = "nobody reads the ids any more"
        raise CommandFailed(fault) from None
    except (CommandFailed, KeyboardInterrupt) as error:
        fault = str(error) or "interrupted"
        raise
    except Exception as error:
        fault = str(error)
        raise
    finally:
        if as_json and fault != "":
            output.emit(
                "put", queue=queue.name, stored=stored.number, ids=stored.ids,
                lines_unsure=stored.unsure, error=fault,
            )  # fmt: skip
        if fault is not None:
            done = output.counted(stored.number, "job")
            output.say(f"stored {done}, then stopped; {stored.advice}")
        elif not as_json:
            output.say(f"stored {output.counted(stored.number, 'job')}")


def _store(
    queue: Queue[Any], batch: _Batch, options: dict[str, Any], stored: _Stored, as_json: bool
) -> None:
    """Store a batch and print its ids, also when Ctrl-C comes while it is stored.

    Handlers are held back until the ids are taken in. In a wait they run all the same, and
    what is raised there tells nothing: another process may have stored a job it was shown.
    """
    from queue_core.engines import deferral
    from queue_core.errors import DurabilityUnknown, PayloadInvalid, QueueError

    ids: list[JobId] = []
    try:
        with deferral.held():
            stored.unsure = batch.numbers[0], batch.numbers[-1]
            try:
                ids = queue.put_many(batch.payloads, **options)
            except DurabilityUnknown:
                raise
            except QueueError:  # nothing is stored then
                stored.unsure = None
                raise
            stored.number += len(ids)
            stored.next_line = batch.numbers[-1] + 1
            stored.unsure = None
            if as_json:
                stored.ids.extend(int(one) for one in ids)
    except PayloadInvalid as error:
        raise CommandFailed(f"{_culprit(batch, error)}; nothing of its batch was stored") from None
    finally:
        if ids and not as_json:
            output.lines([str(int(one)) for one in ids])


def _culprit(batch: _Batch, error: Exception) -> str:
    """Name the line whose payload cannot be stored, as far as its own encoding tells."""
    from queue_core import codec
    from queue_core.errors import PayloadInvalid
    from queue_core.job import PAYLOAD_BYTES_MAX

    for number, payload in zip(batch.numbers, batch.payloads, strict=True):
        try:
            codec.encode(codec.JsonSerializer(), payload, PAYLOAD_BYTES_MAX)
        except PayloadInvalid as own:
            return f"line {number}: {own}"
    return str(error)


def _batches(source: BinaryIO, advance: Any) -> Iterator[_Batch]:
    """Read payloads, one a line; blank lines are skipped. Raises CommandFailed naming a line."""
    batch, number = _Batch(), 0
    while text := source.readline(LINE_BYTES_MAX + 1):
        number += 1
        if len(text) > LINE_BYTES_MAX:
            raise CommandFailed(
                f"line {number} is longer than {LINE_BYTES_MAX} bytes; "
                "nothing of its batch was stored"
            )
        advance(len(text))
        if not text.strip():
            continue
        try:
            batch.payloads.append(_loads(text.rstrip(b"\r\n").decode("utf-8-sig")))
        except UnicodeDecodeError:
            raise CommandFailed(
                f"line {number} is not UTF-8 text; nothing of its batch was stored"
            ) from None
        except (ValueError, RecursionError) as error:
            raise CommandFailed(
                f"line {number} is not JSON: {_reason(error)}; nothing of its batch was stored"
            ) from None
        batch.numbers.append(number)
        batch.size_bytes += len(text)
        if batch.full:
            yield batch
            batch = _Batch()
    if batch.payloads:
        yield batch


@contextmanager
def _progress() -> Iterator[Any]:
    """Show bytes read on a terminal; elsewhere nothing."""
    if not sys.stderr.isatty() or sys.stdin.isatty() or sys.stdout.isatty():
        yield lambda read: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    total = os.fstat(sys.stdin.fileno()).st_size or None
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    # Not redirected: the ids belong to standard output, also while the bar is drawn.
    with Progress(
        *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
    ) as progress:
        bar = progress.add_task("put", total=total)
        yield lambda read: progress.advance(bar, read)
