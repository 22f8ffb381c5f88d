"""Compare the engine with a model of a hundred lines, over generated histories of every transition.

The model says what the design says, in dictionaries and sorted lists. After each step the
engine's counters must equal the model's, and a recount of the rows.
"""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from queue_core import IdempotencyConflict, QueueFull, Reason, State
from queue_core.clock import FakeClock
from queue_core.engine import Engine, Holder
from queue_core.job import Claim, Claimed, Extended, Settled, Settlement, Stale
from tests.engine.conftest import KINDS, Kind, new_job, request, settlement

SECOND_US = 1_000_000
LIVE = (State.READY, State.DELAYED, State.CLAIMED)
RAM = Path("/dev/shm")
STEPS = 50
EXAMPLES_MIN = 200
"""So many examples of all their steps are a proof worth the name."""
EXAMPLES_MAX = 280
"""Of a sixth of the examples hypothesis takes some steps only."""


@dataclass
class Job:
    """What the model knows of one job."""

    id: int
    queue: str
    state: State
    priority: int
    key: str | None
    order: int = 0
    run: int = 0
    attempts: int = 0
    due: int = 0
    lease: int = 0
    expires: int | None = None
    finished: int = 0
    tree_deaths: int = 0
    suspect: bool = False
    waits: bool = False
    """A suspect that may not run yet, because another does."""


@dataclass
class Options:
    """What the model knows of one queue."""

    max_depth: int | None = None
    key_ttl: int | None = None
    keep_done: int | None = None
    keep_dead: int | None = None
    paused: bool = False


class Model:
    """The store as the design describes it; times are microseconds of the test's clock."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.jobs: dict[int, Job] = {}
        self.keys: dict[tuple[str, str], tuple[int, bytes, int | None]] = {}
        self.queues = {
            "a": Options(max_depth=6, keep_done=30 * SECOND_US, keep_dead=60 * SECOND_US),
            "b": Options(key_ttl=20 * SECOND_US, keep_done=10 * SECOND_US),
        }
        self.totals: Counter[tuple[str, str]] = Counter()
        self.order = itertools.count(1)
        self.newest = 0

    def of(self, queue: str, *states: State) -> list[Job]:
        """Return the jobs of a queue in these states."""
        return [job for job in self.jobs.values() if job.queue == queue and job.state in states]

    def count(self, job: Job, name: str) -> None:
        """Add one to a total."""
        self.totals[(job.queue, name)] += 1

    def holder_of(self, queue: str, key: str | None) -> tuple[int, bytes] | None:
        """Return the job that holds a key now, and its data."""
        if key is None or (queue, key) not in self.keys:
            return None
        job_id, data, expires = self.keys[(queue, key)]
        free = expires is not None and expires <= self.clock.wall_us()
        return None if free else (job_id, data)

    def put(self, job: Job, data: bytes) -> None:
        """Store a new job."""
        if job.state is State.READY:
            job.order = next(self.order)
        self.jobs[job.id] = job
        if job.key is not None:
            self.keys[(job.queue, job.key)] = (job.id, data, None)
        self.count(job, "jobs_enqueued_total")

    def best(self, queues: list[str]) -> list[Job]:
        """Return what a claim of these queues would meet, in its order."""
        found: list[Job] = []
        for name in queues:
            if not self.queues[name].paused:
                ready = [job for job in self.of(name, State.READY) if not job.waits]
                found += sorted(ready, key=lambda job: (-job.priority, job.order))
        return found

    def end(self, job: Job, state: State, total: str) -> None:
        """Let a job reach its end, and the life of its key begin."""
        job.state, job.finished = state, self.clock.wall_us()
        ttl = self.queues[job.queue].key_ttl
        held = self.keys.get((job.queue, job.key or ""))
        if ttl is not None and held is not None and held[0] == job.id:
            self.keys[(job.queue, job.key or "")] = (*held[:2], job.finished + ttl)
        self.count(job, total)

    def let_a_suspect_run(self) -> None:
        """Let the oldest suspect run, unless one does or is about to."""
        suspects = [job for job in self.jobs.values() if job.suspect]
        waiting = [job for job in suspects if job.state is State.READY and job.waits]
        busy = [
            job
            for job in suspects
            if job.state is State.CLAIMED or (job.state is State.READY and not job.waits)
        ]
        if waiting and not busy:
            min(waiting, key=lambda job: job.id).waits = False

    def settle(self, word: Settlement) -> Stale | Settled:
        """Carry out a settlement, or refuse it."""
        job = self.jobs.get(word.claim.id)
        if job is None or job.state is not State.CLAIMED or job.run != word.claim.run:
            return Stale(claim=word.claim)
        job.attempts += word.charge
        if word.to is State.DONE:
            self.end(job, State.DONE, "jobs_finished_total:succeeded")
        elif word.to is State.DEAD:
            self.end(job, State.DEAD, "jobs_finished_total:dead")
        else:
            job.state, job.due = word.to, self.clock.wall_us() + word.delay_us
            if word.charge:  # what has started does not expire, and stands at the end
                job.expires, job.order = None, next(self.order)
        return Settled(claim=word.claim, state=word.to)

    def remove(self, job: Job) -> None:
        """Forget a job, with its key unless that has a life of its own left."""
        del self.jobs[job.id]
        held = self.keys.get((job.queue, job.key or ""))
        if held and held[0] == job.id and (held[2] is None or held[2] <= self.clock.wall_us()):
            del self.keys[(job.queue, job.key or "")]

    def prunable(self, job: Job) -> bool:
        """Say whether a job's retention is over."""
        options = self.queues[job.queue]
        keep = {State.DEAD: options.keep_dead, State.DONE: options.keep_done}.get(
            job.state, options.keep_done if job.state is State.CANCELLED else None
        )
        return keep is not None and job.finished <= self.clock.wall_us() - keep


