"""Hold the library's types to what users rely on: inferred rightly, misuse refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
API = Path(__file__).with_name("api.py")
MARK = "  # type: ignore"
SECONDS_MAX = 110


def by_mypy(path: Path, folder: Path) -> set[int]:
    """Let mypy read a file as strictly as it can; return the lines with errors."""
    done = subprocess.run(
        [
            sys.executable, "-m", "mypy", "--strict", "--warn-unused-ignores", "--config-file=",
            f"--cache-dir={folder / 'cache'}", str(path),
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=SECONDS_MAX, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert "errors in" in done.stdout or "error in" in done.stdout or done.returncode == 0
    return {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line}


def by_pyright(path: Path, folder: Path) -> set[int]:
    """Let pyright read a file as most editors do; return the lines with errors."""
    config = folder / "pyrightconfig.json"
    config.write_text(json.dumps({
        "include": [path.name], "extraPaths": [str(ROOT)], "typeCheckingMode": "standard",
        "pythonVersion": "3.11", "reportUnnecessaryTypeIgnoreComment": True,
    }))  # fmt: skip
    done = subprocess.run(
        [
            sys.executable, "-m", "basedpyright", "--outputjson", "-p", str(config),
            "--pythonpath", sys.executable,
        ],
        capture_output=True, text=True, timeout=SECONDS_MAX, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["summary"]["filesAnalyzed"] == 1
    return {
        one["range"]["start"]["line"] + 1
        for one in told["generalDiagnostics"]
        if one["severity"] == "error"
    }


@pytest.mark.parametrize("checked", [by_mypy, by_pyright])
def test_types_are_inferred_and_misuse_is_refused(
    tmp_path: Path, checked: Callable[[Path, Path], set[int]]
) -> None:
    """Every assert_type holds, and every line marked as wrong is an error to the checker."""
    lines = API.read_text().splitlines()
    marked = tmp_path / "marked.py"
    marked.write_text("\n".join(lines))
    assert checked(marked, tmp_path) == set()
    unmarked = tmp_path / "unmarked.py"
    unmarked.write_text("\n".join(line.split(MARK)[0] for line in lines))
    wrong = {number for number, line in enumerate(lines, 1) if MARK in line}
    assert checked(unmarked, tmp_path) == wrong


def test_the_package_says_that_it_is_typed() -> None:
    """Without the marker file, checkers would ignore every annotation."""
    assert (ROOT / "queue_core" / "py.typed").exists()
