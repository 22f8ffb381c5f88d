"""Say what the overview shows, row by row: is it fine, and if not, where not.

Boundary: panels and their words; no layout, no files.
"""

from __future__ import annotations

from typing import Final

from grafana.panels import (
    Json,
    database,
    graph,
    grown,
    heatmap,
    laid_out,
    once,
    process,
    quantile,
    rate,
    stat,
    steps,
    table,
    target,
)

UID: Final = "herdsman-overview"

_READY: Final = database("queue_jobs", 'state="ready"')
_FINISHED: Final = database("jobs_finished_total", task=True)
_ENDED: Final = database("attempts_finished_total", task=True)
_TO_TASK: Final[Json] = {
    "title": "Show this task",
    "url": "/d/herdsman-task?var-job=${job}&var-queue=${__field.labels.queue}"
    "&var-task=${__field.labels.task}&${__url_time_range}",
}
_BUSY: Final = 'state="busy"'
_SEEN: Final = "time() - "


def _fine() -> list[Json]:
    age = database("queue_oldest_ready_age_seconds")
    goal = database("queue_target_wait_seconds")
    paused = database("queue_paused")
    read = database("collector_last_success_timestamp_seconds", queue=False)
    good = database("attempts_finished_total", 'outcome="succeeded"', task=True)
    tried = database("attempts_finished_total", 'outcome!="interrupted"', task=True)
    dead = database("dead_letters_total", task=True)
    return [
        stat("Oldest job against target",
             "Age of the oldest job that could start now, as a share of its queue's target; the"
             " worst queue. Over 100 % is late. Paused queues count too.",
             "percentunit",
             [target(f"max(max by (queue) ({age}) / max by (queue) ({goal}))")],
             limits=steps(0.5, 1)),
        stat("Time to empty",
             "Jobs that are ready, divided by the rate at which jobs finish. Empty: nothing is"
             " ready and nothing finishes. Infinite: jobs are ready and none finishes.",
             "s",
             [target(f"sum(max by (queue) ({_READY})) / sum({once(rate(_FINISHED), 'queue')})")],
             limits=steps(600, 3600), words={"nan": "empty"}),
        stat("Success ratio",
             "Attempts that succeeded among those that ended, interrupted ones left out. Idle: no"
             " attempt ended.",
             "percentunit",
             [target(f"{once(rate(good))} / {once(rate(tried))}")],
             limits=steps(0.9, 0.99, colours=("red", "orange", "green")), words={"nan": "idle"}),
        stat("Dead letters", "Jobs that became dead in the time shown. 0 is meant.", "short",
             [target(once(f"increase({dead}[$__range])"))], limits=steps(1, 100), decimals=0),
        stat("Workers", "Workers that run a job now, and workers the configuration asks for.",
             "short",
             [target(f"sum({process('workers', _BUSY)})", "busy"),
              target(f"sum({process('workers_configured')})", "configured")]),
        stat("Parked pools", "Pools whose processes are no longer restarted. 0 is meant.", "short",
             [target(f"sum({process('worker_pool_parked')})")], limits=steps(1, 1)),
        stat("Age of these numbers",
             "Since the database was last read for a scrape. While it grows, the queues' numbers"
             " below are absent, not old.",
             "s",
             [target(f"{_SEEN}max({read})")],
             limits=steps(60, 120)),
        stat("Database", "Whether the last scrape could read the database.", "bool",
             [target(f"min({database('database_up', queue=False)})")],
             limits=steps(1, colours=("red", "green")), words={"0": "down", "1": "up"}),
        stat("Paused queues", "Queues that someone paused: their jobs wait.", "short",
             [target(f"sum(max by (queue) ({paused}))")], limits=steps(1)),
        stat("Jobs without a handler",
             "Ready jobs whose task no configuration names. They wait aside until one does.",
             "short", [target(once(database("queue_parked_jobs", task=True)))],
             limits=steps(1)),
        stat("Reload", "Whether the configuration in use is the one last asked for.", "bool",
             [target(f"min({process('config_last_reload_success')})")],
             limits=steps(1, colours=("red", "green")), words={"0": "refused", "1": "in use"}),
        stat("Shutting down", "Instances that are draining now.", "short",
             [target(f"sum({process('supervisor_draining')})")], limits=steps(1)),
    ]  # fmt: skip


