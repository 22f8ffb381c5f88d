"""Give tests a supervisor of their own, and leave no process behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.service import Service
from tests.process.template import end_all
from tests.process.tree import Host

HostMaker = Callable[..., Host]

FOLDER = Path(__file__).parent
SLOW = ("test_chaos", "test_leases", "test_service_memory", "test_suspects")
"""Modules with tests of several seconds."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest: begun last, one process works while the others wait."""

    def place(item: pytest.Item) -> int:
        if item.get_closest_marker("long"):
            return 0
        return 1 if item.path.stem in SLOW else 2

    at = [index for index, item in enumerate(items) if item.path.is_relative_to(FOLDER)]
    for index, item in zip(at, sorted((items[index] for index in at), key=place), strict=True):
        items[index] = item


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


@pytest.fixture(autouse=True)
def quick_starts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have supervisors forked by a template; the long tests execute them, as an operator does."""
    if not request.node.get_closest_marker("long"):
        monkeypatch.setattr(Service, "by_template", True)
        monkeypatch.setattr(Host, "by_template", True)


@pytest.fixture(autouse=True, scope="session")
def templates_ended() -> Iterator[None]:
    """End the templates with the run."""
    yield
    end_all()
