"""Work: claim a batch, run each job's handler, settle, in one transaction a turn.

A turn settles what is finished and claims what is next. It claims about ten
milliseconds of work at the handlers' recent speed, so that fast jobs share a
transaction and a slow one holds no other up. Any outcome but plain success is
settled at once.

Boundary: runs in a forked child and starts nothing; how an outcome becomes a
state is `queue_core.retry`'s, how a handler is called is `handlers`'.
"""

from __future__ import annotations

import gc
import random
import signal
import time
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from queue_core.engine import ClaimRequest, Engine, Holder
from queue_core.errors import DatabaseError, QueueBusy, QueueError
from queue_core.job import Claimed, Outcome, Settlement, Stale, State
from queue_core.queue import LEASE_SECONDS_DEFAULT, open_engine
from queue_core.retry import Done, Interrupted, Result, Retry, settle
from supervisor import deaths, handlers, logs, telling, tracing
from supervisor.child import Child, JobInterrupted, SoftTimeout
from supervisor.policy import EXIT_CONFIG, EXIT_OK, EXIT_UNAVAILABLE
from supervisor.settings import PoolSettings, Settings
from supervisor.slot import BATCH_MAX, SlotState

log = structlog.get_logger("herdsman.worker")

JOB_RETRIES: Final = "job_retries"
JOB_DIED: Final = "job_died"
CLAIM_STALE: Final = "claim_stale"
HANDLERS_UNUSABLE: Final = "handlers_unusable"
DATABASE_TROUBLE: Final = "database_trouble"

TURN_SECONDS: Final = 0.010
"""Work claimed at once; measured, it brings batches of 256 for no-op jobs and 1 for slow ones."""
TURN_SECONDS_BEHIND: Final = 0.200
"""The same while more waits than the last turn took. After a sleep a turn costs 1 to 2 ms, its
code and data being cold: 2 % of a worker's time for jobs of 10 ms that share a turn by tens, and
1 % by twenties. What waits would have waited anyway."""
TURN_SECONDS_MAX: Final = 0.400
"""A batch that turns out slower than this is cut short, and its rest claimed anew."""
SPEED_WEIGHT: Final = 0.2
IDLE_SECONDS: Final = 5.0
"""Longest sleep; the supervisor takes 30 s without a sign of life for a hang."""
TROUBLE_SECONDS_MAX: Final = 5.0
LOCK_SECONDS: Final = 10.0
"""A first turn waits for the lock twice, and the supervisor takes 30 s in CLAIM for a hang."""
NS: Final = 1_000_000_000


def main(child: Child, settings: Settings, pool: str) -> int:
    """Be a worker of a pool until told to stop; return the exit code.

    78: a handler cannot be imported; 69: what was finished could not be settled
    before the end, so the keeper will do it.
    """
    # The collector writes to every object it looks at, which would make pages shared with the
    # supervisor our own: measured, 24 MB of PSS for an idle worker instead of 16.
    gc.freeze()
    logs.keep_last(child.slot.lines_path)
    try:
        registry = handlers.load(settings)
    except handlers.HandlerError as error:
        child.slot.note = str(error)
        log.error(HANDLERS_UNUSABLE, error=str(error))
        return EXIT_CONFIG
    structlog.contextvars.bind_contextvars(worker=child.name)
    engine = open_engine(
        settings.database, create=False, flush_finishes=False, lock_timeout_seconds=LOCK_SECONDS
    )
    worker = Worker(child, engine, registry, settings.pools[pool], settings.instance)
    spans = tracing.spans()
    worker.watch(telling.line_of(settings.logs), spans)
    code = worker.run()
    if spans is not None:
        spans.flush()
    return code


