"""Handlers that are imported before the workers are forked: `preload = true`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.process.service import Maker, Service, command, sentence, services


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Maker]:
    """Return a function that prepares a service; it is ended at the end."""
    with services(tmp_path) as make:

        def prepare(source: str) -> Service:
            tree = make()
            tree.teach(source)
            tree.config.write_text(f"preload = true\n{tree.config.read_text()}")
            return tree

        yield prepare


def test_preloaded_handlers_are_imported_once_and_by_no_worker(service: Maker) -> None:
    """Nor by the successor of one that was killed; a descriptor more in none of them."""
    tree = service('note("imported", os.getpid())\n').started()
    queue = tree.queue()
    job_id = queue.put("once wait never")
    tree.kill_running(job_id)
    wait_until(lambda: tree.done(job_id))
    assert tree.outcomes(job_id) == ["crashed", "succeeded"]
    tried, imported = (int(words[0]) for words in tree.notes("imported"))
    assert imported == tree.pid
    assert tried not in tree.all_processes()
    tree.send(signal.SIGHUP)
    wait_until(lambda: tree.events("reload_finished"))
    job_id = queue.put("nothing")
    wait_until(lambda: tree.done(job_id))
    assert len(tree.notes("imported")) == 2
    assert len(os.listdir(f"/proc/{tree.pid}/task")) == 1
    assert tree.stop() == 0


@pytest.mark.parametrize("daemon", [True, False])
def test_a_module_that_starts_a_thread_cannot_be_preloaded(service: Maker, daemon: bool) -> None:
    """78 and one sentence, even when the thread would never end."""
    tree = service(
        "import threading\n"
        f"threading.Thread(target=time.sleep, args=(600,), daemon={daemon}).start()\n"
    )
    refused = command("run", "-c", tree.config, cwd=tree.folder)
    assert refused.returncode == 78
    assert sentence(refused) == (
        "herdsman: preload: the handlers' modules start threads as they are imported; "
        "start them when the first job runs, or set preload = false"
    )
