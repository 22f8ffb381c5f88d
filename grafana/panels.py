"""Build queries and panels of Grafana as plain dicts.

Boundary: how a query or a panel is written; which there are is `grafana.build`'s.
Numbers of the database are shown by every instance of a job, so they are the largest
of any instance and never added up; numbers of processes belong to their instance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

Json = dict[str, Any]

DATASOURCE: Final[Json] = {"type": "prometheus", "uid": "${datasource}"}
WIDTH: Final = 24
"""Columns of Grafana's grid."""
NO_DATA: Final = "no data: the service was not scraped in this time"


def _labels(*parts: str) -> str:
    return ",".join(part for part in parts if part)


def database(name: str, match: str = "", *, task: bool = False, queue: bool = True) -> str:
    """Select a family of the database; `queue` and `task` narrow it by the variables."""
    labels = _labels(
        'job=~"$job"', 'queue=~"$queue"' if queue else "", 'task=~"$task"' if task else "", match
    )
    return f"herdsman_{name}{{{labels}}}"


def process(name: str, match: str = "") -> str:
    """Select a family of the processes."""
    labels = _labels('job=~"$job"', 'instance=~"$instance"', match)
    return f"herdsman_{name}{{{labels}}}"


def once(expr: str, by: str = "") -> str:
    """Take what several instances show of one database as one number per `by`."""
    return f"max by ({by}) (sum by ({_labels(by, 'instance')}) ({expr}))"


def rate(selector: str) -> str:
    """Return the rate per second."""
    return f"rate({selector}[$__rate_interval])"


def grown(selector: str, by: str) -> str:
    """Return how much a counter grew in the time shown.

    Not by `increase`, which takes a series that begins at five for one that was always five.
    """
    now = once(selector, by)
    return f"({now} - ({once(f'{selector} offset $__range', by)} or 0 * {now}))"


def quantile(number: float, selector: str, by: str = "") -> str:
    """Return a quantile of a histogram of the database; `selector` selects its buckets."""
    return f"histogram_quantile({number}, {once(rate(selector), _labels(by, 'le'))})"


def target(expr: str, legend: str = "", **more: Any) -> Json:
    """Return one query of a panel."""
    return {
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": expr,
        "legendFormat": legend or "__auto",
        "range": True,
        **more,
    }


def _panel(
    kind: str, title: str, text: str, unit: str, queries: Iterable[Json], width: int, height: int
) -> Json:
    return {
        "type": kind,
        "title": title,
        "description": text,
        "datasource": DATASOURCE,
        "gridPos": {"w": width, "h": height},
        "targets": [
            {**query, "refId": chr(ord("A") + number)} for number, query in enumerate(queries)
        ],
        "fieldConfig": {"defaults": {"unit": unit, "noValue": NO_DATA}, "overrides": []},
        "options": {},
    }


def steps(*limits: float, colours: Sequence[str] = ("green", "orange", "red")) -> Json:
    """Return thresholds: the first colour up to the first limit, and so on."""
    found: list[Json] = [{"color": colours[0], "value": None}]
    found += [{"color": c, "value": v} for c, v in zip(colours[1:], limits, strict=False)]
    return {"mode": "absolute", "steps": found}


def stat(
    title: str,
    text: str,
    unit: str,
    queries: Iterable[Json],
    *,
    limits: Json | None = None,
    words: Mapping[str, str] | None = None,
    width: int = 3,
    decimals: int | None = None,
) -> Json:
    """Return a single number; `words` replace values, "nan" and "null" among them."""
    panel = _panel("stat", title, text, unit, queries, width, 4)
    defaults = panel["fieldConfig"]["defaults"]
    defaults["thresholds"] = limits or steps(colours=("green",))
    defaults["color"] = {"mode": "thresholds"}
    if decimals is not None:
        defaults["decimals"] = decimals
    if words:
        defaults["mappings"] = [_word(value, word) for value, word in words.items()]
    panel["options"] = {
        "colorMode": "value",
        "graphMode": "area",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "auto",
    }
    if words and "nan" in words:
        # A quotient without anything to divide is NaN, which "last not null" would pass over.
        panel["options"]["reduceOptions"]["calcs"] = ["last"]
    return panel


