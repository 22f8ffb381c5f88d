"""Show that a job is interrupted while it runs, and nothing else ever is."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.child import Child, Role, SoftTimeout
from supervisor.slot import Kind, SlotState
from supervisor.slots import SlotTable

ALARM_SECONDS = 0.001
BYTES = 100_000_000


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    """The child's side of a worker that runs a job, in this process."""
    table = SlotTable.create(
        tmp_path / "x.slots", instance_uuid="0" * 32, pools=["default"], capacity=1
    )
    slot = table.slots[0]
    slot.open(name="default/0", pool_index=0, kind=Kind.WORKER, now_ns=1)
    slot.enter(SlotState.RUN)
    role = Role(name="default/0", pool="default", main=lambda _: 0)
    yield Child(role, slot, table, parent_pid=os.getppid(), news_fd=-1)
    table.close()


@pytest.fixture
def alarmed(child: Child) -> Iterator[Child]:
    """The same, with its handler of the soft timeout installed."""
    before = signal.signal(signal.SIGALRM, child._on_alarm)
    yield child
    signal.signal(signal.SIGALRM, before)


def test_a_job_is_interrupted_while_it_runs(alarmed: Child) -> None:
    """The soft timeout raises inside the stretch, which is closed by that."""
    with pytest.raises(SoftTimeout), alarmed.interruptible():
        signal.raise_signal(signal.SIGALRM)
    assert not alarmed._interruptible


def test_a_signal_as_the_stretch_is_left_leaves_it_closed(alarmed: Child) -> None:
    """It comes too late for the job, and must not leave the worker's own code interruptible."""
    with alarmed.interruptible():
        signal.setitimer(signal.ITIMER_REAL, ALARM_SECONDS)
        # Outlasts the alarm without a look for signals: the next is at the entry of __exit__.
        b" " * BYTES
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0, "the alarm came too late to show anything"
    assert not alarmed._interruptible
    signal.raise_signal(signal.SIGALRM)
