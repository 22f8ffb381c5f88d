"""Check the alert rules with Prometheus's own program, and that each alert says what to do."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from queue_core import Queue
from tests.surface.commands import herdsman
from tests.surface.rules import FOLDER, RULES, alerts, faster, program

README = FOLDER.parent / "README.md"


def promtool(*arguments: str, cwd: Path = FOLDER, stdin: str = "") -> str:
    """Run promtool; it must find nothing wrong. Return what it said."""
    done = subprocess.run(
        [program("promtool"), *arguments], cwd=cwd, input=stdin, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_prometheus_accepts_the_rules_and_the_configuration() -> None:
    """An operator can hand both files to Prometheus as they are."""
    assert "rules found" in promtool("check", "rules", "rules.yml")
    assert "1 rule files found" in promtool("check", "config", "prometheus.yml")


@pytest.mark.long
def test_each_alert_fires_when_it_should_and_is_quiet_when_not() -> None:
    """Runs the unit tests of the rules."""
    assert "SUCCESS" in promtool("test", "rules", "rules_test.yml")


def test_the_metrics_are_named_as_prometheus_likes_them(database: Path) -> None:
    """Promtool's linter finds nothing in a scrape."""
    Queue(database, "emails").put({})
    scrape = herdsman("metrics", "--database", database, cwd=database.parent)
    assert scrape.returncode == 0
    assert "herdsman_jobs_enqueued_total" in scrape.stdout
    assert promtool("check", "metrics", stdin=scrape.stdout) == ""


def test_each_alert_has_a_firing_and_a_quiet_case() -> None:
    """A rule without both is not tested."""
    firing, quiet = set(), set()
    for group in yaml.safe_load((FOLDER / "rules_test.yml").read_text())["tests"]:
        for case in group.get("promql_expr_test", []):
            for sample in case["exp_samples"] or []:
                firing.update(re.findall(r'alertname="(\w+)"', sample["labels"]))
        for case in group.get("alert_rule_test", []):
            (firing if case["exp_alerts"] else quiet).add(case["alertname"])
    assert firing == alerts().keys()
    assert quiet == alerts().keys()


@pytest.mark.parametrize("name", alerts())
def test_an_alert_says_how_urgent_it_is_and_what_to_do(name: str) -> None:
    """Severity, words, the command to run, where to look, and a paragraph of the runbook."""
    rule = alerts()[name]
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["labels"]["service"] == "herdsman"
    notes = rule["annotations"]
    assert set(notes) == {"summary", "description", "command", "dashboard", "runbook"}
    assert not notes["summary"].endswith(".")
    assert notes["description"].endswith((".", "?"))
    assert notes["command"].startswith("herdsman ")
    assert notes["runbook"] == f"grafana/README.md#{name.lower()}"
    section = re.search(rf"^### {name}\n\n(.+)$", README.read_text(), flags=re.MULTILINE)
    assert section, f"grafana/README.md needs a paragraph under ### {name}"
    assert len(section[1]) > 100


def test_the_runbook_has_no_alert_that_does_not_exist() -> None:
    """A removed rule takes its paragraph along."""
    sections = re.findall(r"^### (\w+)$", README.read_text(), flags=re.MULTILINE)
    assert sections == list(alerts())


@pytest.mark.long
def test_every_command_an_alert_names_runs(database: Path) -> None:
    """At three in the morning nobody wants to read that there is no such option."""
    Queue(database, "emails").put({})
    config = database.parent / "herdsman.toml"
    config.write_text(f'database = "{database}"\n[handlers.emails]\ncommand = ["true"]\n')
    commands = {rule["annotations"]["command"] for rule in alerts().values()}
    told = re.findall(r"`herdsman ([^`]+)`", README.read_text())
    commands |= {f"herdsman {rest}" for rest in told if rest.split()[0] != "run"}
    filled = {re.sub(r"\{\{.*?\}\}|QUEUE", "emails", one.replace("ID", "1")) for one in commands}
    for command in sorted(filled):
        _, *words = shlex.split(command)
        done = herdsman(*words, cwd=database.parent, HERDSMAN_CONFIG=str(config))
        assert done.returncode in (0, 1), f"{command}: {done.stderr}"


def test_the_faster_rules_are_the_same_rules() -> None:
    """The end-to-end test changes windows and nothing else."""
    text = faster(RULES.read_text())
    assert "[5m]" not in text
    assert "[300s]" not in text
    assert "[5s]" in text
    assert "for: 15s" in text
    assert len(text.splitlines()) == len(RULES.read_text().splitlines())
    again = re.sub(r"\[\d+s\]|for: \d+s", "", text)
    assert again == re.sub(r"\[\d+[mh]\]|for: \d+m", "", RULES.read_text())
