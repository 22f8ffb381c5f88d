"""Hold the sources to the project's own rules, which no off-the-shelf linter knows.

Each rule is a function from one source to its faults; each test applies rules to the whole tree
and lists every fault with its place. At the end, every rule is shown a source that breaks it.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("queue_core", "supervisor")
ENGINES = "queue_core/engines/"

ORDER = (
    "enqueue", "claim", "extend", "finish", "promote", "reap", "replay", "prune", "counts",
)  # fmt: skip
"""A job's life, in the order in which every file tells it."""

FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 400

WALL_CLOCK = {"time", "time_ns", "localtime", "gmtime"}
STEADY_CLOCK = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "clock_gettime"}

# Where a clock may be read. Everything else is told the time, so that tests can tell it too.
WALL_CLOCK_FILES = {
    "queue_core/clock.py",  # is the clock
    "supervisor/logs.py",  # the time of a line
    "supervisor/reading.py",  # the time of the last good snapshot, as a metric
    "supervisor/metrics.py",  # turns the age of a heartbeat into its time
    "supervisor/web/sources.py",  # the time of a page
    "supervisor/outside.py",  # Retry-After may be a date
    "supervisor/cli/run.py",  # says in the lock file since when it runs
    "supervisor/host.py",  # compares the clocks, to see whether one was set
}
STEADY_CLOCK_FILES = {
    "queue_core/clock.py",  # is the clock
    "queue_core/lockfile.py",  # the deadline of a wait for the lock
    "queue_core/doorbell.py",  # the deadline of a wait for a bell
    "queue_core/claims.py",  # the deadline of get(timeout=)
    "queue_core/queue.py",  # the deadline of put(timeout=)
    "queue_core/engines/sqlite_file.py",  # the deadline of a call that finds the file busy
    "queue_core/engines/sqlite_handle.py",  # likewise, and how long the lock was held
    "queue_core/engines/sqlite_shared.py",  # likewise, and how long another was waited for
    "supervisor/supervise.py",  # the loop reads it once a turn, and hands it to the policy
    "supervisor/herd.py",  # likewise, for what happens within a turn
    "supervisor/child.py",  # deadlines of the first steps
    "supervisor/reap.py",  # the deadline of a wait for the killed
    "supervisor/slot.py",  # stamps what a process writes about itself
    "supervisor/worker.py",  # how long a job took
    "supervisor/keeper.py",  # ticks
    "supervisor/deaths.py",  # how long a job had run when its worker died
    "supervisor/outside.py",  # deadlines of commands and requests
    "supervisor/reading.py",  # how old a snapshot is
    "supervisor/apart.py",  # the deadline of a process that is thrown away
    "supervisor/cli/demo.py",  # how long each step of the demonstration took
    "supervisor/demo/service.py",  # the deadline of its start
    "supervisor/processes.py",  # how old a heartbeat is
    "supervisor/closeup.py",  # likewise
    "supervisor/asking.py",  # the deadline of a request to the supervisor
    "supervisor/chaos.py",  # when to kill, and how long to wait for what comes after
    "supervisor/host.py",  # compares the clocks, to see whether one was set
    "supervisor/cli/why.py",  # how long the database took to answer
}
PRINT_FILES = ("supervisor/cli/",)  # the command line speaks; everything else logs
FORK_FILES = (
    "supervisor/child.py",
    "supervisor/supervise.py",
    "supervisor/trial.py",  # tries a new configuration
    "supervisor/apart.py",  # keeps what handlers import out of the process that supervises
)

SQL = re.compile(r"\b(SELECT|INSERT INTO|UPDATE|DELETE FROM|PRAGMA)\b")
LEFTOVER = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")) + r")\b")
# Written apart so that this file does not hold what it looks for.
FOREIGN = ("/wo" + "rk/", "shared/" + "design", "py" + "pi.org", "python" + "hosted")

