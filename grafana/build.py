"""Write the dashboards: python -m grafana.build, or with --check only compare them.

Boundary: which panels there are, and what they say; how one is written is `grafana.panels`'.
Every family of the exporter is on one of these dashboards; a test compares them with a scrape.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

from grafana import overview, task
from grafana.panels import Json, annotation, database, process, query_variable

FOLDER: Final = Path(__file__).parent / "dashboards"
SCHEMA: Final = 39
"""Version of Grafana's classic dashboard schema; Grafana 11 wrote it, later ones convert it."""

_BUILD: Final = process("build_info")
_CONFIG: Final = process("config_info")
_START: Final = process("supervisor_start_timestamp_seconds")

ANNOTATIONS: Final = [
    annotation("Alerts", 'ALERTS{service="herdsman",alertstate="firing",job=~"$job|"}', "red",
               "{{alertname}}", "{{queue}} {{task}} {{pool}} {{instance}}"),
    annotation("Start",
               f"changes({_START}[$__rate_interval]) > 0"
               f" or {_START} unless on (instance) {_START} offset $__rate_interval",
               "blue", "started", "{{instance}}"),
    annotation("Version",
               f"{_BUILD} unless on (instance, version) {_BUILD} offset $__rate_interval",
               "purple", "version {{version}}", "{{instance}}"),
    annotation("Configuration",
               f"{_CONFIG} unless on (instance, hash) {_CONFIG} offset $__rate_interval",
               "green", "configuration {{hash}}", "{{instance}}"),
]  # fmt: skip


def _variables(*, several: bool) -> list[Json]:
    pick = {"name": "datasource", "label": "Data source", "type": "datasource",
            "query": "prometheus", "refresh": 1, "current": {}}  # fmt: skip
    jobs = "label_values(herdsman_database_up, job)"
    instances = 'label_values(herdsman_build_info{job=~"$job"}, instance)'
    queues = f"label_values({database('queue_jobs', queue=False)}, queue)"
    tasks = f"label_values({database('attempts_started_total')}, task)"
    return [
        pick,
        query_variable("job", "Job", jobs, everything=False),
        query_variable("instance", "Instance", instances, several=True),
        query_variable("queue", "Queue", queues, several=several),
        query_variable("task", "Task", tasks, several=several),
    ]


def _link(title: str, uid: str) -> Json:
    return {"title": title, "type": "link", "url": f"/d/{uid}", "icon": "dashboard",
            "keepTime": True, "includeVars": True, "targetBlank": False}  # fmt: skip


def _dashboard(uid: str, title: str, text: str, panels: list[Json], link: Json) -> Json:
    return {
        "uid": uid,
        "title": title,
        "description": text,
        "tags": ["herdsman"],
        "schemaVersion": SCHEMA,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": ANNOTATIONS},
        "templating": {"list": _variables(several=uid == overview.UID)},
        "links": [link],
        "panels": panels,
    }


def dashboards() -> dict[str, Json]:
    """Return every dashboard by its file name."""
    return {
        "overview.json": _dashboard(
            overview.UID, "herdsman", "Is it fine, since when, and why not.",
            overview.panels(), _link("One task", task.UID),
        ),
        "task.json": _dashboard(
            task.UID, "herdsman: one task", "How the jobs of one task fare.",
            task.panels(), _link("Overview", overview.UID),
        ),
    }  # fmt: skip


def rendered() -> dict[str, str]:
    """Return the text of every file."""
    return {
        name: json.dumps(board, indent=1, ensure_ascii=False) + "\n"
        for name, board in dashboards().items()
    }


def main(arguments: list[str]) -> int:
    """Write the files; with --check return 1 when one differs."""
    differs = 0
    for name, text in rendered().items():
        path = FOLDER / name
        if path.exists() and path.read_text() == text:
            continue
        differs = 1
        if "--check" not in arguments:
            path.write_text(text)
    return differs if "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
