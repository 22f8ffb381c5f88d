"""Say what is wrong with a configuration, where, and what to do next.

Boundary: pure; turns the validator's errors and the file's text into `Fault` records.
Reads no file and knows no particular setting.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails

FAULTS_MAX: Final = 100
"""Most faults listed at once; a file with more is one that was not meant for us."""
_HEADER: Final = re.compile(r"\s*\[\[?([^\[\]]+)\]\]?\s*(?:#.*)?")
_KEY: Final = re.compile(
    r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*="""
)

type_sentences: Final[Mapping[str, str]] = {
    "int_parsing": "is not a whole number",
    "int_type": "is not a whole number",
    "int_from_float": "is not a whole number",
    "float_parsing": "is not a number",
    "float_type": "is not a number",
    "bool_parsing": "is neither true nor false",
    "bool_type": "is neither true nor false",
    "string_type": "is not text",
    "path_type": "is not a path",
    "tuple_type": "is not a list",
    "list_type": "is not a list",
    "dict_type": "is not a table",
    "too_short": "is empty",
    "model_type": "is not a table",
    "model_attributes_type": "is not a table",
}
"""Validator error types whose own message speaks of Python, and the words we use instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong: where it is, what it is, and what to do next."""

    where: str
    what: str
    next: str

    def __str__(self) -> str:
        """One line, never more."""
        return " ".join(f"{self.where}: {self.what}; {self.next}".split())


class SettingsError(Exception):
    """The configuration cannot be used; `faults` lists everything that is wrong with it."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        shown = list(faults[:FAULTS_MAX])
        lines = [str(fault) for fault in shown]
        if len(faults) > len(shown):
            lines.append(f"... and {len(faults) - len(shown)} more")
        super().__init__("\n".join(lines))
        self.faults = tuple(faults)


def describe(
    errors: Iterable[ErrorDetails],
    model: type[BaseModel],
    where: Mapping[tuple[str, ...], str],
    fallback: str,
) -> list[Fault]:
    """Turn the validator's errors into faults; `where` gives the place of each known path."""
    faults = []
    errors = list(errors)
    deeper = {tuple(map(str, e["loc"][:-1])) for e in errors}
    for error in errors:
        loc = tuple(str(part) for part in error["loc"])
        if error["type"] == "too_short" and loc in deeper:
            continue  # an item was refused, and the validator then misses it
        place = place_of(loc, where, fallback)
        name = ".".join(loc) or "the file"
        if error["type"] == "extra_forbidden":
            faults.append(Fault(where=place, what=f"unknown key {name}", next=_advice(loc, model)))
        elif error["type"] == "missing":
            faults.append(Fault(where=place, what=f"{name} is missing", next="add it"))
        else:
            faults.append(Fault(where=place, what=f"{name} {_what(error)}", next="change it"))
    return faults


def _what(error: ErrorDetails) -> str:
    if error["type"] == "value_error":
        return f"is refused: {error['ctx']['error']}"
    words = type_sentences.get(error["type"])
    if words is None:
        message = error["msg"]
        words = f"is refused: {message[:1].lower()}{message[1:]}"
    value = repr(error["input"])
    return f"= {value if len(value) <= 60 else value[:57] + '...'} {words}"


def _advice(loc: tuple[str, ...], model: type[BaseModel]) -> str:
    key, at = loc[-1], _model_at(model, loc[:-1])
    names = sorted(_keys(at)) if at is not None else []
    if close := difflib.get_close_matches(key, names, n=1, cutoff=0.7):
        return f'did you mean "{close[0]}"?'
    for section, field in _keys(model).items():
        inner = _inner(field)
        if inner is None or loc[:-1] == (section,):
            continue
        if close := difflib.get_close_matches(key, _keys(inner), n=1, cutoff=0.8):
            return f'did you mean "{close[0]}" of [{section}]?'
    return f"known keys here are {', '.join(names)}" if names else "remove it"


def _keys(model: type[BaseModel]) -> dict[str, Any]:
    return {f.alias or name: f.annotation for name, f in model.model_fields.items()}


def _inner(annotation: Any) -> type[BaseModel] | None:
    return (
        annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
    )


def _model_at(model: type[BaseModel], loc: Sequence[str]) -> type[BaseModel] | None:
    at: Any = model
    for part in loc:
        if get_origin(at) is dict:
            at = get_args(at)[1]
        elif (inner := _inner(at)) is not None:
            at = _keys(inner).get(part)
        else:
            return None
    return _inner(at)


def place_of(loc: tuple[str, ...], where: Mapping[tuple[str, ...], str], fallback: str) -> str:
    """Return the place of a path, or of the nearest table above it."""
    for length in range(len(loc), 0, -1):
        if (place := where.get(loc[:length])) is not None:
            return place
    return fallback


def lines_of(text: str) -> dict[tuple[str, ...], int]:
    """Find the line of every key and table of a TOML text, as well as a line scan can.

    Keys inside an inline table have no line of their own: the line of the whole value stands.
    """
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.fullmatch(line):
            table = _path(f"[{header[1]}]")
            if table:
                lines.setdefault(table, number)
        elif key := _KEY.match(line):
            path = _path(f"{key[1]} = 0")
            for length in range(1, len(path) + 1):
                lines.setdefault(table + path[:length], number)
    return lines


def _path(text: str) -> tuple[str, ...]:
    try:
        at: Any = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return ()
    path: list[str] = []
    while isinstance(at, dict) and at:
        name, at = next(iter(at.items()))
        path.append(name)
    return tuple(path)
