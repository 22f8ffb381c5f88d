"""Settings: what a configuration may say, and what is said about a wrong one."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor import durations, settings
from supervisor.cli import templates
from supervisor.faults import lines_of
from supervisor.settings import Settings, SettingsError

ROOT = Path(__file__).parents[2]


def read(tmp_path: Path, text: str, **environ: str) -> Settings:
    """Load a configuration text."""
    file = tmp_path / "herdsman.toml"
    file.write_text(text)
    return settings.load(file, environ)


def faults(tmp_path: Path, text: str, **environ: str) -> list[str]:
    """Return the lines that a wrong configuration text is answered with."""
    with pytest.raises(SettingsError) as caught:
        read(tmp_path, text, **environ)
    lines = str(caught.value).splitlines()
    assert len(caught.value.faults) == len(lines)
    return lines


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30s", 30), ("250ms", 0.25), ("5m", 300), ("1h", 3600), ("7d", 604800), ("1h30m", 5400),
        ("1 h 30 m", 5400), (2, 2), (0.5, 0.5), ("10", 10), ("1.5h", 5400), ("2w", 1209600),
    ],
)  # fmt: skip
def test_a_duration_is_read_as_people_write_it(text: object, expected: float) -> None:
    """Numbers are seconds; texts carry their units, also several of them."""
    assert durations.seconds(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    "text", ["", "s", "5 parsecs", "-1s", -1, True, None, [], "1e9d", 1e12, float("nan"), "٣s"]
)
def test_a_wrong_duration_is_one_sentence(text: object) -> None:
    """Whatever is not a duration raises ValueError, never anything else."""
    with pytest.raises(ValueError, match="duration"):
        durations.seconds(text)


@given(st.one_of(st.text(max_size=80), st.floats(), st.integers(), st.none(), st.binary()))
def test_reading_a_duration_is_total(value: object) -> None:
    """A hostile value yields a number within bounds or a ValueError."""
    with contextlib.suppress(ValueError):
        assert 0 <= durations.seconds(value) <= durations.DURATION_SECONDS_MAX


@pytest.mark.parametrize(
    ("text", "expected"),
    [("256MB", 256_000_000), ("1GiB", 2**30), ("4k", 4000), (4096, 4096), ("1.5 MiB", 1572864)],
)
def test_a_size_is_read_as_people_write_it(text: object, expected: int) -> None:
    """Decimal and binary units are kept apart."""
    assert durations.size_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "0", 0, -5, "5XB", True, "9999999GB", None, "1ib x"])
def test_a_wrong_size_is_refused(text: object) -> None:
    """Zero and nonsense are no sizes."""
    with pytest.raises(ValueError, match="size"):
        durations.size_bytes(text)


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    """Every key has a default, and the database lies beside the file."""
    got = read(tmp_path, "")
    assert got.database == str(tmp_path / "var/herdsman.db")
    assert (got.instance, got.grace_seconds, got.web.port) == ("main", 20.0, 9464)
    assert got.pools["default"].queue_names is None
    assert got.folder == tmp_path


def test_every_fault_is_reported_at_once_with_its_line(tmp_path: Path) -> None:
    """A file with many faults is answered with all of them, each on its own line."""
    lines = faults(
        tmp_path,
        '[handlers.a]\npython = "m:f"\ntimout = 3\n[pools.p]\nprocesses = 0\n'
        '[web]\nlisten = "0.0.0.0:80"\n[handlers.b]\ntimeout = "3x"\n[queues.q]\nmax_running = 1\n',
    )
    text = "\n".join(lines)
    assert len(lines) == 5
    assert (
        f'{tmp_path}/herdsman.toml:3: unknown key handlers.a.timout; did you mean "timeout"?'
        in (lines)
    )
    assert "herdsman.toml:5: pools.p.processes = 0" in text
    assert "herdsman.toml:6: web is refused" in text
    assert "needs a token_file" in text
    assert "herdsman.toml:9: handlers.b.timeout is refused: '3x' is not a duration" in text
    assert "herdsman.toml:11: unknown key queues.q.max_running" in text


def test_a_key_of_another_section_is_sent_there(tmp_path: Path) -> None:
    """`listen` at the top is told where it belongs."""
    assert faults(tmp_path, 'listen = "off"')[0].endswith('did you mean "listen" of [web]?')


def test_defaults_reach_every_handler_and_their_faults_are_told_once(tmp_path: Path) -> None:
    """A handler's own keys win, back-off tables merge, a bad default is one fault."""
    got = read(
        tmp_path,
        '[defaults]\nmax_attempts = 9\nbackoff = { base = "1s" }\n'
        '[handlers.a]\npython = "m:f"\nbackoff = { cap = "3m" }\n'
        '[handlers.b]\npython = "m:f"\nmax_attempts = 2\n',
    )
    a, b = got.handlers["a"], got.handlers["b"]
    assert (a.max_attempts, a.backoff.base_seconds, a.backoff.cap_seconds) == (9, 1.0, 180.0)
    assert (b.max_attempts, b.backoff.base_seconds) == (2, 1.0)
    lines = faults(
        tmp_path,
        '[defaults]\nmax_attempts = 0\n[handlers.a]\npython = "m:f"\n[handlers.b]\npython = "m:f"',
    )
    assert len(lines) == 1