class Worker:
    """The loop of one worker process, and what it remembers between turns."""

    def __init__(
        self,
        child: Child,
        engine: Engine,
        registry: handlers.Registry,
        pool: PoolSettings,
        instance: str,
    ) -> None:
        self._child = child
        self._slot = child.slot
        self._engine = engine
        self._registry = registry
        self._names = pool.queue_names
        self._weights = pool.weights
        self._instance = instance
        self._holder = 0
        self._seconds = TURN_SECONDS  # per job, by experience; begins at one job a turn
        self._behind = False  # whether the last claim got all it asked for
        self._trouble = 0
        self._wanted: ClaimRequest | None = None  # the last wish, which is often the next one
        self._unsettled: list[Settlement] = []
        self._run: Callable[[handlers.Handler, Claimed], Result] = self._call

    def watch(self, tell: telling.Tell | None, spans: tracing.Spans | None) -> None:
        """Tell of each attempt from now on, in the log and in traces; None tells nothing."""
        self._run = telling.watched(
            self._call,
            tell=tell,
            spans=spans,
            now_us=self._engine.now_us,
            steady_ns=time.monotonic_ns,
        )

    def run(self) -> int:
        """Take turns until told to stop; then hand back what has not started."""
        ready = False
        while not self._child.stopping:
            taken = self._turn(claim=True)
            if taken is None:
                continue
            if not ready:
                ready = True
                self._child.ready()
            if taken:
                self._work(taken)
            elif not self._unsettled:
                self._sleep(IDLE_SECONDS)
        return self._leave()

    # ------------------------------------------------------------ the turn

    def _turn(self, *, claim: bool) -> list[Claimed] | None:
        """Settle and claim; None when the database could not be used, after a pause."""
        slot = self._slot
        slot.enter(SlotState.SETTLE if self._unsettled else SlotState.CLAIM)
        settlements = self._unsettled
        try:
            if not self._holder:
                self._engine.listen(self._names)
                holder = Holder(worker=self._child.name, instance=self._instance)
                self._holder = self._slot.holder = self._engine.hold(holder)
            request = self._request() if claim else None
            results, taken = self._engine.turn(settlements, request, holder=self._holder)
        except QueueError as error:
            self._on_trouble(error, "claim" if claim else "finish")
            return None
        if self._trouble:
            self._trouble = 0
            slot.note = ""  # what it said is over
        if request is not None:
            self._behind = len(taken) == request.limit
        self._unsettled = []
        slot.end_batch()
        if len(results) != len(settlements) or any(type(one) is Stale for one in results):
            self._tell_stale(settlements, results)
        return taken

    def _request(self) -> ClaimRequest:
        seconds = TURN_SECONDS_BEHIND if self._behind else TURN_SECONDS
        limit = max(1, min(BATCH_MAX, int(seconds / max(self._seconds, 1e-9))))
        order, last = self._order(), self._wanted
        if last is None or last.limit != limit or last.queues is not order:
            last = self._wanted = ClaimRequest(
                queues=order,
                limit=limit,
                lease_us=int(LEASE_SECONDS_DEFAULT * 1_000_000),
                tasks=self._registry.tasks,
                starts=limit == 1,
            )
        return last

    def _order(self) -> Sequence[str] | None:
        """Return the queues in the order to look, drawn by weight so that none starves.

        Sorting by u ** (1 / weight) draws without replacement in proportion to
        the weights (Efraimidis and Spirakis, 2006).
        """
        if self._names is None or len(self._names) == 1:
            return self._names
        drawn = sorted(
            self._weights,
            key=lambda choice: random.random() ** (1 / choice[1]),
            reverse=True,
        )
        return [name for name, _ in drawn]

    def _tell_stale(self, settlements: Sequence[Settlement], results: Sequence[object]) -> None:
        for settlement, result in zip(settlements, results, strict=True):
            if type(result) is Stale and settlement.started_us is not None:
                log.warning(
                    CLAIM_STALE,
                    job_id=settlement.claim.id,
                    run=settlement.claim.run,
                    outcome=settlement.outcome,
                )

    def _on_trouble(self, error: QueueError, operation: str = "other") -> None:
        """Say so, keep what is finished, and come back later; nothing accepted is lost."""
        self._slot.count_fault(operation, telling.fault_of(error))
        self._slot.note = str(error)
        if self._trouble == 0:
            log.warning(DATABASE_TROUBLE, error=str(error), unsettled=len(self._unsettled))
        if not isinstance(error, DatabaseError | QueueBusy):
            raise error
        self._trouble += 1
        if self._slot.ready_ns:
            self._slot.enter(SlotState.IDLE)  # else it is not READY: it never reached the database
        pause = min(TROUBLE_SECONDS_MAX, 0.1 * 2 ** min(self._trouble, 10))
        self._doze(pause)

    def _sleep(self, seconds: float) -> None:
        slot = self._slot
        slot.enter(SlotState.IDLE)
        rang = False
        try:
            rang = self._engine.wait(self._names, seconds, self._child.wake_fd)
        except QueueError as error:
            self._on_trouble(error)
        if not rang:  # a job waits: what signals left in the pipe ends the next sleep at once
            self._child.clear_wake()

    def _doze(self, seconds: float) -> None:
        """Sleep without the database, until a signal or time is up."""
        deadline = time.monotonic() + seconds
        while not self._child.stopping and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))
        self._slot.beat()

    # ------------------------------------------------------------ the jobs

    def _work(self, batch: list[Claimed]) -> None:
        """Run the jobs of a batch in order; what does not get its turn is handed back."""
        while batch:
            batch = self._run_some(batch)
            # Once a batch and not once a job: it takes longer than a short job does.
            self._child.rearm()
        self._slot.beat()

    def _run_some(self, batch: list[Claimed]) -> list[Claimed]:
        """Run jobs until one does not plainly succeed; return those still to run."""
        slot, child, run, unsettled = self._slot, self._child, self._run, self._unsettled
        clock_ns, now_us = time.monotonic_ns, self._engine.now_us
        slot.begin_batch([row[:2] for row in batch])
        late_ns = clock_ns() + int(TURN_SECONDS_MAX * NS)
        for index, row in enumerate(batch):
            begun_ns = clock_ns()
            if child.stopping or (index and begun_ns > late_ns):
                self._hand_back(batch[index:])
                return []
            handler = self._registry.get(row.task)
            hard_ns = begun_ns + int(handler.timeout_seconds * NS)
            started_us = now_us()
            limit = handler.max_memory_bytes
            if not slot.start(index, hard_ns=hard_ns, now_ns=begun_ns, memory_bytes=limit):
                self._hand_back(batch[index:])
                return []
            result = run(handler, row)
            ended_ns = clock_ns()
            duration_us = (ended_ns - begun_ns) // 1000
            self._learn(duration_us)
            if type(result) is Done:
                slot.finish_ok(index, duration_us, ended_ns)
                unsettled.append(Settlement.success(row, started_us, duration_us))
                continue
            settlement = settle(
                row,
                result,
                policy=handler.policy,
                max_attempts_default=handler.max_attempts,
                random=random.random(),
                started_us=started_us,
                duration_us=duration_us,
            )
            self._unsettled.append(settlement)
            slot.finish_failed()
            self._tell(row, settlement)
            while self._unsettled and self._turn(claim=False) is None and not child.stopping:
                pass
            return batch[index + 1 :]
        return []

    def _call(self, handler: handlers.Handler, row: Claimed) -> Result:
        """Call the handler; QUIT and the soft timeout may interrupt it, and nothing else of us."""
        soft = handler.soft_timeout_seconds
        result: Result | None = None
        try:
            with self._child.interruptible():
                if soft is None:
                    result = handler.call(row)
                else:
                    signal.setitimer(signal.ITIMER_REAL, soft)
                    try:
                        result = handler.call(row)
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
        except JobInterrupted:
            interrupted = Interrupted(error="interrupted: the supervisor is shutting down")
            result = interrupted if result is None else result
        except SoftTimeout:
            late = Retry(error=f"soft timeout after {soft} s", outcome=Outcome.TIMED_OUT)
            result = late if result is None else result
        return result if type(result) is Done else deaths.of_interrupted(self._slot, result)

    def _learn(self, duration_us: int) -> None:
        seconds = duration_us / 1_000_000
        if seconds > self._seconds * 10:
            self._seconds = seconds  # a handler that turned slow is believed at once
        else:
            self._seconds += SPEED_WEIGHT * (seconds - self._seconds)

    def _hand_back(self, rows: Sequence[Claimed]) -> None:
        """Release jobs that have not started; no attempt is spent, and they keep their place."""
        self._unsettled.extend(
            Settlement(claim=row.claim, to=State.READY, outcome=Outcome.INTERRUPTED, charge=False)
            for row in rows
        )

    def _tell(self, row: Claimed, settlement: Settlement) -> None:
        if settlement.to is State.DEAD:
            log.error(
                JOB_DIED,
                job_id=row.id, task=row.task, queue=row.queue, attempt=row.attempts + 1,
                outcome=settlement.outcome, reason=settlement.reason, error=settlement.error,
            )  # fmt: skip
        elif settlement.charge:
            log.warning(
                JOB_RETRIES,
                job_id=row.id, task=row.task, queue=row.queue, attempt=row.attempts + 1,
                outcome=settlement.outcome, error=settlement.error,
                delay_seconds=settlement.delay_us / 1_000_000,
            )  # fmt: skip

    def _leave(self) -> int:
        """Settle what is finished, for as long as we are let; the keeper settles the rest."""
        while self._unsettled:
            if self._turn(claim=False) is None:
                time.sleep(0.1)
                if self._trouble > 20 or self._child.interrupted:
                    return EXIT_UNAVAILABLE
        self._slot.end_batch()
        self._engine.close()
        return EXIT_OK
