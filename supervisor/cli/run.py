"""Run the service: check, lock, lay out the tree, supervise.

Boundary: wires the parts by passing functions in; decides nothing. The database
and the handlers are looked at in a process that is thrown away, since the
supervisor itself has neither.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import uuid
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from supervisor.cli import output
from supervisor.cli.context import Config, Database, settings_for
from supervisor.cli.errors import CommandFailed, UsageFault

if TYPE_CHECKING:
    from queue_core.lockfile import InstanceLock
    from supervisor.child import Child
    from supervisor.settings import Settings
    from supervisor.slots import SlotTable
    from supervisor.supervise import Tree

CHECK_SECONDS: Final = 120.0
EXIT_HELD: Final = 73
"""EX_CANTCREAT of sysexits.h: another supervisor holds this database."""

Instance = Annotated[
    str | None,
    typer.Option("--instance", metavar="NAME", help="Name of this supervisor; default main."),
]


def run(
    config: Config = None,
    database: Database = None,
    instance: Instance = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write logs as JSON lines, on a terminal too.")
    ] = False,
) -> None:
    """Run the service in the foreground until it is told to stop.

    TERM or Ctrl-C drains: running jobs finish, nothing new is claimed.
    """
    from supervisor.sections import PLAIN_NAME

    if as_json:  # as the environment says it, so that a reload finds it too
        os.environ["HERDSMAN__LOGS__FORMAT"] = "json"
    settings = settings_for(config, database)
    if instance is not None:
        if not PLAIN_NAME.fullmatch(instance):  # it becomes part of the lock's path
            raise UsageFault("--instance is 1 to 64 letters, digits, '_', '-' or '.'")
        settings = settings.model_copy(update={"instance": instance})
    raise typer.Exit(serve(settings))


def serve(settings: Settings) -> int:
    """Supervise until told to stop; return the exit code."""
    _import_structlog()
    from supervisor.apart import run_apart
    from supervisor.slots import SlotsError

    configure_logs(settings)
    lock = _take_lock(settings)
    if lock is None:
        return EXIT_HELD
    code, text = run_apart(lambda: check(settings), CHECK_SECONDS)
    if code:
        for line in text.splitlines():
            output.say(f"herdsman: {line}")
        lock.close()
        return code
    if not settings.handlers:
        what = settings.path or "no configuration file was read"
        output.say(f"herdsman: no handlers ({what}): jobs will wait until --config names some")
    try:
        return _supervise(settings, lock.fileno())
    except (SlotsError, RuntimeError) as error:
        raise CommandFailed(str(error)) from error


def _supervise(settings: Settings, lock_fd: int) -> int:
    """Lay out the slots, end what a crashed run left behind, and supervise."""
    from supervisor import handlers, supervise
    from supervisor.slots import SlotTable, previous_slots, slots_capacity, slots_path

    path = slots_path(settings.database, settings.instance)
    processes = sum(pool.processes for pool in settings.pools.values())
    table = SlotTable.create(
        path,
        instance_uuid=str(uuid.uuid4()),
        pools=list(settings.pools),
        capacity=slots_capacity(processes),
    )
    with closing(table):
        for before in previous_slots(path):
            _sweep(before)
        if settings.preload:
            handlers.preload(settings)
        _share_memory()
        # From here the lock is supervise's: it is closed in every child first, and here last.
        code = supervise.run(tree(settings, table, lock_fd))
        if not table.dead():  # else it tells the next start which jobs ran
            table.unlink()
        return code


def _import_structlog() -> None:
    """Import structlog without rich, which it takes up for tracebacks in colour where it finds it.

    Ours are plain (see `logs`), and every process of the tree would carry it: 5 MB.
    """
    if "structlog" in sys.modules or "rich" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment]  # "not to be found", as import reads it
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]


def _share_memory() -> None:
    """Keep the garbage collector of every process away from what the supervisor has made so far.

    It writes to each object it looks at, which would make a page of its own out of every page
    that the processes share. Measured: 105 MB of PSS for a service of two workers without this.
    """
    from queue_core.engines import sqlite  # noqa: F401
    from supervisor import keeper, worker  # noqa: F401

    gc.collect()
    gc.freeze()


def _sweep(before: Path) -> None:
    """End what is left of a crashed run; records of another version tell us nothing."""
    from supervisor import supervise
    from supervisor.slots import SlotsError, SlotTable

    with suppress(SlotsError), closing(SlotTable.attach(before)) as old:
        supervise.sweep(old)


def check(settings: Settings) -> tuple[int, str]:
    """Open the database and import the handlers; return an exit code and what is wrong."""
    from queue_core import open_engine
    from supervisor import handlers
    from supervisor.cli import errors

    try:
        engine = open_engine(settings.database)
        engine.counts("default")
        engine.close()
        handlers.load(settings)
        if settings.preload:
            handlers.preload(settings)  # finds threads here, where they end with this process
    except Exception as error:  # whatever it is, the answer is a sentence
        explained = errors.explain(error)
        return explained.code, explained.text
    return 0, ""


def tree(settings: Settings, table: SlotTable, lock_fd: int) -> Tree:
    """Return the process tree of a configuration."""
    from supervisor.supervise import PoolSpec, Tree

    return Tree(
        pools=[
            PoolSpec(
                name=name,
                processes=pool.processes,
                main=_WorkerMain(settings, name),
                max_jobs=pool.max_jobs,
                max_rss_bytes=pool.max_memory_bytes,
                max_age_seconds=pool.max_age_seconds,
                on_crash_loop=pool.on_crash_loop,
                boot_seconds=pool.boot_timeout_seconds,
            )
            for name, pool in settings.pools.items()
        ],
        keeper=_KeeperMain(settings),
        web=_WebMain(settings) if settings.web.enabled else None,
        table=table,
        lock_fd=lock_fd,
        grace_seconds=settings.grace_seconds,
        boot_seconds=max(pool.boot_timeout_seconds for pool in settings.pools.values()),
        reload=lambda: _reload(settings, table, lock_fd),
        validate=lambda: _validate(settings),
        reopen_logs=lambda: configure_logs(settings),
    )


def configure_logs(settings: Settings) -> None:
    """Send logs where the configuration says; also after a rotation."""
    from supervisor import logs

    form = {"auto": None, "json": True, "console": False}[settings.logs.format]
    logs.configure(json=form, level=settings.logs.level)
    if settings.logs.file is not None:
        logs.reopen(settings.logs.file)


def _take_lock(settings: Settings) -> InstanceLock | None:
    from queue_core import open_engine
    from queue_core.clock import SystemClock
    from queue_core.engines import sqlite_faults
    from queue_core.lockfile import InstanceLock, describe_holder

    if "://" in settings.database:
        open_engine(settings.database)  # refuses it in its own words; no file is to be locked
    path = Path(f"{settings.database}.{settings.instance}.lock")
    info = {
        "pid": os.getpid(),
        "instance": settings.instance,
        "boot": SystemClock().boot_id(),
        "started": int(time.time()),
    }
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = InstanceLock.take(path, info)
    except OSError as error:
        raise sqlite_faults.of_os(Path(settings.database), error) from error
    if lock is None:
        output.say(
            f"herdsman: {settings.database} is already served by {describe_holder(path)}; "
            "stop it, or give this one another --instance"
        )
    return lock


def _reload(settings: Settings, table: SlotTable, lock_fd: int) -> Tree | None:
    from supervisor.settings import load

    if settings.path is None:
        return None
    fresh = load(settings.path).model_copy(update={"instance": settings.instance})
    return tree(fresh, table, lock_fd)


def _validate(settings: Settings) -> int:
    from supervisor.policy import EXIT_CONFIG
    from supervisor.settings import SettingsError, load

    try:
        fresh = load(settings.path) if settings.path else settings
    except SettingsError as error:
        for line in str(error).splitlines():
            output.say(f"herdsman: {line}")
        return EXIT_CONFIG
    if fresh.database != settings.database:  # its lock is not ours, nor do our records name it
        output.say(f"herdsman: another database ({fresh.database}) takes a restart, not a reload")
        return EXIT_CONFIG
    code, text = check(fresh)
    if text:
        output.say(text)
    return code


@dataclass(frozen=True, slots=True)
class _WorkerMain:
    settings: Settings
    pool: str

    def __call__(self, child: Child) -> int:
        from supervisor import worker

        return worker.main(child, self.settings, self.pool)


@dataclass(frozen=True, slots=True)
class _KeeperMain:
    settings: Settings

    def __call__(self, child: Child) -> int:
        from supervisor import keeper

        return keeper.main(child, self.settings)


@dataclass(frozen=True, slots=True)
class _WebMain:
    settings: Settings

    def __call__(self, child: Child) -> int:
        from supervisor import web

        return web.serve(child, self.settings, self.settings.database)
