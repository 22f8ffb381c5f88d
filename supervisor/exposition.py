"""Write metric families as text, in the plain and the OpenMetrics format, fast.

The client library's own writer takes some ten microseconds a sample, which is most of a
scrape of fifty queues; this one remembers what is the same in every scrape, the names with
their labels. Its output is the library's, byte for byte, and a test holds it to that.

Boundary: families in, bytes out. Names and label names are those of the catalogue, which
need no escaping; label values may be anything that `catalogue.clean_label` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, cast

from prometheus_client import Metric
from prometheus_client.samples import Exemplar, Sample
from prometheus_client.utils import floatToGoString

_HEADS_MAX: Final = 100_000
"""Remembered beginnings of lines; names are capped, so only changing infos could add more."""
_go: Final = cast("Callable[[float], str]", floatToGoString)
_heads: dict[tuple[str, tuple[str, ...], tuple[str, ...]], str] = {}
_histogram_heads: dict[tuple[str, tuple[str, ...]], list[str]] = {}

Labels = tuple[str, ...]


class Scalars(Metric):
    """A counter or gauge as `(label values, number)`; samples are made for who wants them."""

    def __init__(
        self, name: str, text: str, kind: str, labels: Labels, cells: Iterable[tuple[Labels, float]]
    ) -> None:
        super().__init__(name.removesuffix("_total"), text, kind)
        self.sample_name = name
        self.labels = labels
        self.cells = list(cells)

    @property
    def samples(self) -> list[Sample]:
        """The family as the client library has it."""
        return [
            Sample(self.sample_name, dict(zip(self.labels, at, strict=True)), value)
            for at, value in self.cells
        ]

    @samples.setter
    def samples(self, value: list[Sample]) -> None:
        """Take no samples: they come from the cells."""


class Histograms(Metric):
    """A histogram family as `(label values, cumulative counts, sum, exemplars by bucket)`."""

    def __init__(self, name: str, text: str, labels: Labels, bounds: Sequence[str]) -> None:
        super().__init__(name, text, "histogram")
        self.labels = labels
        self.bounds = bounds
        self.cells: list[tuple[Labels, Sequence[int], float, Mapping[int, Exemplar]]] = []

    @property
    def samples(self) -> list[Sample]:
        """The family as the client library has it."""
        made = []
        for at, counts, total, examples in self.cells:
            own = dict(zip(self.labels, at, strict=True))
            for place, (bound, count) in enumerate(zip(self.bounds, counts, strict=True)):
                labels = {**own, "le": bound}
                example = examples.get(place)
                made.append(Sample(f"{self.name}_bucket", labels, count, None, example))
            made.append(Sample(f"{self.name}_count", own, counts[-1]))
            made.append(Sample(f"{self.name}_sum", own, total))
        return made

    @samples.setter
    def samples(self, value: list[Sample]) -> None:
        """Take no samples: they come from the cells."""

    def lines(self, *, openmetrics: bool) -> Iterable[str]:
        """Yield the lines of every sample."""
        for at, counts, total, examples in self.cells:
            heads = _histogram_heads.get((self.name, at)) or self._heads_of(at)
            if openmetrics and examples:
                for place, count in enumerate(counts):
                    tail = _exemplar(examples[place]) if place in examples else ""
                    yield f"{heads[place]}{_number(count)}{tail}\n"
            elif counts[-1] < 1_000_000:
                yield from [
                    f"{head}{count}.0\n" for head, count in zip(heads, counts, strict=False)
                ]
            else:
                for head, count in zip(heads, counts, strict=False):
                    yield f"{head}{_number(count)}\n"
            yield f"{heads[-2]}{_number(counts[-1])}\n{heads[-1]}{_number(total)}\n"

    def _heads_of(self, at: Labels) -> list[str]:
        if len(_histogram_heads) >= _HEADS_MAX:
            _histogram_heads.clear()
        labels, name = (*self.labels, "le"), f"{self.name}_bucket"
        heads = [_line_head(name, labels, (*at, bound)) for bound in self.bounds]
        heads += [_line_head(f"{self.name}_{end}", self.labels, at) for end in ("count", "sum")]
        _histogram_heads[self.name, at] = heads
        return heads


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
        if isinstance(family, Histograms):
            lines += family.lines(openmetrics=openmetrics)
        elif isinstance(family, Scalars):
            own, keys = family.sample_name, family.labels
            lines += [
                f"{_heads.get((own, keys, at)) or _head(own, keys, at)}{_number(value)}\n"
                for at, value in family.cells
            ]
        else:
            lines += _lines(family, openmetrics=openmetrics)
    if openmetrics:
        lines.append("# EOF\n")
    return "".join(lines).encode()


def _lines(family: Metric, *, openmetrics: bool) -> Iterable[str]:
    for sample in family.samples:
        labels = sample.labels
        at = (sample.name, tuple(labels), tuple(labels.values()))
        head = _heads.get(at) or _head(*at)
        shown = openmetrics and sample.exemplar is not None
        tail = _exemplar(sample.exemplar) if shown and sample.exemplar else ""
        yield f"{head}{_number(sample.value)}{tail}\n"


def _number(value: float) -> str:
    # Below a million the library writes what repr does; that is nearly every sample.
    return repr(float(value)) if -1e6 < value < 1e6 else _go(value)


def _head(name: str, labels: Labels, values: Labels) -> str:
    """Return a sample's line up to its number, and remember it."""
    if len(_heads) >= _HEADS_MAX:
        _heads.clear()
    head = _heads[name, labels, values] = _line_head(name, labels, values)
    return head


def _line_head(name: str, labels: Labels, values: Labels) -> str:
    pairs = sorted(zip(labels, values, strict=True))
    text = ",".join(f'{label}="{_escaped(value)}"' for label, value in pairs)
    return f"{name}{{{text}}} " if text else f"{name} "


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
