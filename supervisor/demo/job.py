"""Compress and hash one file: the handler of the demonstration.

Boundary: imports no more than it needs, as a user's handler would.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from pathlib import Path
from typing import Any


def compress(payload: dict[str, Any]) -> None:
    """Write the file's SHA-256 and its compressed bytes to the target, all or nothing.

    It may run twice for one file, as every handler may: the second time it
    writes the same bytes to the same place.
    """
    data = Path(payload["source"]).read_bytes()
    target = Path(payload["target"])
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(hashlib.sha256(data).hexdigest().encode() + b"\n" + zlib.compress(data, 6))
    os.replace(part, target)
