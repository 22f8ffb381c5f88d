"""Define every key of the configuration: its meaning, its unit, its default, its limits.

Boundary: frozen records and their checks; reads no file and no environment
(`supervisor.settings` does). Field names end in their unit, the keys in the file do not:
`timeout = "30s"` is `timeout_seconds`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    field_validator,
    model_validator,
)  # fmt: skip

from supervisor import durations

NAME_LENGTH_MAX: Final = 128
"""Longest name of a queue or task; the queue library has the same limit."""
PROCESSES_MAX: Final = 512
"""Most processes of one pool; each costs a process, a slot and some 20 MB."""

PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_DOTTED: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def _name(text: str) -> str:
    if not 0 < len(text) <= NAME_LENGTH_MAX or not text.isprintable() or text != text.strip():
        raise ValueError(f"a name has 1 to {NAME_LENGTH_MAX} printable characters")
    return text


def _plain_name(text: str) -> str:
    if not PLAIN_NAME.fullmatch(text):
        raise ValueError("a name here is 1 to 64 letters, digits, '_', '-' or '.'")
    return text


def _positive_seconds(value: object) -> float:
    number = durations.seconds(value)
    if number <= 0:
        raise ValueError("the duration must be more than zero")
    return number


def _kept_seconds(value: object) -> float | None:
    return None if value == "forever" else durations.seconds(value)


def _dotted(text: str) -> str:
    if not _DOTTED.fullmatch(text):
        raise ValueError(f'{text!r} is no dotted name; write "ValueError" or "package.Error"')
    return text


Duration = Annotated[float, BeforeValidator(durations.seconds)]
Span = Annotated[float, BeforeValidator(_positive_seconds)]
Kept = Annotated[float | None, BeforeValidator(_kept_seconds)]
Size = Annotated[int, BeforeValidator(durations.size_bytes)]
Name = Annotated[str, AfterValidator(_name)]
PlainName = Annotated[str, AfterValidator(_plain_name)]
Dotted = Annotated[str, AfterValidator(_dotted)]


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, validate_default=False
    )


class BackoffSettings(_Section):
    """How long a job waits before its next attempt."""

    kind: Literal["exponential", "fixed"] = "exponential"
    base_seconds: Duration = Field(default=2.0, alias="base")
    factor: float = Field(default=2.0, ge=1, le=100)
    cap_seconds: Duration = Field(default=3600.0, alias="cap")
    jitter: float = Field(default=0.1, ge=0, le=1)


class HandlerOptions(_Section):
    """The keys of a handler that `[defaults]` can set for all.

    `max_memory_bytes` is for the worker and all it has started while a job of it runs.
    """

    timeout_seconds: Span = Field(default=900.0, alias="timeout")
    soft_timeout_seconds: Span | None = Field(default=None, alias="soft_timeout")
    max_memory_bytes: Size | None = Field(default=None, alias="max_memory", gt=0)
    max_attempts: int = Field(default=5, ge=1, le=1_000_000)
    backoff: BackoffSettings = BackoffSettings()
    retry_on: tuple[Dotted, ...] = ()
    reject_on: tuple[Dotted, ...] = ()

    @model_validator(mode="after")
    def _soft_is_shorter(self) -> Self:
        soft = self.soft_timeout_seconds
        if soft is not None and soft >= self.timeout_seconds:
            raise ValueError(f"soft_timeout {soft:g} s must be below timeout "
                             f"{self.timeout_seconds:g} s")  # fmt: skip
        return self


class HandlerSettings(HandlerOptions):
    """What runs the jobs of one task: a Python function, a command, or an HTTP endpoint.

    `queue` says where its jobs are put when that is not the queue of the task's own name.
    """

    python: str | None = None
    command: tuple[str, ...] | None = None
    http: str | None = None
    queue: Name | None = None

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        given = [n for n in ("python", "command", "http") if getattr(self, n) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"a handler has exactly one of python, command and http, not {found}")
        return self

    @field_validator("python")
    @classmethod
    def _target(cls, text: str | None) -> str | None:
        if text is not None:
            module, _, function = text.partition(":")
            if not (_DOTTED.fullmatch(module) and _DOTTED.fullmatch(function)):
                raise ValueError(f'{text!r} is no target; write "package.module:function"')
        return text

    @field_validator("command")
    @classmethod
    def _argv(cls, argv: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if argv is not None and (not argv or not argv[0] or any("\0" in part for part in argv)):
            raise ValueError('a command is a list of texts, as in ["convert", "-", "out.png"]')
        return argv

    @field_validator("http")
    @classmethod
    def _url(cls, url: str | None) -> str | None:
        if url is not None and not re.fullmatch(r"https?://[^\s/]+\S*", url):
            raise ValueError('an endpoint starts with "http://" or "https://"')
        return url


class QueueSettings(_Section):
    """Limits and retention of one queue. `keep_*_seconds` None keeps for ever.

    `key_ttl_seconds` None lets a finished job hold its key as long as its row is kept.
    """

    max_depth: int | None = Field(default=None, ge=1)
    keep_done_seconds: Kept = Field(default=7 * 86_400.0, alias="keep_done")
    keep_dead_seconds: Kept = Field(default=None, alias="keep_dead")
    key_ttl_seconds: Duration | None = Field(default=None, alias="key_ttl")
    target_wait_seconds: Span = Field(default=60.0, alias="target_wait")
    paused: bool | None = None


class PoolSettings(_Section):
    """A group of worker processes and the queues they take jobs from."""

    processes: int = Field(default=2, ge=1, le=PROCESSES_MAX)
    queues: tuple[str, ...] = Field(default=("*",), min_length=1)
    max_jobs: int | None = Field(default=None, ge=1)
    max_memory_bytes: Size | None = Field(default=None, alias="max_memory")
    max_age_seconds: Span | None = Field(default=None, alias="max_age")
    on_crash_loop: Literal["exit", "stay"] = "exit"
    boot_timeout_seconds: Span = Field(default=60.0, alias="boot_timeout")

    @field_validator("queues")
    @classmethod
    def _choices(cls, queues: tuple[str, ...]) -> tuple[str, ...]:
        names = [_choice(text)[0] for text in queues]
        if "*" in names and len(names) > 1:
            raise ValueError('"*" already means every queue and stands alone')
        if len(set(names)) < len(names):
            raise ValueError("a queue is named twice")
        return queues

    @property
    def weights(self) -> tuple[tuple[str, int], ...]:
        """The queues with their weights, heaviest first; equal weights keep the file's order."""
        return tuple(sorted((_choice(text) for text in self.queues), key=lambda c: -c[1]))

    @property
    def queue_names(self) -> tuple[str, ...] | None:
        """The queues in order of preference; None means every queue."""
        return None if self.queues == ("*",) else tuple(name for name, _ in self.weights)


