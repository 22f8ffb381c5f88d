"""Show that a service with nothing to do does nothing."""

from __future__ import annotations

import pytest

from benchmarks import idle


@pytest.mark.long
def test_an_idle_service_writes_nothing() -> None:
    """Jobs are done and nothing is due: in ten seconds no file changes and no byte goes to disk."""
    found = idle.measured(10.0)
    assert found["processes"] == 5  # supervisor, keeper, web and two workers
    assert found["same_processes"]
    assert found["files_unchanged"]
    assert found["written_bytes"] == 0
    # The promise is 0.5 % of a core, on a machine of its own; a loop that spins takes it all.
    assert found["cpu_share"] < 0.05
