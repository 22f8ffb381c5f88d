"""Find the handler of every task: names in the configuration become things to call.

Boundary: imports handler code, so only workers and the throwaway child of `check` load it.
How a job is called stands in `calls` (Python) and `outside` (commands, HTTP); what becomes
of the job is decided by `queue_core.retry`.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from queue_core.retry import Backoff
from supervisor.calls import Call, Errors, Takes, error_text, python_call
from supervisor.faults import Fault
from supervisor.linux import thread_count
from supervisor.outside import command_call, http_call
from supervisor.sections import HandlerSettings, Settings

LIMIT_SHARE: Final = 0.1
"""A command or request is ended this share (at most a second) before the hard timeout, at
which the supervisor would kill the whole worker."""


class HandlerError(Exception):
    """Handlers that cannot be used; `faults` has one entry for each."""

    def __init__(self, faults: Collection[Fault]) -> None:
        super().__init__("\n".join(str(fault) for fault in faults))
        self.faults = tuple(faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler:
    """What runs the jobs of one task. `call` never raises; it returns a result of the attempt.

    `max_memory_bytes` 0 is no limit.
    """

    task: str
    settings: HandlerSettings
    policy: Backoff
    max_attempts: int
    timeout_seconds: float
    soft_timeout_seconds: float | None
    max_memory_bytes: int
    call: Call


class Registry:
    """The handlers of a process, by task."""

    __slots__ = ("_handlers", "tasks")

    def __init__(self, handlers: dict[str, Handler]) -> None:
        self._handlers = handlers
        self.tasks: frozenset[str] = frozenset(handlers)

    def get(self, task: str) -> Handler:
        """Return the handler of a task; raises KeyError when there is none."""
        return self._handlers[task]

    def __iter__(self) -> Iterator[Handler]:
        return iter(self._handlers.values())

    def __len__(self) -> int:
        return len(self._handlers)


def load(settings: Settings, only: Collection[str] | None = None) -> Registry:
    """Import every handler (or those of the tasks in `only`) and make it callable.

    The folder of the configuration joins the import path. Raises HandlerError, which names
    every handler that cannot be used and why.
    """
    folder = str(settings.folder)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    handlers: dict[str, Handler] = {}
    faults = []
    for task, options in settings.handlers.items():
        if only is not None and task not in only:
            continue
        try:
            handlers[task] = _handler(task, options, settings.folder)
        except _Unusable as found:
            faults.append(Fault(where=f"handler {task}", what=found.what, next=found.next))
    if faults:
        raise HandlerError(faults)
    return Registry(handlers)


def preload(settings: Settings) -> None:
    """Import every Python handler, so that processes forked from this one have it already.

    Raises HandlerError, also when a module has started a thread: a lock that one holds at a
    fork is held for ever in the child.
    """
    folder = str(settings.folder)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    faults = []
    for task, options in settings.handlers.items():
        try:
            if options.python is not None:
                _import(options.python)
        except _Unusable as found:
            faults.append(Fault(where=f"handler {task}", what=found.what, next=found.next))
    if not faults and thread_count() > 1:
        faults.append(Fault(
            where="preload", what="the handlers' modules start threads as they are imported",
            next="start them when the first job runs, or set preload = false",
        ))  # fmt: skip
    if faults:
        raise HandlerError(faults)


class _Unusable(Exception):
    def __init__(self, what: str, after: str) -> None:
        super().__init__(what)
        self.what, self.next = what, after


def _handler(task: str, options: HandlerSettings, folder: Path) -> Handler:
    backoff = options.backoff
    return Handler(
        task=task,
        settings=options,
        policy=Backoff(
            kind=backoff.kind,
            base_seconds=backoff.base_seconds,
            factor=backoff.factor,
            cap_seconds=backoff.cap_seconds,
            jitter=backoff.jitter,
        ),
        max_attempts=options.max_attempts,
        timeout_seconds=options.timeout_seconds,
        soft_timeout_seconds=options.soft_timeout_seconds,
        max_memory_bytes=options.max_memory_bytes or 0,
        call=_call(options, folder),
    )


def _call(options: HandlerSettings, folder: Path) -> Call:
    hard = options.timeout_seconds
    limit = min(hard - min(1.0, hard * LIMIT_SHARE), options.soft_timeout_seconds or hard)
    if options.command is not None:
        return command_call(_executable(options.command, folder), timeout_seconds=limit)
    if options.http is not None:
        return http_call(options.http, timeout_seconds=limit)
    assert options.python is not None
    function = _import(options.python)
    retry_on = tuple(_exception("retry_on", name) for name in options.retry_on)
    reject_on = tuple(_exception("reject_on", name) for name in options.reject_on)
    return _python(options.python, function, options.max_attempts, retry_on, reject_on)


def _executable(argv: tuple[str, ...], folder: Path) -> tuple[str, ...]:
    name = argv[0]
    if os.sep in name:
        path = str(folder / name)
        found = path if os.path.isfile(path) and os.access(path, os.X_OK) else None
    else:
        found = shutil.which(name)
    if found is None:
        raise _Unusable(
            f"there is no command {name!r} that can be run", "install it, or name it with its path"
        )
    return (found, *argv[1:])


def _import(target: str) -> Callable[..., Any]:
    """Import "package.module:function"; raises _Unusable, naming the line that failed."""
    module, _, path = target.partition(":")
    try:
        at: Any = importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may call sys.exit() as it is imported
        place = _place(error)
        raise _Unusable(
            f"cannot import {target}: {error_text(error)}{place}", _import_advice(error, module)
        ) from None
    for name in path.split("."):
        try:
            at = getattr(at, name)
        except AttributeError:
            raise _Unusable(
                f"{target} does not exist: {getattr(at, '__name__', module)} has no {name}",
                "correct the name, or define it",
            ) from None
    if not callable(at):
        raise _Unusable(f"{target} is no function but {type(at).__name__}", "name a function")
    function: Callable[..., Any] = at
    return function


def _import_advice(error: BaseException, module: str) -> str:
    if isinstance(error, ModuleNotFoundError):
        missing = error.name or module
        if module == missing or module.startswith(missing + "."):
            return (
                f"install {missing}, or put it beside the configuration file, "
                "whose folder is on the import path"
            )
        return f"install {missing}"
    return "mend the module"


def _place(error: BaseException) -> str:
    """Return " (at file:line)" of the innermost line that is not the import machinery."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" (at {error.filename}:{error.lineno})"
    try:
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if not frame.filename.startswith("<frozen") and frame.filename != importlib.__file__
            and frame.filename != __file__
        ]  # fmt: skip
    except Exception:
        return ""
    return f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def _exception(option: str, dotted: str) -> type[BaseException]:
    module, _, name = dotted.rpartition(".")
    try:
        found = getattr(importlib.import_module(module) if module else builtins, name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise _Unusable(
            f"{option} names {dotted}, which cannot be found: {error_text(error)}",
            "write a built-in exception, or package.module.Error",
        ) from None
    if not (isinstance(found, type) and issubclass(found, BaseException)):
        raise _Unusable(f"{option} names {dotted}, which is no exception", "name an exception")
    return found


def _python(
    target: str,
    function: Callable[..., Any],
    max_attempts: int,
    retry_on: Errors,
    reject_on: Errors,
) -> Call:
    inner = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise _Unusable(
            f"{target} is a generator, so calling it would run nothing",
            "return instead of yielding",
        )
    return python_call(
        function,
        takes=_takes(target, function),
        is_async=inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(inner),
        max_attempts=max_attempts,
        retry_on=retry_on,
        reject_on=reject_on,
    )


def _takes(target: str, function: Callable[..., Any]) -> Takes:
    """Say which arguments a function gets.

    A second parameter that has a default is the function's own business, unless it is `job`;
    a function whose only parameter is `job` gets the job, which has the payload.
    """
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # some built-in functions have none
        return "payload"
    parameters = signature.parameters.values()
    placed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = [p.name for p in placed]
    takes: Takes = "payload"
    if names == ["job"]:
        takes = "job"
    elif names[1:2] == ["job"] or sum(p.default is p.empty for p in placed) == 2:
        takes = "payload, job"
    elif "job" in names[2:] or any(
        p.name == "job" and p.kind is p.KEYWORD_ONLY for p in parameters
    ):
        takes = "payload, job=job"
    try:
        if takes == "payload, job=job":
            signature.bind(None, job=None)
        else:
            signature.bind(*[None] * (2 if takes == "payload, job" else 1))
    except TypeError:
        raise _Unusable(
            f"{target}{signature} cannot be called with a payload",
            "take (payload) or (payload, job)",
        ) from None
    return takes
