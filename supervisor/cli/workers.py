"""List, restart, drain and resume workers: `herdsman workers`.

Boundary: reads the shared records and writes requests into them (`asking`); the supervisor acts.
The database is asked for the task of a running job only, and is not needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from supervisor.cli import output
from supervisor.cli.context import Config, Database, Json, opened, settings_for
from supervisor.cli.errors import CommandFailed, UsageFault

if TYPE_CHECKING:
    from supervisor.closeup import Person, Tree
    from supervisor.pool import Pool, Wish
    from supervisor.processes import PoolFacts
    from supervisor.settings import Settings
    from supervisor.slots import Slot, SlotTable

app = typer.Typer(help="List, restart, drain and resume workers.", no_args_is_help=True)

Instance = Annotated[
    str | None,
    typer.Option("--instance", metavar="NAME", help="The supervisor of this name; default main."),
]
PoolName = Annotated[str | None, typer.Option("--pool", "-p", metavar="NAME", help="This pool.")]
Wait = Annotated[
    str | None,
    typer.Option(
        "--wait", metavar="DURATION", show_default=False,
        help='Wait until it is done, at most so long ("30s"); 1 is the exit code of too late.',
    ),
]  # fmt: skip
COLUMNS: Final = (
    "name", "pool", "state", "job", "task", "since", "done", "failed", "memory", "last death",
)  # fmt: skip


@app.command("list")
def list_workers(
    config: Config = None,
    database: Database = None,
    instance: Instance = None,
    as_json: Json = False,
) -> None:
    """List the workers: what each does, since when, and how the one before it ended."""
    from supervisor import closeup

    settings = _settings(config, database, instance)
    tree = closeup.look(settings.database, settings.instance)
    if tree is None:
        raise CommandFailed(
            f"no supervisor {settings.instance} runs on {settings.database}; "
            "start it with `herdsman run`"
        )
    rows = [*worker_rows(tree, running_tasks(settings.database, tree))]
    pools = [_pool(pool, tree) for pool in tree.processes.pools if pool.active]
    if as_json:
        output.emit("workers list", instance=tree.instance, supervisor_pid=tree.supervisor_pid,
                    draining=tree.processes.draining, workers=rows, pools=pools)  # fmt: skip
        return
    output.table(COLUMNS, [shown(row) for row in rows])
    output.line("")
    output.table(
        ["pool", "processes", "live", "ready", "restarts", "state", "note"],
        [
            [p["pool"], p["processes"], p["live"], p["ready"], p["restarts"], p["state"], p["note"]]
            for p in pools
        ],
    )


@app.command("restart")
def restart(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="One worker, such as default/0.")
    ] = None,
    pool: PoolName = None,
    everything: Annotated[bool, typer.Option("--all", help="Every pool.")] = False,
    wait: Wait = None,
    config: Config = None,
    database: Database = None,
    instance: Instance = None,
    as_json: Json = False,
) -> None:
    """Replace workers one at a time: each finishes its job; small pools start the new one first.

    A pool in back-off or parked is tried again at once.
    """
    from supervisor import asking
    from supervisor.pool import Wish

    if sum((name is not None, pool is not None, everything)) != 1:
        raise UsageFault("name one worker, or --pool NAME, or --all")
    with _asked(config, database, instance) as (table, _):
        if name is not None:
            chosen = [_named(table, name)]
            before = {(slot.index, slot.epoch) for slot in chosen}
            asking.ask_slot(table, chosen[0])
        else:
            pools = _pools(table, pool)
            for one in pools:
                if one.drained:
                    raise CommandFailed(
                        f"pool {one.name} is drained; `herdsman workers resume` starts it"
                    )
            indices = {one.index for one in pools}
            before = {(s.index, s.epoch) for s in _live(table) if s.pool_index in indices}
            for one in pools:
                asking.ask_pool(table, one, Wish.RESTART)

        def replaced() -> bool:
            live = _live(table)
            old = any((slot.index, slot.epoch) in before for slot in live)
            return not old and all(
                one.ready >= one.processes for one in _pools(table, None) if not one.drained
            )

        done = _wait(replaced, wait)
    _report("workers restart", len(before), "asked to restart", done, as_json)


@app.command("drain")
def drain(
    pool: PoolName = None,
    wait: Wait = None,
    config: Config = None,
    database: Database = None,
    instance: Instance = None,
    as_json: Json = False,
) -> None:
    """Take workers out of work: running jobs finish, nothing new is claimed until `resume`.

    The supervisor stays up, and forgets it when it is started anew.
    """
    from supervisor.pool import Wish

    _for_pools("workers drain", Wish.DRAIN, pool, wait, config, database, instance, as_json)


@app.command("resume")
def resume(
    pool: PoolName = None,
    wait: Wait = None,
    config: Config = None,
    database: Database = None,
    instance: Instance = None,
    as_json: Json = False,
) -> None:
    """Put drained workers to work again."""
    from supervisor.pool import Wish

    _for_pools("workers resume", Wish.RESUME, pool, wait, config, database, instance, as_json)


# ---- asking -------------------------------------------------------------------------------


def _for_pools(
    command: str, wish: Wish, pool: str | None, wait: str | None, config: Any, database: str | None,
    instance: str | None, as_json: bool,
) -> None:  # fmt: skip
    from supervisor import asking
    from supervisor.pool import Wish

    with _asked(config, database, instance) as (table, _):
        pools = _pools(table, pool)
        for one in pools:
            asking.ask_pool(table, one, wish)
        drains = wish is Wish.DRAIN

        def reached() -> bool:
            return all(one.live == 0 if drains else one.ready >= one.processes for one in pools)

        done = _wait(reached, wait)
        names = [one.name for one in pools]
    verb = "asked to drain" if drains else "put to work again"
    _report(command, len(names), f"({', '.join(names)}) {verb}", done, as_json, "pool")


@contextmanager
def _asked(
    config: Any, database: str | None, instance: str | None
) -> Iterator[tuple[SlotTable, Settings]]:
    from supervisor import asking

    settings = _settings(config, database, instance)
    try:
        with closing(asking.attach(settings.database, settings.instance)) as table:
            yield table, settings
    except asking.NotAsked as error:
        raise CommandFailed(str(error)) from error


def _settings(config: Any, database: str | None, instance: str | None) -> Settings:
    settings = settings_for(config, database)
    return settings if instance is None else settings.model_copy(update={"instance": instance})


def _live(table: SlotTable) -> list[Slot]:
    from supervisor.slots import Kind

    return [slot for slot in table.live() if slot.kind is Kind.WORKER]


def _named(table: SlotTable, name: str) -> Slot:
    live = {slot.name: slot for slot in _live(table) if not slot.retire}
    if name not in live:
        known = ", ".join(sorted(live)) or "there is none"
        raise CommandFailed(
            f"no live worker is named {name} (live: {known}); "
            "one that waits in back-off is tried at once by `workers restart --pool`"
        )
    return live[name]


def _pools(table: SlotTable, name: str | None) -> list[Pool]:
    found = {
        one.name: one for one in table.pools.values() if one.active and not one.name.startswith("@")
    }
    if name is None:
        return list(found.values())
    if name not in found:
        raise CommandFailed(f"there is no pool {name}; there are {', '.join(sorted(found))}")
    return [found[name]]


def _wait(reached: Any, wait: str | None) -> bool | None:
    """Wait if that was asked for; None when it was not."""
    from supervisor import asking, durations

    if wait is None:
        return None
    try:
        seconds = durations.seconds(wait)
    except ValueError as error:
        raise UsageFault(f"--wait {wait}: {error}") from error
    return asking.wait_for(reached, seconds)


def _report(
    command: str, number: int, verb: str, done: bool | None, as_json: bool, what: str = "worker"
) -> None:
    if as_json:
        output.emit(command, number=number, done=done)
    else:
        output.line(f"{output.counted(number, what)} {verb}{'; done' if done else ''}")
    if done is False:
        raise CommandFailed("it is not done within --wait; `herdsman workers list` shows how far")


# ---- showing ------------------------------------------------------------------------------


def running_tasks(database: str, tree: Tree) -> Mapping[int, str]:
    """Return the tasks of the running jobs; none when the database cannot be asked."""
    from queue_core.errors import QueueError

    jobs = [person.job for person in tree.people if person.job]
    found: dict[int, str] = {}
    if not jobs:
        return found
    try:
        with opened(database) as engine:
            for job in jobs:
                record = engine.find(job)
                if record is not None:
                    found[job] = record.task
    except QueueError:
        return found
    return found


def worker_rows(tree: Tree, tasks: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    """Yield a document per worker, seats without a process included."""
    from supervisor.slots import Kind

    by_name: dict[str, list[Person]] = {}
    for person in tree.of(Kind.WORKER):
        by_name.setdefault(person.name, []).append(person)
    for pool in tree.processes.pools:
        if not pool.active or pool.internal:
            continue
        for number in range(pool.processes):
            name = f"{pool.name}/{number}"
            people = by_name.pop(name, [])
            if not people:
                yield _empty(pool, name, tree)
            for person in people:
                yield _worker(person, tasks)
    for people in by_name.values():  # of pools that shrank or went, while they finish
        for person in people:
            yield _worker(person, tasks)


def _worker(person: Person, tasks: Mapping[int, str]) -> dict[str, Any]:
    return {
        "name": person.name, "pool": person.pool, "pid": person.pid, "state": str(person.state),
        "job": person.job, "task": tasks.get(person.job or 0),
        "since_seconds": round(person.since_seconds, 3),
        "age_seconds": round(person.age_seconds, 3),
        "timeout_seconds": person.limit_seconds,
        "jobs_done": person.jobs_done, "jobs_failed": person.jobs_failed,
        "resident_bytes": person.resident_bytes, "asked_to_restart": person.asked_to_restart,
        "note": person.note, "last_death": _death(person.last_death),
    }  # fmt: skip


def _empty(pool: PoolFacts, name: str, tree: Tree) -> dict[str, Any]:
    state = "drained" if pool.drained else "parked" if pool.parked else "backoff"
    return {
        "name": name, "pool": pool.name, "pid": None, "state": state, "job": None, "task": None,
        "since_seconds": None, "age_seconds": None, "timeout_seconds": None,
        "jobs_done": None, "jobs_failed": None, "resident_bytes": None,
        "asked_to_restart": False, "note": "" if pool.drained else pool.note,
        "last_death": _death(tree.deaths.get(name)),
    }  # fmt: skip


def _death(death: Any) -> dict[str, Any] | None:
    if death is None:
        return None
    return {
        "cause": None if death.cause is None else str(death.cause), "signal": death.signal,
        "exit_code": death.exit_code, "age_seconds": round(death.age_seconds, 3),
        "text": death.text, "note": death.note,
    }  # fmt: skip


def shown(row: Mapping[str, Any]) -> list[object]:
    """Return the cells of one worker, in the order of COLUMNS."""
    since, memory, death = row["since_seconds"], row["resident_bytes"], row["last_death"]
    ended = f"{death['text']}, {output.span(death['age_seconds'])} ago" if death else None
    return [
        row["name"], row["pool"], row["state"], row["job"], row["task"],
        None if since is None else output.span(since), row["jobs_done"], row["jobs_failed"],
        output.size(memory) if memory else None, ended,
    ]  # fmt: skip


def _pool(pool: PoolFacts, tree: Tree) -> dict[str, Any]:
    live = [one for one in tree.people if one.pool == pool.name]
    ready = sum(one.state.value in ("idle", "busy") for one in live)
    state = "working"
    for name, holds in (
        ("drained", pool.drained), ("parked", pool.parked), ("crash loop", pool.crash_loop),
        ("backoff", pool.backoff_seconds > 0), ("starting", ready < pool.processes),
    ):  # fmt: skip
        if holds:
            state = name
            break
    return {
        "pool": pool.name, "processes": pool.processes, "live": len(live), "ready": ready,
        "restarts": pool.restarts, "state": state,
        "backoff_seconds": round(pool.backoff_seconds, 3), "note": pool.note,
        "exits": {str(cause): number for cause, number in pool.exits.items()},
    }  # fmt: skip
