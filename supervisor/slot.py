"""Read and write the shared record of one process.

Boundary: the record only; `slots` owns the file it lives in, and no process is
started, signalled or judged here. Each field has one writer at a time: the
supervisor while the process boots and after it died, the process itself in
between, the keeper for `revoked` alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from supervisor import lastlines, stacks
from supervisor.record import NAME_BYTES_MAX, Record, word

BATCH_MAX: Final = 256
"""Jobs a worker may claim in one turn."""
NOTE_BYTES_MAX: Final = 512
SLOT_WORDS: Final = 1024
REVOKE_WAIT_SECONDS: Final = 0.005
"""Pause between writing `revoked` and reading `started`.

A worker stores `started` before it loads `revoked`. A store leaves the store
buffer of its core within microseconds, so after this pause either the worker
has seen the revocation or we see its start.
"""


class SlotState(IntEnum):
    """What the process of a record is doing; FREE and DEAD have no process."""

    FREE = 0
    BOOT = 1
    IDLE = 2
    CLAIM = 3
    RUN = 4
    SETTLE = 5
    EXIT = 6
    DEAD = 7


class Kind(IntEnum):
    """Which part of the tree a process is."""

    WORKER = 0
    KEEPER = 1
    WEB = 2


_RUNNING: Final = int(SlotState.RUN)

# Word numbers inside a slot record.
_SEQ, _EPOCH, _PID, _START_TIME, _POOL, _STATE, _ENTERED, _BOOT, _READY = range(9)
_HOLDER, _JOB, _RUN, _STARTED_NS, _SOFT, _HARD, _PROGRESS, _DONE, _FAILED = range(9, 18)
_RSS, _CPU, _CAUSE, _SIGNAL, _EXIT_CODE, _NOTE_LEN, _SIZE, _STARTED = range(18, 26)
_FINISHED: Final = 26  # four words
_REVOKED, _NAME_LEN, _KIND, _LEAKED, _DIED, _REARMED, _RETIRE, _BEAT, _WISH = range(30, 39)
_MEMORY: Final = 39
_NAME: Final = 40
_NOTE: Final = 60
_IDS: Final = 124
_RUNS: Final = _IDS + BATCH_MAX
_DURATIONS: Final = _RUNS + BATCH_MAX
_FAULTS: Final = _DURATIONS + BATCH_MAX

FAULTS: Final = ("busy", "full", "read_only", "corrupt", "durability", "other")
"""Why a transaction can fail; the word of a fault is its place here."""
FAULT_OPERATIONS: Final = (
    "claim", "extend", "finish", "promote", "reap", "prune", "checkpoint", "other",
)  # fmt: skip
"""What a process of the tree runs transactions for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchView:
    """One consistent look at the batch of a slot.

    `claims` are `(id, run)` in start order. `started` counts the jobs begun:
    the last of them is the one running, unless it is in `finished`, which maps
    an index to its duration in microseconds. `revoked_from` is the first index
    that the keeper took back.
    """

    claims: tuple[tuple[int, int], ...]
    started: int
    finished: dict[int, int]
    revoked_from: int | None = None

    @property
    def running(self) -> int | None:
        """Index of the job that began and has not finished well; None when there is none."""
        last = self.started - 1
        return last if last >= 0 and last not in self.finished else None

    @property
    def unstarted(self) -> tuple[tuple[int, int], ...]:
        """Claims never begun: hand them back uncharged."""
        return self.claims[self.started :]

    @property
    def rest(self) -> tuple[tuple[int, int], ...]:
        """Claims taken back by a revocation; empty when there was none."""
        return () if self.revoked_from is None else self.claims[self.revoked_from :]