def _word(value: str, word: str) -> Json:
    if value in ("nan", "null"):
        return {"type": "special", "options": {"match": value, "result": {"text": word}}}
    return {"type": "value", "options": {value: {"text": word}}}


def graph(
    title: str,
    text: str,
    unit: str,
    queries: Iterable[Json],
    *,
    width: int = 8,
    stacked: bool = False,
    link: Json | None = None,
    low: float | None = 0,
) -> Json:
    """Return lines over time."""
    panel = _panel("timeseries", title, text, unit, queries, width, 8)
    defaults = panel["fieldConfig"]["defaults"]
    defaults["custom"] = {
        "drawStyle": "line",
        "fillOpacity": 30 if stacked else 10,
        "lineWidth": 1,
        "showPoints": "never",
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
    }
    if low is not None:
        defaults["min"] = low
    if link:
        defaults["links"] = [link]
    panel["options"] = {
        "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return panel


def heatmap(title: str, text: str, unit: str, expr: str, *, width: int = 12) -> Json:
    """Return the buckets of a histogram over time; `expr` keeps their label `le`."""
    panel = _panel("heatmap", title, text, unit, [target(expr, "{{le}}", format="heatmap")],
                   width, 8)  # fmt: skip
    panel["options"] = {
        "calculate": False,
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
        "rowsFrame": {"layout": "auto"},
        "tooltip": {"mode": "single", "yHistogram": True},
        "yAxis": {"axisPlacement": "left", "unit": unit},
    }
    return panel


def table(
    title: str, text: str, unit: str, expr: str, names: Mapping[str, str], *, width: int = 8
) -> Json:
    """Return the present labels of a query, and its value; `names` are the columns' titles."""
    panel = _panel("table", title, text, unit,
                   [target(expr, format="table", instant=True, range=False)], width, 8)  # fmt: skip
    panel["transformations"] = [
        {
            "id": "organize",
            "options": {"excludeByName": {"Time": True}, "renameByName": dict(names)},
        }
    ]
    panel["options"] = {"showHeader": True, "sortBy": [{"displayName": "number", "desc": True}]}
    return panel


def laid_out(rows: Iterable[tuple[str, Sequence[Json]]]) -> list[Json]:
    """Give every panel its id and its place, left to right under the title of its row."""
    found: list[Json] = []
    top = 0
    for title, panels in rows:
        place = {"x": 0, "y": top, "w": WIDTH, "h": 1}
        found.append({"type": "row", "title": title, "collapsed": False, "panels": [],
                      "gridPos": place})  # fmt: skip
        top += 1
        left = height = 0
        for panel in panels:
            size = panel["gridPos"]
            if left + size["w"] > WIDTH:
                top, left, height = top + height, 0, 0
            found.append({**panel, "gridPos": {"x": left, "y": top, **size}})
            left, height = left + size["w"], max(height, size["h"])
        top += height
    return [{"id": number, **panel} for number, panel in enumerate(found, 1)]


def query_variable(
    name: str, label: str, query: str, *, several: bool = False, everything: bool = True
) -> Json:
    """Return a variable whose values come from Prometheus.

    `several` allows more than one of them, `everything` allows all.
    """
    if not everything:
        current: Json = {}
    elif several:
        current = {"selected": True, "text": ["All"], "value": ["$__all"]}
    else:
        current = {"selected": True, "text": "All", "value": "$__all"}
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": several,
        "includeAll": everything,
        "allValue": ".*" if everything else None,
        "current": current,
    }


def annotation(name: str, expr: str, colour: str, title: str, text: str) -> Json:
    """Return marks over time wherever a query gives something."""
    return {
        "name": name,
        "datasource": DATASOURCE,
        "enable": True,
        "expr": expr,
        "iconColor": colour,
        "step": "",
        "tagKeys": "alertname,severity" if "ALERTS" in expr else "instance",
        "textFormat": text,
        "titleFormat": title,
        "useValueForTime": False,
    }
