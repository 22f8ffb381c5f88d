"""Watch a running service through a real Prometheus: every query answers, the right alerts fire."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import wait_until
from tests.process.service import ROOT, Service, services
from tests.surface.rules import FOR_SECONDS_MIN, RULES, faster, program

VARIABLES = {
    "$__rate_interval": "15s", "$__range": "120s", "$job": "herdsman", "$instance": ".*",
    "$queue": ".*", "$task": ".*",
}  # fmt: skip
STOP_SECONDS = 10


class Prometheus:
    """One Prometheus on loopback, with a data folder of its own."""

    def __init__(self, folder: Path, scraped: str) -> None:
        """Start it, to scrape one address every second with the rules made faster."""
        folder.mkdir(mode=0o700)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        config = yaml.safe_load((RULES.parent / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        (job,) = config["scrape_configs"]
        job["static_configs"][0]["targets"] = [scraped]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        (folder / "rules.yml").write_text(faster(RULES.read_text()))
        self.log = folder / "log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    program("prometheus"), f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder,
                env={**os.environ, "GOMAXPROCS": "1"},
            )  # fmt: skip

    def get(self, path: str, **query: str) -> Any:
        """Return the data of one answer of the API."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{query}: {error.read().decode()}") from None
        except OSError as error:
            assert self.process.poll() is None, self.log.read_text()
            raise AssertionError(f"no answer: {error}") from None

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Return the series of an instant query."""
        found: list[dict[str, Any]] = self.get("query", query=expr)["result"]
        return found

    def fired(self) -> set[str]:
        """Return every alert that has fired at any time."""
        found = self.query('last_over_time(ALERTS{alertstate="firing"}[10m])')
        return {one["metric"]["alertname"] for one in found}

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(STOP_SECONDS)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[Service, Prometheus]]:
    """Run a service and a Prometheus that has scraped it at least twice."""
    program("prometheus")
    with services(tmp_path) as make:
        tree = make(processes=2, web=True, extra="[queues.work]\nmax_depth = 10000\n").started()
        wait_until(lambda: tree.get("metrics")[0] == 200, what="the web answers")
        address = tree.events("web_listening")[-1]["address"]
        prometheus = Prometheus(tmp_path / "prometheus", urllib.parse.urlsplit(address).netloc)
        try:
            seen = "count_over_time(herdsman_dead_letters_total[1m]) > 1"
            wait_until(lambda: prometheus.query(seen), timeout_seconds=40, poll_seconds=0.1)
            yield tree, prometheus
        finally:
            prometheus.stop()


def boards() -> list[dict[str, Any]]:
    """Return the committed dashboards, with the variables of their queries filled."""
    found = []
    for path in sorted((ROOT / "grafana" / "dashboards").glob("*.json")):
        text = path.read_text()
        for name, value in VARIABLES.items():
            text = text.replace(name, value)
        found.append(json.loads(text))
    return found


def written() -> list[tuple[str, str]]:
    """Return (place, expression) of every panel's queries."""
    return [
        (f"{board['title']}: {panel['title']} {target['refId']}", target["expr"])
        for board in boards()
        for panel in board["panels"]
        for target in panel.get("targets", [])
    ]


def wait_for_alerts(prometheus: Prometheus, names: set[str]) -> None:
    """Wait until these alerts have fired, and check that no other has."""

    def fired() -> bool:
        assert prometheus.fired() == names
        return True

    wait_until(fired, poll_seconds=0.2)


@pytest.mark.long
def test_the_right_alerts_fire_and_every_panel_has_data(
    watched: tuple[Service, Prometheus],
) -> None:
    """Through a load, a crash loop and a burst of dead letters, and no alert beside those two."""
    tree, prometheus = watched
    queue = tree.queue()
    queue.put("nothing", delay=3600)

    ids = queue.put_many(["sleep 0.01"] * 200)
    wait_until(lambda: tree.done(ids[-1]) and tree.done(*ids), poll_seconds=0.1)
    assert prometheus.fired() == set(), prometheus.query("up[2m]")

    queue.put_many(["reject"] * 10)
    wait_for_alerts(prometheus, {"DeadLetters"})

    crashes = queue.put_many(["once die"] * 5)
    wait_until(lambda: tree.done(*crashes), poll_seconds=0.1)
    both = {"DeadLetters", "WorkerCrashLoop"}
    wait_for_alerts(prometheus, both)

    queue.put_many(["sleep 0.01"] * 50)
    for where, expr in written():
        wait_until(lambda expr=expr: prometheus.query(expr), poll_seconds=0.2, what=where)

    marks = {mark["name"]: mark["expr"] for mark in boards()[0]["annotations"]["list"]}
    seen = {name: len(prometheus.query(expr)) for name, expr in marks.items()}
    assert seen["Alerts"] == 2
    for board in boards():
        for variable in board["templating"]["list"][1:]:
            match, label = variable["definition"].removeprefix("label_values(")[:-1].rsplit(", ", 1)
            assert prometheus.get(f"label/{label}/values", **{"match[]": match}), variable["name"]

    # What is pending now gets the time to fire.
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > FOR_SECONDS_MIN + 2, poll_seconds=0.2)
    assert prometheus.fired() == both, prometheus.query("up[2m]")
    broken = [
        f"{rule['name']}: {rule['lastError']}"
        for group in prometheus.get("rules")["groups"]
        for rule in group["rules"]
        if rule["health"] != "ok"
    ]
    assert broken == []
    texts = [one["annotations"] for one in prometheus.get("alerts")["alerts"]]
    assert "error" not in json.dumps(texts).lower()
    assert "no value" not in json.dumps(texts)