QUEUES = st.sampled_from(["a", "b"])
ORDERS = st.sampled_from([["a"], ["b"], ["a", "b"], ["b", "a"]])
ENDS = st.sampled_from([State.DONE, State.DONE, State.READY, State.DELAYED, State.DEAD])
SECONDS = st.sampled_from([0, 1, 5, 10, 20, 60])
LIMITS = st.integers(1, 5)
RECENT = st.integers(0, 15)
"""Which job or claim is meant: 0 is the newest; past the oldest is one that never was."""


def verdict(row: Claimed, _started: bool) -> Settlement:
    """Decide over a lost lease by the id, so that all three ends occur."""
    to = (State.READY, State.DELAYED, State.DEAD)[row.id % 3]
    return settlement(row, to, reason=Reason.EXHAUSTED if to is State.DEAD else None)


class Life(RuleBasedStateMachine):
    """Do things to an engine and to the model, and compare."""

    kind: Kind
    lives: ClassVar[list[int]]
    """How many steps each example took so far."""

    @initialize()
    def begin(self) -> None:
        """Start with an empty store, and two queues of different habits."""
        where = RAM if RAM.is_dir() else None
        self.folder = tempfile.TemporaryDirectory(prefix="herdsman-model-", dir=where)
        self.path = Path(self.folder.name) / "herdsman.db"
        self.clock = FakeClock()
        self.model = Model(self.clock)
        self.ids: list[int] = []
        self.claims: list[Claim] = []
        self.lives.append(-1)  # the look at the beginning follows no step
        self.open()
        for name, options in self.model.queues.items():
            self.engine.configure(
                name, max_depth=options.max_depth, key_ttl_us=options.key_ttl,
                keep_done_us=options.keep_done, keep_dead_us=options.keep_dead,
            )  # fmt: skip

    def open(self) -> None:
        """Open the engine as a process of this boot does."""
        self.engine: Engine = self.kind.open(
            self.path, clock=self.clock, durability="normal", lock="off", unsafe_sqlite=True
        )
        self.holder = self.engine.hold(Holder(worker="model/0"))

    def teardown(self) -> None:
        """Leave nothing behind."""
        if hasattr(self, "engine"):
            self.engine.close()
            self.folder.cleanup()

    def ids_of(self, recent: list[int]) -> list[int]:
        """Return the ids of jobs by how recent they are."""
        return [self.ids[-1 - n] if n < len(self.ids) else 10**9 + n for n in recent]

    def claim_of(self, recent: int) -> Claim:
        """Return a claim by how recent it is; most of the older ones are stale."""
        known = recent < len(self.claims)
        return self.claims[-1 - recent] if known else Claim(id=10**9, run=1)

    # --- enqueue

    @rule(
        queue=QUEUES, priority=st.sampled_from([-1, 0, 0, 3]), delay=SECONDS,
        key=st.sampled_from([None, None, "k", "l"]),
        data=st.sampled_from([b"1", b"2", b"x" * 2500]),
        expires=st.sampled_from([None, None, 15]),
    )  # fmt: skip
    def put(
        self, queue: str, priority: int, delay: int, key: str | None, data: bytes,
        expires: int | None,
    ) -> None:  # fmt: skip
        """Put a job: new, a duplicate, in conflict, or one too many."""
        job = new_job(
            data, priority=priority, delay_us=delay * SECOND_US, key=key,
            expires_us=None if expires is None else expires * SECOND_US,
        )  # fmt: skip
        held = self.model.holder_of(queue, key)
        options = self.model.queues[queue]
        if held is not None and held[1] != data:
            with pytest.raises(IdempotencyConflict) as caught:
                self.engine.enqueue(queue, [job])
            assert caught.value.job_id == held[0]
            return
        # A replay may lift the depth over the limit: that job had been accepted before.
        full = options.max_depth is not None and options.max_depth <= len(
            self.model.of(queue, *LIVE)
        )
        if held is None and full:
            with pytest.raises(QueueFull):
                self.engine.enqueue(queue, [job])
            return
        (stored,) = self.engine.enqueue(queue, [job])
        if held is not None:
            assert (stored.id, stored.duplicate) == (held[0], True)
            return
        assert not stored.duplicate
        assert stored.id > self.model.newest, "an id was given twice, or out of order"
        self.model.newest = stored.id
        due = self.clock.wall_us() + delay * SECOND_US
        self.model.put(
            Job(
                id=stored.id, queue=queue, priority=priority, key=key, due=due,
                state=State.DELAYED if delay else State.READY,
                expires=None if expires is None else due + expires * SECOND_US,
            ),
            data,
        )  # fmt: skip
        self.ids.append(stored.id)

    @rule(queue=QUEUES, delays=st.lists(SECONDS, min_size=2, max_size=4))
    def put_batch(self, queue: str, delays: list[int]) -> None:
        """Put several jobs at once: all of them, or none."""
        batch = [new_job(delay_us=delay * SECOND_US) for delay in delays]
        room = self.model.queues[queue].max_depth
        if room is not None and len(self.model.of(queue, *LIVE)) + len(batch) > room:
            with pytest.raises(QueueFull):
                self.engine.enqueue(queue, batch)
            return
        for delay, stored in zip(delays, self.engine.enqueue(queue, batch), strict=True):
            assert stored.id > self.model.newest
            self.model.newest = stored.id
            self.ids.append(stored.id)
            state = State.DELAYED if delay else State.READY
            due = self.clock.wall_us() + delay * SECOND_US
            self.model.put(
                Job(id=stored.id, queue=queue, priority=0, key=None, due=due, state=state), b"{}"
            )

    # --- claim

    def _claimed(self, queues: list[str], limit: int, lease: int, rows: list[Claimed]) -> None:
        """Check what a claim gave against what it may give, and let the model follow."""
        now = self.clock.wall_us()
        taken = [row.id for row in rows]
        given = 0
        for job in self.model.best(queues):
            if job.expires is not None and job.expires <= now:
                record = self.engine.find(job.id)
                if record is not None and record.state is State.DEAD:
                    assert record.reason is Reason.EXPIRED
                    job.run += 1
                    self.model.end(job, State.DEAD, "jobs_finished_total:dead")
                else:  # not looked at any more: then nothing behind it was taken either
                    assert given == len(taken) > 0
            elif given < len(taken):
                assert taken[given] == job.id, "a claim took another than the best"
                job.state, job.run = State.CLAIMED, job.run + 1
                job.lease = self.clock.monotonic_us() + lease * SECOND_US
                self.model.count(job, "claims_total")
                assert (rows[given].run, rows[given].attempts) == (job.run, job.attempts)
                given += 1
            else:
                # It may stop at its limit, or after meeting expired jobs, but not with nothing.
                assert taken, f"job {job.id} was there to be claimed"
        assert given == len(taken) <= limit

    @rule(queues=ORDERS, limit=LIMITS, lease=SECONDS)
    def claim(self, queues: list[str], limit: int, lease: int) -> None:
        """Claim some jobs."""
        wanted = request(*queues, limit=limit, lease_us=lease * SECOND_US)
        rows = self.engine.claim(wanted, holder=self.holder)
        self._claimed(queues, limit, lease, rows)
        self.claims += [row.claim for row in rows]

    # --- extend

    @rule(batch=st.lists(RECENT, min_size=1, max_size=4), lease=SECONDS)
    def extend(self, batch: list[int], lease: int) -> None:
        """Extend live and stale claims together."""
        expected: list[Extended | Stale] = []
        claims = [self.claim_of(recent) for recent in batch]
        for claim in claims:
            job = self.model.jobs.get(claim.id)
            if job and job.state is State.CLAIMED and job.run == claim.run:
                job.lease = self.clock.monotonic_us() + lease * SECOND_US
                expected.append(Extended(claim=claim))
            else:
                expected.append(Stale(claim=claim))
        assert self.engine.extend(claims, lease * SECOND_US) == expected

    # --- finish

    @rule(batch=st.lists(st.tuples(RECENT, ENDS), min_size=1, max_size=5))
    def finish(self, batch: list[tuple[int, State]]) -> None:
        """Settle live, stale and repeated claims in one batch."""
        words = [settlement(self.claim_of(recent), to, started_us=1) for recent, to in batch]
        assert self.engine.finish(words) == [self.model.settle(word) for word in words]

    @rule(
        batch=st.lists(st.tuples(RECENT, ENDS), max_size=5), queues=ORDERS,
        limit=LIMITS, lease=SECONDS, plain=st.booleans(),
    )  # fmt: skip
    def turn(
        self, batch: list[tuple[int, State]], queues: list[str], limit: int, lease: int,
        plain: bool,
    ) -> None:  # fmt: skip
        """Take a worker's turn: settle and claim at once."""
        words = [
            settlement(self.claim_of(recent), State.DONE if plain else to, started_us=1)
            for recent, to in batch
        ]
        wanted = request(*queues, limit=limit, lease_us=lease * SECOND_US, starts=False)
        results, rows = self.engine.turn(words, wanted, holder=self.holder)
        assert results == [self.model.settle(word) for word in words]
        self._claimed(queues, limit, lease, rows)
        self.claims += [row.claim for row in rows]

    @rule(recent=st.lists(RECENT, min_size=1, max_size=4))
    def cancel(self, recent: list[int]) -> None:
        """Cancel jobs in any state."""
        ids = self.ids_of(recent)
        waiting = [
            job
            for job in map(self.model.jobs.get, set(ids))
            if job is not None and job.state in (State.READY, State.DELAYED)
        ]
        assert self.engine.cancel(None, ids) == len(waiting)
        for job in waiting:
            self.model.end(job, State.CANCELLED, "jobs_finished_total:cancelled")

    # --- promote

    @rule(limit=LIMITS)
    def promote(self, limit: int) -> None:
        """Make due jobs ready, the earliest of each queue first."""
        now = self.clock.wall_us()
        due = [
            job
            for queue in self.model.queues
            for job in sorted(
                self.model.of(queue, State.DELAYED), key=lambda job: (job.due, job.id)
            )
            if job.due <= now
        ]
        assert self.engine.promote(limit) == min(limit, len(due))
        self.model.let_a_suspect_run()
        for job in due[:limit]:
            job.state, job.order = State.READY, next(self.model.order)
        for job in due:
            record = self.engine.find(job.id)
            assert record is not None
            assert record.state is job.state, "another than the earliest was promoted"

    # --- reap

    @rule(limit=LIMITS)
    def reap(self, limit: int) -> None:
        """Take back claims whose lease ran out, the oldest leases first."""
        now = self.clock.monotonic_us()
        expired = [
            job
            for job in self.model.jobs.values()
            if job.state is State.CLAIMED and job.lease <= now
        ]
        reaped = self.engine.reap(verdict, limit)
        assert len(reaped) == min(limit, len(expired))
        leases = [self.model.jobs[row.claim.id].lease for row in reaped]
        assert sorted(leases) == sorted(job.lease for job in expired)[: len(reaped)]
        for row in reaped:
            job = self.model.jobs[row.claim.id]
            word = verdict_of(job)
            assert self.model.settle(word) == Settled(claim=row.claim, state=row.state)

    # --- replay, discard

    def _dead(self, ids: list[int]) -> list[Job]:
        found = [self.model.jobs.get(job_id) for job_id in sorted(set(ids))]
        return [job for job in found if job is not None and job.state is State.DEAD]

    @rule(recent=st.lists(RECENT, min_size=1, max_size=8))
    def replay(self, recent: list[int]) -> None:
        """Run the dead again."""
        ids = self.ids_of(recent)
        dead = self._dead(ids)
        assert self.engine.replay(None, ids) == len(dead)
        for job in dead:
            job.state, job.attempts, job.expires = State.READY, 0, None
            job.tree_deaths, job.suspect, job.waits = 0, False, False
            job.order = next(self.model.order)
            held = self.model.keys.get((job.queue, job.key or ""))
            if held is not None and held[0] == job.id:
                self.model.keys[(job.queue, job.key or "")] = (*held[:2], None)
            self.model.count(job, "jobs_replayed_total")

    @rule(recent=st.lists(RECENT, min_size=1, max_size=4))
    def discard(self, recent: list[int]) -> None:
        """Remove the dead for good."""
        ids = self.ids_of(recent)
        dead = self._dead(ids)
        assert self.engine.discard(None, ids) == len(dead)
        for job in dead:
            self.model.remove(job)
            self.model.count(job, "jobs_finished_total:discarded")

    # --- prune

    @rule(limit=LIMITS)
    def prune(self, limit: int) -> None:
        """Remove what is past its retention, the oldest of each queue and kind first."""
        old = [job for job in self.model.jobs.values() if self.model.prunable(job)]
        assert self.engine.prune(limit) == min(limit, len(old))
        gone = [job for job in old if self.engine.find(job.id) is None]
        assert len(gone) == min(limit, len(old))
        for job in gone:
            for other in old:
                kept = other not in gone
                like = (other.queue, other.state) == (job.queue, job.state)
                assert not (kept and like and other.finished < job.finished)
            self.model.remove(job)
            self.model.count(job, f"pruned_jobs_total:{job.state}")

    # --- the world around

    @rule(seconds=st.sampled_from([0.000_001, 1, 4, 11, 30]))
    def time_passes(self, seconds: float) -> None:
        """Let time pass on both clocks."""
        self.clock.advance(seconds)

    @rule(queues=ORDERS, limit=st.sampled_from([2, 100]), seconds=st.sampled_from([0, 10, 60]))
    def a_worker_does_all_it_can(self, queues: list[str], limit: int, seconds: int) -> None:
        """Let time pass, promote, and claim until there is nothing left: the order shows."""
        self.clock.advance(seconds)
        self.promote(100)
        while True:
            known = len(self.claims)
            self.claim(queues, limit, 60)
            if len(self.claims) == known:
                return

    @rule(seconds=st.sampled_from([1, 11, 100]))
    def the_wall_clock_is_set_forward(self, seconds: int) -> None:
        """Step the wall clock; leases must not notice (back: see the single tests)."""
        self.clock.step_wall(seconds)

    @rule(queue=QUEUES, paused=st.sampled_from([False, False, False, True]))
    def pause_or_resume(self, queue: str, paused: bool) -> None:
        """Stop claims of a queue, or let them go on."""
        self.model.queues[queue].paused = paused
        self.engine.configure(queue, paused=paused)

    @rule(reboot=st.booleans())
    def restart(self, reboot: bool) -> None:
        """Open the store anew, perhaps after a power cut."""
        self.engine.close()
        if reboot:
            self.clock.reboot()
            for job in self.model.jobs.values():
                if job.state is State.CLAIMED:
                    job.state = State.READY
                    job.tree_deaths += 1
                    job.waits = job.tree_deaths >= 3
                    job.suspect = job.suspect or job.waits
        self.open()

    # --- what must hold after every step

    @invariant()
    def counters_equal_the_model_and_the_rows(self) -> None:
        """Depths and totals are exact, whatever happened."""
        if not hasattr(self, "engine"):
            return
        self.lives[-1] += 1
        rows = self.kind.recount(self.path)
        for queue in self.model.queues:
            expected = {state.value: len(self.model.of(queue, state)) for state in State}
            counts = self.engine.counts(queue)
            assert {state: counts[state] for state in expected} == expected
            assert rows[queue] == expected
            for (name, total), number in self.model.totals.items():
                if name == queue:
                    assert counts[total] == number, total

    @invariant()
    def keys_are_held_by_whom_and_until_when_the_model_says(self) -> None:
        """A key that is held too long refuses a job; one that is free too soon lets it run twice.

        Of keys that are free again any number may still be stored.
        """
        if not hasattr(self, "engine"):
            return
        stored = self.kind.keys(self.path)
        for at, (job_id, _, expires) in self.model.keys.items():
            if self.model.holder_of(*at) is not None:
                assert stored[at] == (job_id, expires)
        held = {at for at in stored if self.model.holder_of(*at) is not None}
        now = self.clock.wall_us()
        assert all(
            stored[at][1] is not None and stored[at][1] <= now for at in stored.keys() - held
        )

    @rule(recent=RECENT)
    def look(self, recent: int) -> None:
        """Find a job: it stands where the model says, or nowhere."""
        (job_id,) = self.ids_of([recent])
        job, record = self.model.jobs.get(job_id), self.engine.find(job_id)
        if job is None:
            assert record is None
        else:
            assert record is not None
            assert (record.state, record.run) == (job.state, job.run)
            assert (record.queue, record.key, record.priority) == (job.queue, job.key, job.priority)
            assert record.attempts == job.attempts


def verdict_of(job: Job) -> Settlement:
    """Return what `verdict` says of a job of the model."""
    to = (State.READY, State.DELAYED, State.DEAD)[job.id % 3]
    return settlement(Claim(id=job.id, run=job.run), to)


@pytest.mark.long
@pytest.mark.timeout(600)  # a failure is shortened before it is shown, and that takes a while
@pytest.mark.parametrize("name", sorted(KINDS))
def test_the_engine_does_what_the_model_does(name: str) -> None:
    """Over long mixed histories, no transition loses, doubles, reorders or miscounts a job."""
    machine = type("LifeOfOneKind", (Life,), {"kind": KINDS[name], "lives": []})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES_MAX,
            stateful_step_count=STEPS + 1,  # to begin is one
            deadline=None,
            report_multiple_bugs=False,
        ),
    )
    assert sum(steps >= STEPS for steps in machine.lives) >= EXAMPLES_MIN
