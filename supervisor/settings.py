"""Read the configuration: a TOML file and the environment in, frozen records out.

Every fault is reported at once, with its line and a suggestion. Boundary: no queue, no
import of handlers, no socket; the database and the paths are only named here. The keys
themselves are defined in `supervisor.sections`.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from supervisor.faults import Fault, SettingsError, describe, lines_of
from supervisor.sections import (
    BackoffSettings,
    HandlerOptions,
    HandlerSettings,
    LogSettings,
    PoolSettings,
    QueueSettings,
    Settings,
    WebSettings,
)  # fmt: skip

__all__ = [
    "BackoffSettings", "Fault", "HandlerOptions", "HandlerSettings", "LogSettings",
    "PoolSettings", "QueueSettings", "Settings", "SettingsError", "WebSettings", "find", "load",
    "without_file",
]  # fmt: skip

ENVIRONMENT_PREFIX: Final = "HERDSMAN__"
ENVIRONMENT_CONFIG: Final = "HERDSMAN_CONFIG"
LOOKUP: Final = (Path("herdsman.toml"), Path("config/herdsman.toml"))
FILE_BYTES_MAX: Final = 1024 * 1024


def find(path: Path | None = None, environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the file `load` would read, absolute; None when there is none to be found."""
    given = path or Path((os.environ if environ is None else environ).get(ENVIRONMENT_CONFIG, ""))
    if given != Path():
        return given.expanduser().absolute()
    return next((name.absolute() for name in LOOKUP if name.is_file()), None)


def load(path: Path | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Read the file (given, or HERDSMAN_CONFIG, or found here) and the environment.

    Raises SettingsError, which lists every fault, when there is no file or it cannot be used.
    """
    environ = os.environ if environ is None else environ
    file = find(path, environ)
    if file is None:
        raise SettingsError([Fault(
            where=str(Path.cwd()),
            what="there is neither herdsman.toml nor config/herdsman.toml here",
            next="write one with `herdsman init`, or name one with --config",
        )])  # fmt: skip
    text, raw = _read(file)
    where = {at: f"{file}:{line}" for at, line in lines_of(text).items()}
    return _build(raw, environ, where, file)


def without_file(database: str, environ: Mapping[str, str] | None = None) -> Settings:
    """Return the defaults with a database, for commands that need no configuration."""
    environ = os.environ if environ is None else environ
    built = _build({}, environ, {}, None)
    return built.model_copy(update={"database": _absolute_database(database, Path.cwd())})


def _read(file: Path) -> tuple[str, dict[str, Any]]:
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):
            raise _fault(file, "it is not a regular file", "name a TOML file")
        if found.st_size > FILE_BYTES_MAX:
            raise _fault(file, "it is larger than 1 MiB", "name a herdsman configuration")
        text = file.read_bytes().decode()
        return text, tomllib.loads(text)
    except OSError as error:
        what = f"it cannot be read: {error.strerror}"
        raise _fault(file, what, "create it with `herdsman init`, or check its rights") from None
    except UnicodeDecodeError:
        raise _fault(file, "it is not UTF-8 text", "save it as UTF-8") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        line = re.search(r"at line (\d+)", str(error))
        place = f"{file}:{line[1]}" if line else str(file)
        raise _fault(place, f"it is not valid TOML: {error}", "mend the syntax there") from None


def _fault(where: object, what: str, after: str) -> SettingsError:
    return SettingsError([Fault(where=str(where), what=what, next=after)])


def _build(
    raw: dict[str, Any],
    environ: Mapping[str, str],
    where: dict[tuple[str, ...], str],
    file: Path | None,
) -> Settings:
    faults = _override(raw, environ, where)
    own = _inherit(raw)
    fallback = str(file or "the environment")
    try:
        settings = Settings.model_validate(raw)
    except ValidationError as failed:
        errors = [e for e in failed.errors() if not _inherited(e["loc"], own)]
        faults += describe(errors, Settings, where, fallback)
        raise SettingsError(faults) from None
    if faults:
        raise SettingsError(faults)
    settings._path = file
    return _resolve(settings)


def _override(
    raw: dict[str, Any], environ: Mapping[str, str], where: dict[tuple[str, ...], str]
) -> list[Fault]:
    """Lay HERDSMAN__SECTION__KEY variables over the file; return those that do not fit."""
    faults = []
    for variable in sorted(environ):
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        parts = variable.removeprefix(ENVIRONMENT_PREFIX).split("__")
        at: Any = raw
        path: list[str] = []
        for part in parts:
            if not isinstance(at, dict) or not part:
                faults.append(Fault(
                    where=f"environment {variable}", what="it names no key of the configuration",
                    next="write HERDSMAN__SECTION__KEY",
                ))  # fmt: skip
                break
            path.append(_known(part, at))
            if len(path) < len(parts):
                at = at.setdefault(path[-1], {})
        else:
            at[path[-1]] = _value(environ[variable])
            where[tuple(path)] = f"environment {variable}"
    return faults


def _known(part: str, table: Mapping[str, Any]) -> str:
    """Return the table's own spelling of a name that a variable cannot spell."""
    folded = part.lower()
    for key in table:
        if re.sub(r"[^a-z0-9]", "_", key.lower()) == folded:
            return key
    return folded


def _value(text: str) -> Any:
    """Read lists, tables and quoted texts as TOML; anything else is plain text."""
    if text[:1] in ("[", "{", '"', "'"):
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except (tomllib.TOMLDecodeError, RecursionError):
            return text
    return text


def _inherit(raw: dict[str, Any]) -> dict[str, set[str]]:
    """Fill handlers from `[defaults]`; return which keys each handler had of its own."""
    defaults, handlers = raw.get("defaults"), raw.get("handlers")
    own: dict[str, set[str]] = {}
    if isinstance(defaults, dict) and isinstance(handlers, dict):
        for task, keys in handlers.items():
            if isinstance(keys, dict):
                own[task] = set(keys)
                merged = {**defaults, **keys}
                if isinstance(defaults.get("backoff"), dict) and isinstance(
                    keys.get("backoff"), dict
                ):
                    merged["backoff"] = {**defaults["backoff"], **keys["backoff"]}
                handlers[task] = merged
    return own


def _inherited(loc: tuple[int | str, ...], own: Mapping[str, set[str]]) -> bool:
    """Say whether an error of a handler comes from `[defaults]`, where it is reported once."""
    if len(loc) < 3 or loc[0] != "handlers":
        return False
    keys = own.get(str(loc[1]))
    return keys is not None and str(loc[2]) not in keys


def _resolve(settings: Settings) -> Settings:
    folder = settings.folder
    update: dict[str, Any] = {"database": _absolute_database(settings.database, folder)}
    if settings.web.token_file is not None:
        token_file = _absolute(settings.web.token_file, folder)
        update["web"] = settings.web.model_copy(update={"token_file": token_file})
    if settings.logs.file is not None:
        file = _absolute(settings.logs.file, folder)
        update["logs"] = settings.logs.model_copy(update={"file": file})
    return settings.model_copy(update=update)


def _absolute(path: Path, folder: Path) -> Path:
    return Path(os.path.normpath(folder / path.expanduser()))


def _absolute_database(database: str, folder: Path) -> str:
    if database.startswith(("postgresql://", "postgres://")):
        return database
    # By its real path: whoever comes by a link has to meet the same locks and logs.
    return os.path.realpath(_absolute(Path(database), folder))