def _backlog() -> list[Json]:
    enqueued = database("jobs_enqueued_total", task=True)
    live = database("queue_jobs", 'state=~"ready|delayed|claimed"')
    kept = database("queue_jobs", 'state=~"done|dead|cancelled"')
    due = database("queue_next_due_timestamp_seconds")
    return [
        graph("Live jobs by state",
              "Ready, delayed and claimed jobs. Delayed ones are scheduled or back off: they are"
              " no backlog.",
              "short", [target(f"sum by (state) (max by (queue, state) ({live}))", "{{state}}")],
              stacked=True),
        graph("Oldest ready job, by queue",
              "Age of the oldest job that could start now; 0 when there is none. A"
              " queue's target is drawn beside it.",
              "s",
              [target(f"max by (queue) ({database('queue_oldest_ready_age_seconds')})",
                      "{{queue}}"),
               target(f"max by (queue) ({database('queue_target_wait_seconds')})",
                      "target of {{queue}}")]),
        graph("Arriving and finishing",
              "Jobs per second that are accepted, and that reach their end. 0 when idle.",
              "ops",
              [target(once(rate(enqueued)), "accepted"),
               target(once(rate(_FINISHED), "outcome"), "{{outcome}}")]),
        graph("Time to empty, by queue",
              "Ready jobs divided by the rate of finishing. No line: nothing is ready and nothing"
              " finishes. Infinite is not drawn.",
              "s",
              [target(f"max by (queue) ({_READY}) / {once(rate(_FINISHED), 'queue')}",
                      "{{queue}}")]),
        graph("Ready jobs, by queue",
              "Jobs that could start now, with the depth at which puts are refused. A queue"
              " without a limit has no such line.",
              "short",
              [target(f"max by (queue) ({_READY})", "{{queue}}"),
               target(f"max by (queue) ({database('queue_max_depth')})", "limit of {{queue}}")]),
        graph("Refused puts",
              "Puts per second that stored nothing: duplicates of a key, a full queue, a key with"
              " other data. 0 is usual.",
              "ops",
              [target(once(rate(database("jobs_rejected_total", task=True)), "queue, reason"),
                      "{{queue}} {{reason}}")]),
        graph("Delayed jobs that became ready",
              "Per second: schedules and back-offs that ran out.",
              "ops", [target(once(rate(database("jobs_promoted_total")), "queue"), "{{queue}}")]),
        graph("Until the next delayed job",
              "Below 0 it should be ready already. No line: nothing is delayed.",
              "s", [target(f"max by (queue) ({due}) - time()", "{{queue}}")], low=None),
        graph("Kept and removed",
              "Finished jobs that are kept, and (per second) removed by retention.",
              "short",
              [target("sum by (state) (max by (queue, state) ("
                      f"{kept}))", "{{state}}"),
               target(once(rate(database("pruned_jobs_total")), "state"),
                      "{{state}} removed per second")]),
    ]  # fmt: skip


def _latency() -> list[Json]:
    wait = database("queue_wait_seconds_bucket", task=True)
    duration = database("attempt_duration_seconds_bucket", task=True)
    latency = database("job_latency_seconds_bucket", task=True)
    attempts = database("job_attempts_bucket", task=True)
    count, total = (database(f"job_attempts_{one}", task=True) for one in ("count", "sum"))
    quiet = " No line: nothing of the kind happened."

    def quantiles(selector: str) -> list[Json]:
        return [target(quantile(q, selector), f"p{q * 100:g}") for q in (0.5, 0.95, 0.99)]

    return [
        heatmap("Wait", "From ready to started; delay and back-off are no wait.", "s",
                once(rate(wait), "le")),
        graph("Wait", "From ready to started." + quiet, "s", quantiles(wait), width=12),
        graph("Duration of attempts", "How long attempts ran, by how they ended." + quiet, "s",
              [target(quantile(q, duration, "outcome"), f"p{q * 100:g} {{{{outcome}}}}")
               for q in (0.5, 0.99)]),
        graph("End to end", "From first ready to done, retries included." + quiet, "s",
              quantiles(latency)),
        graph("Attempts per job", "Attempts a job had taken at its end." + quiet, "short",
              [target(f"{once(rate(total))} / {once(rate(count))}", "mean"),
               target(quantile(0.99, attempts), "p99")]),
    ]  # fmt: skip


