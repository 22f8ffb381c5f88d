"""Choose the files of the demonstration, and verify what became of each.

Boundary: reads the standard library and the output folder, nothing else.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SKIPPED: Final = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One file to work on, and where its output goes."""

    source: Path
    target: Path


def pieces(output: Path, limit: int | None = None) -> list[Piece]:
    """Return every file of the running Python's standard library, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for path in _files(root):
        found.append(Piece(source=path, target=output / f"{path.relative_to(root)}.z"))
        if limit is not None and len(found) >= limit:
            break
    return found


def _files(root: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in _SKIPPED)
        for name in sorted(files):
            path = Path(folder, name)
            # What cannot be read, or may change while we look, proves nothing.
            if path.is_file() and os.access(path, os.R_OK) and not name.endswith(".pyc"):
                yield path


def wrong(found: Sequence[Piece]) -> list[Piece]:
    """Return the pieces whose output is missing or is not that of their file."""
    return [piece for piece in found if not _right(piece)]


def _right(piece: Piece) -> bool:
    try:
        data = piece.source.read_bytes()
        told, _, packed = piece.target.read_bytes().partition(b"\n")
        return told.decode() == hashlib.sha256(data).hexdigest() and zlib.decompress(packed) == data
    except (OSError, ValueError, zlib.error):
        return False
