"""Demonstrate: thousands of real files, a worker killed on the way, nothing lost.

Boundary: tells the story and prints the proof; what runs is the product itself,
as a service of its own in a folder of its own.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from supervisor.cli import output
from supervisor.cli.errors import CommandFailed, UsageFault

if TYPE_CHECKING:
    from queue_core import Queue
    from supervisor.demo.files import Piece
    from supervisor.demo.service import Service

BATCH: Final = 200
DONE_SECONDS: Final = 600.0
KILL_AT_SHARE: Final = 0.25
KILLS_MAX: Final = 20
SCRAPE_SECONDS: Final = 3.0
MARK: Final = ".herdsman-demo"


@dataclass(slots=True, kw_only=True)
class _Story:
    """What happened so far."""

    began: float = field(default_factory=time.monotonic)
    killed: list[int] = field(default_factory=list)
    killed_at: float = 0.0
    killed_us: int = 0
    rerun_seconds: float | None = None


def demo(
    folder: Annotated[
        Path, typer.Option("--folder", metavar="PATH", help="Folder of the demonstration.")
    ] = Path("var/demo"),
    files: Annotated[
        int | None, typer.Option("--files", min=1, metavar="N", help="Only so many files.")
    ] = None,
    processes: Annotated[
        int, typer.Option("--processes", min=1, max=64, metavar="N", help="Worker processes.")
    ] = 2,
    keep_running: Annotated[
        bool, typer.Option("--keep-running", help="Leave the service up until Ctrl-C.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Compress and hash every file of Python's standard library, and kill a worker meanwhile.

    Ends with a table of what was done and verified; exit code 1 if anything is missing.
    """
    from queue_core import Queue
    from supervisor.demo.files import pieces
    from supervisor.demo.service import QUEUE, Service, ServiceFailed

    folder = folder.absolute()
    _prepare(folder)
    todo = pieces(folder / "out", files)
    try:
        service = Service(folder, processes)
    except ServiceFailed as error:
        raise CommandFailed(str(error)) from error
    try:
        service.wait_ready()
        output.say(f"herdsman serves {service.database}; dashboard: {service.address}")
        with Queue[dict[str, str]](service.database, QUEUE) as queue:
            story = _work(service, queue, todo)
            facts = _prove(service, queue, todo, story)
        _print(facts, as_json)
        if keep_running:
            output.say(f"the service stays up: {service.address} (Ctrl-C stops it)")
            service.wait()
    except KeyboardInterrupt:
        output.say("stopping")
        service.stop()
        if not keep_running:
            raise
        return
    except ServiceFailed as error:
        raise CommandFailed(str(error)) from error
    finally:
        code = service.stop()
    if not facts["ok"] or code:
        raise typer.Exit(1)


def _prepare(folder: Path) -> None:
    """Make the folder, or empty it when it is that of an earlier demonstration."""
    from supervisor.demo.service import is_running

    if folder.exists() and not folder.is_dir():
        raise UsageFault(f"{folder} is no folder; name an empty or new --folder")
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARK).is_file():
            raise UsageFault(f"{folder} holds something else; name an empty or new --folder")
        if is_running(folder / "herdsman.db"):
            output.say(f"herdsman: a demonstration runs in {folder}; stop it or name a --folder")
            raise typer.Exit(73)
        shutil.rmtree(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / MARK).touch(mode=0o600)


def _work(service: Service, queue: Queue[dict[str, str]], todo: list[Piece]) -> _Story:
    """Enqueue every file, kill a worker on the way, wait until all is settled."""
    story = _Story()
    with _progress(len(todo)) as show:
        for part in _parts(todo):
            # The last files come one by one until a worker has died: short jobs are hard to hit.
            for some in [part] if story.killed or part[-1] is not todo[-1] else [[f] for f in part]:
                queue.put_many(
                    [{"source": str(piece.source), "target": str(piece.target)} for piece in some],
                    keys=[str(piece.source) for piece in some],
                )
                _kill_once(service, queue, story, part[0] is not todo[0])
                show(_settled(queue), story, service)
        deadline = time.monotonic() + DONE_SECONDS
        while (settled := _settled(queue)) < len(todo) and time.monotonic() < deadline:
            _kill_once(service, queue, story, settled >= KILL_AT_SHARE * len(todo))
            show(settled, story, service)
            time.sleep(0.005 if story.killed and story.rerun_seconds is None else 0.02)
        _look_for_rerun(queue, story)
        show(_settled(queue), story, service)
    return story