def _failures() -> list[Json]:
    errors = database("errors_total", 'task=~"$task"', queue=False)
    return [
        graph("Attempts by outcome", "Attempts per second that ended, by how.", "ops",
              [target(once(rate(_ENDED), "outcome"), "{{outcome}}")], stacked=True),
        graph("Retries",
              "Attempts per second that another follows, by how they ended. 0 is usual.", "ops",
              [target(once(rate(database("retries_total", task=True)), "reason"), "{{reason}}")],
              stacked=True),
        graph("Dead letters by task", "Jobs that became dead in the interval. 0 is meant.",
              "short",
              [target(once(f"increase({database('dead_letters_total', task=True)}"
                           "[$__rate_interval])", "queue, task"), "{{queue}} {{task}}")],
              link=_TO_TASK),
        graph("Dead letters by reason", "Jobs that became dead in the interval, by why.", "short",
              [target(once(f"increase({database('dead_letters_total', task=True)}"
                           "[$__rate_interval])", "reason"), "{{reason}}")]),
        table("Errors", "Attempts that did not succeed in the time shown, by the class of their"
              " error; since the queue began, if scraping began later. Empty: none.", "short",
              f"topk(20, {grown(errors, 'task, exception')} > 0)",
              {"Value": "number"}),
        graph("Leases lost and writes refused",
              "Per second: leases that ran out, by what became of the job; and writes refused"
              " because the claim was no longer held. 0 is meant.",
              "ops",
              [target(once(rate(database("leases_reaped_total")), "result"), "to {{result}}"),
               target(once(rate(database("stale_claims_total", queue=False))), "stale writes")]),
        graph("Expired leases and the oldest claim",
              "Leases that ran out and are not reaped yet (0 is meant), and the age of the oldest"
              " claim.",
              "short",
              [target(f"max by (queue) ({database('queue_stale_leases')})", "expired {{queue}}"),
               target(f"max by (queue) ({database('queue_oldest_claimed_age_seconds')})",
                      "oldest claim of {{queue}}, seconds")]),
        graph("Claims handed back",
              "Per second: claims handed back because the whole tree or the host went down.",
              "ops",
              [target(once(rate(database("tree_deaths_total", task=True)), "queue"),
                      "{{queue}}")]),
        graph("Operators", "Actions per second that changed something, by how they came.", "ops",
              [target(once(rate(database("operator_actions_total", queue=False)), "action, via"),
                      "{{action}} by {{via}}"),
               target(once(rate(database("jobs_replayed_total", task=True))), "jobs replayed")]),
    ]  # fmt: skip


