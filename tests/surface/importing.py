"""Make the sources that the tests of `herdsman import` read, and look at what arrived.

Boundary: helpers; no test is here. litequeue and localqueue write their files themselves.
"""

from __future__ import annotations

import hashlib
import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from queue_core import Job, Queue, State
from supervisor.cli import main


def contents(path: Path) -> dict[str, str]:
    """Return the digest of every file of a folder, or of a file and those beside it."""
    folder = path if path.is_dir() else path.parent
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def bring(kind: str, source: Path, database: Path, *options: object, code: int = 0) -> Any:
    """Run an import in this process, which is quicker than another, and return its document."""
    args = ["import", kind, source, "--database", database, "--json", *options]
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left:
        main([str(arg) for arg in args])
    assert left.value.code == code, err.getvalue()
    assert out.getvalue().count("\n") == 1
    return json.loads(out.getvalue())


def arrived(database: Path, queue: str) -> dict[str, list[Job[Any]]]:
    """Return every job of a queue by state, with its ledger if few, in the order of ids."""
    with Queue[Any](database, queue) as opened:
        found: dict[str, list[Job[Any]]] = {}
        for state in State:
            jobs = opened.jobs(state, limit=10_000)
            whole = [opened.find(job.id) for job in jobs[:100]]
            found[state.value] = [job for job in whole if job is not None] + jobs[100:]
        assert opened.recount() == []
        assert opened.check(full=True) == []
    return found


def payloads(jobs: list[Job[Any]]) -> list[Any]:
    """Return what the jobs carry."""
    return [job.payload for job in jobs]


def lines(*objects: Any) -> str:
    """Return objects as lines of JSON."""
    return "".join(json.dumps(item) + "\n" for item in objects)
