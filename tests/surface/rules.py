"""Find the programs of Prometheus, and read the alert rules as the tests need them.

Boundary: helpers; no test is here.
"""

from __future__ import annotations

import os
import re
import shutil
from functools import cache
from typing import Any, Final

import pytest
import yaml

from tests.process.service import ROOT

FOLDER: Final = ROOT / "grafana" / "prometheus"
RULES: Final = FOLDER / "rules.yml"
FASTER: Final = 60
"""An end-to-end test has a second where an operator has a minute."""
FOR_SECONDS_MIN: Final = 10
"""Scrapes are a second apart, and a loaded machine misses some in a row: that is no alert."""


def program(name: str) -> str:
    """Return a program's path; without it the test is skipped, and in CI it fails."""
    path = shutil.which(name)
    if path is None:
        why = f"no {name} here; on Debian: apt-get install --no-install-recommends prometheus"
        if os.environ.get("CI") == "true":
            pytest.fail(why)
        pytest.skip(why)
    return path


@cache
def alerts() -> dict[str, dict[str, Any]]:
    """Return every alert rule by its name."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    found = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    assert len({rule["alert"] for rule in found}) == len(found)
    return {rule["alert"]: rule for rule in found}


def faster(text: str) -> str:
    """Divide every window and every `for` of the rules by FASTER; limits stay."""

    def seconds(number: str, unit: str) -> int:
        return int(number) * {"m": 60, "h": 3600}[unit] // FASTER

    text = re.sub(r"\[(\d+)([mh])\]", lambda found: f"[{seconds(found[1], found[2])}s]", text)
    return re.sub(
        r"(?m)^( +for: )(\d+)([mh])$",
        lambda found: f"{found[1]}{max(FOR_SECONDS_MIN, seconds(found[2], found[3]))}s",
        text,
    )
