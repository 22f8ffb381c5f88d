"""Check a configuration as far as it can be without running it: `herdsman check`.

Boundary: handlers are imported in a throwaway process, which may crash or hang without harm;
the database is opened only if it exists.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from supervisor.cli import output
from supervisor.cli.context import Config, Json, opened
from supervisor.cli.errors import CONFIGURATION

if TYPE_CHECKING:
    from supervisor.faults import Fault
    from supervisor.settings import Settings

IMPORT_SECONDS_MAX: Final = 60.0
"""As long as a worker may take to start."""
REPORT_BYTES_MAX: Final = 1024 * 1024

_PROBE: Final = (
    "import json, sys\n"
    "asked = json.loads(sys.argv[1])\n"
    "sys.path[:] = asked['path']\n"
    "from supervisor.cli.check import probe\n"
    "probe(asked['config'], asked['fd'])\n"
)


def check(config: Config = None, as_json: Json = False) -> None:
    """Check the configuration, the handlers and the database, and say everything that is wrong."""
    import typer

    from supervisor import settings as reading
    from supervisor.catalogue import targets_between_bounds
    from supervisor.faults import SettingsError

    faults: list[Fault] = []
    warnings: tuple[str, ...] = ()
    settings: Settings | None = None
    try:
        settings = reading.load(config)
        warnings = (*settings.warnings, *targets_between_bounds(settings))
        faults += _handlers(settings) + _token(settings) + _database(settings)
    except SettingsError as error:
        faults += error.faults
    if as_json:
        output.emit(
            "check",
            ok=not faults,
            config=str(settings.path) if settings else None,
            handlers=sorted(settings.handlers) if settings else [],
            queues=list(settings.queue_names) if settings else [],
            pools=sorted(settings.pools) if settings else [],
            faults=[{"where": f.where, "what": f.what, "next": f.next} for f in faults],
            warnings=list(warnings),
        )
    for warning in warnings:
        output.say(f"warning: {warning}")
    for fault in faults:
        output.say(f"fault: {fault}")
    if faults:
        raise typer.Exit(CONFIGURATION)
    if settings is not None and not as_json:
        output.line(
            f"ok: {settings.path}: {output.counted(len(settings.handlers), 'handler')}, "
            f"{output.counted(len(settings.queue_names), 'queue')}, "
            f"{output.counted(len(settings.pools), 'pool')}"
        )


def _token(settings: Settings) -> list[Fault]:
    from supervisor.faults import Fault

    path = settings.web.token_file
    if path is None:
        return []
    try:
        with path.open("rb") as file:
            if file.readline(4096).strip():
                return []
        what = "it is empty"
    except OSError as error:
        what = f"it cannot be read: {error.strerror}"
    return [Fault(where=f"web.token_file {path}", what=what, next="write the secret on one line")]


def _database(settings: Settings) -> list[Fault]:
    from queue_core.errors import QueueError
    from supervisor.faults import Fault

    if "://" not in settings.database and not Path(settings.database).exists():
        return []
    try:
        with opened(settings.database) as engine:
            engine.snapshot()
    except QueueError as error:
        what, _, then = str(error).rpartition("; ")  # the sentence names file and remedy itself
        if not what:
            what, then = then, "mend it, or name another"
        return [Fault(where="database", what=what, next=then)]
    return []


def _handlers(settings: Settings) -> list[Fault]:
    """Import all handlers in a process of its own and return what it found wrong."""
    from supervisor.faults import Fault

    read, write = os.pipe()
    asked = {"path": _import_path(), "config": str(settings.path), "fd": write}
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROBE, json.dumps(asked)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            pass_fds=(write,), start_new_session=True,
        )  # fmt: skip
    except OSError:
        os.close(read)
        raise
    finally:
        os.close(write)
    report = _report(process, read)
    if report is None:
        code = process.returncode
        why = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        if code == -signal.SIGKILL:
            why = f"took longer than {IMPORT_SECONDS_MAX:g} s, or was killed"
        return [Fault(
            where="handlers", what=f"the process that imported them {why}",
            next="import each module by hand to see which one does it",
        )]  # fmt: skip
    return [Fault(where=f["where"], what=f["what"], next=f["next"]) for f in report]


def _import_path() -> list[str]:
    """Return the import path as a worker would have it: absolute, without the current folder."""
    return [path for path in sys.path if path and Path(path).is_absolute()]


def _report(process: subprocess.Popen[bytes], read: int) -> list[dict[str, str]] | None:
    """Wait for the report and the end of the process, at most the time a start may take."""
    try:
        with os.fdopen(read, "rb") as pipe:
            with suppress(subprocess.TimeoutExpired):
                # The report is small: it fits into the pipe before the process ends.
                process.wait(IMPORT_SECONDS_MAX)
            if process.returncode is None:
                return None
            os.set_blocking(pipe.fileno(), False)
            data = pipe.read(REPORT_BYTES_MAX) or b""
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
    try:
        found: list[dict[str, str]] = json.loads(data)
    except ValueError:
        return None
    return found


def probe(config: str, fd: int) -> None:
    """Import the handlers and write what is wrong with them to a descriptor; for the child."""
    from supervisor import handlers, settings

    found: list[dict[str, Any]] = []
    try:
        handlers.load(settings.load(Path(config)))
    except handlers.HandlerError as error:
        found = [{"where": f.where, "what": f.what, "next": f.next} for f in error.faults]
    # Nobody reads before this process ends: the whole must fit into a pipe (64 KiB).
    short = [{key: text[:800] for key, text in fault.items()} for fault in found[:40]]
    data = json.dumps(short, ensure_ascii=False).encode(errors="replace")[:60_000]
    os.write(fd, data)
    os._exit(0)
