"""Decide what the death of a worker, or of the whole tree, means for each job it held.

A worker's death charges the job it ran, and that one alone. When the whole tree
dies nobody knows which job was to blame: those that ran are suspects, run again
one at a time, and charged only when the tree dies again while a suspect was the
only one running.

Boundary: pure over what the slot and the database say; the keeper stores it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from queue_core.engine import Abandoned
from queue_core.job import Claimed, Outcome, Settlement, State
from queue_core.retry import DEFAULT_BACKOFF, Backoff, Crashed, Interrupted, Result, Retry, settle
from supervisor import lastlines
from supervisor.policy import CAUSES, Cause
from supervisor.settings import HandlerSettings, Settings
from supervisor.slot import Slot, SlotState


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """The configuration that settlements follow, and the clock they are dated by."""

    settings: Settings
    now_us: Callable[[], int]

    def of_worker(self, slot: Slot, row: Claimed) -> Settlement:
        """Settle a job of a dead worker: finished is done, running is charged, the rest is free."""
        match _stage(slot, row):
            case None:
                return release(row)
            case int(took_us):
                return self.done(row, took_us)
            case _:
                cause = cause_of(slot)
                ran_us = _ran_us(slot)
                result = _result_of_death(slot, cause)
                settled = self.settle(row, result, self.now_us() - ran_us, ran_us)
                return settled._replace(cause=cause)

    def of_tree(
        self, left: Sequence[Abandoned], slots: dict[int, Slot]
    ) -> list[tuple[Claimed, Settlement]]:
        """Settle what an earlier run of this instance left claimed, by the slots it left behind."""
        stages = [
            _stage(slots[one.holder], one.row) if one.holder in slots else UNKNOWN for one in left
        ]
        suspects = sum(
            one.suspect and stage is RUNNING for one, stage in zip(left, stages, strict=True)
        )
        settled = []
        for one, stage in zip(left, stages, strict=True):
            row = one.row
            if stage is UNKNOWN:
                settlement = release(row)._replace(tree_death=True)
            elif stage is not None and slots[one.holder].state is SlotState.DEAD:
                settlement = self.of_worker(slots[one.holder], row)  # it had died before the tree
            elif stage is None:
                settlement = release(row)
            elif isinstance(stage, int):
                settlement = self.done(row, stage)
            else:
                settlement = self._suspected(
                    slots[one.holder], row, alone=one.suspect and suspects == 1
                )
            settled.append((row, settlement))
        return settled

    def _suspected(self, slot: Slot, row: Claimed, *, alone: bool) -> Settlement:
        ran_us = _ran_us(slot)
        how = "died again while this suspect ran alone" if alone else "died while it ran"
        error = f"the whole process tree {how} in worker {slot.name}"
        result: Result = Interrupted(error=error)
        if alone:
            result = Crashed(cause=Cause.SIGNAL, error=error, traceback=left_by(slot))
        settled = self.settle(row, result, self.now_us() - ran_us, ran_us)
        return settled._replace(tree_death=True, suspect=settled.to is State.READY)

    def done(self, row: Claimed, took_us: int) -> Settlement:
        """Settle a job that had finished well, as its worker had told the slot."""
        return Settlement(
            claim=row.claim,
            to=State.DONE,
            outcome=Outcome.SUCCEEDED,
            started_us=self.now_us() - took_us,
            duration_us=took_us,
        )

    def settle(
        self, row: Claimed, result: Result, started_us: int | None, duration_us: int
    ) -> Settlement:
        """Turn a result into a settlement by the options of the job's handler."""
        handler = self.settings.handlers.get(row.task)
        return settle(
            row,
            result,
            policy=_policy(handler),
            max_attempts_default=(handler or self.settings.defaults).max_attempts,
            random=random.random(),
            started_us=started_us,
            duration_us=duration_us,
        )


class _Stage:
    """A mark; there are two of it."""


RUNNING = _Stage()
UNKNOWN = _Stage()


def _stage(slot: Slot, row: Claimed) -> int | _Stage | None:
    """Return how far a job had come: its duration when finished, RUNNING, None if unstarted."""
    batch = slot.batch()
    at = (row.id, row.run)
    if batch is None or at not in batch.claims:
        return None
    position = batch.claims.index(at)
    if position in batch.finished:
        return batch.finished[position]
    return RUNNING if position < batch.started else None


def release(row: Claimed) -> Settlement:
    """Hand a job back that had not started: no attempt is spent, and it keeps its place."""
    return Settlement(claim=row.claim, to=State.READY, outcome=Outcome.INTERRUPTED, charge=False)


def cause_of(slot: Slot) -> Cause:
    """Return why the process of a dead slot ended."""
    code = slot.cause
    return CAUSES[code - 1] if 0 < code <= len(CAUSES) else Cause.EXIT


def of_interrupted(slot: Slot, result: Result) -> Result:
    """Charge an interruption to the job when it was its memory that the supervisor ended it for.

    Nobody else would: its worker lives long enough to settle it, and it would run for ever.
    """
    if type(result) is not Interrupted or cause_of(slot) is not Cause.MEMORY:
        return result
    error = f"worker {slot.name} was over its memory limit while running the job"
    lines = lastlines.read(slot.lines_path)
    return Crashed(
        cause=Cause.MEMORY, error=error, traceback=f"last log lines:\n{lines}" if lines else None
    )


def left_by(slot: Slot) -> str | None:
    """Return the stacks a process left, and its last log lines; None when there is neither."""
    lines = lastlines.read(slot.lines_path)
    parts = [slot.stack_text(), f"last log lines:\n{lines}" if lines else ""]
    return "\n\n".join(filter(None, parts)) or None


def _ran_us(slot: Slot) -> int:
    return int(max(0, time.monotonic_ns() - slot.started_ns) // 1000)


def _result_of_death(slot: Slot, cause: Cause) -> Result:
    how = f"signal {slot.signal}" if slot.signal else f"exit code {slot.exit_code}"
    error = f"worker {slot.name} died while running the job: {cause} ({how})"
    stack = left_by(slot)
    if cause is Cause.TIMEOUT:
        return Retry(
            error="the job ran past its timeout and its worker was killed",
            traceback=stack,
            outcome=Outcome.TIMED_OUT,
        )
    if cause in {Cause.DRAIN, Cause.RECYCLE, Cause.SCALE}:
        return Interrupted(error=error)
    return Crashed(cause=cause, error=error, traceback=stack)


def _policy(handler: HandlerSettings | None) -> Backoff:
    if handler is None:
        return DEFAULT_BACKOFF
    options = handler.backoff
    return Backoff(
        kind=options.kind,
        base_seconds=options.base_seconds,
        factor=options.factor,
        cap_seconds=options.cap_seconds,
        jitter=options.jitter,
    )