@pytest.mark.parametrize(
    "target",
    ["", 'python = "m:f"\nhttp = "http://h/"', 'python = "nocolon"', "command = []",
     'http = "file:///etc/passwd"', 'command = ["a\\u0000b"]'],
)  # fmt: skip
def test_a_handler_has_exactly_one_target_that_makes_sense(tmp_path: Path, target: str) -> None:
    """None, two, or a malformed one is a fault."""
    assert len(faults(tmp_path, f"[handlers.a]\n{target}\n")) == 1


def test_the_soft_timeout_is_the_shorter_one(tmp_path: Path) -> None:
    """A soft limit at or past the hard one could never strike."""
    text = '[handlers.a]\npython = "m:f"\ntimeout = "5s"\nsoft_timeout = "5s"\n'
    assert "must be below" in faults(tmp_path, text)[0]


def test_the_environment_overrides_the_file(tmp_path: Path) -> None:
    """Variables reach any depth, find the file's own spelling, and take lists as TOML."""
    got = read(
        tmp_path,
        '[handlers.send-email]\npython = "m:f"\n[pools.default]\nprocesses = 1\n',
        HERDSMAN__POOLS__DEFAULT__PROCESSES="4",
        HERDSMAN__POOLS__DEFAULT__QUEUES='["a:2", "b"]',
        HERDSMAN__HANDLERS__SEND_EMAIL__TIMEOUT="3s",
        HERDSMAN__WEB__LISTEN="off",
        HERDSMAN_CONFIG="/nowhere",
    )
    assert got.pools["default"].processes == 4
    assert got.pools["default"].weights == (("a", 2), ("b", 1))
    assert got.handlers["send-email"].timeout_seconds == 3.0
    assert not got.web.enabled


def test_a_wrong_variable_is_a_fault_that_names_it(tmp_path: Path) -> None:
    """Unknown keys and impossible paths from the environment are told like the file's."""
    lines = faults(
        tmp_path, "",
        HERDSMAN__WEB__LISTN="x", HERDSMAN__DATABASE__X="1", HERDSMAN__="1", HERDSMAN__GRACE="soon",
        HERDSMAN__DATABASE="a.db",
    )  # fmt: skip
    text = "\n".join(lines)
    assert 'environment HERDSMAN__WEB__LISTN: unknown key web.listn; did you mean "listen"?' in text
    assert "environment HERDSMAN__DATABASE__X: it names no key" in text
    assert "environment HERDSMAN__: it names no key" in text
    assert "environment HERDSMAN__GRACE: grace is refused" in text


@pytest.mark.parametrize(
    ("listen", "fine"),
    [("127.0.0.1:1", True), ("[::1]:0", True), ("localhost:80", True), ("", True), ("off", True),
     ("0.0.0.0:80", False), ("[::]:80", False), ("example.org:80", False), (":80", False),
     ("127.0.0.1", False), ("::1:80", False), ("127.0.0.1:99999", False)],
)  # fmt: skip
def test_only_this_machine_is_served_without_a_token(
    tmp_path: Path, listen: str, fine: bool
) -> None:
    """A listen address others can reach needs a token file; a malformed one is refused."""
    text = f'[web]\nlisten = "{listen}"\n'
    if fine:
        read(tmp_path, text)
    else:
        assert len(faults(tmp_path, text)) == 1
    got = read(tmp_path, '[web]\nlisten = "0.0.0.0:80"\ntoken_file = "token"')
    assert got.web.token_file == tmp_path / "token"


