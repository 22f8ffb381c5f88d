"""Show that a service with nothing to do does nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import idle
from benchmarks.contenders import HERDSMAN
from benchmarks.harness import QUICK
from benchmarks.workloads import memory


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


@pytest.mark.long
def test_an_idle_service_is_small() -> None:
    """A worker takes less than 20 MB, and all of a service with two workers less than 90 MB."""
    found = memory.once(QUICK, HERDSMAN)
    assert found["processes"] == 5
    assert found["worker_mb"] < memory.WORKER_MB_MAX
    assert found["total_mb"] < memory.TOTAL_MB_MAX


def test_the_supervisor_forks_without_what_only_some_processes_use() -> None:
    """What it has imported all of them carry: no web server, no drawing of terminals."""
    code = """if True:
        import sys
        from supervisor.cli import run
        run._import_structlog()
        run._share_memory()
        from supervisor import logs, supervise
        print(*(name for name in ("rich", "pygments", "starlette", "uvicorn", "jinja2",
                                  "prometheus_client") if name in sys.modules))
        import rich.console  # a handler finds it as ever
        """
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr, ran.stdout.strip()) == (0, "", "")
