"""Show that no statement on a job's way reads more than it must, however many jobs there are."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from queue_core.engines import sql
from queue_core.engines.sqlite import SqliteEngine
from tests.engine.conftest import new_job, put, settlement, take

SQL = sql.load("sqlite.sql")
TABLES = ("job", "done", "dead", "body", "attempt", "idempotency", "stat")

# Groups that do not touch jobs: they make, open and end things.
NOT_PLANNED = re.compile(r"schema|pragma|begin|commit|rollback")

CLAIMED = "reads the claimed rows alone, through their index: as many as there are busy workers"
PARKED = "reads the parked rows alone, through their index"
ONCE = "runs once after a reboot, and touches what the reboot voided"
NUMBERS = "reads the numbers of all queues, which do not grow with jobs"
ALLOWED: dict[str, tuple[str, str]] = {
    # statement: (the step of the plan that may be there, why)
    "boot_instances": ("SCAN job USING INDEX job_claimed", ONCE),
    "boot_depths": ("SCAN job USING INDEX job_claimed", ONCE),
    "reap_next": ("SCAN job USING INDEX job_claimed", "reads the first entry alone"),
    "boot_release": ("SCAN job USING INDEX job_claimed", ONCE),
    "claim_held": ("SCAN job USING INDEX job_claimed", CLAIMED),
    "claim_abandoned": ("SCAN job USING INDEX job_claimed", CLAIMED),
    "counts_claimed": ("SCAN job USING INDEX job_claimed", CLAIMED),
    "counts_all": ("SCAN stat", NUMBERS),
    "prune_holders": ("SCAN job USING INDEX job_claimed", CLAIMED),
}
SORTS: dict[str, str] = {
    "boot_instances": ONCE,
    "boot_depths": ONCE,
    "claim_held": CLAIMED,
    "claim_abandoned": CLAIMED,
    "counts_claimed": CLAIMED,
}


class Anything(dict[str, object]):
    """Give every named parameter a value."""

    def __missing__(self, name: str) -> object:
        """Return a list where one is read, else a number."""
        return json.dumps([1]) if name in {"ids", "tasks", "holders", "living"} else 1


@pytest.fixture(scope="module", params=["fresh", "full and analysed"])
def connection(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[sqlite3.Connection]:
    """Open a file with our schema; once empty, once with jobs and the planner's statistics."""
    path: Path = tmp_path_factory.mktemp("plans") / "herdsman.db"
    engine = SqliteEngine(path, durability="normal")
    put(engine)
    if request.param != "fresh":
        put(engine, *[new_job(key=f"k{number}") for number in range(3000)])
        put(engine, *[new_job(delay_us=10**12, payload=b"x" * 3000) for _ in range(300)])
        rows = take(engine, 2000)
        ends = [settlement(row) for row in rows[:1000]]
        ends += [settlement(row, "dead", started_us=1) for row in rows[1000:1990]]
        engine.finish(ends)
    with closing(sqlite3.connect(path)) as opened:
        if request.param != "fresh":
            opened.execute("ANALYZE")
            opened.commit()
    engine.close()
    with closing(sqlite3.connect(path)) as opened:
        yield opened


def plan(connection: sqlite3.Connection, text: str) -> list[str]:
    """Return the steps by which SQLite would run a statement."""
    numbered = [int(number) for number in re.findall(r"\?(\d+)", text)]
    number = max(numbered, default=text.count("?"))
    parameters: Mapping[str, object] | list[object] = [1] * number if number else Anything()
    rows = connection.execute(f"EXPLAIN QUERY PLAN {text}", parameters)
    return [str(row[3]) for row in rows]


PLANNED = [name for name in SQL if not NOT_PLANNED.match(name)]


def unbounded(step: str) -> bool:
    """Say whether a step of a plan walks a table that grows with jobs."""
    return re.match(rf"SCAN ({'|'.join(TABLES)})\b", step) is not None


@pytest.mark.parametrize("name", PLANNED)
def test_a_statement_scans_no_table_that_grows(connection: sqlite3.Connection, name: str) -> None:
    """Every statement finds its rows by an index; those that may not are named, with a reason."""
    allowed = ALLOWED.get(name, ("no exception", ""))[0]
    scans = [step for step in plan(connection, SQL[name]) if unbounded(step)]
    assert [step for step in scans if not step.startswith(allowed)] == []


@pytest.mark.parametrize("name", PLANNED)
def test_a_statement_sorts_nothing(connection: sqlite3.Connection, name: str) -> None:
    """Order comes from an index, so that a limit stops the read; exceptions are named."""
    sorts = [step for step in plan(connection, SQL[name]) if "TEMP B-TREE" in step]
    assert sorts == [] or name in SORTS


def test_exceptions_name_statements_that_exist_and_need_them(
    connection: sqlite3.Connection,
) -> None:
    """An exception that is not needed any more would hide the next mistake."""
    steps = {name: plan(connection, SQL[name]) for name in {*ALLOWED, *SORTS}}
    idle = [name for name, (step, _) in ALLOWED.items() if not any(map(unbounded, steps[name]))]
    assert idle == []
    assert [name for name in SORTS if not any("TEMP B-TREE" in step for step in steps[name])] == []


HOT = {
    "claim_rows": "job_ready (queue=?)",
    "claim_jobs": "INTEGER PRIMARY KEY (rowid=?)",
    "finish_removes": "INTEGER PRIMARY KEY (rowid=?)",
    "promote_due": "job_delayed (queue=? AND due_us<?)",
    "promote_next": "job_delayed (queue=?)",
    "reap_next": "job_claimed",
    "reap_expired": "job_claimed (lease_us<?)",
    "extend_lease": "INTEGER PRIMARY KEY (rowid=?)",
    "finish_rows": "INTEGER PRIMARY KEY (rowid=?)",
    "prune_done": "done_finished (queue=? AND finished_us<?)",
    "prune_dead": "dead_finished (queue=? AND finished_us<?)",
    "counts_oldest_ready": "job_ready (queue=? AND priority<?)",
    "counts_list_dead": "INTEGER PRIMARY KEY (rowid>?)",
}


@pytest.mark.parametrize("name", sorted(HOT))
def test_a_hot_statement_uses_its_index(connection: sqlite3.Connection, name: str) -> None:
    """The index made for a query is the one it uses, down to the columns."""
    assert any(HOT[name] in step for step in plan(connection, SQL[name]))


def test_a_scan_and_a_sort_are_seen(connection: sqlite3.Connection) -> None:
    """The checks above find what they look for."""
    steps = plan(connection, "SELECT id FROM job WHERE attempts = 1 ORDER BY attempts, run")
    assert any(map(unbounded, steps))
    assert any("TEMP B-TREE" in step for step in steps)
