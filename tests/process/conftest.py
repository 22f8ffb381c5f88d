"""Give tests a supervisor of their own, and leave no process behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.tree import Host

HostMaker = Callable[..., Host]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[HostMaker]:
    """Return a function that prepares a supervisor with options; it is killed at the end."""
    made: list[Host] = []

    def make(**options: Any) -> Host:
        folder = tmp_path / f"host{len(made)}"
        folder.mkdir()
        made.append(Host(folder, **options))
        return made[-1]

    yield make
    for one in made:
        one.clean()