NOT_IMPERATIVE = {"a", "an", "the", "this", "it", "module", "file", "class", "helper", "helpers"}

TOP_LEVEL = {
    ".ci", ".git", ".gitignore", "CHANGELOG.md", "LICENSE", "Makefile", "README.md", "benchmarks",
    "config", "grafana", "pyproject.toml", "queue_core", "supervisor", "tests",
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """One Python file: where it is in the tree, and what it says."""

    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The file, parsed."""
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the file."""
        return list(ast.walk(self.tree))

    def at(self, node: Any, fault: str) -> str:
        """Word a fault at a node."""
        return f"{self.name}:{node.lineno}: {fault}"


Rule = Callable[[Source], Iterator[str]]


def product() -> list[Source]:
    """Read every module of both packages."""
    return [
        Source(path.relative_to(ROOT).as_posix(), path.read_text())
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    ]


def check(rule: Rule) -> None:
    """Apply a rule to the whole product, and list every fault."""
    sources = product()
    assert sources, "found no sources; the tests look in the wrong place"
    faults = [fault for source in sources for fault in rule(source)]
    assert not faults, "\n".join(["", *faults])


# --- rules --------------------------------------------------------------------------------------


def duty_is_missing(source: Source) -> Iterator[str]:
    """A module opens with its duty: one imperative sentence on one line."""
    opening = (ast.get_docstring(source.tree) or "").split("\n")[0]
    first = re.split(r"\W", opening, maxsplit=1)[0]
    if not opening:
        yield f"{source.name}: has no docstring"
    elif not opening.endswith("."):
        yield f"{source.name}: the first line is no whole sentence: {opening!r}"
    elif first.lower() in NOT_IMPERATIVE or re.search(r"([^s]s|ing|ed)$", first) or not first:
        yield f"{source.name}: the first sentence does not begin with an imperative: {first!r}"


def docstring_is_missing(source: Source) -> Iterator[str]:
    """Whatever is public says what it means."""

    def visit(body: list[ast.stmt]) -> Iterator[str]:
        for node in body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
            if node.name.startswith("_") or decorators & {"overload", "typing.overload"}:
                continue
            if any(decorator.endswith((".setter", ".deleter")) for decorator in decorators):
                continue
            if not ast.get_docstring(node):
                yield source.at(node, f"{node.name} has no docstring")
            if isinstance(node, ast.ClassDef):
                yield from visit(node.body)

    yield from visit(source.tree.body)


def sql_outside_the_engines(source: Source) -> Iterator[str]:
    """SQL lives under the engines; docstrings may speak of it."""
    if source.name.startswith(ENGINES):
        return
    docstrings = {
        id(node.value)
        for node in source.nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in source.nodes:
        if not isinstance(node, ast.Constant) or id(node) in docstrings:
            continue
        if isinstance(node.value, str) and (found := SQL.search(node.value)):
            yield source.at(node, f"SQL in a string: {found[0]}")


def clock_is_read(source: Source) -> Iterator[str]:
    """Only the named files ask what time it is."""

    def forbidden(name: str) -> bool:
        wall = name in WALL_CLOCK and source.name not in WALL_CLOCK_FILES
        return wall or (name in STEADY_CLOCK and source.name not in STEADY_CLOCK_FILES)

    for node in source.nodes:
        match node:
            case ast.Attribute(value=ast.Name(id="time"), attr=name) if forbidden(name):
                yield source.at(node, f"reads the clock: time.{name}")
            case ast.ImportFrom(module="time", names=names):
                for alias in names:
                    if forbidden(alias.name):
                        yield source.at(node, f"reads the clock: {alias.name}")
            case ast.Attribute(value=ast.Name(id="datetime"), attr="now" | "utcnow" | "today"):
                if source.name not in WALL_CLOCK_FILES:
                    yield source.at(node, "reads the clock: datetime")


def prints(source: Source) -> Iterator[str]:
    """Only the command line writes to the terminal."""
    if source.name.startswith(PRINT_FILES):
        return
    for node in source.nodes:
        match node:
            case ast.Call(func=ast.Name(id="print")):
                yield source.at(node, "prints; log it instead")


def imported(source: Source) -> Iterator[tuple[ast.stmt, str]]:
    """Yield each absolute import as (node, dotted name)."""
    for node in source.nodes:
        match node:
            case ast.Import(names=names):
                yield from ((node, alias.name) for alias in names)
            case ast.ImportFrom(module=str(module), level=0, names=names):
                yield from ((node, f"{module}.{alias.name}") for alias in names)
            case ast.ImportFrom(level=level) if level:
                yield node, "."


def imports_what_it_may_not(source: Source) -> Iterator[str]:
    """The database, forks, pickle and other packages come in only where they belong."""
    for node, name in imported(source):
        top = name.split(".", maxsplit=1)[0]
        if not top:
            yield source.at(node, "relative import; write the module's whole name")
        if top == "sqlite3" and not source.name.startswith(ENGINES):
            yield source.at(node, "sqlite3 outside the engines")
        if top in {"pickle", "marshal", "shelve", "dill", "cloudpickle"}:
            yield source.at(node, f"{top}: whoever writes the data would run code here")
        if top == "multiprocessing" and source.name not in FORK_FILES:
            yield source.at(node, "multiprocessing outside the process keeping")
        if source.name.startswith("queue_core/") and top != "queue_core":
            known = top in sys.stdlib_module_names or not top
            driver = top.startswith("psycopg") and source.name.startswith(f"{ENGINES}postgres")
            if not known and not driver:
                yield source.at(node, f"{top} is not the standard library")


def forks_or_shells(source: Source) -> Iterator[str]:
    """Only the process keeping forks, and nothing gives text to a shell."""
    for node in source.nodes:
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr="fork" | "forkpty"):
                if source.name not in FORK_FILES:
                    yield source.at(node, "forks outside the process keeping")
            case ast.Attribute(value=ast.Name(id="os"), attr="system" | "popen"):
                yield source.at(node, "runs a shell")
            case ast.keyword(arg="shell", value=ast.Constant(value=False)):
                pass
            case ast.keyword(arg="shell"):
                yield source.at(node.value, "runs a shell")


def grew_too_long(source: Source) -> Iterator[str]:
    """A function fits a screen, a file a sitting."""
    lines = source.text.count("\n")
    if lines > FILE_LINES_MAX:
        yield f"{source.name}: {lines} lines; split it by duty (at most {FILE_LINES_MAX})"
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield source.at(node, f"{node.name} has {length} lines ({FUNCTION_LINES_MAX})")


def left_over(source: Source) -> Iterator[str]:
    """What is not done is not in the product as a note to oneself."""
    for number, line in enumerate(source.text.splitlines(), 1):
        if found := LEFTOVER.search(line):
            yield f"{source.name}:{number}: left over: {found[0]}"


# --- the rules, applied to the product ----------------------------------------------------------


def test_every_module_opens_with_its_duty() -> None:
    """A reader learns from a module's first line what it is for."""
    check(duty_is_missing)


def test_everything_public_has_a_docstring() -> None:
    """Public classes, functions and methods say what they mean."""
    check(docstring_is_missing)


def test_sql_lives_only_under_the_engines() -> None:
    """Whoever wants to know what is asked of the database reads one folder."""
    check(sql_outside_the_engines)


def test_the_clock_is_read_only_where_named() -> None:
    """Rules are told the time, so that they can be tested at any time."""
    check(clock_is_read)


def test_only_the_command_line_prints() -> None:
    """Everything else logs, in one form, to one place."""
    check(prints)


def test_imports_stay_where_they_belong() -> None:
    """The queue is a plain library; sqlite3, forks and other packages have their places."""
    check(imports_what_it_may_not)


def test_only_the_process_keeping_forks_and_nothing_uses_a_shell() -> None:
    """Forks need care in one place; a shell would let a payload become a command."""
    check(forks_or_shells)


def test_functions_and_files_stay_short() -> None:
    """What does not fit one's head is split."""
    check(grew_too_long)


def test_nothing_is_left_over() -> None:
    """The product holds no notes of unfinished work."""
    check(left_over)


def test_the_import_contracts_hold() -> None:
    """The layers of pyproject.toml are what the modules really do."""
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


# --- one order, one map, one place for each setting ---------------------------------------------


def is_in_order(names: list[str]) -> list[str]:
    """Return faults in how names follow a job's life; names of no transition may stand anywhere."""
    known = [name for name in names if name in ORDER]
    faults = [f"{name} is missing" for name in ORDER if name not in known]
    for former, later in pairwise(known):
        if ORDER.index(former) > ORDER.index(later):
            faults.append(f"{later} comes after {former}")
    return faults


def statement_groups(text: str) -> list[str]:
    """Return the group of each named statement: the name up to its first underscore."""
    return re.findall(r"^-- name: ([a-z]+)", text, flags=re.MULTILINE)


def functions(name: str) -> list[str]:
    """Return the methods of a file's classes, in order."""
    tree = ast.parse((ROOT / name).read_text())
    return [
        node.name
        for holder in tree.body
        if isinstance(holder, ast.ClassDef)
        for node in holder.body
        if isinstance(node, ast.FunctionDef)
    ]


def test_the_statements_follow_a_jobs_life() -> None:
    """A newcomer reads the SQL top to bottom and meets the job in the order it lives."""
    for path in sorted((ROOT / ENGINES).glob("*.sql")):
        groups = statement_groups(path.read_text())
        if path.name != "sqlite.sql" and not set(groups) & set(ORDER):
            continue  # a file of the schema alone
        assert is_in_order(groups) == [], path.name
        first = next(at for at, group in enumerate(groups) if group in ORDER)
        late = [group for group in groups[first:] if group in {"schema", "pragma"}]
        assert late == [], f"{path.name}: schema and pragmas come first"


def test_every_statement_is_used() -> None:
    """A statement that no engine names is dead, and would be maintained for nothing."""
    code = "\n".join(path.read_text() for path in sorted((ROOT / ENGINES).glob("*.py")))
    words = set(re.findall(r"\w+", code))

    def is_used(name: str) -> bool:
        if name in words:
            return True
        # An engine may put a name together from a written beginning and a listed end.
        cuts = [at for at, letter in enumerate(name, 1) if letter == "_"]
        return any(f'f"{name[:at]}{{' in code and name[at:] in words for at in cuts)

    for path in sorted((ROOT / ENGINES).glob("*.sql")):
        named = re.findall(r"^-- name: (\w+)", path.read_text(), flags=re.MULTILINE)
        assert named, f"{path.name} names no statement"
        assert [name for name in named if not is_used(name)] == [], path.name


def test_the_protocol_follows_a_jobs_life() -> None:
    """The protocol tells the transitions in the order of the SQL."""
    assert is_in_order(functions("queue_core/engine.py")) == []


def test_the_engine_follows_a_jobs_life() -> None:
    """The engine does too; a transition it inherits stands where the rest of that duty does."""
    engine = importlib.import_module("queue_core.engines.sqlite").SqliteEngine
    inherited = [name for name in ORDER if name not in vars(engine) and hasattr(engine, name)]
    found = is_in_order(functions("queue_core/engines/sqlite.py"))
    assert [fault for fault in found if fault.removesuffix(" is missing") not in inherited] == []


def test_the_map_names_every_module_and_only_modules() -> None:
    """Each module is in the README's map, and the map leads nowhere else."""
    readme = (ROOT / "README.md").read_text()
    parts = re.split(r"^## ", readme, flags=re.MULTILINE)
    sections = [part for part in parts if part.startswith("The map\n")]
    assert len(sections) == 1, "README.md needs one section '## The map'"
    named = set(re.findall(r"[\w/]+\.py\b", sections[0]))
    modules = {source.name for source in product()}

    def leads_to(name: str, module: str) -> bool:
        return f"/{module}".endswith(f"/{name}")

    # A package's own file is named by its folder; it may be named, and need not.
    unnamed = [
        module
        for module in sorted(modules)
        if not module.endswith("/__init__.py") and not any(leads_to(name, module) for name in named)
    ]
    astray = [name for name in sorted(named) if not any(leads_to(name, m) for m in modules)]
    assert not unnamed, "\n".join(["not on the map:", *unnamed])
    assert not astray, "\n".join(["on the map, not in the tree:", *astray])


def setting_keys(model: type[BaseModel], section: str) -> Iterator[tuple[str, str]]:
    """Yield (section, key) for every key of a settings model, and of the models inside it."""
    for name, field in model.model_fields.items():
        key = field.alias or name
        inner = list(models_in(field.annotation))
        if not section and inner:
            for found in inner:
                yield from setting_keys(found, key)
            continue
        yield section, key
        for found in inner:
            yield from setting_keys(found, section)


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the settings models an annotation mentions, however deep."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)


def sections(text: str) -> dict[str, str]:
    """Cut a configuration at its table headers, commented ones too; the key is the first name."""
    found: dict[str, str] = {"": ""}
    at = ""
    for line in text.splitlines():
        if header := re.match(r"^#?\s?\[+([\w-]+)([^\]]*)\]+\s*(#.*)?$", line):
            at = header[1]
        found[at] = found.get(at, "") + line + "\n"
    return found


def test_every_setting_is_in_the_sample_configuration() -> None:
    """An operator finds each key, with its comment, in the file that is shipped."""
    settings = importlib.import_module("supervisor.settings").Settings
    text = (ROOT / "config" / "herdsman.toml").read_text()
    tomllib.loads(text)
    parts = sections(text)
    parts["defaults"] = parts.get("defaults", "") + parts.get("handlers", "")
    parts["handlers"] = parts["defaults"]  # a handler's keys may be given once for all
    missing = [
        f"[{section}] {key}"
        for section, key in setting_keys(settings, "")
        if not re.search(rf"\b{re.escape(key)}\b\"?(\.[\w.]+)?\s*(=|\])", parts.get(section, ""))
    ]
    assert missing == []


def tree() -> Iterator[Path]:
    """Yield every file of the project that is text, without what tools leave behind."""
    for top in sorted(TOP_LEVEL - {".git"}):
        path = ROOT / top
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                yield file


def test_the_product_names_no_place_outside_itself() -> None:
    """No path of a workplace and no package host is written anywhere in the project."""
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in tree()
        for word in FOREIGN
        if word in path.read_text(errors="replace")
    ]
    assert found == []


