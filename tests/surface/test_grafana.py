"""Hold dashboards, rules and documents to what a running service really exposes."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from grafana import build
from tests.conftest import wait_until
from tests.process.service import ROOT, Service, services

pytestmark = pytest.mark.xdist_group("grafana")  # one service for all of them

GRAFANA = ROOT / "grafana"
RULES = GRAFANA / "prometheus" / "rules.yml"
BOARDS = {path.name: json.loads(path.read_text()) for path in GRAFANA.glob("dashboards/*.json")}
DOCUMENTS = [*ROOT.glob("*.md"), *GRAFANA.glob("*.md"), *(ROOT / "config").glob("*.md")]
SCRAPED_WITH = {"job", "instance"}
"""Labels that Prometheus adds."""
NOT_OURS = {"up", "ALERTS"}
KINDS = {"row", "stat", "timeseries", "heatmap", "table"}
"""Types of Grafana's own panels that we use."""
UNITS = {"short", "s", "ops", "bytes", "percentunit", "bool"}
"""Names from Grafana's list of units that we use."""
VARIABLES = {
    "$__rate_interval": "5m", "$__range": "1h", "$job": "herdsman", "$instance": ".*",
    "$queue": ".*", "$task": ".*",
}  # fmt: skip


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the panels of a dashboard that show something."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def filled(text: str) -> str:
    """Put a value in the place of each of Grafana's variables."""
    for name, value in VARIABLES.items():
        text = text.replace(name, value)
    return text