def test_a_queue_in_no_pool_is_a_warning(tmp_path: Path) -> None:
    """It is allowed, since another instance may serve it, but it is said."""
    got = read(tmp_path, '[queues.a]\n[queues.b]\n[pools.p]\nqueues = ["a:3"]\n')
    assert got.warnings == (
        "queue b is in no pool: its jobs wait for ever; name it in a pool's queues",
    )


@pytest.mark.parametrize("queues", ['["*", "a"]', '["a", "a:3"]', "[]", '["a:0"]', '[""]', "[3]"])
def test_a_pool_lists_each_queue_once(tmp_path: Path, queues: str) -> None:
    """Doubles, empty lists and weights out of range are faults."""
    assert len(faults(tmp_path, f"[pools.p]\nqueues = {queues}\n")) == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"a = !", ":1: it is not valid TOML"), (b"\xff\xfe", "not UTF-8"), (b"x" * 2**21, "larger")],
)
def test_a_file_that_is_no_toml_is_one_sentence(tmp_path: Path, content: bytes, said: str) -> None:
    """Syntax errors carry their line."""
    file = tmp_path / "x.toml"
    file.write_bytes(content)
    with pytest.raises(SettingsError, match=said):
        settings.load(file, {})


def test_a_missing_file_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing to be found, a name that does not exist and a folder are told apart."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match="herdsman init"):
        settings.load(None, {})
    with pytest.raises(SettingsError, match="No such file"):
        settings.load(Path("nope.toml"), {})
    with pytest.raises(SettingsError, match="not a regular file"):
        settings.load(tmp_path, {})


def test_the_file_is_looked_for_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flag, then variable, then herdsman.toml, then config/herdsman.toml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    for name in ("config/herdsman.toml", "herdsman.toml", "v.toml", "f.toml"):
        (tmp_path / name).write_text(f'instance = "{Path(name).stem}"\ndatabase = "../x.db"\n')
        assert settings.find(None, {}) in (
            tmp_path / "config/herdsman.toml", tmp_path / "herdsman.toml",
        )  # fmt: skip
    assert settings.find(None, {}) == tmp_path / "herdsman.toml"
    assert settings.load(None, {"HERDSMAN_CONFIG": "v.toml"}).instance == "v"
    assert settings.load(Path("f.toml"), {"HERDSMAN_CONFIG": "v.toml"}).instance == "f"
    (tmp_path / "herdsman.toml").unlink()
    got = settings.load(None, {})
    assert got.path == tmp_path / "config/herdsman.toml"
    assert got.database == str(tmp_path / "x.db")


def test_lines_are_found_in_every_spelling() -> None:
    """Dotted keys, quoted names and headers with spaces have their lines."""
    lines = lines_of('a.b = 1\n[ x . "y.z" ] # c\n"k k" = 2\n[[t]]\nn = 1\n')
    assert lines[("a",)] == lines[("a", "b")] == 1
    assert lines[("x", "y.z")] == 2
    assert lines[("x", "y.z", "k k")] == 3
    assert lines[("t", "n")] == 5


KEYS = st.sampled_from(
    ["web", "listen", "pools", "p", "queues", "handlers", "python", "timeout", "defaults",
     "backoff", "cap", "processes", "logs", "database", "é\n", "", "max_memory", "token_file"],
)  # fmt: skip
VALUES = st.recursive(
    st.one_of(st.text(max_size=9), st.integers(), st.floats(), st.booleans(), st.datetimes()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)


@given(raw=st.dictionaries(KEYS, VALUES, max_size=5), text=st.text(max_size=200))
def test_any_file_yields_settings_or_faults(raw: dict[str, Any], text: str) -> None:
    """Whatever a file holds, the loader raises nothing but SettingsError, a line per fault."""
    lines_of(text)
    try:
        settings._build(raw, {}, {}, None)
    except SettingsError as error:
        assert len(str(error).splitlines()) == len(error.faults)  # noqa: PT017


def test_the_shipped_file_is_what_init_writes_and_loads_clean() -> None:
    """The example configuration and the template cannot drift apart."""
    shipped = (ROOT / "config/herdsman.toml").read_text()
    assert shipped == templates.config(database="../var/herdsman.db", module="handlers_example")
    assert (ROOT / "config/handlers_example.py").read_text() == templates.HANDLERS
    got = settings.load(ROOT / "config/herdsman.toml", {})
    assert got.database == str(ROOT / "var/herdsman.db")
    assert set(got.handlers) == {"hello", "flaky"}
    assert got.warnings == ()
