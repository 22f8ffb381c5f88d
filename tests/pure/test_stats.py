"""Show that numbers added up in batches are the numbers that are read back."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queue_core import stats
from queue_core.engines.sqlite_schema import SCHEMA_VERSION
from queue_core.stats import COUNTERS, HISTOGRAMS, Row, Tally, assemble, bounds

durations_us = st.integers(0, 10_000 * 1_000_000)


def stored(tally: Tally) -> list[tuple[str, str, str, str, int]]:
    """Return a tally's rows as they are read back, with the queue's name for its number."""
    return [(f"q{row.queue}", row.task, row.name, row.label, row.value) for row in tally.rows()]


def test_additions_to_one_number_are_one_row() -> None:
    """A transaction that moves a thousand jobs writes each number once."""
    tally = Tally()
    for _ in range(1000):
        tally.add(1, "send", stats.CLAIMS)
        tally.add(1, "send", stats.FINISHED, "succeeded", 2)
    assert sorted(tally.rows()) == [
        Row(1, "send", stats.FINISHED, "succeeded", 2000),
        Row(1, "send", stats.CLAIMS, "", 1000),
    ] or sorted(tally.rows()) == [
        Row(1, "send", stats.CLAIMS, "", 1000),
        Row(1, "send", stats.FINISHED, "succeeded", 2000),
    ]


def test_a_number_that_did_not_change_is_not_written() -> None:
    """A job claimed and released in one transaction leaves the depths alone."""
    tally = Tally()
    tally.move(1, "ready", "claimed")
    tally.move(1, "claimed", "ready")
    assert list(tally.rows()) == []


@given(
    moves=st.lists(
        st.tuples(
            st.none() | st.sampled_from(["ready", "claimed", "done"]),
            st.none() | st.sampled_from(["ready", "claimed", "done"]),
            st.integers(1, 50),
        )
    )
)
def test_moves_keep_the_number_of_jobs(moves: list[tuple[str | None, str | None, int]]) -> None:
    """What leaves one state enters another; only "no job" makes and ends jobs."""
    tally = Tally()
    made = 0
    for old, new, number in moves:
        tally.move(1, old, new, number)
        made += number * ((old is None) - (new is None))
    rows = list(tally.rows())
    assert sum(row.value for row in rows) == made
    assert all(row.name == stats.DEPTH and row.task == "" for row in rows)


@given(values=st.lists(durations_us, min_size=1))
def test_a_histogram_counts_each_duration_in_its_bucket(values: list[int]) -> None:
    """The buckets hold every value once, under the first bound not below it, and the sum."""
    tally = Tally()
    for value in values:
        tally.observe_us(1, "send", stats.DURATION, value, "ok")
    counters, histograms = assemble(stored(tally))
    assert counters == {}
    found = histograms[(stats.DURATION, "q1", "send", "ok")]
    limits = [round(bound * 1_000_000) for bound in bounds(stats.DURATION)]
    assert len(found.counts) == len(limits) + 1
    assert sum(found.counts) == len(values)
    for at, limit in enumerate(limits):
        assert sum(found.counts[: at + 1]) == sum(value <= limit for value in values)
    assert found.total == pytest.approx(sum(values) / 1_000_000)


def test_bounds_belong_to_the_lower_bucket() -> None:
    """A value of exactly a bound counts under it, as Prometheus means `le`."""
    tally = Tally()
    for value in (0, 1_000, 1_001, 3_600_000_000, 3_600_000_001):
        tally.observe_us(1, "", stats.WAIT, value)
    counts = assemble(stored(tally))[1][(stats.WAIT, "q1", "", "")].counts
    assert (counts[0], counts[1], counts[-2], counts[-1]) == (2, 1, 1, 1)


def test_a_negative_duration_counts_as_none() -> None:
    """A clock that was set back does not make a sum shrink."""
    tally = Tally()
    tally.observe_us(1, "", stats.WAIT, -5_000_000)
    found = assemble(stored(tally))[1][(stats.WAIT, "q1", "", "")]
    assert (found.counts[0], found.total) == (1, 0.0)


@given(taken=st.lists(st.integers(1, 100), min_size=1))
def test_attempts_are_counted_in_attempts(taken: list[int]) -> None:
    """The histogram of attempts has bounds of its own, and its sum is no time."""
    tally = Tally()
    for number in taken:
        tally.observe_attempts(1, "send", number)
    found = assemble(stored(tally))[1][(stats.ATTEMPTS, "q1", "send", "")]
    assert len(found.counts) == len(bounds(stats.ATTEMPTS)) + 1
    assert found.counts[0] == Counter(taken)[1]
    assert found.counts[-1] == sum(number > 21 for number in taken)
    assert found.total == sum(taken)


@given(batches=st.lists(st.lists(st.tuples(st.sampled_from(["ok", "error"]), durations_us))))
def test_batches_add_up_to_the_whole(batches: list[list[tuple[str, int]]]) -> None:
    """Many transactions, added row by row, read back as one."""
    whole, rows = Tally(), Counter[tuple[str, str, str, str]]()
    for batch in batches:
        part = Tally()
        for series, value in batch:
            for tally in (part, whole):
                tally.observe_us(1, "send", stats.DURATION, value, series)
                tally.add(1, "send", stats.FINISHED, series)
        for *key, value in stored(part):
            rows[(key[0], key[1], key[2], key[3])] += value
    assert assemble((*key, value) for key, value in rows.items()) == assemble(stored(whole))


def test_depths_are_not_counters() -> None:
    """A depth goes up and down; it is read with the facts of its queue instead."""
    tally = Tally()
    tally.move(1, None, "ready", 3)
    tally.add(1, "send", stats.ENQUEUED, value=3)
    counters, histograms = assemble(stored(tally))
    assert counters == {(stats.ENQUEUED, "q1", "send", ""): 3}
    assert histograms == {}


def test_a_series_may_hold_the_separator() -> None:
    """The bucket is what follows the last bar, so that no series can be mistaken for one."""
    rows = [("q", "", stats.WAIT, "a|b|0", 2), ("q", "", stats.WAIT, "a|b|sum", 1_500_000)]
    found = assemble(rows)[1][(stats.WAIT, "q", "", "a|b")]
    assert (found.counts[0], found.total) == (2, 1.5)


def test_names_are_the_metric_names_without_prefix() -> None:
    """Counters end in _total and times in _seconds, each name once, bounds in rising order."""
    assert all(name.endswith("_total") for name in COUNTERS)
    assert len({*COUNTERS, *HISTOGRAMS, stats.DEPTH}) == len(COUNTERS) + len(HISTOGRAMS) + 1
    for name in HISTOGRAMS:
        assert list(bounds(name)) == sorted(set(bounds(name)))
        assert name.endswith("_seconds") == (name != stats.ATTEMPTS)


def test_other_bounds_are_another_schema() -> None:
    """Buckets are stored by their place: under other bounds, old numbers would mean other times."""
    seconds = "0.001 0.005 0.01 0.05 0.1 0.25 0.5 1 2.5 5 10 30 60 120 300 600 1800 3600"
    lock = "0.0001 0.0005 0.001 0.005 0.01 0.05 0.1 0.25 0.5 1 2.5 5 10 30"
    layouts = {1: {stats.WAIT: seconds, stats.DURATION: seconds, stats.LATENCY: seconds,
                   stats.ATTEMPTS: "1 2 3 5 8 13 21", stats.LOCK_WAIT: lock,
                   stats.LOCK_HOLD: lock}}  # fmt: skip
    found = {name: " ".join(f"{bound:g}" for bound in bounds(name)) for name in HISTOGRAMS}
    assert found == layouts[SCHEMA_VERSION], "raise the version, and let the families start anew"


@pytest.mark.parametrize(
    ("error", "found"),
    [
        ("ValueError: no such user", "ValueError"),
        ("ValueError", "ValueError"),
        ("socket.timeout: timed out", "socket.timeout"),
        ("never", "__other__"),
        ("not yet", "__other__"),
        (None, "__other__"),
    ],
)
def test_an_error_is_counted_under_its_class_and_a_mere_word_is_none(
    error: str | None, found: str
) -> None:
    """What a handler says in its own words is no label: the words may be anything."""
    assert stats.error_class(error) == found
