"""Read and make W3C `traceparent` texts, with no tracing library.

    00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01
    version, trace id, id of the parent span, flags (1: sampled)

Boundary: pure text (W3C Trace Context, level 1, section 3.2). Headers are hostile: what
does not fit is as if it were not there.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from typing import Final

HEADER: Final = "traceparent"
_TEXT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TEXT_LENGTH_MAX: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceParent:
    """The trace a job belongs to, and the span that put it there; lower-case hexadecimal."""

    trace_id: str
    span_id: str
    sampled: bool = True

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"


def parse(text: object) -> TraceParent | None:
    """Return what a `traceparent` says; None when it is none.

    A version we do not know is read like ours, as the standard asks; only ours
    must end after the flags.
    """
    if not isinstance(text, str) or len(text) > _TEXT_LENGTH_MAX:
        return None
    found = _TEXT.fullmatch(text)
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == "ff" or (version == "00" and rest is not None):
        return None
    if not trace_id.strip("0") or not span_id.strip("0"):
        return None
    return TraceParent(trace_id=trace_id, span_id=span_id, sampled=bool(int(flags, 16) & 1))


def fresh(parent: TraceParent | None = None) -> TraceParent:
    """Return a new span's context: of the parent's trace, or of a trace of its own."""
    return TraceParent(
        trace_id=parent.trace_id if parent else secrets.token_hex(16),
        span_id=secrets.token_hex(8),
        sampled=parent.sampled if parent else True,
    )


def of_headers(headers: str | None) -> TraceParent | None:
    """Return the trace that a job's stored headers name; None when they name none."""
    if not headers or HEADER not in headers:
        return None
    try:
        found = json.loads(headers)
    except (ValueError, RecursionError):
        return None
    return parse(found.get(HEADER)) if isinstance(found, dict) else None
