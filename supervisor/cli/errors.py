"""Map everything that can go wrong to one exit code and a sentence or more.

The one place that knows exit codes of commands. Boundary: decides and prints to standard
error; raises nothing.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Final

CLEAN: Final = 0
FAILED: Final = 1
USAGE: Final = 2
DATABASE: Final = 69
"""EX_UNAVAILABLE of sysexits.h."""
CONFIGURATION: Final = 78
"""EX_CONFIG of sysexits.h."""
INTERRUPTED: Final = 130
"""128 + SIGINT, as shells report it."""


class UsageFault(Exception):
    """The command was called in a way that makes no sense; the text says how to call it."""


class CommandFailed(Exception):
    """The command ran and failed; the text says at what. Exit code 1."""


class OutputClosed(Exception):
    """Whoever read our output has gone, as `head` does: nothing is left to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """An exit code, and what is said on standard error before it: a line for each fault.

    A sentence is a line whatever it quotes: line feeds of a path or a name are escaped.
    """

    code: int
    text: str


def explain(error: BaseException) -> Explained:
    """Return the exit code and the words for an exception that ended a command."""
    from queue_core import errors as queue

    match error:
        case KeyboardInterrupt():
            return Explained(code=INTERRUPTED, text="interrupted")
        case UsageFault() | queue.PayloadInvalid():
            return Explained(code=USAGE, text=printable(str(error)))
        case queue.DatabaseError() | queue.QueueBusy():
            return Explained(code=DATABASE, text=printable(str(error)))
        case CommandFailed() | queue.QueueError():
            return Explained(code=FAILED, text=printable(str(error)))
        case OSError():
            what = error.strerror or type(error).__name__
            where = f"{error.filename}: " if error.filename else ""
            return Explained(code=FAILED, text=printable(f"{where}{what}"))
    if (text := _configuration(error)) is not None:
        return Explained(code=CONFIGURATION, text=text)
    if (explained := _from_typer(error)) is not None:
        return explained
    kind = type(error).__name__
    return Explained(
        code=FAILED,
        text=f"unexpected {kind}: {_one_line(error)}; run it again with --debug and report this",
    )


def tell(explained: Explained) -> None:
    """Print the words on standard error, if there are any and anybody listens."""
    try:
        for line in explained.text.splitlines():
            print(f"herdsman: {printable(line)}", file=sys.stderr)
    except (OSError, ValueError):
        pass


def printable(text: str) -> str:
    """Return text that cannot move the cursor, change colours or break the encoding."""
    clean = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return clean.encode("utf-8", "backslashreplace").decode()


def _configuration(error: BaseException) -> str | None:
    from supervisor.faults import SettingsError

    if isinstance(error, SettingsError):
        return str(error)
    # Handlers are imported by few commands: whoever raised this has loaded the module.
    handlers = sys.modules.get("supervisor.handlers")
    if handlers is not None and isinstance(error, handlers.HandlerError):
        return str(error)
    return None


def _from_typer(error: BaseException) -> Explained | None:
    import typer

    if isinstance(error, typer.Abort):
        if isinstance(error.__cause__ or error.__context__, KeyboardInterrupt):
            return explain(KeyboardInterrupt())
        return Explained(code=FAILED, text="aborted")
    if isinstance(error, typer.Exit):
        return Explained(code=error.exit_code, text="")
    message = getattr(error, "format_message", None)
    code = getattr(error, "exit_code", None)
    if not callable(message) or not isinstance(code, int):
        return None
    context = getattr(error, "ctx", None)
    path = getattr(context, "command_path", "herdsman")
    text = str(message())
    if not text.strip() or "\n" in text:  # the help of a group that was called alone
        return Explained(code=code, text=f"name a command; see '{path} --help'")
    return Explained(code=code, text=f"{text.rstrip('.')}; see '{path} --help'")


def _one_line(error: BaseException) -> str:
    try:
        return " ".join(str(error).split())[:500]
    except Exception:
        return "it has no text"
