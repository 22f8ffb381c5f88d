"""Show what a handler looks like: a function that gets the payload of one job.

Return normally and the job is done; raise and it is tried again after the back-off, until its
attempts are spent and it is dead. `herdsman dead list` shows it then, with the traceback.
"""

from __future__ import annotations

import logging
from typing import Any

from queue_core.job import Job

log = logging.getLogger(__name__)


def hello(payload: dict[str, Any]) -> None:
    """Greet somebody: `herdsman put hello '{"name": "Ada"}'`."""
    log.info("Hello, %s!", payload.get("name", "world"))


def flaky(payload: dict[str, Any], job: Job[dict[str, Any]]) -> None:
    """Fail until the attempt the payload names: `herdsman put flaky '{"succeed_on": 3}'`."""
    if job.attempt < payload.get("succeed_on", 2):
        raise ConnectionError(f"attempt {job.attempt} failed, as the payload asked")
    log.info("job %s succeeded on attempt %s", job.id, job.attempt)
