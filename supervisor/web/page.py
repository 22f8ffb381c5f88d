"""Turn the status document into HTML.

Boundary: pure; a document in, text out. Everything is escaped by the template
engine, and no template marks anything as safe.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import jinja2

_HERE: Final = Path(__file__).parent
DASH: Final = "\u2013"
BAR_WIDTH: Final = 200.0
"""Width of a depth bar in the units of its picture."""
BAR_STATES: Final = ("claimed", "ready", "delayed", "dead")

ICON: Final = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">'
    '<rect width="32" height="32" rx="8" fill="#2f6f4f"/>'
    '<path d="M21 26V12a4.5 4.5 0 0 0-9 0" fill="none" stroke="#fff" stroke-width="3.2" '
    'stroke-linecap="round"/><circle cx="12" cy="21" r="2.6" fill="#fff"/></svg>'
)


def number(value: int | None) -> str:
    """Return a count with thin groups of digits; a dash when it is unknown."""
    return DASH if value is None else f"{value:,}".replace(",", "\u202f")


def short(value: int | None) -> str:
    """Return a count that fits a tile: three digits and a unit from a million on."""
    if value is None or value < 1_000_000:
        return number(value)
    scaled = float(value)
    for unit in ("", "", "M", "G", "T"):
        if scaled < 1000 or unit == "T":
            break
        scaled /= 1000
    digits = 2 if scaled < 10 else 1 if scaled < 100 else 0
    return f"{scaled:.{digits}f}\u00a0{unit}"


def span(seconds: float | None) -> str:
    """Return a duration in the one or two units an operator thinks in."""
    if seconds is None:
        return DASH
    if seconds < 0.001:
        return "0 s"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    whole = int(seconds)
    for size, unit, small, part in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min")):
        if whole >= size:
            rest = whole % size // small
            return f"{whole // size} {unit} {rest} {part}" if rest else f"{whole // size} {unit}"
    return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"


def size(count: int | None) -> str:
    """Return a number of bytes in binary units."""
    if count is None:
        return DASH
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def bar(depth: Mapping[str, int], most: int) -> list[dict[str, Any]]:
    """Return the pieces of a queue's bar: state, place and width, on the scale of `most` jobs.

    A state that has jobs is at least visible.
    """
    counts = {state: depth.get(state, 0) for state in BAR_STATES if depth.get(state, 0)}
    if not counts or not most:
        return []
    widths = {state: max(3.0, BAR_WIDTH * count / most) for state, count in counts.items()}
    # What the smallest pieces were given more than their due, the largest gives up.
    largest = max(widths, key=lambda state: widths[state])
    widths[largest] -= max(0.0, sum(widths.values()) - BAR_WIDTH)
    pieces = []
    left = 0.0
    for state, width in widths.items():
        pieces.append({"state": state, "x": f"{left:.2f}", "width": f"{width:.2f}"})
        left += width
    return pieces


@cache
def assets() -> Mapping[str, tuple[bytes, str]]:
    """Return every static file by name: its bytes and content type."""
    found = {"icon.svg": (ICON.encode(), "image/svg+xml")}
    for suffix, content_type in ((".css", "text/css"), (".js", "text/javascript")):
        for path in sorted((_HERE / "static").glob(f"*{suffix}")):
            found[path.name] = (path.read_bytes(), f"{content_type}; charset=utf-8")
    return found


@cache
def assets_tag() -> str:
    """Return a short digest of all static files: a new version gets a new address."""
    digest = hashlib.sha256()
    for name, (content, _) in assets().items():
        digest.update(name.encode() + b"\0" + content)
    return digest.hexdigest()[:12]


@cache
def _templates() -> jinja2.Environment:
    import jinja2  # here: 2 MB that a service nobody looks at does without

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters.update(number=number, short=short, span=span, size=size)
    environment.globals["bar"] = bar
    return environment


def dashboard(status: Mapping[str, Any]) -> str:
    """Return the dashboard of one status document."""
    most = max(
        (sum(queue["depth"][state] for state in BAR_STATES) for queue in status["queues"]),
        default=0,
    )
    template = _templates().get_template("dashboard.html")
    return template.render(status=status, most=most, tag=assets_tag(), bar_states=BAR_STATES)
