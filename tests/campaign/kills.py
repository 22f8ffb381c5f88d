"""Kill producers, workers, keepers and supervisors at random, and account for every job.

    python -m tests.campaign.kills [--kills N] [--seed N] [--seconds N] [--folder DIR]

The seed is printed; with it the same choices are made again, as far as the machine lets them
meet the same moments. The exit code is 1 when database and accounts disagree, and then the
folder is kept.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.campaign.arenas import Arena, Library, Supervised

SUPERVISED_SHARE = 0.5
FULL_KILLS = 200
"""With so many, losing a lease is as good as certain."""


@dataclass(frozen=True)
class Report:
    """What a campaign did, and what it found."""

    name: str
    kills: dict[str, int]
    jobs: int
    runs: int
    unnoted: int
    stale: int
    scrapes: int
    reruns: int
    rerun_median_seconds: float
    rerun_worst_seconds: float
    seconds: float
    faults: list[str]

    def lines(self) -> list[str]:
        """Return it in words."""
        told = ", ".join(f"{number} {kind}s" for kind, number in sorted(self.kills.items()))
        waits = f"median {self.rerun_median_seconds:.3f} s, worst {self.rerun_worst_seconds:.3f} s"
        return [
            f"{self.name}: {sum(self.kills.values())} kills ({told}) in {self.seconds:.1f} s",
            f"  {self.jobs} jobs in {self.runs} runs; {self.unnoted} stored by a killed put",
            f"  {self.stale} settlements refused as stale; {self.scrapes} scrapes",
            f"  {self.reruns} jobs begun again after a kill: {waits}",
            f"  {len(self.faults)} faults",
            *(f"  FAULT {fault}" for fault in self.faults[:20]),
        ]


def run(arena: Arena, kills: int, pause_seconds: float) -> Report:
    """Fight one campaign, and account for it."""
    began = time.monotonic()
    try:
        arena.begin()
        arena.campaign(kills, pause_seconds)
        arena.settle()
        books = arena.books()
        found = arena.faults(books)
        reruns = books.reruns_seconds(arena.kills)
        return Report(
            name=type(arena).__name__,
            kills=dict(arena.killed),
            jobs=len(books.ends),
            runs=len(books.notes.begun),
            unnoted=len(books.ends.keys() - {id_ for id_, *_ in books.notes.puts}),
            stale=books.notes.stale,
            scrapes=arena.scrapes.number,
            reruns=len(reruns),
            rerun_median_seconds=reruns[len(reruns) // 2] if reruns else 0.0,
            rerun_worst_seconds=reruns[-1] if reruns else 0.0,
            seconds=time.monotonic() - began,
            faults=found,
        )
    finally:
        arena.end()


def campaign(folder: Path, kills: int, seed: int, seconds: float | None = None) -> list[Report]:
    """Fight under a supervisor, then without one; `seconds` spreads the kills over so long."""
    chance = random.Random(seed)
    supervised = round(kills * SUPERVISED_SHARE)
    # A supervisor takes a storm of deaths for a crash loop; the library has no such judgement.
    pauses = (0.25, 0.05) if seconds is None else (seconds / kills,) * 2
    return [
        run(Supervised(folder / "supervised", chance), supervised, pauses[0]),
        run(Library(folder / "library", chance), kills - supervised, pauses[1]),
    ]


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=None, help="spread the kills over so long")
    parser.add_argument("--folder", type=Path, default=None, help="an empty folder to use and keep")
    given = parser.parse_args()
    seed = random.randrange(2**32) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    folder = given.folder or Path(tempfile.mkdtemp(prefix="herdsman-campaign-"))
    reports = campaign(folder, given.kills, seed, given.seconds)
    if given.kills >= FULL_KILLS and not any(report.stale for report in reports):
        reports[-1].faults.append("no settlement was refused as stale: the fence was not tried")
    for report in reports:
        print("\n".join(report.lines()))
    failed = any(report.faults for report in reports)
    if failed:
        print(f"kept for a look: {folder}", file=sys.stderr)
    elif given.folder is None:
        shutil.rmtree(folder)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
