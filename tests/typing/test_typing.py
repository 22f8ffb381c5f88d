"""Hold the library's types to what users rely on: inferred rightly, misuse refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
API = Path(__file__).with_name("api.py")


def checked(path: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    """Let mypy read a file as strictly as it can."""
    return subprocess.run(
        [
            sys.executable, "-m", "mypy", "--strict", "--warn-unused-ignores", "--config-file=",
            f"--cache-dir={cache}", str(path),
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip


def test_types_are_inferred_and_misuse_is_refused(tmp_path: Path) -> None:
    """Every assert_type holds, and every line marked as wrong is an error to the checker."""
    done = checked(API, tmp_path)
    assert done.returncode == 0, done.stdout
    unmarked = tmp_path / "unmarked.py"
    lines = API.read_text().splitlines()
    unmarked.write_text("\n".join(line.split("  # type: ignore")[0] for line in lines))
    wrong = [number for number, line in enumerate(lines, 1) if "# type: ignore" in line]
    found = checked(unmarked, tmp_path).stdout
    refused = {int(line.split(":")[1]) for line in found.splitlines() if ": error:" in line}
    assert refused == set(wrong)


def test_the_package_says_that_it_is_typed() -> None:
    """Without the marker file, checkers would ignore every annotation."""
    assert (ROOT / "queue_core" / "py.typed").exists()