def _parts(todo: list[Piece]) -> list[list[Piece]]:
    """Cut the work into batches, four at least."""
    size = max(1, min(BATCH, len(todo) // 4))
    return [todo[start : start + size] for start in range(0, len(todo), size)]


def _settled(queue: Queue[dict[str, str]]) -> int:
    counts = queue.counts()
    return counts.done + counts.dead + counts.cancelled


def _kill_once(
    service: Service, queue: Queue[dict[str, str]], story: _Story, far_enough: bool
) -> None:
    """Kill a worker in the middle of a job; again, if it had just finished that one."""
    _look_for_rerun(queue, story)
    crashed = queue.counts().totals.get("attempts_finished_total:crashed", 0)
    if not far_enough or crashed or len(story.killed) >= KILLS_MAX:
        return
    if story.killed and time.monotonic() - story.killed_at < 1.0:
        return
    deadline = time.monotonic() + 0.2
    while time.monotonic() < deadline:
        at, at_us = time.monotonic(), queue.engine.now_us()
        job = service.kill_a_worker()
        if job is not None:
            story.killed.append(job)
            story.killed_at, story.killed_us = at, at_us
            return


def _look_for_rerun(queue: Queue[dict[str, str]], story: _Story) -> None:
    """Note how long after the kill the killed job started again, as its own ledger says."""
    if not story.killed or story.rerun_seconds is not None:
        return
    job = queue.find(story.killed[-1])
    if job is None or len(job.ledger) < 2:
        return
    first, second = job.ledger[-2:]
    if first.outcome == "crashed":
        story.rerun_seconds = max(0.0, (second.started_us - story.killed_us) / 1_000_000)


def _prove(
    service: Service, queue: Queue[dict[str, str]], todo: list[Piece], story: _Story
) -> dict[str, object]:
    """Compare what was asked for with what is there, file by file and number by number."""
    from supervisor.demo.files import wrong

    seconds = time.monotonic() - story.began
    counts = queue.counts()
    bad = wrong(todo)
    told = _told_done(service, counts.done)
    lost = len(todo) - counts.done - counts.dead - counts.ready - counts.delayed - counts.claimed
    totals = counts.totals
    return {
        "files": len(todo),
        "jobs_done": counts.done,
        "jobs_dead": counts.dead,
        "jobs_lost": max(0, lost),
        "retries": sum(n for name, n in totals.items() if name.startswith("retries_total")),
        "workers_killed": len(story.killed),
        "worker_restarts": service.restarts,
        "rerun_after_kill_seconds": story.rerun_seconds,
        "outputs_verified": len(todo) - len(bad),
        "outputs_wrong": [str(piece.source) for piece in bad[:10]],
        "metrics_equal_database": told == counts.done,
        "seconds": round(seconds, 2),
        "files_per_second": round(len(todo) / seconds, 1),
        "dashboard": service.address,
        "ok": counts.done == len(todo) and not bad and told == counts.done,
    }


def _told_done(service: Service, done: int) -> int | None:
    """Return the jobs done according to a scrape; None when there was no answer.

    What a scrape shows may be a second old: one that differs is looked at anew for a while.
    """
    deadline = time.monotonic() + SCRAPE_SECONDS
    while (told := _scraped_done(service)) != done and time.monotonic() < deadline:
        time.sleep(0.1)
    return told


def _scraped_done(service: Service) -> int | None:
    from prometheus_client.parser import text_string_to_metric_families

    text = service.get("metrics/database")
    if text is None:
        return None
    return sum(
        int(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "herdsman_jobs_finished_total"
        and sample.labels.get("outcome") == "succeeded"
    )


def _print(facts: dict[str, object], as_json: bool) -> None:
    if as_json:
        output.emit("demo", **facts)
        return
    rerun = facts["rerun_after_kill_seconds"]
    shown = {
        "files": facts["files"],
        "jobs done": facts["jobs_done"],
        "jobs dead": facts["jobs_dead"],
        "jobs lost": facts["jobs_lost"],
        "outputs verified against their file": facts["outputs_verified"],
        "workers killed": facts["workers_killed"],
        "worker restarts": facts["worker_restarts"],
        "retries": facts["retries"],
        "killed job ran again after": "-"
        if rerun is None
        else f"{float(str(rerun)) * 1000:.0f} ms",
        "metrics equal the database": "yes" if facts["metrics_equal_database"] else "NO",
        "time": f"{facts['seconds']} s ({facts['files_per_second']} files/s)",
    }
    output.line("")
    output.table(["what", "result"], [[name, value] for name, value in shown.items()])
    for source in facts["outputs_wrong"] if isinstance(facts["outputs_wrong"], list) else []:
        output.say(f"missing or wrong: {source}")
    output.line("")
    output.line("every file is accounted for" if facts["ok"] else "SOMETHING IS MISSING")


class _Show:
    """Print progress as lines, at most one a second, where there is no terminal."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._next = 0.0

    def __call__(self, settled: int, story: _Story, service: Service) -> None:
        now = time.monotonic()
        if now >= self._next or settled == self._total:
            self._next = now + 1.0
            output.say(f"{settled} of {self._total} done{_note(story, service)}")


def _note(story: _Story, service: Service) -> str:
    if not story.killed:
        return ""
    return f"; {len(story.killed)} killed, {service.restarts} restarted"


@contextmanager
def _progress(total: int) -> Iterator[_Show]:
    """Show a live bar on a terminal, lines elsewhere."""
    if not sys.stderr.isatty():
        yield _Show(total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    # 80 columns hold it all; on fewer the count is the last to go.
    columns = (
        TextColumn("compressing"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(table_column=Column(min_width=2 * len(str(total)) + 1)),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total, note="")

        class _Bar(_Show):
            def __call__(self, settled: int, story: _Story, service: Service) -> None:
                progress.update(task, completed=settled, note=_note(story, service))

        yield _Bar(total)
