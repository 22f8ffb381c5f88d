"""Say what the dashboard of one task shows: its jobs, their waits, their failures.

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
    quantile,
    rate,
    stat,
    steps,
    table,
    target,
)

UID: Final = "herdsman-task"

_QUIET: Final = " No line: nothing of the kind happened."
_PAIR: Final = "queue, task"
_NAMES: Final = "{{queue}} {{task}}"


def _of(name: str, match: str = "") -> str:
    return database(name, match, task=True)


def _now() -> list[Json]:
    good, tried = (
        _of("attempts_finished_total", match)
        for match in ('outcome="succeeded"', 'outcome!="interrupted"')
    )
    dead = _of("dead_letters_total")
    return [
        stat("Done per second", "Jobs of the task that succeeded, per second.", "ops",
             [target(once(rate(_of("jobs_finished_total", 'outcome="succeeded"'))))], width=4),
        stat("Success ratio",
             "Attempts that succeeded among those that ended, interrupted ones left out. Idle: no"
             " attempt ended.",
             "percentunit", [target(f"{once(rate(good))} / {once(rate(tried))}")],
             limits=steps(0.9, 0.99, colours=("red", "orange", "green")),
             words={"nan": "idle"}, width=4),
        stat("Wait, p95", "95 of 100 started within this time after they were ready. Idle: none"
             " started.", "s", [target(quantile(0.95, _of("queue_wait_seconds_bucket")))],
             words={"nan": "idle"}, width=4),
        stat("Target of the queue", "Longest wait the configuration calls fine.", "s",
             [target(f"max({database('queue_target_wait_seconds')})")], width=4),
        stat("Dead letters", "Jobs that became dead in the time shown. 0 is meant.", "short",
             [target(once(f"increase({dead}[$__range])"))], limits=steps(1, 100), decimals=0,
             width=4),
        stat("Without a handler", "Ready jobs of the task that no configuration has a handler"
             " for. 0 is meant.", "short", [target(once(_of("queue_parked_jobs")))],
             limits=steps(1), width=4),
    ]  # fmt: skip


def _flow() -> list[Json]:
    return [
        graph("Accepted, claimed, started",
              "Jobs per second. A claim is not yet an attempt: what is handed back unstarted is"
              " claimed again.",
              "ops",
              [target(once(rate(_of(name))), word) for name, word in (
                  ("jobs_enqueued_total", "accepted"), ("claims_total", "claimed"),
                  ("attempts_started_total", "started"))]),
        graph("Jobs that ended", "Jobs per second that reached their end, by which.", "ops",
              [target(once(rate(_of("jobs_finished_total")), "outcome"), "{{outcome}}")],
              stacked=True),
        graph("Attempts by outcome", "Attempts per second that ended, by how.", "ops",
              [target(once(rate(_of("attempts_finished_total")), "outcome"), "{{outcome}}")],
              stacked=True),
    ]  # fmt: skip


def _latency() -> list[Json]:
    duration = _of("attempt_duration_seconds_bucket")
    return [
        heatmap("Wait", "From ready to started; delay and back-off are no wait.", "s",
                once(rate(_of("queue_wait_seconds_bucket")), "le")),
        heatmap("Duration of attempts that succeeded", "How long they ran.", "s",
                once(rate(_of("attempt_duration_seconds_bucket", 'outcome="ok"')), "le")),
        graph("Wait", "From ready to started." + _QUIET, "s",
              [target(quantile(q, _of("queue_wait_seconds_bucket")), f"p{q * 100:g}")
               for q in (0.5, 0.95, 0.99)]),
        graph("Duration of attempts", "How long attempts ran, by how they ended." + _QUIET, "s",
              [target(quantile(q, duration, "outcome"), f"p{q * 100:g} {{{{outcome}}}}")
               for q in (0.5, 0.99)]),
        graph("End to end", "From first ready to done, retries included." + _QUIET, "s",
              [target(quantile(q, _of("job_latency_seconds_bucket")), f"p{q * 100:g}")
               for q in (0.5, 0.95, 0.99)]),
    ]  # fmt: skip


def _failures() -> list[Json]:
    errors = database("errors_total", 'task=~"$task"', queue=False)
    return [
        graph("Retries", "Attempts per second that another follows, by how they ended.", "ops",
              [target(once(rate(_of("retries_total")), "reason"), "{{reason}}")], stacked=True),
        graph("Dead letters", "Jobs that became dead in the interval, by why. 0 is meant.",
              "short",
              [target(once(f"increase({_of('dead_letters_total')}[$__rate_interval])", "reason"),
                      "{{reason}}")], stacked=True),
        table("Errors", "Attempts that did not succeed in the time shown, by the class of their"
              " error; since the queue began, if scraping began later. Empty: none.", "short",
              f"topk(20, {grown(errors, 'task, exception')} > 0)",
              {"Value": "number"}),
        graph("Attempts per job", "Attempts a job had taken at its end; mean." + _QUIET, "short",
              [target(f"{once(rate(_of('job_attempts_sum')), _PAIR)}"
                      f" / {once(rate(_of('job_attempts_count')), _PAIR)}", _NAMES)]),
        graph("Refused puts", "Puts per second that stored nothing, by why. 0 is usual.", "ops",
              [target(once(rate(_of("jobs_rejected_total")), "reason"), "{{reason}}")]),
        graph("Replayed", "Dead jobs made ready again by an operator, per second.", "ops",
              [target(once(rate(_of("jobs_replayed_total")), _PAIR), _NAMES)]),
    ]  # fmt: skip


def panels() -> list[Json]:
    """Return every panel of the dashboard."""
    return laid_out([
        ("Now", _now()),
        ("Flow", _flow()),
        ("Latency", _latency()),
        ("Failures", _failures()),
    ])  # fmt: skip
