"""What is shipped: the wheel holds both packages and their files, nothing else, and works alone."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("queue_core", "supervisor")
BUILD_SECONDS_MAX = 100

pytestmark = pytest.mark.xdist_group("packaging")  # builds once, not once per pytest process


def sources() -> set[str]:
    """Return every file below the two packages, as the wheel would name it."""
    return {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".md"
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, so that the build leaves nothing in the tree."""
    folder = tmp_path_factory.mktemp("packaging")
    copy = folder / "copy"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in (*PACKAGES, "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", str(folder)]
    if setuptools_is_new_enough():
        command.append("--no-build-isolation")
    built = subprocess.run(
        [*command, str(copy)], capture_output=True, text=True, timeout=BUILD_SECONDS_MAX
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = folder.glob("herdsman-*.whl")
    return path


def setuptools_is_new_enough() -> bool:
    """Say whether the build can use the setuptools installed here, and so needs no network."""
    try:
        major = int(importlib.metadata.version("setuptools").split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return False
    return major >= 77


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the wheel: it is pure Python, so that this is what installing would do."""
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_the_wheel_holds_every_file_of_both_packages_and_no_other(unpacked: Path) -> None:
    """Modules, SQL, type marks and web assets are all shipped; tests and examples are not."""
    shipped = {
        path.relative_to(unpacked).as_posix()
        for path in unpacked.rglob("*")
        if path.is_file() and not path.parts[len(unpacked.parts)].endswith(".dist-info")
    }
    assert sources() == shipped


@pytest.mark.parametrize(
    "name",
    [
        "queue_core/py.typed",
        "supervisor/py.typed",
        "queue_core/engines/sqlite.sql",
        "queue_core/queue.py",
        "supervisor/cli/__init__.py",
        "supervisor/web/__init__.py",
    ],
)
def test_the_wheel_holds_what_nothing_works_without(unpacked: Path, name: str) -> None:
    """A file the product cannot do without is in the wheel, even if the tree should lose it."""
    assert (unpacked / name).is_file()


def test_the_wheel_holds_the_assets_of_the_web_page(unpacked: Path) -> None:
    """The page's style and script travel with its code."""
    kinds = {path.suffix for path in (unpacked / "supervisor" / "web").rglob("*")}
    assert {".css", ".js"} <= kinds


def test_every_package_in_the_tree_is_listed(unpacked: Path) -> None:
    """A new folder with modules is shipped only when pyproject.toml names it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {Path(name).parent for name in sources() if name.endswith(".py")}
    assert sorted(".".join(folder.parts) for folder in folders) == sorted(
        settings["tool"]["setuptools"]["packages"]
    )


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    """Nothing works by the luck of another package's dependencies, and nothing is dragged along."""
    imported = {
        name.split(".")[0]
        for path in sources()
        if path.endswith(".py")
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    # pydantic pins its core to the exact version, and documents importing from it.
    foreign = imported - set(PACKAGES) - set(sys.stdlib_module_names) - {"pydantic_core"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {
        # The only one whose package is not named like what it is imported as.
        re.split(r"[^\w-]", requirement)[0].replace("-", "_").removesuffix("_api")
        for requirement in project["dependencies"] + project["optional-dependencies"]["otel"]
    }
    assert foreign == declared


def test_the_wheel_says_what_it_is(unpacked: Path) -> None:
    """Name, version, licence, Python and the command are in the metadata."""
    (info,) = unpacked.glob("*.dist-info")
    metadata = importlib.metadata.PathDistribution(info).metadata
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert metadata["Name"] == "herdsman"
    assert metadata["Version"] == project["version"]
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.11"
    assert "herdsman = supervisor.cli:main" in (info / "entry_points.txt").read_text()
    assert (info / "licenses" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_what_the_wheel_installs_works_away_from_the_tree(unpacked: Path, database: Path) -> None:
    """The installed files alone can store a job and show the command's help."""
    environment = {**os.environ, "PYTHONPATH": str(unpacked), "PYTHONSAFEPATH": "1"}
    put = (
        "import queue_core, supervisor.cli, sys\n"
        "assert queue_core.__file__.startswith(sys.argv[1]), queue_core.__file__\n"
        "assert supervisor.cli.__file__.startswith(sys.argv[1]), supervisor.cli.__file__\n"
        "queue = queue_core.Queue(sys.argv[2], 'emails')\n"
        "job_id = queue.put({'to': 'a@b.c'})\n"
        "assert queue.counts().ready == 1\n"
        "queue.close()\n"
    )
    for arguments in (["-c", put, str(unpacked), str(database)], ["-m", "supervisor", "--help"]):
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=database.parent,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
