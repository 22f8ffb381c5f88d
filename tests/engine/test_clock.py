"""Show that the clocks measure what leases and due dates need, and that the fake one obeys."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from queue_core import clock
from queue_core.clock import BOOT_UNKNOWN, Clock, FakeClock, SystemClock, parse_offsets


def test_wall_time_is_microseconds_since_the_epoch() -> None:
    """Due dates can be compared with what other programs call the time."""
    before = time.time_ns() // 1_000
    assert before <= SystemClock().wall_us() <= time.time_ns() // 1_000


def test_monotonic_time_is_the_same_clock_in_every_process() -> None:
    """A lease written by one process is read by another."""
    code = "from queue_core.clock import SystemClock as C; print(C().monotonic_us(), C().boot_id())"
    here = SystemClock()
    before = here.monotonic_us()
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(clock.__file__).parents[1],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    there_us, boot_id = run.stdout.split()
    assert before < int(there_us) < here.monotonic_us()
    assert boot_id == here.boot_id()


def test_the_boot_id_is_the_kernels() -> None:
    """A restart of the host is told from a restart of the program."""
    told = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert SystemClock().boot_id() == told


def test_a_host_without_a_boot_id_has_a_constant_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere no clock step may look like a restart."""
    monkeypatch.setattr(clock, "_BOOT_ID_PATH", Path("/nowhere/boot_id"))
    clock._read_boot_id.cache_clear()
    try:
        assert SystemClock().boot_id() == BOOT_UNKNOWN
    finally:
        clock._read_boot_id.cache_clear()


def test_the_offset_of_a_time_namespace_is_taken_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A container with its own clock and the host agree on when a lease ends."""
    offsets = tmp_path / "timens_offsets"
    offsets.write_text("monotonic         100 500000000\nboottime 7 0\n")
    plain = SystemClock()
    monkeypatch.setattr(clock, "_OFFSETS_PATH", offsets)
    clock._offset_ns.cache_clear()
    try:
        inside = SystemClock()
        assert 100.4e6 < plain.monotonic_us() - inside.monotonic_us() < 100.6e6
    finally:
        clock._offset_ns.cache_clear()


@pytest.mark.parametrize(
    ("text", "offset_ns"),
    [
        ("monotonic           0         0\nboottime            0         0\n", 0),
        ("monotonic 3 5\n", 3_000_000_005),
        ("boottime 9 9\nmonotonic -2 500000000\n", -1_500_000_000),
        ("", 0),
    ],
)
def test_offsets_are_read_with_their_sign(text: str, offset_ns: int) -> None:
    """Seconds may be negative; nanoseconds always add."""
    assert parse_offsets(text) == offset_ns


def test_the_fake_clock_moves_only_when_told() -> None:
    """Users test delays and leases without waiting for them."""
    fake = FakeClock(wall_us=5_000_000, monotonic_us=7_000_000, boot_id="one")
    clocks: Clock = fake
    assert (clocks.wall_us(), clocks.monotonic_us(), clocks.boot_id()) == (
        5_000_000,
        7_000_000,
        "one",
    )
    fake.advance(1.5)
    assert (fake.wall_us(), fake.monotonic_us()) == (6_500_000, 8_500_000)
    fake.step_wall(-3)
    assert (fake.wall_us(), fake.monotonic_us()) == (3_500_000, 8_500_000)
    with pytest.raises(ValueError, match="step_wall"):
        fake.advance(-1)


def test_a_fake_reboot_changes_boot_and_monotonic_time() -> None:
    """What a test does to the host is what a power cut does."""
    fake = FakeClock()
    wall_us, boot_id, monotonic_us = fake.wall_us(), fake.boot_id(), fake.monotonic_us()
    fake.reboot()
    assert fake.boot_id() != boot_id
    assert fake.monotonic_us() < monotonic_us
    assert fake.wall_us() == wall_us
    again = fake.boot_id()
    fake.reboot()
    assert fake.boot_id() != again
