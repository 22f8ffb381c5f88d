"""Keep the records of all processes in one shared file that outlives them.

The file lies on a tmpfs, 0600, so that after a SIGKILL of any process, the
supervisor too, the next one can read which job was running.

Boundary: the file, its header and the list of records; what is inside a record
is `slot`'s. Never imports the queue, never starts or signals a process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from supervisor.linux import boot_id, resident_bytes, start_time
from supervisor.pool import POOL_WORDS, Pool
from supervisor.slot import BATCH_MAX, SLOT_WORDS, BatchView, Kind, Slot, SlotState
from supervisor.slotpaths import (
    SlotsError,
    find_slots,
    previous_slots,
    set_aside,
    slots_path,
    stacks_of,
)

__all__ = [
    "BATCH_MAX", "DUTIES", "KEEPER_POOL", "WEB_POOL", "BatchView", "Kind", "Pool", "Slot",
    "SlotState", "SlotTable", "SlotsError", "find_slots", "previous_slots", "resident_bytes",
    "slots_capacity", "slots_path", "start_time",
]  # fmt: skip

DUTIES: Final = (
    "configure", "bury", "recover", "extend", "relieve", "promote", "reap", "prune", "flush",
)  # fmt: skip
"""What the keeper does again and again; the words of a duty are by its place here."""
KEEPER_POOL: Final = "@keeper"
WEB_POOL: Final = "@web"
_MAGIC: Final = int.from_bytes(b"herdsman", "little")
_LAYOUT: Final = 1
_HEADER_WORDS: Final = 512
_SPARE_POOLS: Final = 16
UPKEEP_RECORDS: Final = 4
"""Kept free for the keeper and `web`, each with a successor."""

_H_MAGIC, _H_LAYOUT, _H_BOOT, _H_BOOT2, _H_UUID, _H_UUID2, _H_CAPACITY, _H_POOLS = range(8)
_H_POOLS_MAX, _H_DRAINING, _H_PID, _H_START, _H_TICK, _H_WAKE, _H_RELOAD_OK = range(8, 15)
_H_RELOAD_NS, _H_CREATED, _H_LEAKED, _H_READY, _H_LAG = range(15, 20)
_H_DUTIES: Final = 64  # two words each


def slots_capacity(processes: int) -> int:
    """Return how many records a tree of so many worker processes gets.

    Dead records wait for the keeper, so there are more than processes.
    """
    return 4 * processes + 16


class SlotTable:
    """The shared file: a header, a record per pool, a record per process."""

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self.path = path
        self._mapping = mapping
        self._words = memoryview(mapping).cast("Q")
        w = self._words
        pools_max = w[_H_POOLS_MAX]
        at = _HEADER_WORDS
        self._pool_records = [
            Pool(w[at + i * POOL_WORDS : at + (i + 1) * POOL_WORDS], i) for i in range(pools_max)
        ]
        at += pools_max * POOL_WORDS
        stacks = stacks_of(path)
        self.slots = [
            Slot(w[at + i * SLOT_WORDS : at + (i + 1) * SLOT_WORDS], i, str(stacks / str(i)))
            for i in range(w[_H_CAPACITY])
        ]

    @classmethod
    def create(
        cls, path: str | Path, *, instance_uuid: str, pools: Sequence[str], capacity: int
    ) -> SlotTable:
        """Create the file; a leftover of a crashed run is set aside (`previous_slots`).

        Call it while holding the instance lock. Raises SlotsError.
        """
        path = Path(path)
        names = [*dict.fromkeys(pools), KEEPER_POOL, WEB_POOL]
        pools_max = 2 * len(names) + _SPARE_POOLS
        size = 8 * (_HEADER_WORDS + pools_max * POOL_WORDS + capacity * SLOT_WORDS)
        fresh = path.with_name(f"{path.name}.new{os.getpid()}")
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(fresh)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(fresh, flags, 0o600)
            try:
                os.posix_fallocate(fd, 0, size)  # a full tmpfs would be a SIGBUS later
                mapping = mmap.mmap(fd, size)
            finally:
                os.close(fd)
            words = memoryview(mapping).cast("Q")
            key = uuid.UUID(instance_uuid).bytes
            boot = boot_id()
            words[_H_LAYOUT] = _LAYOUT
            words[_H_BOOT] = int.from_bytes(boot[:8], "little")
            words[_H_BOOT2] = int.from_bytes(boot[8:], "little")
            words[_H_UUID] = int.from_bytes(key[:8], "little")
            words[_H_UUID2] = int.from_bytes(key[8:], "little")
            words[_H_CAPACITY] = capacity
            words[_H_POOLS_MAX] = pools_max
            words[_H_PID] = os.getpid()
            words[_H_START] = start_time()
            words[_H_MAGIC] = _MAGIC
            words.release()
            if path.exists():
                set_aside(path)
            shutil.rmtree(stacks_of(path), ignore_errors=True)
            os.mkdir(stacks_of(path), 0o700)
            os.rename(fresh, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(fresh)
            raise SlotsError(f"cannot create {path}: {error.strerror}") from error
        table = cls(path, mapping)
        for name in names:
            table.add_pool(name)
        return table

    @classmethod
    def attach(cls, path: str | Path, *, writable: bool = True) -> SlotTable:
        """Open the file of another process. Raises SlotsError when it is none, or not of ours."""
        path = Path(path)
        mode = os.O_RDWR if writable else os.O_RDONLY
        try:
            fd = os.open(path, mode | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise SlotsError(f"cannot open {path}: {error.strerror}") from error
        try:
            size = os.fstat(fd).st_size
            if size < 8 * _HEADER_WORDS or size % 8:
                raise SlotsError(f"{path} is no herdsman slot file; remove it")
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            mapping = mmap.mmap(fd, size, access=access)
        finally:
            os.close(fd)
        words = memoryview(mapping).cast("Q")
        magic, layout = words[_H_MAGIC], words[_H_LAYOUT]
        need = _HEADER_WORDS + words[_H_POOLS_MAX] * POOL_WORDS + words[_H_CAPACITY] * SLOT_WORDS
        words.release()
        if magic == _MAGIC and layout == _LAYOUT and need * 8 == size:
            return cls(path, mapping)
        mapping.close()
        if magic != _MAGIC or layout == _LAYOUT:
            raise SlotsError(f"{path} is no herdsman slot file; remove it")
        raise SlotsError(
            f"{path} has layout {layout}, and this herdsman reads layout {_LAYOUT};"
            " use the version that started the supervisor"
        )

    # ---- header -----------------------------------------------------------------------

    def _get(self, word: int) -> int:
        return self._words[word]

    @property
    def instance_uuid(self) -> str:
        """The instance that made this file."""
        low, high = self._words[_H_UUID], self._words[_H_UUID2]
        return str(uuid.UUID(bytes=low.to_bytes(8, "little") + high.to_bytes(8, "little")))

    @property
    def same_boot(self) -> bool:
        """Whether the file was made since this kernel booted, so that its pids mean something."""
        low, high = self._words[_H_BOOT], self._words[_H_BOOT2]
        return low.to_bytes(8, "little") + high.to_bytes(8, "little") == boot_id()

    @property
    def draining(self) -> bool:
        """Whether the tree is shutting down: claim nothing more."""
        return self._words[_H_DRAINING] != 0

    @draining.setter
    def draining(self, value: bool) -> None:
        self._words[_H_DRAINING] = int(value)

    @property
    def ready(self) -> bool:
        """Whether a worker has been READY since the start (systemd's READY=1)."""
        return self._words[_H_READY] != 0

    @ready.setter
    def ready(self, value: bool) -> None:
        self._words[_H_READY] = int(value)

    @property
    def supervisor_pid(self) -> int:
        """Process id of the supervisor."""
        return self._words[_H_PID]

    @property
    def supervisor_start_time(self) -> int:
        """Start time of the supervisor in clock ticks since boot."""
        return self._words[_H_START]

    def tick(self, now_ns: int, lag_ns: int = 0) -> None:
        """Record that the supervisor's loop turned, and how late it was."""
        self._words[_H_LAG] = lag_ns
        self._words[_H_TICK] = now_ns

    @property
    def tick_ns(self) -> int:
        """Monotonic time of the supervisor's last turn."""
        return self._words[_H_TICK]

    @property
    def lag_ns(self) -> int:
        """How late the supervisor's last turn was."""
        return self._words[_H_LAG]

    @property
    def keeper_wake(self) -> int:
        """Deaths told to the keeper so far."""
        return self._words[_H_WAKE]

    @keeper_wake.setter
    def keeper_wake(self, value: int) -> None:
        self._words[_H_WAKE] = value

    @property
    def leaked(self) -> int:
        """Processes that workers left behind and the supervisor had to kill or reap."""
        return self._words[_H_LEAKED]

    @leaked.setter
    def leaked(self, value: int) -> None:
        self._words[_H_LEAKED] = value

    @property
    def reload_ok(self) -> bool:
        """Whether the last reload succeeded; True when there was none."""
        return self._words[_H_RELOAD_OK] != 2

    @property
    def reload_ns(self) -> int:
        """Monotonic time of the last reload; 0 when there was none."""
        return self._words[_H_RELOAD_NS]

    def record_reload(self, ok: bool, now_ns: int) -> None:
        """Record how a reload ended."""
        self._words[_H_RELOAD_OK] = 1 if ok else 2
        self._words[_H_RELOAD_NS] = now_ns

    def record_duty(self, duty: str, began_ns: int, ended_ns: int) -> None:
        """Record that the keeper did a duty. Here, so that it outlives this keeper."""
        at = _H_DUTIES + 2 * DUTIES.index(duty)
        self._words[at + 1] = ended_ns - began_ns
        self._words[at] = ended_ns

    def duty(self, duty: str) -> tuple[int, int] | None:
        """Return when a duty last succeeded (monotonic) and how long it took; None before that."""
        at = _H_DUTIES + 2 * DUTIES.index(duty)
        ended_ns = self._words[at]
        return (ended_ns, self._words[at + 1]) if ended_ns else None

    # ---- records ----------------------------------------------------------------------

    @property
    def pools(self) -> dict[str, Pool]:
        """All pools by name, retired ones included; `@keeper` and `@web` are pools too."""
        return {pool.name: pool for pool in self._pool_records[: self._words[_H_POOLS]]}

    def add_pool(self, name: str) -> Pool:
        """Return the record of a pool, making one if there is none. Raises SlotsError when full."""
        found = self.pools.get(name)
        if found is None:
            at = self._words[_H_POOLS]
            if at == len(self._pool_records):
                raise SlotsError(
                    f"{self.path} has no room for another pool; restart the supervisor"
                )
            found = self._pool_records[at]
            found.name = name
            self._words[_H_POOLS] = at + 1
        return found

    def pool_of(self, slot: Slot) -> str:
        """Return the name of the pool a slot belongs to."""
        at = slot.pool_index
        return self._pool_records[at].name if at < self._words[_H_POOLS] else ""

    def take(self, *, upkeep: bool = False) -> Slot | None:
        """Return a FREE record; None when all are in use, or all but those kept for upkeep.

        Only the keeper frees the records of dead workers. If those took all while it is dead
        itself, it could never be started again.
        """
        free = [slot for slot in self.slots if slot.state == SlotState.FREE]
        if not upkeep and len(free) <= UPKEEP_RECORDS:
            return None
        # The one whose process died first: the deaths of late stay readable for longest.
        return min(free, key=lambda slot: slot.died_ns, default=None)

    def live(self) -> list[Slot]:
        """Return the records whose process has not died."""
        return [slot for slot in self.slots if slot.live]

    def dead(self) -> list[Slot]:
        """Return the records of dead processes that the keeper has not dealt with."""
        return [slot for slot in self.slots if slot.state == SlotState.DEAD]

    def close(self) -> None:
        """Let go of the mapping in this process."""
        for record in (*self.slots, *self._pool_records):
            record.release()
        self._words.release()
        self._mapping.close()

    def unlink(self) -> None:
        """Remove the file and the stack files; mappings stay usable."""
        shutil.rmtree(stacks_of(self.path), ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
