"""Run users of a database and kill them at random: under a supervisor, and without one."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from queue_core import Queue
from supervisor.slot import Kind
from tests.campaign import numbers
from tests.campaign.accounts import Books
from tests.campaign.roles import BATCH_MAX, HANDLERS, consume, produce, write
from tests.conftest import wait_until
from tests.process.service import Service

SETTLE_SECONDS_MAX = 90.0
KILLED = {"producer": 40, "worker": 42, "keeper": 13, "supervisor": 5}
"""Who is killed beside a supervisor, of a hundred."""
RELOAD_CHANCE = 0.05
FREEZE_CHANCE = 0.15
FREEZE_SECONDS_MAX = 5.0
"""A frozen consumer thaws when another has one of its jobs, which takes a lease and a backlog."""
FREEZE_TRIES = 50
HOLDS = """
SELECT job.id, run FROM job JOIN holder ON holder.id = job.holder
WHERE job.state = 'claimed' AND holder.worker = ?
"""
TAKEN = "SELECT 1 FROM job WHERE id = ? AND run > ? AND state = 'claimed'"


class Arena:
    """A database, those who use it, and whoever is killed next."""

    producers = 3

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder = folder
        self.chance = chance
        self.kills: list[tuple[int, int]] = []
        self.killed: Counter[str] = Counter()
        self._pids: dict[int, Callable[[int], None]] = {}
        self._kinds: dict[int, str] = {}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.database = folder / "data" / "herdsman.db"

    # ---- processes ----

    def begin(self) -> None:
        """Make the database, and start everybody."""
        (self.folder / "service_handlers.py").write_text(HANDLERS)
        with Queue(self.database, "work", max_depth=None) as queue:
            queue.counts()
            queue.put({"n": "first", "do": "ok", "times": 1, "ms": 0, "fill": ""})
        with closing(sqlite3.connect(self.database)) as connection:
            connection.execute("CREATE TABLE mine (n TEXT PRIMARY KEY)")
            connection.commit()
        self._fork("watcher", self._watch)
        for _ in range(self.producers):
            self._fork("producer", self._produce)

    def _watch(self, _seed: int) -> None:
        numbers.watch(self.folder, self.database)
        os._exit(0)

    def _produce(self, seed: int) -> None:
        produce(self.folder, self.database, "work", seed)

    def _fork(self, kind: str, work: Callable[[int], None]) -> int:
        seed = self.chance.getrandbits(60)  # of each child another
        if (pid := os.fork()) == 0:
            try:
                work(seed)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        self._pids[pid], self._kinds[pid] = work, kind
        return pid

    def _children(self, kind: str) -> list[int]:
        return [pid for pid, found in self._kinds.items() if found == kind]

    def _kill_child(self, pid: int) -> None:
        """Kill a child of ours and reap it."""
        kind = self._kinds.pop(pid)
        del self._pids[pid]
        gone, status = os.waitpid(pid, os.WNOHANG)
        if gone:
            raise AssertionError(f"a {kind} ended by itself, status {status}")
        self._kill(pid, kind)
        os.waitpid(pid, 0)

    def _kill(self, pid: int, kind: str) -> None:
        os.kill(pid, signal.SIGKILL)
        self.kills.append((pid, time.monotonic_ns()))
        self.killed[kind] += 1

    # ---- the campaign ----

    def strike(self) -> None:
        """Kill one process at random, and put another in its place."""
        raise NotImplementedError

    def campaign(self, kills: int, pause_seconds: float) -> None:
        """Kill until so many were."""
        while len(self.kills) < kills:
            time.sleep(self.chance.uniform(0, 2 * pause_seconds))
            self.strike()

    def settle(self) -> None:
        """End the producers, and wait until no job is left to do."""
        for pid in self._children("producer"):
            self._kill_child(pid)
        with Queue(self.database, "work") as queue:
            wait_until(
                lambda: queue.counts().live == 0,
                timeout_seconds=SETTLE_SECONDS_MAX,
                poll_seconds=0.05,
                what="every job is done or dead",
            )

    def books(self) -> Books:
        """Return the accounts, when everybody is gone; the last scrape is taken then."""
        (self.folder / numbers.ENOUGH).touch()
        for pid in self._children("watcher"):
            gone = wait_until(lambda pid=pid: self._ended(pid), what="the last scrape")
            assert gone == (pid, 0), f"the scrapes failed: {gone}"
            del self._pids[pid], self._kinds[pid]
        return Books(self.folder, self.database)

    def _ended(self, pid: int) -> tuple[int, int] | None:
        found = os.waitpid(pid, os.WNOHANG)
        return found if found[0] else None

    def faults(self, books: Books) -> list[str]:
        """Return what is wrong with the accounts, and with the numbers shown to operators."""
        # The first job, and what each killed producer may have put and not noted.
        found = list(books.faults(unnoted_max=1 + self.killed["producer"] * BATCH_MAX))
        self.scrapes = numbers.Scrapes.read(self.folder)
        return found + list(numbers.faults(books, self.scrapes, self.killed))

    def end(self) -> None:
        """Kill and reap whoever is left."""
        for pid in list(self._pids):
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        self._pids.clear()
        self._kinds.clear()


class Supervised(Arena):
    """Producers beside `herdsman run`: workers, keeper and the whole tree are killed too."""

    def begin(self) -> None:
        """Start the service as well."""
        self.service = Service(self.folder, processes=3, max_attempts=100, database=self.database)
        super().begin()
        self.service.started()

    def strike(self) -> None:
        """Kill a producer, a worker, the keeper, or all of them by way of the supervisor.

        Now and then it is made to reload, which replaces every worker meanwhile.
        """
        if self.chance.random() < RELOAD_CHANCE and self.service.pid_of(Kind.KEEPER):
            self.service.send(signal.SIGHUP)
        kind = self.chance.choices(list(KILLED), list(KILLED.values()))[0]
        if kind == "producer":
            self._kill_child(self.chance.choice(self._children("producer")))
            self._fork("producer", self._produce)
        elif kind == "supervisor":
            self._kill(self.service.pid, kind)
            self.service.wait()
            self.service.start()
        else:
            keeper = self.service.pid_of(Kind.KEEPER)
            pids = [keeper] if kind == "keeper" else list(self.service.workers().values())
            if pids and all(pids):
                with suppress(ProcessLookupError):
                    self._kill(self.chance.choice(pids), kind)

    def settle(self) -> None:
        """Let the service finish what is left, and stop it."""
        super().settle()
        code = self.service.stop()
        assert code == 0, self.service.output()

    def end(self) -> None:
        """Leave nothing of the service either."""
        super().end()
        if hasattr(self, "service"):
            self.service.clean()


class Library(Arena):
    """Producers and get-and-ack loops that use the library alone."""

    consumers = 3

    def begin(self) -> None:
        """Start the loops as well."""
        self._frozen: dict[int, tuple[float, list[tuple[int, int]]]] = {}
        """Until when at most each is frozen, and the claims it had."""
        self._thawed: dict[int, list[tuple[int, int]]] = {}
        """Who is awake again, and has not tried to settle all of them yet."""
        self._lost = False
        super().begin()
        for _ in range(self.consumers):
            self._fork("consumer", self._consume)

    def _consume(self, _seed: int) -> None:
        consume(self.folder, self.database, "work")

    def strike(self) -> None:
        """Kill a producer or a consumer; freeze one now and then, so that its lease is lost."""
        self._thaw()
        # Who is killed before would not try to settle a lost claim.
        spared = self._frozen.keys() | self._thawed.keys()
        awake = [pid for pid in self._children("consumer") if pid not in spared]
        # A short campaign tries the fence too.
        if len(awake) > 1 and (not self._lost or self.chance.random() < FREEZE_CHANCE):
            self._freeze(self.chance.choice(awake))
            return
        kind = self.chance.choice(["producer", "consumer"] if awake else ["producer"])
        pid = self.chance.choice(awake if kind == "consumer" else self._children(kind))
        work = self._pids[pid]
        self._kill_child(pid)
        self._fork(kind, work)

    def _freeze(self, pid: int) -> None:
        """Freeze a consumer that holds claims, if it soon does: those are lost meanwhile.

        Not while it holds a lock, though, which would let nobody take them, and SQLite's
        readers, ours too, give up.
        """
        claims: list[tuple[int, int]] = []
        for _ in range(FREEZE_TRIES):
            os.kill(pid, signal.SIGSTOP)
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
            if not self._locks(pid):
                with closing(sqlite3.connect(self.database)) as connection:
                    claims = connection.execute(HOLDS, (f"pid {pid}",)).fetchall()
                if claims:
                    break
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.002)
        else:
            return  # nothing to lose
        for claim in claims:
            write(self.folder, "frozen", *claim)
        self._frozen[pid] = (time.monotonic() + FREEZE_SECONDS_MAX, claims)

    def _locks(self, pid: int) -> bool:
        """Whether a stopped process keeps others from the database: by our lock, or SQLite's.

        What /proc/locks tells of all processes is read in pieces, and may leave some out.
        """
        for info in Path(f"/proc/{pid}/fdinfo").iterdir():
            path = os.readlink(f"/proc/{pid}/fd/{info.name}")
            if path in (f"{self.database}.lock", f"{self.database}-shm"):
                found = [line.split() for line in info.read_text().splitlines()]
                if any(line[0] == "lock:" and "WRITE" in line for line in found):
                    return True
        return False

    def _thaw(self) -> bool:
        """Wake whose jobs are another's now, or who slept long enough.

        Whoever has such a job lingers over it, so that the sleeper tries to settle it too. Return
        whether nobody is frozen, or is yet to try.
        """
        with closing(sqlite3.connect(self.database)) as connection:
            for pid, (until, claims) in list(self._frozen.items()):
                taken = any(connection.execute(TAKEN, claim).fetchone() for claim in claims)
                if taken or time.monotonic() > until:
                    self._lost |= taken
                    self._thawed[pid] = claims
                    del self._frozen[pid]
                    os.kill(pid, signal.SIGCONT)
        if self._thawed:
            notes = (self.folder / "notes").read_text(errors="replace")
            for pid, claims in list(self._thawed.items()):
                if all(
                    any(f"\n{word} {id_} {run} " in notes for word in ("settled", "stale"))
                    for id_, run in claims
                ):
                    del self._thawed[pid]
        return not self._frozen and not self._thawed

    def settle(self) -> None:
        """Let the loops finish what is left, and end them."""
        wait_until(self._thaw, poll_seconds=0.02, what="the frozen have settled what they can")
        super().settle()
        for pid in self._children("consumer"):
            self._kill_child(pid)
