"""Run `herdsman` as users do: a process of its own, judged by output and exit code.

Boundary: helpers for the tests of the command line; no test is here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("HERDSMAN")},
    "PYTHONPATH": str(ROOT),
    "COLUMNS": "200",
}
Finished = subprocess.CompletedProcess[str]


def herdsman(
    *args: object, cwd: Path, stdin: str | bytes | None = None, **environ: str
) -> Finished:
    """Run a command to its end; its output is text."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "supervisor", *map(str, args)],
        cwd=cwd, env={**ENVIRONMENT, **environ}, timeout=60, capture_output=True, check=False,
        input=stdin.encode() if isinstance(stdin, str) else (stdin or b""),
    )  # fmt: skip
    finished = Finished(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())
    assert "Traceback" not in finished.stderr, finished.stderr
    return finished


def document(finished: Finished) -> dict[str, Any]:
    """Return the one JSON document a command printed."""
    found: dict[str, Any] = json.loads(finished.stdout)
    assert found["schema_version"] == 1
    assert finished.stdout.count("\n") == 1
    return found
