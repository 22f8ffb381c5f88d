"""Hold back Python's signal handlers while a lock or a transaction is held.

A handler that raises (Ctrl-C, a soft timeout) could otherwise strike between BEGIN and the
roll-back. Handlers run in the main thread, whichever thread the kernel interrupted, so a signal
mask of the main thread keeps them away only while there is no other thread. Hence the handlers
themselves are replaced by one that takes a note, and what was noted is run at the end.

Boundary: signals only; what is protected is the caller's affair.
"""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

_c: Final[Any] = importlib.import_module("_signal")
"""The module below `signal`, whose conversions to enums cost a hundred times the call itself."""
HEED_SECONDS: Final = 0.05
"""How long a wait may keep a signal waiting: nobody notices it at a key."""
_DEFERRED: Final = tuple(
    int(signum)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGALRM, signal.SIGHUP)
)


class _State:
    """What is held back in this process. Only the main thread changes it."""

    __slots__ = ("active", "handlers", "main", "noted")

    def __init__(self) -> None:
        self.main = threading.main_thread().ident
        self.active: Hold | None = None
        self.handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self.noted: dict[int, FrameType | None] = {}


class Hold:
    """A stretch of work without handlers; they may nest."""

    __slots__ = ("outer",)

    def __init__(self) -> None:
        self.outer: Hold | None = None

    def begin(self) -> None:
        """Hold handlers back from now on.

        Its last step is one store: a handler that strikes before leaves nothing but stand-ins,
        and those hand on what comes while nothing is held.
        """
        _stand_in()
        self.outer = state.active
        state.active = self

    def rest(self) -> None:
        """Let handlers run, for code of the user's; `resume` goes on."""
        state.active = self.outer
        heed()

    def resume(self) -> None:
        """Hold handlers back again, after the caller has stored this hold as `state.active`.

        That store is the caller's, since a handler could strike at the entry of a method.
        """
        _stand_in()

    def end(self) -> None:
        """Put the handlers back, and run what was noted; does nothing when `begin` did not end."""
        if state.active is not self:
            return
        state.active = self.outer
        if self.outer is None:
            try:
                _put_back()
            finally:
                heed()


def hold() -> Hold | None:
    """Return a hold that has yet to begin; None in threads where no handler runs."""
    return Hold() if threading.get_ident() == state.main else None


@contextmanager
def held() -> Iterator[None]:
    """Hold handlers back for a block of code that does not wait."""
    guard = hold()
    try:
        if guard is not None:
            guard.begin()
        yield
    finally:
        if guard is not None:
            guard.end()


def heed() -> None:
    """Run what was noted; in a wait, where nothing is lost when a handler raises."""
    if state.noted and threading.get_ident() == state.main:
        noted, state.noted = state.noted, {}
        _run(noted)


def reset() -> None:
    """In a forked child: what the parent's main thread held back is no concern of ours."""
    state.main = threading.get_ident()  # whoever forked is the child's main thread
    state.active = None
    state.noted = {}
    _put_back()


def _run(noted: dict[int, FrameType | None]) -> None:
    while noted:
        number, frame = noted.popitem()
        try:
            state.handlers[number](number, frame)
        finally:
            _run(noted)  # whatever that one raised, the others have their turn


def _note(number: int, frame: FrameType | None) -> None:
    """Stand in for a handler."""
    if state.active is None:
        state.handlers[number](number, frame)
    else:
        state.noted[number] = frame


def _stand_in() -> None:
    for number in _DEFERRED:
        handler = _c.getsignal(number)
        if handler is not _note and callable(handler):
            state.handlers[number] = handler
            _c.signal(number, _note)


def _put_back() -> None:
    for number, handler in list(state.handlers.items()):
        if _c.getsignal(number) is _note:
            _c.signal(number, handler)


state = _State()
