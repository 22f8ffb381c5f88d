"""Write metric families as text, in the plain and the OpenMetrics format, fast.

The client library's own writer takes some ten microseconds a sample, which is most of a
scrape of fifty queues; this one remembers what is the same in every scrape, the names with
their labels. Its output is the library's, byte for byte, and a test holds it to that.

Boundary: families in, bytes out. Names and label names are those of the catalogue, which
need no escaping; label values may be anything that `catalogue.clean_label` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, cast

from prometheus_client import Metric
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

_HEADS_MAX: Final = 100_000
"""Remembered beginnings of lines; names are capped, so only changing infos could add more."""
_go: Final = cast("Callable[[float], str]", floatToGoString)
_heads: dict[tuple[str, tuple[str, ...], tuple[str, ...]], str] = {}


def encode(families: Iterable[Metric], *, openmetrics: bool) -> bytes:
    """Return the families as text; exemplars are written in OpenMetrics alone."""
    lines: list[str] = []
    for family in families:
        name = family.name
        kind = family.type
        if not openmetrics:
            name += {"counter": "_total", "info": "_info"}.get(kind, "")
            kind = "gauge" if kind == "info" else kind
        lines.append(f"# HELP {name} {_help(family.documentation, openmetrics)}\n")
        lines.append(f"# TYPE {name} {kind}\n")
        for sample in family.samples:
            labels = sample.labels
            at = (sample.name, tuple(labels), tuple(labels.values()))
            head = _heads.get(at)
            if head is None:
                head = _head(*at)
            if openmetrics and sample.exemplar is not None:
                tail = _exemplar(sample.exemplar)
                lines.append(f"{head}{_number(sample.value)}{tail}\n")
            else:
                lines.append(f"{head}{_number(sample.value)}\n")
    if openmetrics:
        lines.append("# EOF\n")
    return "".join(lines).encode()


def _number(value: float) -> str:
    # Below a million the library writes what repr does; that is nearly every sample.
    return repr(float(value)) if -1e6 < value < 1e6 else _go(value)


def _head(name: str, labels: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Return a sample's line up to its number, and remember it."""
    if len(_heads) >= _HEADS_MAX:
        _heads.clear()
    pairs = sorted(zip(labels, values, strict=True))
    text = ",".join(f'{label}="{_escaped(value)}"' for label, value in pairs)
    head = f"{name}{{{text}}} " if text else f"{name} "
    _heads[name, labels, values] = head
    return head


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _help(text: str, openmetrics: bool) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if openmetrics else text


def _exemplar(exemplar: Exemplar) -> str:
    pairs = sorted(exemplar.labels.items())
    text = ",".join(f'{label}="{_escaped(value)}"' for label, value in pairs)
    moment = "" if exemplar.timestamp is None else f" {exemplar.timestamp}"
    return f" # {{{text}}} {_number(exemplar.value)}{moment}"