def test_git_ignores_no_file_of_the_product() -> None:
    """A pattern meant for the top level must not keep a module of that name out of the project."""
    everywhere = {
        line.rstrip("/")
        for line in (ROOT / ".gitignore").read_text().split()
        if not line.startswith(("/", "#", "!"))
    }
    lost = [source.name for source in product() if everywhere & set(source.name.split("/"))]
    assert lost == [], "begin the pattern with a slash"


def test_the_top_level_holds_only_what_the_readme_explains() -> None:
    """A new file at the top needs a reason, and a place in this list."""
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().split()}
    found = {path.name for path in ROOT.iterdir()} - ignored
    assert set() == {name for name in found - TOP_LEVEL if not name.endswith(".egg-info")}


# --- the rules find what they forbid ------------------------------------------------------------

DUTY = '"""Do one thing."""\n'
FUNCTION_OF_71_LINES = DUTY + "def _f():\n" + "    a = 1\n" * FUNCTION_LINES_MAX

BROKEN: list[tuple[Rule, str, str]] = [
    (duty_is_missing, "supervisor/a.py", "a = 1\n"),
    (duty_is_missing, "supervisor/a.py", '"""Do one thing, and\n\nanother."""\n'),
    (duty_is_missing, "supervisor/a.py", '"""The things one does."""\n'),
    (duty_is_missing, "supervisor/a.py", '"""Does one thing."""\n'),
    (docstring_is_missing, "supervisor/a.py", DUTY + "def f(): pass\n"),
    (docstring_is_missing, "supervisor/a.py", DUTY + 'class C:\n    """C."""\n    def f(s): ...\n'),
    (sql_outside_the_engines, "queue_core/a.py", 'x = "SELECT 1"\n'),
    (sql_outside_the_engines, "queue_core/a.py", 'x = f"DELETE FROM {y}"\n'),
    (clock_is_read, "supervisor/policy.py", "import time\nx = time.monotonic()\n"),
    (clock_is_read, "supervisor/worker.py", "import time\nx = time.time()\n"),
    (clock_is_read, "supervisor/policy.py", "from time import time_ns\n"),
    (clock_is_read, "supervisor/policy.py", "x = datetime.now(UTC)\n"),
    (prints, "supervisor/keeper.py", 'print("x")\n'),
    (imports_what_it_may_not, "supervisor/keeper.py", "import sqlite3\n"),
    (imports_what_it_may_not, "supervisor/keeper.py", "import pickle\n"),
    (imports_what_it_may_not, "supervisor/keeper.py", "from multiprocessing import Process\n"),
    (imports_what_it_may_not, "queue_core/job.py", "import structlog\n"),
    (imports_what_it_may_not, "queue_core/job.py", "from supervisor import child\n"),
    (imports_what_it_may_not, "queue_core/job.py", "from . import engine\n"),
    (forks_or_shells, "queue_core/job.py", "import os\nx = os.fork()\n"),
    (forks_or_shells, "supervisor/handlers.py", "subprocess.run(x, shell=True)\n"),
    (forks_or_shells, "supervisor/handlers.py", "import os\nos.system(x)\n"),
    (grew_too_long, "supervisor/a.py", FUNCTION_OF_71_LINES),
    (grew_too_long, "supervisor/a.py", "a = 1\n" * (FILE_LINES_MAX + 1)),
    (left_over, "supervisor/a.py", "a = 1  # " + "TO" + "DO: more\n"),
]


