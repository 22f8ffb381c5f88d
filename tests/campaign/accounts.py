"""Hold what stands in a database against what its users wrote down outside of it."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.campaign.roles import WHOLE
from tests.fault.checks import faults

POISON_DEATHS = 3
Claim = tuple[int, int]

ENDS = """
SELECT id, run, 'done', outcome,
    coalesce(payload, (SELECT payload FROM body WHERE body.id = done.id))
FROM done
UNION ALL
SELECT id, run, 'dead', reason,
    coalesce(payload, (SELECT payload FROM body WHERE body.id = dead.id))
FROM dead
"""


@dataclass
class Notes:
    """What was written outside the database."""

    puts: list[tuple[int, str, str]] = field(default_factory=list)
    begun: dict[Claim, tuple[int, int]] = field(default_factory=dict)
    """Process and monotonic nanoseconds at which each claim was begun."""
    verdicts: dict[Claim, str] = field(default_factory=dict)
    settled: dict[Claim, str] = field(default_factory=dict)
    stale: int = 0
    """Settlements that were refused, since the lease was lost."""
    twice: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Notes:
        """Read all files; a line that a kill has cut short says nothing."""
        notes = cls()
        for line in _lines(folder / "puts"):
            notes.puts.append((int(line[0]), line[1], line[2]))
        for line in _lines(folder / "notes"):
            claim = (int(line[1]), int(line[2]))
            kind, decided = line[0], line[3]
            if kind == "begin":
                notes._once(claim in notes.begun, f"claim {claim} was begun twice")
                notes.begun[claim] = (int(line[3]), int(line[4]))
            elif kind == "verdict":
                notes._once(claim in notes.verdicts, f"claim {claim} was decided twice")
                notes.verdicts[claim] = decided
            elif kind == "settled":
                notes._once(claim in notes.settled, f"claim {claim} was settled twice")
                notes.settled[claim] = decided
            elif kind == "stale":
                notes.stale += 1
        return notes

    def _once(self, seen: bool, fault: str) -> None:
        if seen:
            self.twice.append(fault)


def _lines(path: Path) -> Iterator[list[str]]:
    if path.exists():
        for line in path.read_text().splitlines():
            *words, last = line.split() or [""]
            if last == WHOLE:
                yield words


class Books:
    """One database at its end, beside the notes of those who used it."""

    def __init__(self, folder: Path, database: Path) -> None:
        self.database = database
        self.notes = Notes.read(folder)
        with closing(sqlite3.connect(database)) as connection:
            self.live = connection.execute("SELECT id, state FROM job").fetchall()
            self.ends: dict[int, tuple[int, str, str, dict[str, Any]]] = {
                id_: (run, place, how, json.loads(payload))
                for id_, run, place, how, payload in connection.execute(ENDS)
            }
            self.ledger: dict[Claim, str] = {
                (job, run): outcome
                for job, run, outcome in connection.execute("SELECT job, run, outcome FROM attempt")
            }
            self.mine = [n for (n,) in connection.execute("SELECT n FROM mine")]

    def faults(self, *, unnoted_max: int) -> Iterator[str]:
        """Yield every way in which database and notes disagree.

        At most `unnoted_max` jobs may stand there of which no put was noted: a producer may
        have been killed between the two.
        """
        yield from faults(self.database)
        yield from self.notes.twice
        yield from (f"job {id_} is {state} at the end" for id_, state in self.live)
        noted = set()
        serials: dict[str, int] = {}
        for id_, serial, do in self.notes.puts:
            noted.add(id_)
            if id_ not in self.ends:
                yield f"put {serial} returned {id_}, which is lost"
            elif (found := self.ends[id_][3])["n"] != serial or found["do"] != do:
                yield f"put {serial} returned {id_}, which is the job of {found['n']}"
            if serials.setdefault(serial, id_) != id_:
                yield f"put {serial} is job {serials[serial]} and {id_}"
        for serial, number in Counter(end[3]["n"] for end in self.ends.values()).items():
            if number > 1:
                yield f"put {serial} is stored {number} times"
        if len(unnoted := self.ends.keys() - noted) > unnoted_max:
            yield f"{len(unnoted)} jobs of which no put is noted, of at most {unnoted_max}"
        with_tx = sorted(end[3]["n"] for end in self.ends.values() if "tx" in end[3])
        if with_tx != sorted(self.mine):
            yield "a user's row and the job put beside it do not stand and fall together"
        for id_ in self.ends:
            yield from self._faults_of(id_)
        yield from self._faults_of_settlements()

    def _faults_of(self, id_: int) -> Iterator[str]:
        """Yield how a job's end is not what its handler decided."""
        run, place, how, payload = self.ends[id_]
        decided = self.notes.verdicts.get((id_, run))
        what = f"job {id_} ({payload['do']}) is {place}, {how}, by run {run} ({decided})"
        if how == "poison":
            # The handler's word is not asked: it died too often before it could give one.
            deaths = [at for at, outcome in self.ledger.items()
                      if at[0] == id_ and outcome == "crashed"]  # fmt: skip
            if len(deaths) < POISON_DEATHS:
                yield f"{what}, with {len(deaths)} deaths"
        elif place == "done":
            if decided != "ok" or payload["do"] not in ("ok", "fail"):
                yield what
        elif how == "rejected":
            if decided != "reject" or payload["do"] != "reject":
                yield what
        elif payload["do"] != "exhaust" or not self._was_exhausted(id_, run, how):
            yield what

    def _was_exhausted(self, id_: int, run: int, how: str) -> bool:
        lost = self.ledger.get((id_, run)) in ("crashed", "lease_lost")
        return how == "exhausted" and (lost or self.notes.verdicts.get((id_, run)) == "fail")

    def _faults_of_settlements(self) -> Iterator[str]:
        """Yield settlements that were accepted and do not stand, or stand and were not decided."""
        wanted = {"ok": None, "fail": "failed", "reject": "rejected"}
        for claim, decided in self.notes.settled.items():
            id_, run = claim
            stands = self.ledger.get(claim)
            if stands != wanted[decided]:
                yield f"claim {claim} was settled as {decided}, and stands as {stands}"
            if decided == "ok" and self.ends.get(id_, (0, ""))[:2] != (run, "done"):
                yield f"claim {claim} was acked, and its job is {self.ends.get(id_)}"
        word = {"failed": "fail", "rejected": "reject"}
        for claim, outcome in self.ledger.items():
            if outcome in word and self.notes.verdicts.get(claim) != word[outcome]:
                yield f"claim {claim} stands as {outcome}, decided {self.notes.verdicts.get(claim)}"
            run, place, *_ = self.ends.get(claim[0], (0, ""))
            if place == "done" and claim[1] >= run:
                yield f"claim {claim} was settled, and its job was done by run {run}"

    def reruns_seconds(self, kills: list[tuple[int, int]]) -> list[float]:
        """Return how long after its worker's kill each running job was begun again.

        `kills` are pids and monotonic nanoseconds.
        """
        killed = dict(kills)
        by_job: dict[int, list[int]] = {}
        for id_, run in self.notes.begun:
            by_job.setdefault(id_, []).append(run)
        found = []
        for (id_, run), (pid, _) in self.notes.begun.items():
            later = [at for at in by_job[id_] if at > run]
            if pid in killed and (id_, run) not in self.notes.verdicts and later:
                begun_ns = self.notes.begun[(id_, min(later))][1]
                found.append((begun_ns - killed[pid]) / 1e9)
        return sorted(found)
