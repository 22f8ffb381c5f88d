"""Hold the place of `herdsman demo`, which is not written yet.

Boundary: none.
"""

from __future__ import annotations


def demo() -> None:
    """Not written yet."""
    raise SystemExit(70)
