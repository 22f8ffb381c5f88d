"""Share what every test needs: a place for a database, and a way to wait for a fact."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import hypothesis
import pytest

T = TypeVar("T")

WAIT_SECONDS_MAX = 20.0
"""How long a fact may take. Generous: loaded cores are slow, and only a failure waits it out."""

# A deadline per example would measure the machine's other tenants, not the code.
hypothesis.settings.register_profile("herdsman", deadline=None, print_blob=True)
hypothesis.settings.load_profile("herdsman")


def pytest_configure(config: pytest.Config) -> None:
    """Let hundreds of processes share compiled modules, also where none are to be kept.

    Each would compile the sources anew, for a third of its start. They go to a folder of this
    run, which whatever it starts inherits; without the variable Python keeps them itself.
    """
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        folder = tempfile.mkdtemp(prefix="herdsman-tests-")
        os.environ["PYTHONPYCACHEPREFIX"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def wait_until(
    fact: Callable[[], T],
    *,
    timeout_seconds: float = WAIT_SECONDS_MAX,
    poll_seconds: float = 0.005,
    what: str = "",
) -> T:
    """Wait until `fact()` is true, and return what it returned.

    Args:
        fact: Called again and again; an AssertionError in it counts as "not yet".
        timeout_seconds: After this long the test fails.
        poll_seconds: Pause after the first call; it grows to four times that in a long wait, so
            that what is waited for gets the processor.
        what: The fact in words, for the failure.

    Raises:
        AssertionError: The fact did not come about; says the last value, or the last assertion.
    """
    deadline = time.monotonic() + timeout_seconds
    pause_seconds = poll_seconds
    while True:
        seen: object
        try:
            value = fact()
        except AssertionError as error:
            seen = error
        else:
            if value:
                return value
            seen = value
        if time.monotonic() >= deadline:
            name = what or getattr(fact, "__qualname__", repr(fact))
            raise AssertionError(f"after {timeout_seconds:g} s still not: {name}; last: {seen!r}")
        time.sleep(pause_seconds)
        pause_seconds = min(pause_seconds * 1.1, poll_seconds * 4)


@pytest.fixture(name="wait_until")
def wait_until_fixture() -> Callable[..., object]:
    """Hand out `wait_until` to tests that take it as a fixture."""
    return wait_until


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """Name a database file that does not exist yet, in a folder of this test's own."""
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    return folder / "herdsman.db"
