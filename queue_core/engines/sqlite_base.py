"""Hold what every transition of the SQLite engine needs: the file, names, bells, options.

Boundary: opening, waiting, the caller's own transactions, upkeep of the file and
plain reads. The transitions themselves are `sqlite.py`'s.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from queue_core.clock import Clock, SystemClock
from queue_core.doorbell import BELLS, Doorbell
from queue_core.engine import Caps
from queue_core.engines import sqlite_reads, sqlite_schema
from queue_core.engines.sql import SQL
from queue_core.engines.sqlite_file import CHECKPOINT_BYTES
from queue_core.engines.sqlite_handle import Durability
from queue_core.engines.sqlite_shared import SharedFile
from queue_core.errors import DatabaseUnavailable, PayloadInvalid, QueueError
from queue_core.job import Reason, Record, State
from queue_core.lockfile import NETWORK_FILESYSTEMS, filesystem_type
from queue_core.stats import OPERATED, Snapshot, Tally

T = TypeVar("T")
_log = logging.getLogger("queue_core.queue")

DATA_VERSION_SECONDS: Final = 1.0
"""How often a waiter looks for commits of writers that do not ring."""


class SqliteBase:
    """The engine without its transitions."""

    def __init__(
        self,
        path: str | Path,
        *,
        clock: Clock | None = None,
        lock: Literal["flock", "off"] = "flock",
        durability: Durability = "full",
        lock_timeout_seconds: float = 30.0,
        flush_finishes: bool = True,
        create: bool = True,
        network_filesystem: bool = False,
        unsafe_sqlite: bool = False,
        via: Literal["library", "cli", "web", ""] = "library",
    ) -> None:
        """Name the file; it is opened when first used.

        `flush_finishes` False leaves the flush of acks to a keeper. `create`
        False refuses a file that is not there. `network_filesystem` True
        allows one, where neither lock nor log can be trusted. `lock` "off" (or
        HERDSMAN_NO_FLOCK=1) is for file systems without flock; on a SQLite that
        needs the lock to be safe it takes `unsafe_sqlite` (or
        HERDSMAN_UNSAFE_SQLITE=1) as well. `via` says in the
        numbers who acts here; "" is upkeep, which no operator asked for.
        """
        if lock == "flock" and os.environ.get("HERDSMAN_NO_FLOCK") == "1":
            lock = "off"
        self._unsafe = unsafe_sqlite or os.environ.get("HERDSMAN_UNSAFE_SQLITE") == "1"
        self._unlocked = lock == "off"
        self.path = Path(os.path.realpath(path))
        self.clock: Clock = clock or SystemClock()
        self._create = create
        self._network = network_filesystem
        self._via = via
        self._flush_finishes = flush_finishes
        self._ids: dict[str, int] = {}
        self._bell = Doorbell(Path(f"{self.path}.bells"), number_of=self._bell_of)
        self._names: dict[int, str] = {}
        self._holders: dict[int, dict[str, Any]] = {}
        self._seen_version = -1
        self._rung = False  # a bell woke us
        self._looked = False  # and before, there was nothing to claim
        self._rung_after: set[str] = set()
        self._file = SharedFile(
            self.path,
            bells=self._bell.folder,
            clock=self.clock,
            check=self.check_place,
            prepare=self._prepare,
            abandon=self._bell.abandon,
            lock=lock,
            durability=durability,
            lock_timeout_seconds=lock_timeout_seconds,
        )

    @property
    def caps(self) -> Caps:
        """One host; a put rings a pipe."""
        return Caps(multi_host=False, wait_push=True)

    def now_us(self) -> int:
        """Return the wall time of this engine's clock."""
        return self.clock.wall_us()

    def _prepare(self, connection: sqlite3.Connection) -> None:
        self._ids.clear()
        self._names.clear()
        sqlite_schema.prepare(connection, self.path, self.clock)

    def check_place(self) -> None:
        """Refuse where no database can be, and where none is when none is to be made."""
        if self.path.is_dir():
            raise DatabaseUnavailable(f"{self.path} is a folder; name a file")
        there = self.path.exists()
        if not self._create and not (there and self.path.stat().st_size):
            what = "is empty" if there else "does not exist"
            raise DatabaseUnavailable(
                f"{self.path} {what}; start 'herdsman run', or check the path"
            )
        version = sqlite3.sqlite_version_info
        if self._unlocked and not self._unsafe and sqlite_schema.has_wal_reset_bug(version):
            raise DatabaseUnavailable(
                f"{self.path}: SQLite {sqlite3.sqlite_version} can damage a log that two "
                "processes reset at once, which the lock prevents; keep it, use SQLite 3.51.3 "
                "or later, or allow this by name with unsafe_sqlite=True"
            )
        kind = filesystem_type(self.path.parent)
        if kind in NETWORK_FILESYSTEMS and not self._network:
            raise DatabaseUnavailable(
                f"{self.path} is on a network filesystem ({kind}), where locks cannot be trusted; "
                "use a local disk, or allow it by name"
            )

    # ------------------------------------------------------------ helpers

    def _write(
        self,
        work: Callable[[sqlite3.Connection, Tally, int], T],
        *,
        flush: bool,
        operation: str,
        tally: Tally | None = None,
        ring: Callable[[T], None] | None = None,
    ) -> T:
        """Run `work(connection, tally, now)` in a transaction that also stores its tally.

        What is in `tally` already is stored with it. `operation` is one of `stats.OPERATIONS`.
        `ring` is called with the result before the flush: a waiter begins while the disk works.
        """
        return self._file.write(
            lambda connection: self._counted(connection, work, tally),
            flush=flush,
            operation=operation,
            ring=ring,
        )

    def _counted(
        self,
        connection: sqlite3.Connection,
        work: Callable[[sqlite3.Connection, Tally, int], T],
        before: Tally | None = None,
    ) -> T:
        tally = Tally() if before is None else before.copy()
        result = work(connection, tally, self.clock.wall_us())
        if not self._file.user_transaction:  # its user may yet undo it
            self._file.times.give(tally, self.clock.monotonic_us() * 1000)
        connection.executemany(SQL["stat_add"], tally.rows())
        if errors := tally.errors():
            connection.executemany(SQL["stat_add_error"], [row._asdict() for row in errors])
        return result

    def _operated(self, tally: Tally, action: str, number: int = 1) -> None:
        """Count an operator's action that changed something; the keeper is no operator."""
        if self._via and number:
            tally.add(0, "", OPERATED, f"{action}|{self._via}")

    def _queue_id(self, connection: sqlite3.Connection, name: str) -> int | None:
        """Return a queue's number. Numbers are for ever, so what was read stays true."""
        found = self._ids.get(name)
        if found is None:
            row = connection.execute(SQL["queue_id"], {"name": name}).fetchone()
            if row is None:
                return None
            found = row[0]
            # A user's transaction that made the queue may yet be undone.
            if not self._file.user_transaction:
                self._ids[name] = found
                self._names[found] = name
        return found

    def _queue_made(self, connection: sqlite3.Connection, name: str, now_us: int) -> int:
        found = self._queue_id(connection, name)
        if found is None:
            row = connection.execute(SQL["queue_insert"], {"name": name, "now": now_us}).fetchone()
            found = row[0]
        return int(found)

    def _all_names(self, connection: sqlite3.Connection) -> Mapping[int, str]:
        return dict(connection.execute(SQL["queue_ids"]).fetchall())

    def _ring(self, names: Iterable[str]) -> None:
        for name in names:
            self._bell.ring(name)

    # ------------------------------------------------------------ the rest

    def configure(self, queue: str, **options: Any) -> None:
        """Store options of a queue; those not named stay as they are.

        Of two who want different limits the later one has its way, so the log says it.
        """
        changed: dict[str, tuple[int, Any]] = {}
        names = ("paused", "max_depth", "key_ttl_us", "keep_done_us", "keep_dead_us")
        if unknown := set(options) - set(names):
            raise PayloadInvalid(f"queue {queue!r} has no option {', '.join(sorted(unknown))}")

        def stored(connection: sqlite3.Connection, queue_id: int) -> dict[str, Any]:
            row = connection.execute(SQL["queue_options"], {"queue": queue_id}).fetchone()
            return dict(zip(names, row, strict=True))

        def same(connection: sqlite3.Connection) -> bool:
            queue_id = self._queue_id(connection, queue)
            if queue_id is None:
                return False
            now = stored(connection, queue_id)
            return now | options == now

        def work(connection: sqlite3.Connection, tally: Tally, now_us: int) -> None:
            queue_id = self._queue_made(connection, queue, now_us)
            before = stored(connection, queue_id)
            merged = before | options
            merged["paused"] = int(merged["paused"])
            if merged["paused"] != before["paused"]:
                self._operated(tally, "pause" if merged["paused"] else "resume")
            connection.execute(SQL["queue_configure"], merged | {"queue": queue_id})
            changed.update(
                (name, (before[name], merged[name]))
                for name in names[1:]
                if before[name] not in (None, merged[name])
            )

        if not self._file.read(same):
            self._write(work, flush=True, operation="other", ring=lambda _: self._bell.ring(queue))
        for name, (old, new) in changed.items():
            _log.warning("queue %r: %s was %s and is now %s, for everybody", queue, name, old, new)

    def wait(
        self, queues: Sequence[str] | None, timeout_seconds: float, wake_fd: int | None = None
    ) -> bool:
        """Sleep until a put rings, `wake_fd` is readable or time is up; only ever a hint."""
        deadline = self.clock.monotonic_us() + int(timeout_seconds * 1_000_000)
        while True:
            self._learn(queues)
            left_seconds = (deadline - self.clock.monotonic_us()) / 1_000_000
            slice_seconds = min(max(0.0, left_seconds), DATA_VERSION_SECONDS)
            if self._bell.wait(queues, slice_seconds, wake_fd):
                self._rung = True
                return True
            version = self._file.data_version()
            changed, self._seen_version = version != self._seen_version, version
            if changed or left_seconds <= slice_seconds or _readable(wake_fd):
                return changed

    def version(self) -> int:
        """Return a number that changes whenever anything was committed by anybody."""
        return self._file.data_version() << 32 | self._file.commits

    def listen(self, queues: Sequence[str] | None) -> None:
        """Open the bells, before the look that precedes a sleep: no ring is lost between."""
        self._learn(queues)
        self._bell.listen(queues)

    def _bell_of(self, queue: str) -> int:
        """Return a queue's bell: 0 until it is stored, then one by its number.

        So no two of the first 63 queues share one. Where two do, a waiter of one is woken for
        the other, in vain, and the one that was meant looks a second later.
        """
        number = self._ids.get(queue)
        return 0 if number is None else 1 + number % (BELLS - 1)

    def _learn(self, queues: Sequence[str] | None) -> None:
        """Look up the numbers of queues that had none when last asked; it may fail to."""
        unknown = [name for name in queues or () if name not in self._ids]
        if unknown:
            with contextlib.suppress(QueueError):  # who claims next says what the trouble is
                self._file.read(
                    lambda connection: [self._queue_id(connection, name) for name in unknown]
                )

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Open a write transaction that the caller's own statements and `enqueue` share."""
        with self._file.transaction() as connection:
            self._rung_after.clear()
            yield connection
            rung = set(self._rung_after)
        self._ring(rung)

    def checkpoint_due(self) -> bool:
        """Whether the log has grown to where a keeper checkpoints."""
        return self._file.log_bytes() >= CHECKPOINT_BYTES

    def checkpoint(self) -> bool:
        """Copy the log into the file; return whether all of it was."""
        return self._file.checkpoint()

    def flush(self) -> None:
        """Make everything committed so far, by any process, survive a power cut."""
        self._file.flush()

    def close(self) -> None:
        """Release files and connections for good."""
        self._bell.close()
        self._file.close()

    def _scope(self, connection: sqlite3.Connection, queue: str | None) -> int | None:
        """Return a queue's number, None for all queues, and -1 for one that does not exist."""
        return None if queue is None else (self._queue_id(connection, queue) or -1)

    def _ring_ids(self, queues: Iterable[int]) -> None:
        """Ring after a commit; a hint that fails must not make what was done look undone."""
        with contextlib.suppress(QueueError):
            for queue in queues:
                name = self._names.get(queue)
                if name is None:
                    self._names.update(self._file.read(self._all_names))
                    name = self._names[queue]
                self._bell.ring(name)

    # ------------------------------------------------------------ counts

    def counts(self, queue: str) -> dict[str, int]:
        """Return jobs per state now, and the totals since the queue began."""
        return self._file.read(
            lambda connection: sqlite_reads.counts(
                connection, self._queue_id(connection, queue) or -1
            ),
            snapshot=True,
        )

    def find(self, job_id: int) -> Record | None:
        """Return one job in whatever state, with its ledger."""
        return self._file.read(
            lambda connection: sqlite_reads.find(connection, self._all_names(connection), job_id),
            snapshot=True,
        )

    def peek(self, queue: str) -> Record | None:
        """Return the job of a queue that would be claimed next, without claiming it."""
        return self._file.read(
            lambda connection: sqlite_reads.peek(
                connection, self._all_names(connection), self._scope(connection, queue) or -1
            ),
            snapshot=True,
        )

    def select(
        self,
        state: State,
        *,
        queue: str | None = None,
        task: str | None = None,
        reason: Reason | None = None,
        limit: int = 100,
        after: int = 0,
        newest: bool = False,
    ) -> list[Record]:
        """Return one page of jobs in a state, by id, after the id `after`; without ledgers.

        With `newest` the dead of a queue, or of all, who died last come first.
        """
        return self._file.read(
            lambda connection: sqlite_reads.select(
                connection, self._all_names(connection), state,
                queue=self._scope(connection, queue), task=task, reason=reason,
                limit=limit, after=after, newest=newest,
            ),
            snapshot=True,
        )  # fmt: skip

    def snapshot(self) -> Snapshot:
        """Read every number in one transaction."""
        log_bytes = self._file.log_bytes()
        return self._file.read(
            lambda connection: sqlite_reads.snapshot(
                connection, self.clock.wall_us(), self.clock.monotonic_us(), log_bytes
            ),
            snapshot=True,
        )


def _readable(descriptor: int | None) -> bool:
    return descriptor is not None and bool(select.select([descriptor], [], [], 0)[0])
