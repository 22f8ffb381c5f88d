"""List, pause and resume queues: `herdsman queues`.

Boundary: one snapshot, and `Engine.configure`; a queue is never made by being paused, unless the
configuration names it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from supervisor.cli import output
from supervisor.cli.context import Config, Database, Json, opened, settings_for
from supervisor.cli.errors import CommandFailed
from supervisor.cli.status import STATES

if TYPE_CHECKING:
    from queue_core.stats import QueueFacts, Snapshot
    from supervisor.settings import Settings

NAMED_MAX: Final = 10

app = typer.Typer(help="List, pause and resume queues.", no_args_is_help=True)

Names = Annotated[list[str], typer.Argument(metavar="QUEUE...", help="Names of queues.")]


@app.command("list")
def list_queues(config: Config = None, database: Database = None, as_json: Json = False) -> None:
    """List the queues: jobs in each state, parked ones, the limit, and whether it is paused.

    A parked job is ready, and waits because no handler is configured for it.
    """
    settings = settings_for(config, database)
    with opened(settings.database) as engine:
        snapshot = engine.snapshot()
    found = {facts.name: facts for facts in snapshot.queues}
    names = sorted({*found, *settings.queue_names})
    queues = [_queue(name, found.get(name), snapshot) for name in names]
    if as_json:
        output.emit("queues list", queues=queues)
        return
    output.table(
        ["queue", *STATES, "parked", "max_depth", "note"],
        [
            [
                one["queue"], *(one[state] for state in STATES), one["parked"], one["max_depth"],
                "paused" if one["paused"] else None,
            ]
            for one in queues
        ],
    )  # fmt: skip


@app.command("pause")
def pause(
    names: Names, config: Config = None, database: Database = None, as_json: Json = False
) -> None:
    """Stop claims from these queues; puts and running jobs go on."""
    _set(names, True, settings_for(config, database), as_json)


@app.command("resume")
def resume(
    names: Names, config: Config = None, database: Database = None, as_json: Json = False
) -> None:
    """Let jobs of these queues be claimed again, and wake a worker."""
    _set(names, False, settings_for(config, database), as_json)


def _queue(name: str, facts: QueueFacts | None, snapshot: Snapshot) -> dict[str, Any]:
    from queue_core.stats import PARKED

    return {
        "queue": name,
        **{state: facts.depth.get(state, 0) if facts else 0 for state in STATES},
        "parked": sum(
            value for at, value in snapshot.counters.items() if at[:2] == (PARKED, name)
        ),
        "paused": facts is not None and facts.paused,
        "max_depth": facts.max_depth if facts else None,
    }  # fmt: skip


def _set(names: list[str], paused: bool, settings: Settings, as_json: bool) -> None:
    """Pause or resume all of these queues, or none when one of them is unknown."""
    wanted = list(dict.fromkeys(names))
    with opened(settings.database) as engine:
        before = {facts.name: facts.paused for facts in engine.snapshot().queues}
        known = {*before, *settings.queue_names}
        for name in wanted:
            if name not in known:
                raise CommandFailed(_unknown(name, known))
        for name in wanted:
            engine.configure(name, paused=paused)
    word = "paused" if paused else "resumed"
    if as_json:
        output.emit(
            f"queues {word.removesuffix('d')}",
            queues=[
                {"queue": name, "paused": paused, "changed": before.get(name, False) != paused}
                for name in wanted
            ],
        )
    for name in wanted:
        if not as_json:
            changed = before.get(name, False) != paused
            output.line(f"{word} {name}" if changed else f"{name} was {word} already")
        section = settings.queues.get(name)
        if section is not None and section.paused is not None and section.paused != paused:
            output.say(
                f"queues.{name}.paused is {str(section.paused).lower()} in {settings.path}, "
                "which holds again from the next start or reload"
            )


def _unknown(name: str, known: set[str]) -> str:
    listed = ", ".join(sorted(known)[:NAMED_MAX]) or "none"
    more = f" and {len(known) - NAMED_MAX} more" if len(known) > NAMED_MAX else ""
    return f"there is no queue {name!r}; there are: {listed}{more}"