def queries(board: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (where it stands, expression) of every panel and annotation, as written."""
    for panel in panels(board):
        for target in panel["targets"]:
            yield f"{panel['title']} {target['refId']}", target["expr"]
    for mark in board["annotations"]["list"]:
        yield mark["name"], mark["expr"]


@cache
def rules() -> list[dict[str, Any]]:
    """Return every rule."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def everywhere() -> list[tuple[str, str]]:
    """Return every expression there is, ready to be parsed, with its place."""
    found = [
        (f"{name}: {where}", filled(expr))
        for name, board in BOARDS.items()
        for where, expr in queries(board)
    ]
    return found + [(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()]


@dataclass(slots=True)
class Used:
    """What an expression names."""

    selectors: list[promql_parser.VectorSelector] = field(default_factory=list)
    labels: set[str] = field(default_factory=set)
    ranges: list[promql_parser.MatrixSelector] = field(default_factory=list)


def used(expr: str) -> Used:
    """Walk an expression."""
    found = Used()

    def visit(node: object) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.selectors.append(node)
        elif isinstance(node, promql_parser.MatrixSelector):
            found.ranges.append(node)
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier:
            found.labels.update(node.modifier.labels)
        elif isinstance(node, promql_parser.BinaryExpr) and node.modifier:
            if node.modifier.matching:
                found.labels.update(node.modifier.matching.labels)
            found.labels.update(node.modifier.group_labels or ())

    promql_parser.walk(promql_parser.parse(expr), visit)
    return found


# ---- what a service really exposes ------------------------------------------------------------


@dataclass(slots=True)
class Scrape:
    """The families of one scrape, and each sample name's labels with their values."""

    families: dict[str, set[str]] = field(default_factory=dict)
    labels: dict[str, dict[str, set[str]]] = field(default_factory=dict)

    def __init__(self, text: str) -> None:
        self.families, self.labels = {}, {}
        for family in text_string_to_metric_families(text):
            self.families[family.name] = {sample.name for sample in family.samples}
            for sample in family.samples:
                seen = self.labels.setdefault(sample.name, {})
                for name, value in sample.labels.items():
                    seen.setdefault(name, set()).add(value)


def exercised(tree: Service) -> str:
    """Have everything happen of which a family without zeros tells, and return a scrape."""
    queue = tree.queue()
    ids = queue.put_many(["nothing", "nothing", "raise", "reject"])
    queue.put("nothing", delay=3600)  # gives the next due time
    queue.put("nothing", task="nobody")  # waits aside
    wait_until(lambda: tree.done(*ids[:2]) and tree.rows()["dead"] == 2)
    return wait_until(lambda: complete(tree.get("metrics")[1]), timeout_seconds=40)


def complete(text: str) -> str:
    """Return a scrape in which the keeper has done each duty once, "" before."""
    late = ("herdsman_reaper_last_run", "herdsman_queue_next_due", "herdsman_errors_total{")
    return text if all(f"\n{name}" in text for name in late) else ""


@pytest.fixture(scope="module")
def scrape(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scrape]:
    """Scrape a service that has worked."""
    with services(tmp_path_factory.mktemp("grafana")) as make:
        tree = make(web=True, max_attempts=1, extra="[queues.work]\nmax_depth = 1000\n").started()
        yield Scrape(exercised(tree))
        tree.stop()


@cache
def recorded() -> set[str]:
    """Return the names that recording rules give."""
    return {rule["record"] for rule in rules() if "record" in rule}


def test_every_metric_label_and_value_in_use_exists(scrape: Scrape) -> None:
    """A typing error in a dashboard or an alert would show nothing, for ever."""
    faults = []
    for where, expr in everywhere():
        found = used(expr)
        allowed = SCRAPED_WITH | {"le"}
        for selector in found.selectors:
            name = selector.name
            if name in NOT_OURS | recorded():
                allowed |= {"queue"}
                continue
            if name not in scrape.labels:
                faults.append(f"{where}: no metric {name}")
                continue
            known = scrape.labels[name]
            allowed |= known.keys()
            for matcher in selector.matchers.matchers:
                if matcher.name in SCRAPED_WITH:
                    continue
                if matcher.name not in known:
                    faults.append(f"{where}: {name} has no label {matcher.name}")
                elif matcher.value not in ("", ".*"):
                    wrong = set(matcher.value.split("|")) - known[matcher.name]
                    if wrong:
                        faults.append(f"{where}: {name} has no {matcher.name} {sorted(wrong)}")
        if found.labels - allowed:
            faults.append(f"{where}: groups by unknown {sorted(found.labels - allowed)}")
    assert faults == []


def test_every_exported_family_is_on_a_dashboard(scrape: Scrape) -> None:
    """What is measured can be seen; a new family needs a panel in grafana/overview.py."""
    shown = {
        selector.name
        for board in BOARDS.values()
        for panel in panels(board)
        for target in panel["targets"]
        for selector in used(filled(target["expr"])).selectors
    }
    assert [name for name, samples in scrape.families.items() if not samples & shown] == []


def test_the_scrape_has_every_family_of_the_catalogue(scrape: Scrape) -> None:
    """Otherwise the two tests above would look at less than there is."""
    from supervisor.catalogue import CATALOGUE

    shown = {name.removesuffix("_bucket") for name in scrape.labels}
    assert [family.name for family in CATALOGUE if family.name not in shown] == []


def test_documents_name_only_metrics_that_exist(scrape: Scrape) -> None:
    """An operator can paste what the documents say."""
    known = scrape.labels.keys() | scrape.families.keys()
    faults = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in DOCUMENTS
        for name in re.findall(r"\bherdsman_[a-z_]+[a-z]\b", path.read_text())
        if name not in known
    ]
    assert faults == []


def test_variables_ask_for_what_exists(scrape: Scrape) -> None:
    """The lists at the top of a dashboard are filled."""
    for board in BOARDS.values():
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                asked = re.fullmatch(r"label_values\((\w+).*, (\w+)\)", variable["definition"])
                assert asked, variable["definition"]
                assert asked[2] in scrape.labels[asked[1]].keys() | SCRAPED_WITH


# ---- the dashboards themselves ----------------------------------------------------------------


def test_the_committed_dashboards_are_those_the_script_writes() -> None:
    """Nobody edits the JSON by hand; after a change run `python -m grafana.build`."""
    written = build.rendered()
    assert {path.name for path in GRAFANA.glob("dashboards/*")} == set(written)
    assert {n: (GRAFANA / "dashboards" / n).read_text() for n in written} == written


def test_building_is_quick_and_the_same_every_time() -> None:
    """No time, path or chance gets into the files."""
    began = time.monotonic()
    assert build.rendered() == build.rendered()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("name", BOARDS)
def test_panels_are_whole(name: str) -> None:
    """Each has a known type, a title, a description, a unit, queries, and says when it is empty."""
    board = BOARDS[name]
    assert set() == {panel["type"] for panel in board["panels"]} - KINDS
    identities = [panel["id"] for panel in board["panels"]]
    assert len(set(identities)) == len(identities)
    for panel in panels(board):
        defaults = panel["fieldConfig"]["defaults"]
        assert panel["title"], panel["id"]
        assert panel["description"].endswith("."), panel["title"]
        assert defaults["unit"] in UNITS, panel["title"]
        assert defaults["noValue"], panel["title"]
        assert panel["targets"], panel["title"]
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters), panel["title"]