@pytest.mark.parametrize(("rule", "name", "text"), BROKEN)
def test_a_rule_finds_what_it_forbids(rule: Rule, name: str, text: str) -> None:
    """A rule that finds nothing anywhere would hold nothing."""
    assert len(list(rule(Source(name, text)))) == 1


def test_rules_allow_what_is_right() -> None:
    """A rule that finds fault with everything would be switched off."""
    right = DUTY + (
        "import time\nfrom queue_core.job import Job\n"
        'def f() -> None:\n    """Say SELECT in words."""\n    time.sleep(1)\n'
    )
    rules = {rule for rule, _, _ in BROKEN}
    assert [fault for rule in rules for fault in rule(Source("queue_core/a.py", right))] == []


def test_a_break_of_the_order_is_found() -> None:
    """Both a transition in the wrong place and one that is missing are named."""
    assert is_in_order(["schema", *ORDER, "vacuum"]) == []
    assert is_in_order([name for name in ORDER if name != "counts"]) == ["counts is missing"]
    swapped = ["claim", "enqueue", *ORDER[2:]]
    assert is_in_order(swapped) == ["enqueue comes after claim"]


def test_a_setting_is_looked_for_in_its_own_section() -> None:
    """A key of one table does not stand in for the same key of another."""
    parts = sections("a = 1\n# [web]\n# listen = 2\n[pools.default]\nlisten = 3\n")
    assert "listen = 2" in parts["web"]
    assert "listen = 3" in parts["pools"]
    assert "listen" not in parts[""]
