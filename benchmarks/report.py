"""Turn results into what is committed: JSON, a Markdown report, plots, the README's figures.

    python -m benchmarks.report            # write results.md and the plots anew from results.json
    python -m benchmarks.report --readme   # write the README's section anew

A workload that ran replaces its part of `results.json`; the others stay, each with the machine
and the time of its own run. Boundary: measures nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.place import ROOT
from benchmarks.tables import table

RESULTS = ROOT / "benchmarks" / "results"
WORKLOADS = {
    "1": "drain", "2": "together", "3": "puts", "4": "latency", "5": "ideal", "6": "backlog",
    "7": "payloads", "8": "memory", "9": "rerun", "idle": "quiet",
}  # fmt: skip
BEGIN, END = "<!-- benchmarks -->", "<!-- end of benchmarks -->"
Results = dict[str, Any]


def module(key: str) -> Any:
    """Return the module of a workload."""
    return importlib.import_module(f"benchmarks.workloads.{WORKLOADS[key]}")


def load(folder: Path = RESULTS) -> Results:
    """Return the stored results, empty when there are none."""
    path = folder / "results.json"
    return json.loads(path.read_text()) if path.exists() else {}


def save(results: Results, folder: Path = RESULTS) -> None:
    """Write results, report and plots."""
    folder.mkdir(parents=True, exist_ok=True)
    ordered = {key: results[key] for key in WORKLOADS if key in results}
    (folder / "results.json").write_text(json.dumps(ordered, indent=1) + "\n")
    (folder / "results.md").write_text(markdown(ordered))
    plots(ordered, folder)


def bars(results: Results) -> list[tuple[str, dict[str, Any]]]:
    """Return every bar with the workload it belongs to."""
    return [
        (key, bar) for key, found in results.items() for bar in module(key).bars(found["result"])
    ]


def _bar_lines(results: Results) -> list[list[str]]:
    return [
        [f"{key}: {bar['bar']}", f"{bar['wanted']:g}", f"{bar['found']:,.3g}",
         "yes" if bar["met"] else "no"]
        for key, bar in bars(results)
    ]  # fmt: skip


def markdown(results: Results) -> str:
    """Return the whole report."""
    parts = ["# Benchmark results\n"]
    parts.append(
        "Written by `make bench`. Each figure is the median of its rounds; contenders ran in turn "
        "within a round.\nRead them as ratios within one table: another machine, or another hour, "
        "moves all of them.\n"
    )
    if lines := _bar_lines(results):
        parts.append(table(("Bar", "wanted", "found", "met"), lines))
    for key, found in results.items():
        parts.append(f"## {key}. {module(key).TITLE}\n")
        parts.append(_about(found) + "\n")
        parts.append(module(key).render(found["result"]))
    kept = _kept()
    parts.append("## What survives a power cut\n")
    parts.append(table(("", "kept"), [[name, what] for name, what in kept.items()]))
    return "\n".join(parts)


def _kept() -> dict[str, str]:
    from benchmarks.contenders import EVERYONE

    return {one.name: one.kept for one in EVERYONE}


def _about(found: dict[str, Any]) -> str:
    machine, options = found["machine"], found["options"]
    text = (
        f"{machine['time']}; {machine['cores']} cores ({machine['cpu']}), "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, Linux {machine['kernel']}, "
        f"{machine['filesystem']}; Python {machine['python']}, SQLite {machine['sqlite']}"
    )
    if machine["redis"]:
        text += f", Redis {machine['redis']}"
    if machine["packages"]:
        text += "; " + ", ".join(f"{name} {at}" for name, at in machine["packages"].items())
    text += (
        f". Rounds: {options['rounds']} of {options['seconds']:g} s for herdsman, "
        f"{min(options['rounds'], options['peer_rounds'])} of {options['peer_seconds']:g} s for a "
        f"peer; load average before: {found['load']:.1f}."
    )
    if found["absent"]:
        text += " Not here: " + "; ".join(f"{who} ({why})" for who, why in found["absent"].items())
    return text + (" A quick try: its figures mean nothing." if options["quick"] else "")


def readme_section(results: Results) -> str:
    """Return what the README says, between its marks: the bars and the first table."""
    parts = [BEGIN, ""]
    if "1" in results:
        machine = results["1"]["machine"]
        parts.append(
            f"No-op jobs, two workers, on {machine['cores']} cores of {machine['cpu']}, "
            f"{machine['filesystem']}, Python {machine['python']}, SQLite {machine['sqlite']}:\n"
        )
        parts.append(module("1").render(results["1"]["result"]))
    parts.append(table(("What is wanted, in one run", "wanted", "found", "met"),
                       _bar_lines(results)))  # fmt: skip
    parts.append(END)
    return "\n".join(parts)


def write_readme(results: Results, path: Path) -> None:
    """Put the section between the README's marks; raises ValueError when it has none."""
    text = path.read_text()
    between = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if not between.search(text):
        raise ValueError(f"{path} has no line {BEGIN!r} followed by {END!r}")
    path.write_text(between.sub(lambda _: readme_section(results), text))


def plots(results: Results, folder: Path) -> list[Path]:
    """Draw throughput against workers and claim cost against backlog, if matplotlib is here."""
    try:
        import matplotlib as mpl
    except ImportError:
        return []
    mpl.use("svg")
    from matplotlib import pyplot

    made = []

    def draw(name: str, title: str, xlabel: str, ylabel: str, lines: Any, log: bool) -> None:
        figure, axes = pyplot.subplots(figsize=(7, 4))
        for label, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
        if log:
            axes.set_xscale("log")
        axes.set(title=title, xlabel=xlabel, ylabel=ylabel, ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
        figure.tight_layout()
        figure.savefig(folder / name, metadata={"Date": None})
        pyplot.close(figure)
        made.append(folder / name)

    if "1" in results:
        lines: dict[str, list[tuple[int, float]]] = {}
        for name, one in results["1"]["result"]["contenders"].items():
            if (at := re.match(r"(herdsman|bare limit), (\d)", name)) and "median" in one:
                point = (int(at[2]), one["median"]["jobs_per_second"])
                lines.setdefault(at[1], []).append(point)
            elif "median" in one and not name.endswith(", always"):
                lines[name] = [(2, one["median"]["jobs_per_second"])]
        draw("throughput.svg", "Drain of no-op jobs", "workers", "jobs/s", lines, False)
    if "6" in results:
        costs = module("6").costs(results["6"]["result"])
        operations = ("put", "claim", "ack")
        lines = {
            name: [(size, found[name]) for size, found in costs.items()] for name in operations
        }
        draw("backlog.svg", "Cost against backlog", "jobs waiting", "µs", lines, True)
    return made


def main() -> int:
    """Write the report anew from what is stored."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--readme", action="store_true", help="write the README's section")
    given = parser.parse_args()
    results = load()
    if given.readme:
        write_readme(results, ROOT / "README.md")
    else:
        save(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