@pytest.mark.parametrize("name", BOARDS)
def test_panels_stand_in_the_grid_and_on_nothing_else(name: str) -> None:
    """None overlaps another or leaves the grid's 24 columns."""
    taken: dict[tuple[int, int], str] = {}
    for panel in BOARDS[name]["panels"]:
        at = panel["gridPos"]
        assert 0 <= at["x"] < at["x"] + at["w"] <= 24, panel["title"]
        cells = itertools.product(
            range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])
        )
        for cell in cells:
            assert taken.setdefault(cell, panel["title"]) == panel["title"], cell


@pytest.mark.parametrize("name", BOARDS)
def test_no_data_source_is_written_down(name: str) -> None:
    """Whoever imports a dashboard picks the source; every query goes to it."""
    board = BOARDS[name]
    variables = {one["name"]: one for one in board["templating"]["list"]}
    assert list(variables) == ["datasource", "job", "instance", "queue", "task"]
    assert variables["datasource"]["type"] == "datasource"
    sources = [
        *(panel["datasource"] for panel in panels(board)),
        *(target["datasource"] for panel in panels(board) for target in panel["targets"]),
        *(mark["datasource"] for mark in board["annotations"]["list"]),
        *(one["datasource"] for one in board["templating"]["list"] if one["type"] == "query"),
    ]
    assert {source["uid"] for source in sources} == {"${datasource}"}


@pytest.mark.parametrize("name", BOARDS)
def test_a_dashboard_can_be_found_and_left(name: str) -> None:
    """Fixed uid, title, tag, a link to the other, and marks for what may explain a change."""
    board = BOARDS[name]
    assert board["uid"] == f"herdsman-{name.removesuffix('.json')}"
    assert board["editable"] is False
    others = {f"/d/{one['uid']}" for one in BOARDS.values() if one is not board}
    assert {link["url"] for link in board["links"]} == others
    assert all(link["includeVars"] and link["keepTime"] for link in board["links"])
    marks = [mark["name"] for mark in board["annotations"]["list"]]
    assert marks == ["Alerts", "Start", "Version", "Configuration"]


@pytest.mark.parametrize("name", BOARDS)
def test_queries_parse_and_follow_the_rules(name: str) -> None:
    """Rates fit the zoom; a job is chosen; a number of the database is never added up twice."""
    from supervisor.catalogue import CATALOGUE, Source

    of_database = {one.name for one in CATALOGUE if one.source is Source.DATABASE}
    for where, expr in queries(BOARDS[name]):
        ranges = re.findall(r"\[([^\]]*)\]", expr)
        assert set(ranges) <= {"$__rate_interval", "$__range"}, where
        assert len(ranges) == len(used(filled(expr)).ranges), where
        for selector in used(filled(expr)).selectors:
            matched = {matcher.name for matcher in selector.matchers.matchers}
            assert "job" in matched, where
            family = re.sub(r"_(bucket|sum|count)$", "", selector.name or "")
            if family in of_database:
                assert re.search(rf"(max|min)( by \([^)]*\))? ?\((sum by \([^)]*instance\) \()?"
                                 rf"[^{{]*{selector.name}", filled(expr)), where  # fmt: skip


def test_links_lead_to_dashboards_with_these_variables() -> None:
    """A click on a line, or in an alert, opens the right dashboard at the right place."""
    uids = {board["uid"] for board in BOARDS.values()}
    names = {f"var-{one['name']}" for b in BOARDS.values() for one in b["templating"]["list"]}
    urls = [rule["annotations"]["dashboard"] for rule in rules() if "alert" in rule]
    urls += [
        link["url"]
        for board in BOARDS.values()
        for panel in panels(board)
        for link in panel["fieldConfig"]["defaults"].get("links", [])
    ]
    assert len(urls) > len(uids)
    for url in urls:
        path, _, query = url.partition("?")
        assert path.removeprefix("/d/") in uids, url
        assert {part.partition("=")[0] for part in query.split("&") if "=" in part} <= names, url


def test_provisioning_leaves_no_way_to_drift() -> None:
    """Grafana reads the folder, and nobody edits in the browser what the next start would lose."""
    folder = GRAFANA / "provisioning"
    (provider,) = yaml.safe_load((folder / "dashboards/herdsman.yaml").read_text())["providers"]
    assert provider["type"] == "file"
    assert provider["allowUiUpdates"] is False
    assert provider["options"]["path"].startswith("$")
    (source,) = yaml.safe_load((folder / "datasources/prometheus.yaml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    assert source["url"].startswith("$")
    text = (GRAFANA / "README.md").read_text()
    for variable in (provider["options"]["path"], source["url"]):
        assert variable.strip("${}") in text
