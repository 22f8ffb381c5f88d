"""Read durations, sizes and addresses as people write them.

Boundary: pure text to numbers; a value that cannot be read raises ValueError with one
sentence that shows accepted forms. No file, no clock.
"""

from __future__ import annotations

import ipaddress
import math
import re
from typing import Final

DURATION_SECONDS_MAX: Final = 10 * 366 * 86_400.0
"""Longest duration accepted: ten years, which still fits microseconds in 64 bits with room."""
SIZE_BYTES_MAX: Final = 2**50
"""Largest size accepted: one PiB, far above any machine this runs on."""

_SECONDS: Final = {
    "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0,
}  # fmt: skip
_BYTES: Final = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30,
}  # fmt: skip
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|m|h|d|w)\s*", re.ASCII)
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?i?b?)", re.ASCII | re.IGNORECASE)
_NUMBER: Final = re.compile(r"\d+(?:\.\d+)?", re.ASCII)


def seconds(value: object) -> float:
    """Read a duration: a number of seconds, or text such as "250ms", "30s", "1h30m", "7d".

    Raises ValueError for anything else, a negative number, or more than ten years.
    """
    total = _seconds(value)
    if not 0 <= total <= DURATION_SECONDS_MAX:
        raise ValueError(f"the duration {value!r} is not between 0 and ten years")
    return total


def _seconds(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if math.isfinite(value) else -1.0
    if isinstance(value, str) and len(value) <= 64:
        text = value.strip().lower()
        if _NUMBER.fullmatch(text):
            return float(text)
        at, total = 0, 0.0
        while part := _PART.match(text, at):
            total += float(part[1]) * _SECONDS[part[2]]
            at = part.end()
        if at == len(text) and text:
            return total
    raise ValueError(f'{_shown(value)} is not a duration; write seconds, or "250ms", "30s", "7d"')


def size_bytes(value: object) -> int:
    """Read a size: a number of bytes, or text such as "256MB" (10^6) or "1GiB" (2^30).

    Raises ValueError for anything else, zero, or more than a PiB.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        total = value
    elif isinstance(value, str) and len(value) <= 64 and (part := _SIZE.fullmatch(value.strip())):
        unit = part[2].lower()
        if unit and not unit.endswith("b"):
            unit += "b"
        total = int(float(part[1]) * _BYTES[unit]) if unit in _BYTES else -1
    else:
        total = -1
    if not 0 < total <= SIZE_BYTES_MAX:
        raise ValueError(f'{_shown(value)} is not a size; write bytes, or "256MB", "1GiB"')
    return total


def address(text: str) -> tuple[str, int]:
    """Split "host:port" or "[ipv6]:port"; port 0 lets the system choose.

    Raises ValueError when either half is missing or the port is not 0 to 65535.
    """
    host, colon, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not (colon and host and port.isascii() and port.isdigit() and int(port) <= 65_535):
        raise ValueError(
            f'{_shown(text)} is no address; write "127.0.0.1:9464", "[::1]:9464" or "off"'
        )
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach `host`; a name other than localhost is not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