class Slot(Record):
    """The record of one process: who it is, what it does, which jobs it holds."""

    __slots__ = ("_stack_path",)

    epoch = word(_EPOCH, "Number of processes that have had this record.", writable=False)
    pid = word(_PID, "Process id; 0 before the fork.")
    start_time = word(_START_TIME, "Start time of the pid in clock ticks since boot.")
    pool_index = word(_POOL, "Index of the pool in the table.", writable=False)
    entered_ns = word(_ENTERED, "Monotonic time the state was entered.", writable=False)
    boot_ns = word(_BOOT, "Monotonic time of the fork.", writable=False)
    ready_ns = word(_READY, "Monotonic time of READY; 0 while booting.", writable=False)
    beat_ns = word(_BEAT, "Monotonic time of the last sign of life.", writable=False)
    holder = word(_HOLDER, "The number this worker's claims carry; 0 before it has one.")
    job = word(_JOB, "Id of the job started last; 0 outside a batch.", writable=False)
    run = word(_RUN, "Run of that job.", writable=False)
    started_ns = word(_STARTED_NS, "Monotonic time that job started.", writable=False)
    soft_deadline_ns = word(_SOFT, "Monotonic soft deadline; 0 is none.", writable=False)
    hard_deadline_ns = word(_HARD, "Monotonic hard deadline; 0 is none.", writable=False)
    job_memory_bytes = word(_MEMORY, "Most memory while that job runs; 0 is any.", writable=False)
    progress = word(_PROGRESS, "Grows with every sign of life.", writable=False)
    jobs_done = word(_DONE, "Jobs this process finished well.", writable=False)
    jobs_failed = word(_FAILED, "Jobs this process finished otherwise.", writable=False)
    rss_bytes = word(_RSS, "Memory of it and what it started, as seen about a second ago.")
    cpu_us = word(_CPU, "Processor time used by then, in microseconds.")
    cause = word(_CAUSE, "Code (`policy.CAUSES`) of why it is to end, or ended; 0 for none.")
    signal = word(_SIGNAL, "Signal that ended the process; 0 for none.")
    exit_code = word(_EXIT_CODE, "Exit code of the process.")
    leaked = word(_LEAKED, "Processes this one left behind, which were killed.")
    died_ns = word(_DIED, "Monotonic time the death was seen; 0 while alive.")
    rearmed = word(_REARMED, "Signal handlers that jobs replaced and we put back.")
    retire = word(_RETIRE, "1 when the supervisor wants this process to finish and leave.")
    wish = word(_WISH, "The epoch an operator wants replaced; it dies with the process.")
    batch_size = word(_SIZE, "Claims in the batch.", writable=False)
    started = word(_STARTED, "Jobs of the batch begun so far.", writable=False)

    def __init__(self, words: memoryview, index: int, stack_path: str) -> None:
        super().__init__(words, index)
        self._stack_path = stack_path

    @property
    def stack_path(self) -> str:
        """File that faulthandler of this process writes to."""
        return self._stack_path

    @property
    def lines_path(self) -> str:
        """File that holds the last log lines of this process."""
        return f"{self._stack_path}.lines"

    @property
    def state(self) -> SlotState:
        """What the process does now."""
        value = self._w[_STATE]
        return SlotState(value) if value <= SlotState.DEAD else SlotState.DEAD

    @property
    def kind(self) -> Kind:
        """Which part of the tree this process is."""
        value = self._w[_KIND]
        return Kind(value) if value <= Kind.WEB else Kind.WORKER

    @property
    def live(self) -> bool:
        """Whether the record belongs to a process that has not died."""
        return SlotState.BOOT <= self._w[_STATE] <= SlotState.EXIT

    @property
    def name(self) -> str:
        """Name of the process, `emails/0`."""
        return self.text(_NAME_LEN, _NAME, NAME_BYTES_MAX)

    @property
    def note(self) -> str:
        """Last error the process told about itself."""
        return self.text(_NOTE_LEN, _NOTE, NOTE_BYTES_MAX)

    @note.setter
    def note(self, text: str) -> None:
        self.set_text(_NOTE_LEN, _NOTE, NOTE_BYTES_MAX, text)

    # ---- supervisor -------------------------------------------------------------------

    def open(self, *, name: str, pool_index: int, kind: Kind, now_ns: int) -> None:
        """Give the record to a process about to be forked."""
        w = self._w
        seq, epoch, state = w[_SEQ], w[_EPOCH], w[_STATE]
        if state != SlotState.FREE:
            raise RuntimeError(f"slot {self.index} is {SlotState(state).name}, not FREE")
        w[_SEQ] = seq | 1
        for at in range(_PID, _NAME):
            w[at] = 0
        w[_POOL] = pool_index
        w[_KIND] = kind
        self.set_text(_NAME_LEN, _NAME, NAME_BYTES_MAX, name)
        w[_EPOCH] = epoch + 1
        w[_BOOT] = w[_ENTERED] = w[_BEAT] = now_ns
        w[_SEQ] = (seq | 1) + 1
        self.clear_stack()
        lastlines.clear(self.lines_path)
        w[_STATE] = SlotState.BOOT

    def bury(self, *, cause: int, signal: int, exit_code: int, now_ns: int) -> None:
        """Record a death; batch and note stay for the keeper."""
        w = self._w
        w[_CAUSE], w[_SIGNAL], w[_EXIT_CODE], w[_DIED] = cause, signal, exit_code, now_ns
        w[_STATE] = SlotState.DEAD

    # ---- the process itself -----------------------------------------------------------

    def enter(self, state: SlotState) -> None:
        """Say what the process does from now on."""
        w = self._w
        now_ns = time.monotonic_ns()
        w[_ENTERED] = w[_BEAT] = now_ns
        w[_STATE] = state
        w[_PROGRESS] += 1
        if state == SlotState.IDLE and not w[_READY]:
            w[_READY] = now_ns

    def beat(self) -> None:
        """Show a sign of life: a worker at least every 5 s, the keeper and `web` every 1 s."""
        w = self._w
        w[_BEAT] = time.monotonic_ns()
        w[_PROGRESS] += 1

    def begin_batch(self, claims: Sequence[tuple[int, int]]) -> None:
        """Publish claims before any of them starts. Raises ValueError over BATCH_MAX."""
        size = len(claims)
        if size > BATCH_MAX:
            raise ValueError(f"a batch of {size} claims is over the {BATCH_MAX} a slot holds")
        w = self._w
        seq = w[_SEQ]
        w[_SEQ] = seq | 1  # odd: readers wait, or take the batch as unknown
        w[_STARTED] = 0
        w[_FINISHED] = w[_FINISHED + 1] = w[_FINISHED + 2] = w[_FINISHED + 3] = 0
        for at, (job, run) in enumerate(claims):
            w[_IDS + at] = job
            w[_RUNS + at] = run
        w[_SIZE] = size
        w[_SEQ] = (seq | 1) + 1

    def start(
        self, i: int, *, soft_ns: int = 0, hard_ns: int = 0, now_ns: int = 0, memory_bytes: int = 0
    ) -> bool:
        """Begin claim `i` of the batch; deadlines are monotonic instants, 0 is none.

        `now_ns` is the monotonic time, where the caller has just read it; `memory_bytes` the
        most that the worker, with all it has started, may use meanwhile, 0 for any.

        False: the keeper took the rest back. Do not run it; release the claims
        from `i` on (the keeper may have been faster: stale ones are expected).
        """
        w = self._w
        w[_STARTED] = i + 1  # before `revoked` is read: see REVOKE_WAIT_SECONDS
        revoked = w[_REVOKED]
        if revoked and revoked >> 16 == w[_SEQ]:
            w[_STARTED] = i
            return False
        now_ns = now_ns or time.monotonic_ns()
        w[_HARD], w[_SOFT] = hard_ns, soft_ns
        w[_JOB], w[_RUN] = w[_IDS + i], w[_RUNS + i]
        w[_STARTED_NS] = w[_ENTERED] = w[_BEAT] = now_ns
        w[_MEMORY] = memory_bytes  # after the start: who sees the limit sees whose it is
        w[_STATE] = _RUNNING
        return True

    def finish_ok(self, i: int, duration_us: int, now_ns: int = 0) -> None:
        """Record that claim `i` finished well, so that the keeper can settle it if we die."""
        w = self._w
        # Before the deadline goes: RUN without one has a limit too.
        w[_BEAT] = now_ns or time.monotonic_ns()
        w[_HARD] = 0  # the deadline was this job's, not the next one's
        w[_DURATIONS + i] = duration_us
        w[_FINISHED + (i >> 6)] |= 1 << (i & 63)
        w[_DONE] += 1
        w[_PROGRESS] += 1

    def finish_failed(self) -> None:
        """Count a job that ended otherwise than well; its settlement is the worker's."""
        w = self._w
        w[_BEAT] = time.monotonic_ns()
        w[_HARD] = 0
        w[_FAILED] += 1
        w[_PROGRESS] += 1

    def end_batch(self) -> None:
        """Forget the batch: all of it is settled."""
        w = self._w
        seq = w[_SEQ]
        w[_SEQ] = seq | 1
        w[_SIZE] = w[_STARTED] = w[_JOB] = w[_RUN] = w[_HARD] = w[_SOFT] = 0
        w[_SEQ] = (seq | 1) + 1

    def count_fault(self, operation: str, fault: str) -> None:
        """Count a failed transaction; the count is the record's and outlives the process.

        Words, and not rows of the database: that is what cannot be written now.
        """
        at = FAULT_OPERATIONS.index(operation) * len(FAULTS) + FAULTS.index(fault)
        self._w[_FAULTS + at] += 1

    def faults(self) -> list[int]:
        """Return how many transactions failed in the processes that have had this record.

        For each of FAULT_OPERATIONS, in its order, one number for each of FAULTS.
        """
        return self._w[_FAULTS : _FAULTS + len(FAULT_OPERATIONS) * len(FAULTS)].tolist()

    # ---- keeper -----------------------------------------------------------------------

    def batch(self) -> BatchView | None:
        """Return a consistent view of the batch.

        None: the process died while it published one (or is publishing now), so
        none of its claims had started; ask the database what the holder has.
        """
        w = self._w
        for _ in range(50):
            seq = w[_SEQ]
            if not seq & 1:
                size = min(w[_SIZE], BATCH_MAX)
                ids = w[_IDS : _IDS + size].tolist()
                runs = w[_RUNS : _RUNS + size].tolist()
                bits = [w[_FINISHED + at] for at in range(4)]
                started, revoked = min(w[_STARTED], size), w[_REVOKED]
                finished = {
                    at: w[_DURATIONS + at] for at in range(size) if bits[at >> 6] >> (at & 63) & 1
                }
                if w[_SEQ] == seq:
                    word = revoked & 0xFFFF
                    mine = revoked >> 16 == seq and word >= 2
                    return BatchView(
                        claims=tuple(zip(ids, runs, strict=True)),
                        started=started,
                        finished=finished,
                        revoked_from=min(word - 2, size) if mine else None,
                    )
            time.sleep(0.0002)
        return None

    def revoke(self, pause: Callable[[float], None] = time.sleep) -> int | None:
        """Take back the claims that have not started; return how many had.

        Then `batch().rest` lists them. None: there is no batch, nothing is left
        to take back, or the batch ended meanwhile. The word carries the sequence
        number of the batch it means, so a new batch starts unrevoked.
        """
        w = self._w
        seq = w[_SEQ]
        if seq & 1 or w[_STARTED] >= w[_SIZE]:
            return None
        w[_REVOKED] = seq << 16 | 1
        pause(REVOKE_WAIT_SECONDS)
        started = w[_STARTED]
        size = w[_SIZE]
        if w[_SEQ] != seq or started >= size:
            return None
        w[_REVOKED] = seq << 16 | (started + 2)
        return started

    def free(self) -> None:
        """Give a DEAD record back for a new process, once its jobs are dealt with."""
        if self._w[_STATE] == SlotState.DEAD:
            self._w[_PID] = 0
            self._w[_STATE] = SlotState.FREE

    # ---- stacks -----------------------------------------------------------------------

    def clear_stack(self) -> None:
        """Empty the stack file."""
        stacks.clear(self._stack_path)

    def stack_text(self) -> str:
        """Return the stacks the process left, bounded."""
        return stacks.read(self._stack_path)