def _workers() -> list[Json]:
    busy = process("workers", _BUSY)
    return [
        graph("Workers by state", "What the workers do.", "short",
              [target(f"sum by (state) ({process('workers')})", "{{state}}")], stacked=True),
        graph("Busy share", "Busy workers among those configured. At 100 % jobs begin to wait.",
              "percentunit",
              [target(f"sum by (pool) ({busy})"
                      f" / sum by (pool) ({process('workers_configured')})", "{{pool}}")]),
        graph("Ends by cause",
              "Processes that ended, per second. Recycle, scale and drain are meant.", "ops",
              [target(f"sum by (cause) ({rate(process('worker_exits_total'))})", "{{cause}}"),
               target(f"sum by (pool) ({rate(process('worker_restarts_total'))})",
                      "{{pool}} restarts")]),
        graph("Crash loops and back-off",
              "Time until the next restart, and 1 while a pool crashes in a loop. 0 is meant.",
              "short",
              [target(f"max by (pool) ({process('worker_backoff_seconds')})",
                      "{{pool}} back-off, seconds"),
               target(f"max by (pool) ({process('worker_pool_crash_loop')})",
                      "{{pool}} crash loop"),
               target(f"max by (pool) ({process('worker_pool_parked')})", "{{pool}} parked")]),
        graph("CPU", "Cores used by each pool, ended processes included.", "short",
              [target(f"sum by (pool) ({rate(process('worker_cpu_seconds_total'))})",
                      "{{pool}}")]),
        graph("Memory", "Resident memory of each pool.", "bytes",
              [target(f"sum by (pool) ({process('worker_resident_memory_bytes')})", "{{pool}}")]),
        graph("Longest running job", "How long the longest running job has run; 0 when none runs.",
              "s", [target(f"max by (pool) ({process('longest_running_job_seconds')})",
                           "{{pool}}")]),
        graph("Renewals that failed",
              "Times the leases of a pool's busy workers could not be renewed. 0 is meant.",
              "short",
              [target(f"sum by (pool) (increase({process('lease_renewal_failures_total')}"
                      "[$__rate_interval]))", "{{pool}}")]),
        graph("Signs of life",
              "Since the supervisor's loop turned, the keeper made progress, and leases were"
              " looked through. No line for the keeper: there is none.",
              "s",
              [target(f"{_SEEN}max by (instance) ({process(f'{one}_timestamp_seconds')})",
                      f"{name} of {{{{instance}}}}")
               for one, name in (("supervisor_heartbeat", "supervisor"),
                                 ("keeper_heartbeat", "keeper"), ("reaper_last_run", "reaper"))]),
        graph("Up for", "Since the supervisor started. A fall is a new start.", "s",
              [target(f"{_SEEN}max by (instance) ("
                      f"{process('supervisor_start_timestamp_seconds')})", "{{instance}}")]),
        graph("Duties of the keeper, since",
              "Since each duty last succeeded. Prune and configure are rare by design.",
              "s", [target(f"{_SEEN}max by (duty) ("
                           f"{process('keeper_duty_last_run_timestamp_seconds')})", "{{duty}}")]),
        graph("Duties of the keeper, duration", "How long each duty took when it last succeeded.",
              "s", [target(f"max by (duty) ({process('keeper_duty_duration_seconds')})",
                           "{{duty}}")]),
        table("Versions", "What runs where.", "short",
              f"{process('build_info')} * on (job, instance) group_left (hash)"
              f" {process('config_info')}",
              {"Value": "number"}),
    ]  # fmt: skip


def _database() -> list[Json]:
    def p99(name: str) -> list[Json]:
        selector = database(f"{name}_bucket", queue=False)
        return [target(quantile(0.99, selector, "op"), "{{op}}")]

    return [
        graph("Wait for the write lock",
              "99 of 100 waited no longer, by what for. No line: it was not taken.", "s",
              p99("lock_wait_seconds")),
        graph("Hold of the write lock",
              "99 of 100 held it no longer, by what for. No line: it was not taken.", "s",
              p99("lock_hold_seconds")),
        graph("Transactions that failed",
              "Per second, of workers and keeper, by why. 0 is meant; busy ones are tried again.",
              "ops",
              [target(f"sum by (kind) ({rate(process('transaction_errors_total'))})",
                      "{{kind}}")]),
        graph("Size", "Size of the database file, and of its write-ahead log.", "bytes",
              [target(f"max({database('database_size_bytes', queue=False)})", "database"),
               target(f"max({database('wal_size_bytes', queue=False)})", "log")], width=12),
        graph("Taking the write lock", "Times per second, by what for.", "ops",
              [target(once(rate(database("lock_wait_seconds_count", queue=False)), "op"),
                      "{{op}}")], width=12),
    ]  # fmt: skip


def _collector() -> list[Json]:
    def exporter(name: str) -> str:
        return database(name, queue=False)

    return [
        graph("Time of a read", "How long reading the database for a scrape took.", "s",
              [target(f"max by (instance) ({exporter('collector_duration_seconds')})",
                      "{{instance}}")]),
        graph("Reads that failed", "Per second. 0 is meant.", "ops",
              [target(f"sum by (instance) ({rate(exporter('collector_errors_total'))})",
                      "{{instance}}")]),
        graph("Names over the cap",
              "Pairs of queue and task counted together under __other__. 0 is meant.", "short",
              [target(f"max by (instance) ({exporter('series_dropped_total')})",
                      "{{instance}}")]),
    ]  # fmt: skip


def panels() -> list[Json]:
    """Return every panel of the overview."""
    return laid_out([
        ("Is it fine?", _fine()),
        ("Backlog", _backlog()),
        ("Latency", _latency()),
        ("Failures", _failures()),
        ("Workers", _workers()),
        ("Database", _database()),
        ("Collector", _collector()),
    ])  # fmt: skip
