"""Hold the files that `herdsman init` writes.

Boundary: text only. `config/herdsman.toml` and `config/handlers_example.py` of the source tree
are the same text; a test keeps them so.
"""

from __future__ import annotations

from string import Template
from typing import Final

_CONFIG: Final = Template("""\
# herdsman: every key there is. A key that is commented out shows its default, or an example.
#
# Durations are "250ms", "30s", "5m", "1h30m", "7d", or a number of seconds.
# Sizes are "256MB" (millions of bytes), "1GiB" (2^30), or a number of bytes.
# Relative paths start from the folder of this file, which is also where handlers are imported
# from. HERDSMAN__SECTION__KEY in the environment overrides a key, for example
# HERDSMAN__POOLS__DEFAULT__PROCESSES=4. Check your changes with `herdsman check`.

# Where jobs are stored. It must be on a local filesystem; the file is created when needed.
database = "$database"

# The name of this supervisor: several may share one database under different names.
# instance = "main"

# How long running jobs may go on after a stop was asked for. After that they are interrupted
# and given back without spending an attempt. Keep it below the time-out of systemd or Docker.
# grace = "20s"

# Import the handlers once, before the workers are forked: they start sooner and share memory.
# Modules must then start no thread as they are imported, and open no file or connection that
# workers cannot share. New code takes a restart: a reload brings new settings only.
# preload = false

[web]
# Where /metrics, /livez, /readyz and the dashboard are served; "off" serves nothing.
# An address that other machines can reach needs a token_file.
# listen = "127.0.0.1:9464"
# A file whose first line is the secret that clients must present; readable by you alone.
# token_file = "token"

[logs]
# debug, info, warning or error.
# level = "info"
# "console" for people, "json" for machines; "auto" is console on a terminal, else json.
# format = "auto"
# A line for every attempt, with its wait, duration, processor time and memory: "off", "debug" or
# "info". When it is on, it costs a quick job about 0.1 ms.
# attempts = "off"
# A file to write to, opened anew on USR1; default is standard error.
# file = "herdsman.log"

# --- Handlers: what runs the jobs of a task. A job's task is its queue's name unless it says
# --- otherwise. [defaults] takes any key of a handler but python, command, http and queue.

[defaults]
# A job still running after this is killed, with its worker, and counts as timed out.
# timeout = "15m"
# Earlier than that, the handler itself may be interrupted by an exception. Default: never.
# soft_timeout = "14m"
# A job whose worker, with all it has started, uses more memory than this is ended, and charged
# with a crash. Looked at once a second; an idle worker uses some 40 MB itself. Default: no limit.
# max_memory = "512MB"
# Attempts until a job is dead; a job can bring its own number.
# max_attempts = 5
# Exceptions after which another attempt makes sense; when set, any other makes the job dead.
# retry_on = ["ConnectionError", "TimeoutError"]
# Exceptions that make the job dead at once: it can never succeed.
# reject_on = ["ValueError", "myapp.errors.Unusable"]

[defaults.backoff]
# "exponential": base, base*factor, base*factor^2, ... up to cap. "fixed": always base.
# kind = "exponential"
# base = "2s"
# factor = 2.0
# cap = "1h"
# Each wait is spread by this share, up or down, so that jobs do not all return at once.
# jitter = 0.1

[handlers.hello]
# A Python function, called with the payload, or with (payload, job). It may be async.
python = "$module:hello"
timeout = "30s"

[handlers.flaky]
python = "$module:flaky"
max_attempts = 4
backoff = { base = "500ms", cap = "10s" }

# A command: the payload comes on its standard input. Exit code 0 is done, 65 makes the job
# dead, any other retries. There is no shell.
# [handlers.thumbnails]
# command = ["convert", "-", "out.png"]

# An endpoint: the payload is posted as JSON. 2xx is done, 4xx makes the job dead (save 408,
# 425 and 429), anything else retries, after Retry-After when the answer has one.
# [handlers.webhooks]
# http = "http://127.0.0.1:8000/hook"
# The queue these jobs are put into, when that is not the queue of the task's name.
# queue = "outgoing"

# --- Queues: limits and retention. A queue needs no section; these are for the exceptions.

[queues.hello]
# Refuse new jobs when so many are waiting. Default: no limit.
# max_depth = 100000
# How long finished jobs are kept; "forever" keeps them all.
# keep_done = "7d"
# How long dead jobs are kept. Default: until they are replayed or discarded.
# keep_dead = "forever"
# How long a finished job still refuses its key to others. Default: as long as it is kept.
# key_ttl = "1d"
# The longest wait you would call normal; dashboards and alerts compare with it. Late starts are
# counted if it is a bound of the histogram: 1s, 2.5s, 5s, 10s, 30s, 1m, 2m, 5m, 10m, 30m, 1h, …
# target_wait = "1m"
# Start with the queue paused (true) or running (false). Default: leave it as it is.
# paused = false

# --- Pools: groups of worker processes.

[pools.default]
# Worker processes.
processes = 2
# The queues they take jobs from: all, or a list in order of weight, as "name:weight".
queues = ["*"]
# queues = ["critical:10", "default:1"]
# Replace a worker after so many jobs, above so much memory, or at that age. Default: never.
# What it has started counts too. A job at twice the memory is ended, and charged with a crash.
# max_jobs = 10000
# max_memory = "512MB"
# max_age = "1d"
# When its workers keep crashing for ten minutes: "exit" with code 70, or "stay" and keep trying.
# on_crash_loop = "exit"
# How long a worker may take to start before it is killed.
# boot_timeout = "1m"
""")

HANDLERS: Final = '''\
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
'''


def config(*, database: str, module: str) -> str:
    """Return the commented configuration for a database path and the module of the handlers."""
    return _CONFIG.substitute(database=database, module=module)
