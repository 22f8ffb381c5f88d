"""Hold the comparison with other queues to account: each of their features, and what shows it here.

A row names a feature of tiny-queue, litequeue or localqueue and the tests that show ours; a row
without tests gives the answer why ours is another. A test that is renamed or dropped fails here.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

SHOWN: dict[str, tuple[str, ...]] = {
    # --- states and claims
    "one file, many named queues": (
        "engine/test_prune.py::test_retention_belongs_to_the_queue",
        "engine/test_claim.py::test_listed_queues_are_served_in_their_order",
    ),
    "states that are told apart": ("engine/test_counts.py::test_each_state_is_counted_as_itself",),
    "put with payload, id and options": (
        "engine/test_enqueue.py::test_a_job_keeps_everything_it_was_put_with",
    ),
    "batch put, all or nothing, in order, a key for each": (
        "engine/test_enqueue.py::test_a_batch_that_does_not_fit_is_refused_whole",
        "engine/test_enqueue.py::test_ids_grow_in_the_order_of_puts",
        "engine/test_enqueue.py::test_keys_must_match_the_payloads",
    ),
    "batch claim and batch ack": (
        "engine/test_claim.py::test_a_claim_takes_at_most_its_limit_over_all_queues",
        "engine/test_finish.py::test_a_batch_with_a_stale_claim_settles_the_rest",
    ),
    "get that does not wait, or waits so long": (
        "engine/test_claim.py::test_get_without_waiting_returns_at_once",
        "engine/test_claim.py::test_a_waiting_get_is_woken_by_a_put",
    ),
    "first in, first out": (
        "engine/test_claim.py::test_claims_go_by_priority_and_then_by_arrival",
    ),
    "an order that no producer's clock can change": (
        "engine/test_claim.py::test_a_clock_that_goes_back_lets_nobody_jump_the_queue",
    ),
    "delay at put": ("engine/test_enqueue.py::test_a_delay_decides_between_ready_and_delayed",),
    "priority and time to live": (
        "engine/test_claim.py::test_claims_go_by_priority_and_then_by_arrival",
        "engine/test_claim.py::test_a_job_that_was_not_started_in_time_is_dead_as_expired",
    ),
    "ids": ("engine/test_enqueue.py::test_an_id_is_never_reused_when_its_row_is_gone",),
    "fencing of stale claims": (
        "engine/test_finish.py::test_an_old_run_cannot_settle_the_claim_of_a_later",
        "engine/test_finish.py::test_settling_twice_raises_and_names_the_claim",
    ),
    "complete, transient failure, permanent failure": (
        "engine/test_finish.py::test_a_claim_ends_in_the_state_that_was_decided",
        "engine/test_finish.py::test_a_failed_job_is_dead_at_once",
    ),
    "attempts counted and bounded": (
        "engine/test_finish.py::test_a_job_is_tried_as_often_as_allowed_and_then_dead",
    ),
    "back-off: fixed, exponential, capped, jitter, callable": (
        "pure/test_retry.py::test_delays_double_up_to_the_cap",
        "pure/test_retry.py::test_the_random_number_spreads_the_delay_evenly",
        "pure/test_retry.py::test_a_policy_of_ones_own_is_used",
    ),
    "a delay of the handler's own, once": (
        "pure/test_retry.py::test_the_table_is_carried_out",
        "engine/test_worker.py::test_a_result_decides_what_becomes_of_the_job",
    ),
    "leases of each claim": (
        "engine/test_claim.py::test_a_lease_begins_when_the_claim_is_made",
        "engine/test_reap.py::test_a_job_whose_lease_ran_out_goes_where_was_decided",
    ),
    "recovery by itself, charged and bounded": (
        "engine/test_reap.py::test_a_lease_lost_again_and_again_spends_all_attempts",
        "process/test_service_kill.py::test_a_job_whose_claimer_was_killed_is_reaped_and_run",
    ),
    "heartbeat and lease extension": (
        "engine/test_extend.py::test_a_lease_ends_so_long_after_it_was_extended",
        "engine/test_worker.py::test_the_heartbeat_keeps_the_lease_of_a_long_job",
    ),
    "fetch by id, and peek": (
        "engine/test_counts.py::test_a_job_is_found_in_every_state",
        "engine/test_counts.py::test_peek_shows_what_would_be_claimed_next",
    ),
    "list what is in flight": ("engine/test_counts.py::test_jobs_of_a_state_are_listed_in_pages",),
    "counts, qsize, empty, full": (
        "engine/test_counts.py::test_each_state_is_counted_as_itself",
        "engine/test_maintenance.py::test_sizes_count_what_can_be_claimed",
    ),
    "times of put, claim and end": (
        "engine/test_finish.py::test_the_ledger_tells_every_attempt_in_order",
        "engine/test_counts.py::test_histograms_tell_wait_duration_latency_and_attempts",
    ),
    "last error, reason and category": (
        "engine/test_worker.py::test_an_exception_is_tried_again_until_the_attempts_are_spent",
    ),
    # --- idempotency
    "same key, same data: the job there is": (
        "engine/test_enqueue.py::test_a_key_is_held_in_every_state",
    ),
    "same key, other data: a conflict, never dropped silently": (
        "engine/test_enqueue.py::test_other_data_under_a_held_key_is_refused",
    ),
    "a key held by done and dead jobs, for as long as wanted": (
        "engine/test_enqueue.py::test_a_finished_job_frees_its_key_after_key_ttl",
        "engine/test_prune.py::test_a_key_with_a_longer_life_outlives_the_row",
    ),
    "a key is free after prune": (
        "engine/test_prune.py::test_a_key_without_a_life_of_its_own_goes_with_the_row",
    ),
    "a duplicate needs no room": ("engine/test_enqueue.py::test_a_duplicate_needs_no_room",),
    "keys belong to a queue": ("engine/test_enqueue.py::test_a_key_belongs_to_its_queue",),
    # --- capacity, dead letters, worker
    "a limit stored with the queue": (
        "engine/test_enqueue.py::test_a_full_queue_refuses_and_says_so",
    ),
    "waiting for room, with a time-out": (
        "engine/test_maintenance.py::test_a_blocking_put_waits_for_room",
        "engine/test_maintenance.py::test_a_blocking_put_gives_up_in_time",
    ),
    "dead letters listed in pages, with reasons": (
        "engine/test_replay.py::test_the_dead_can_be_paged_by_reason",
        "engine/test_maintenance.py::test_the_newest_dead_come_first_by_reason",
    ),
    "raw bytes and the decoding error kept": (
        "engine/test_claim.py::test_bytes_that_do_not_decode_are_dead_with_the_bytes_kept",
    ),
    "replay by id, one winner": (
        "engine/test_replay.py::test_of_two_who_replay_one_job_one_wins",
        "engine/test_replay.py::test_a_replayed_job_is_ready_with_no_attempt_spent",
    ),
    "replay and discard in bulk, filtered": (
        "engine/test_maintenance.py::test_a_bulk_replay_takes_what_matches",
        "engine/test_maintenance.py::test_of_two_who_replay_all_each_job_has_one_winner",
    ),
    "worker: run, run once, stop, permanent errors": (
        "engine/test_worker.py::test_stop_lets_the_job_in_hand_finish",
        "engine/test_worker.py::test_a_permanent_error_makes_a_job_dead_at_once",
    ),
    "handler time-outs, of plain functions too": (
        "process/test_service_kill.py::test_a_job_past_its_hard_timeout_is_killed_on_time",
    ),
    "supervisor, signals, restart": (
        "process/test_service_kill.py::test_a_killed_worker_loses_nothing_and_charges_the_running_job_alone",
        "process/test_service_drain.py::test_a_stop_lets_the_running_job_finish_and_starts_no_other",
    ),
    "command line and configuration file": (
        "surface/test_cli_put.py::test_put_stores_one_job_with_its_options_and_prints_its_id",
        "surface/test_cli_setup.py::test_the_shipped_configuration_checks_clean",
    ),
    "async": (
        "engine/test_async.py::test_every_method_has_a_twin",
        "engine/test_async.py::test_a_cancelled_get_holds_no_job",
    ),
    "idle without polling": (
        "engine/test_worker.py::test_a_put_wakes_an_idle_worker",
        "engine/test_claim.py::test_an_empty_queue_gives_nothing_and_writes_nothing",
    ),
    "typed generics": ("typing/test_typing.py::test_types_are_inferred_and_misuse_is_refused",),
    # --- concurrency, durability, upkeep
    "processes": ("engine/test_claim.py::test_no_job_is_claimed_twice_by_processes_at_once",),
    "closing ends waits": ("engine/test_maintenance.py::test_closing_ends_the_waits_of_others",),
    "threads": ("engine/test_fork.py::test_threads_share_one_queue",),
    "forks": ("engine/test_fork.py::test_parent_and_child_may_both_put_and_close",),
    "one transaction with the user's own rows": (
        "engine/test_transaction.py::test_a_row_and_its_job_are_committed_together",
        "engine/test_transaction.py::test_a_keyed_put_inside_finds_and_holds_keys",
    ),
    "a busy database is waited for in every call": (
        "engine/test_transaction.py::test_other_writers_wait_for_the_end",
        "engine/test_worker.py::test_a_worker_outlives_a_busy_database",
    ),
    "retention by age, in slices": (
        "engine/test_prune.py::test_pruning_is_bounded_and_takes_the_oldest_first",
    ),
    "vacuum": ("engine/test_maintenance.py::test_vacuum_gives_space_back",),
    "online backup, verified, never overwriting": (
        "engine/test_maintenance.py::test_a_backup_is_of_one_moment_while_others_write",
        "engine/test_maintenance.py::test_a_backup_never_overwrites",
    ),
    "integrity check": (
        "engine/test_maintenance.py::test_a_damaged_page_is_found",
        "engine/test_maintenance.py::test_what_sql_by_hand_broke_is_found",
    ),
    "diagnostics": ("engine/test_maintenance.py::test_diagnostics_tell_what_is_true_now",),
    "newer files are refused": (
        "process/test_service_faults.py::test_a_database_of_a_newer_schema_is_refused_and_left_alone",
    ),
    "payload size is capped": ("engine/test_enqueue.py::test_a_payload_over_the_cap_is_refused",),
    "cost that does not grow with the backlog": (
        "engine/test_plans.py::test_a_statement_scans_no_table_that_grows",
        "engine/test_plans.py::test_a_statement_sorts_nothing",
    ),
    "moving in from each of the three": (
        "surface/test_import_tiny_queue.py::test_every_job_arrives_as_it_stood",
        "surface/test_import_litequeue.py::test_every_message_arrives_as_it_stood",
        "surface/test_import_localqueue.py::test_every_job_arrives_as_it_stood",
        "surface/test_import_localqueue.py::test_an_import_that_was_killed_goes_on",
    ),
}

ANSWERED: dict[str, str] = {
    "options for SQLite's connections": "The engine owns its connection, since durability depends "
    "on how it is set; a caller's own statements run inside transaction().",
    "attempts of a stored job lowered later": "max_attempts is stored with the job or taken from "
    "who settles it, so a lowered default holds from the next failure on.",
    "Windows": "The write lock, forks and signals are POSIX.",
    "network filesystems": "Refused unless allowed by name, as locks cannot be trusted there.",
    "compatibility with old SQLite": "From 3.35 on, as RETURNING needs; builds with the log bug "
    "are named by diagnostics.",
}


@cache
def named_in(name: str) -> frozenset[str]:
    """Return the names of the tests in a file."""
    tree = ast.parse((TESTS / name).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("feature", SHOWN)
def test_each_feature_is_shown_by_a_test(feature: str) -> None:
    """The tests that a row names are there."""
    assert SHOWN[feature]
    for shown in SHOWN[feature]:
        name, _, test = shown.partition("::")
        assert test in named_in(name), shown


def test_each_other_row_has_an_answer() -> None:
    """What works otherwise here says how, in a sentence."""
    assert all(answer.endswith(".") for answer in ANSWERED.values())
    assert not SHOWN.keys() & ANSWERED.keys()
