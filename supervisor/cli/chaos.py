"""Kill random processes of a running service, and check what must hold: `herdsman chaos`.

Boundary: parses, asks, prints; `supervisor.chaos` kills and checks.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from supervisor.cli import output
from supervisor.cli.context import Config, Database, Json, settings_for
from supervisor.cli.errors import CommandFailed, UsageFault
from supervisor.cli.workers import Instance

if TYPE_CHECKING:
    from queue_core import Queue
    from supervisor.chaos import Plan, Report

JOBS_MAX: Final = 1_000_000


def chaos(
    kill_every: Annotated[
        str, typer.Option("--kill-every", metavar="DURATION", help="Between kills, on average.")
    ] = "2s",
    for_: Annotated[
        str, typer.Option("--for", metavar="DURATION", help="How long to go on killing.")
    ] = "10s",
    targets: Annotated[
        str, typer.Option("--targets", metavar="LIST", help="Of workers,keeper,web,supervisor.")
    ] = "workers,keeper,web",
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Repeat the choices of a run.")
    ] = None,
    jobs: Annotated[
        int, typer.Option("--jobs", min=0, max=JOBS_MAX, metavar="N", help="Put so many jobs.")
    ] = 0,
    queue: Annotated[
        str | None, typer.Option("--queue", "-q", metavar="NAME", help="Queue to put them into.")
    ] = None,
    payload: Annotated[
        str, typer.Option("--payload", metavar="JSON", help="Their payload; {n} is the number.")
    ] = "{n}",
    settle: Annotated[
        str, typer.Option("--settle", metavar="DURATION", help="Longest wait after the kills.")
    ] = "60s",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    config: Config = None,
    database: Database = None,
    instance: Instance = None,
    as_json: Json = False,
) -> None:
    """Kill random processes of the running service, then check that nothing was lost.

    Every job that was put must be done, or dead because of the kills; counters must equal a
    recount; no zombie, descriptor or stale lease may be left. Exit code 1 if anything is.
    """
    from supervisor import chaos as experiment
    from supervisor.chaos import ChaosFailed, Plan

    settings = settings_for(config, database)
    if instance is not None:
        settings = settings.model_copy(update={"instance": instance})
    chosen = tuple(dict.fromkeys(part.strip() for part in targets.split(",")))
    unknown = [name for name in chosen if name not in experiment.TARGETS]
    if unknown:
        raise UsageFault(f"--targets knows {', '.join(experiment.TARGETS)}, not {unknown[0]!r}")
    if jobs and queue is None:
        raise UsageFault("--jobs needs a --queue to put them into")
    if jobs:
        _payload(payload, 0)
    plan = Plan(
        kill_every_seconds=_seconds("--kill-every", kill_every),
        for_seconds=_seconds("--for", for_),
        settle_seconds=_seconds("--settle", settle),
        seed=random.randrange(2**31) if seed is None else seed,
        targets=chosen,
    )
    _confirm(settings.database, plan, yes)
    try:
        report = _run(settings, plan, jobs, queue or "", payload)
    except ChaosFailed as error:
        raise CommandFailed(str(error)) from error
    _print(plan, report, as_json)
    if not report.ok:
        raise CommandFailed("an invariant does not hold")


def _run(settings: Any, plan: Plan, jobs: int, queue: str, payload: str) -> Report:
    from queue_core import Queue, open_engine
    from supervisor import chaos as experiment

    engine = open_engine(settings.database, create=False)
    opened: Queue[Any] | None = Queue(settings.database, queue, create=False) if jobs else None

    def put(first: int, last: int) -> Sequence[int]:
        assert opened is not None
        return opened.put_many([_payload(payload, number) for number in range(first, last)])

    try:
        return experiment.run(
            settings, engine, plan, jobs=jobs, put=put if jobs else None, tell=output.say
        )
    finally:
        engine.close()
        if opened is not None:
            opened.close()


def _seconds(option: str, text: str) -> float:
    from supervisor import durations

    try:
        seconds = durations.seconds(text)
    except ValueError as error:
        raise UsageFault(f"{option} {text}: {error}") from error
    if seconds <= 0:
        raise UsageFault(f"{option} must be more than zero")
    return seconds


def _payload(text: str, number: int) -> Any:
    try:
        return json.loads(text.replace("{n}", str(number)))
    except ValueError as error:
        raise UsageFault(f"--payload is not JSON: {error}") from error


def _confirm(database: str, plan: Plan, yes: bool) -> None:
    if "supervisor" in plan.targets:
        output.say("warning: the supervisor is a target: something else must start it again")
    if yes:
        return
    what = f"kill processes of the service on {database} for {plan.for_seconds:g} s"
    if not sys.stdin.isatty():
        raise UsageFault(f"this would {what}; add --yes to do it")
    typer.confirm(f"{what.capitalize()}?", abort=True, err=True)


def _print(plan: Plan, report: Report, as_json: bool) -> None:
    if as_json:
        output.emit(
            "chaos",
            ok=report.ok, seed=plan.seed, seconds=round(report.seconds, 3),
            kills=dict(report.kills), jobs=dict(report.jobs),
            checks=[{"name": c.name, "ok": c.ok, "seen": c.seen} for c in report.checks],
        )  # fmt: skip
        return
    kills = ", ".join(f"{n} {kind}" for kind, n in sorted(report.kills.items())) or "none"
    output.facts({"killed": kills, "seed": plan.seed, "time": output.span(report.seconds)})
    output.line("")
    output.table(
        ["what must hold", "holds", "seen"],
        [[check.name, "yes" if check.ok else "NO", check.seen] for check in report.checks],
    )
