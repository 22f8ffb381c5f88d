"""List who runs: herdsman and what people would use instead, each with what it promises.

Boundary: a table. How each is driven is in `benchmarks/peers/`, one file each, through its own
worker as its documentation says.
"""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass
from typing import Literal

Redis = Literal["", "default", "always"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One queue in one configuration.

    `module` drives it; `variant` is told to it in `BENCH_VARIANT`. `kept` says in words which
    jobs survive a power cut. `jobs_per_second` is a rough expectation with two workers, for
    sizing a run. `shared` is False where several processes must not use the queue at once.
    """

    name: str
    module: str
    package: str
    kept: str
    jobs_per_second: int
    variant: str = ""
    redis: Redis = ""
    shared: bool = True

    def missing(self) -> str:
        """Say what is not installed here; "" when all is."""
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"the package {self.package} is not installed"
        if self.redis and (
            not shutil.which("redis-server") or importlib.util.find_spec("redis") is None
        ):
            return "redis-server or its client is not installed"
        return ""


HERDSMAN = Contender(
    name="herdsman", module="herdsman_peer", package="",
    kept="a put on return; an ack within 0.1 s", jobs_per_second=50_000,
)  # fmt: skip
FULL_OWN_LOCK = Contender(
    name="synchronous=FULL, SQLite's own lock", module="herdsman_peer", package="",
    variant="full, own lock", kept="a put on return, flushed by COMMIT", jobs_per_second=60_000,
)  # fmt: skip
FULL_OUR_LOCK = Contender(
    name="synchronous=FULL, our lock", module="herdsman_peer", package="", variant="full",
    kept="a put on return, flushed by COMMIT", jobs_per_second=60_000,
)  # fmt: skip
FULL = (FULL_OWN_LOCK, FULL_OUR_LOCK)
"""The rivals of single puts: our statements, with SQLite's own durable commit."""

NORMAL = "what the last checkpoint had (synchronous=NORMAL)"
COMMIT = "every commit (synchronous=FULL)"
SNAPSHOT = "what the last snapshot had (Redis as it comes)"
ALWAYS = "every write (appendfsync always)"

SQLITE = (
    Contender(name="litequeue", module="litequeue_peer", package="litequeue",
              kept=NORMAL, jobs_per_second=2_600),
    Contender(name="localqueue", module="localqueue_peer", package="localqueue",
              kept=NORMAL, jobs_per_second=1_000),
    Contender(name="localqueue, durable", module="localqueue_peer", package="localqueue",
              variant="durable", kept=COMMIT, jobs_per_second=600),
    Contender(name="huey, SQLite", module="huey_peer", package="huey",
              variant="sqlite", kept=COMMIT, jobs_per_second=1_000),
    Contender(name="persist-queue", module="persistqueue_peer", package="persistqueue",
              kept=COMMIT, jobs_per_second=600, shared=False),
)  # fmt: skip
ON_REDIS = tuple(
    Contender(
        name=name if redis == "default" else f"{name}, always", module=module, package=package,
        variant="redis", kept=SNAPSHOT if redis == "default" else ALWAYS, jobs_per_second=speed,
        redis=redis,
    )
    for redis in ("default", "always")
    for name, module, package, speed in (
        ("Dramatiq", "dramatiq_peer", "dramatiq", 3_000),
        ("huey, Redis", "huey_peer", "huey", 2_800),
        ("Celery", "celery_peer", "celery", 500),
        ("RQ", "rq_peer", "rq", 80),
    )
)  # fmt: skip
PEERS = SQLITE + ON_REDIS
EVERYONE = (HERDSMAN, *PEERS)


def present(wanted: tuple[Contender, ...]) -> list[Contender]:
    """Return those that can run here."""
    return [one for one in wanted if not one.missing()]


def absent() -> dict[str, str]:
    """Return who cannot run here, and why."""
    return {one.name: why for one in EVERYONE if (why := one.missing())}
