"""Find a contender's own program beside this interpreter."""

from __future__ import annotations

import sys
from pathlib import Path


def program(name: str) -> str:
    """Return the path of an installed program."""
    folder = Path(sys.executable).parent
    for candidate in (folder / name, folder / f"{name}.py"):
        if candidate.exists():
            return str(candidate)
    raise FileNotFoundError(f"{name} is not beside {sys.executable}")
