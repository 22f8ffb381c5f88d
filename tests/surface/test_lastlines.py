"""The ring of last log lines: bounded, readable at any moment, and of one process only."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from supervisor.lastlines import LINES_MAX, RING_BYTES, LastLines, read


def test_lines_come_back_in_order_before_the_ring_is_full(tmp_path: Path) -> None:
    """Also before there is one, and the file is ours alone."""
    path = str(tmp_path / "lines")
    assert read(path) == ""
    ring = LastLines(path)
    assert read(path) == ""
    ring.write(b"one\n")
    ring.write("zwei ü\n".encode())
    assert read(path) == "one\nzwei ü"
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    LastLines(path).close()
    assert read(path) == "", "a new process begins with none"
    ring.write(b"of the process before\n")
    assert read(path) == ""
    ring.close()


@given(sizes=st.lists(st.integers(1, 4095), min_size=1, max_size=60))
def test_the_newest_lines_are_whole_wherever_the_ring_wraps(
    tmp_path_factory: Callable[..., object], sizes: list[int]
) -> None:
    """As many as fit, each as it was written, none twice, and the file never grows over its size.

    The ring loses a byte to its mark, and the oldest line that it overwrites in part.
    """
    path = str(tmp_path_factory.mktemp("ring") / "lines")  # type: ignore[attr-defined]
    ring = LastLines(path)
    lines = [f"{at:04} ".ljust(size, "x") for at, size in enumerate(sizes)]
    for at, line in enumerate(lines, 1):
        ring.write(line.encode() + b"\n")
        kept = read(path).split("\n")
        assert kept == lines[at - len(kept) : at]
        least, used = 0, 1
        for one in reversed(lines[:at]):
            used += len(one) + 1
            least += used < RING_BYTES
        assert len(kept) >= min(least, LINES_MAX, at) > 0
        assert len(kept) <= LINES_MAX
        assert os.stat(path).st_size <= RING_BYTES
    ring.close()


def test_a_ring_torn_by_a_kill_is_still_read(tmp_path: Path) -> None:
    """Without a mark, and with control characters: whatever it is, it is printable text."""
    path = tmp_path / "lines"
    path.write_bytes(b"half a line\nwhole \x1b[31mline\n" + b"\xff" * 10)
    assert read(str(path)) == "half a line\nwhole [31mline\n" + "�" * 10
    path.write_bytes(b"\0" * RING_BYTES)
    assert read(str(path)) == ""


def test_a_line_that_wrapped_and_lost_its_head_is_not_shown(tmp_path: Path) -> None:
    """Its tail stands at the start of the ring, and says nothing without the head."""
    path = str(tmp_path / "lines")
    ring = LastLines(path)
    # Two lines, the second around the end; the third goes over its head's first bytes.
    for size in (RING_BYTES - 100, 199, RING_BYTES - 160):
        ring.write(b"x" * (size - 1) + b"\n")
    ring.close()
    assert read(path) == "x" * (RING_BYTES - 161)