def _choice(text: str) -> tuple[str, int]:
    name, colon, weight = text.rpartition(":")
    if not (colon and weight.isascii() and weight.isdigit()):
        return _name(text), 1
    if not 1 <= int(weight) <= 1000:
        raise ValueError(f"the weight of {text!r} is not between 1 and 1000")
    return _name(name), int(weight)


class WebSettings(_Section):
    """Where the dashboard and the metrics are served; `listen` "off" serves nothing."""

    listen: str = "127.0.0.1:9464"
    token_file: Path | None = None

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.enabled and not durations.is_loopback(self.host) and self.token_file is None:
            raise ValueError(
                f"listen = {self.listen!r} can be reached from other machines, which needs a "
                "token_file"
            )
        return self

    @property
    def enabled(self) -> bool:
        """Whether anything is served."""
        return self.listen not in ("", "off")

    @property
    def host(self) -> str:
        """The address to bind; "" when nothing is served."""
        return durations.address(self.listen)[0] if self.enabled else ""

    @property
    def port(self) -> int:
        """The port to bind; 0 lets the system choose."""
        return durations.address(self.listen)[1] if self.enabled else 0


class LogSettings(_Section):
    """What is logged, in which form, and to which file (None: standard error).

    `attempts` is the level of a line for every attempt.
    """

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"
    attempts: Literal["off", "debug", "info"] = "off"
    file: Path | None = None


class Settings(_Section):
    """The whole configuration. `database` is an absolute path or a postgresql:// URL.

    With `preload` the handlers are imported in the supervisor, before it forks.
    """

    database: str = Field(default="var/herdsman.db", min_length=1)
    instance: PlainName = "main"
    grace_seconds: Duration = Field(default=20.0, alias="grace")
    preload: bool = False
    web: WebSettings = WebSettings()
    defaults: HandlerOptions = HandlerOptions()
    handlers: dict[Name, HandlerSettings] = {}
    queues: dict[Name, QueueSettings] = {}
    pools: dict[PlainName, PoolSettings] = Field(default={"default": PoolSettings()}, min_length=1)
    logs: LogSettings = LogSettings()
    _path: Path | None = PrivateAttr(default=None)

    @property
    def path(self) -> Path | None:
        """The file this was read from; None when there was none."""
        return self._path

    @property
    def folder(self) -> Path:
        """The folder that relative paths start from, and where handlers are imported from."""
        return self._path.parent if self._path is not None else Path.cwd()

    @property
    def queue_names(self) -> tuple[str, ...]:
        """Every queue the configuration names, sorted: of queues, handlers and pools."""
        names = {*self.queues, *(h.queue or task for task, h in self.handlers.items())}
        for pool in self.pools.values():
            names.update(pool.queue_names or ())
        return tuple(sorted(names))

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed but probably not meant, one sentence each."""
        covered: set[str] = set()
        for pool in self.pools.values():
            if pool.queue_names is None:
                return ()
            covered.update(pool.queue_names)
        return tuple(
            f"queue {name} is in no pool: its jobs wait for ever; name it in a pool's queues"
            for name in self.queue_names
            if name not in covered
        )
