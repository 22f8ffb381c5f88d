"""Run a real supervisor over dummy jobs, in a process of its own, and look at it from outside.

As a script it is the supervisor: its workers take files from `jobs/` as jobs, each
holding one line such as `sleep 0.5`. As a module it is `Host`, with which a test starts
that script, signals it and reads the slots.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import termios
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.process.template import Copy

ROOT = Path(__file__).resolve().parents[2]
MARK = "HERDSMAN_TEST_TREE"

# ---- the supervisor's side ------------------------------------------------------------------


def note(path: Path, value: object) -> None:
    """Write a file that is either absent or whole."""
    path.with_suffix(".new").write_text(str(value))
    path.with_suffix(".new").rename(path)


def act(line: str, folder: Path) -> None:
    """Do what a job says."""
    word, _, rest = line.partition(" ")
    ACTIONS[word](rest, folder)


def _hold_gil(rest: str, folder: Path) -> None:
    library = ctypes.PyDLL(None)
    until = time.monotonic() + float(rest)
    while time.monotonic() < until:
        library.usleep(999_999)


def _grandchild(rest: str, folder: Path) -> None:
    """Fork a process that goes on for long, `setsid` out of the group; then do the rest."""
    word, _, after = rest.partition(" ")
    pid = os.fork()
    if pid == 0:
        if word == "setsid":
            os.setsid()
        time.sleep(600)
        os._exit(0)
    note(folder / "grandchild", pid)
    if after:
        act(after, folder)


def _exec(rest: str, folder: Path) -> None:
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    note(folder / "grandchild", child.pid)
    if rest:
        act(rest, folder)


def _double_fork(rest: str, folder: Path) -> None:
    for _ in range(int(rest)):
        pid = os.fork()
        if pid == 0:
            if os.fork() == 0:
                os._exit(0)
            os._exit(0)
        os.waitpid(pid, 0)


def _spin(rest: str, folder: Path) -> None:
    until = time.monotonic() + float(rest)
    while time.monotonic() < until:
        pass


def _steal_signals(rest: str, folder: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    signal.set_wakeup_fd(-1)


def _count_terms(rest: str, folder: Path) -> None:
    """Count the TERMs that come within a while."""
    terms: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, frame: terms.append(signum))
    note(folder / "counting", os.getpid())
    until = time.monotonic() + float(rest)
    while time.monotonic() < until:
        time.sleep(0.01)
    note(folder / "terms", len(terms))


def _leave_thread(rest: str, folder: Path) -> None:
    threading.Thread(target=time.sleep, args=(1e6,), daemon=False).start()


def _kill_self(rest: str, folder: Path) -> None:
    os.kill(os.getpid(), int(rest))


def _allocate(rest: str, folder: Path) -> None:
    block = bytearray(int(rest))
    block[::4096] = b"x" * len(block[::4096])
    time.sleep(600)


def _raise(rest: str, folder: Path) -> None:
    raise getattr(builtins, rest)


class _Blocked:
    def flush(self) -> None:
        time.sleep(600)


def _block_output(rest: str, folder: Path) -> None:
    """Hang at the very end of the process."""
    setattr(sys, "stdout", _Blocked())  # noqa: B010


def _close_output(rest: str, folder: Path) -> None:
    os.close(1)
    os.close(2)


def _deaf(rest: str, folder: Path) -> None:
    """Swallow every interruption."""
    until = time.monotonic() + float(rest)
    while time.monotonic() < until:
        with contextlib.suppress(BaseException):
            time.sleep(0.05)


def _later(rest: str, folder: Path) -> None:
    seconds, _, line = rest.partition(" ")
    time.sleep(float(seconds))
    act(line, folder)


def _babble(rest: str, folder: Path) -> None:
    def deeper(steps: int) -> str:
        return deeper(steps - 1) if steps else traceback.format_exc()

    while not (folder / rest).exists():
        for _ in range(100):
            deeper(5)


def _fault_on_abort(rest: str, folder: Path) -> None:
    """Have ABRT jump to where there is no code, as if it were fatal to write the stack."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(signal.SIGABRT, 8)
    time.sleep(600)


def _until(rest: str, folder: Path) -> None:
    while not (folder / rest).exists():
        time.sleep(0.01)


def _environment(rest: str, folder: Path) -> None:
    (folder / "environment").write_text(json.dumps(dict(os.environ)))


def _deaf_to_questions(rest: str, folder: Path) -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    _until("gate", folder)


ACTIONS: dict[str, Callable[[str, Path], None]] = {
    "sleep": lambda rest, folder: time.sleep(float(rest)),
    "hold_gil": _hold_gil,
    "grandchild": _grandchild,
    "exec": _exec,
    "double_fork": _double_fork,
    "spin": _spin,
    "steal_signals": _steal_signals,
    "count_terms": _count_terms,
    "leave_thread": _leave_thread,
    "kill_self": _kill_self,
    "segv": lambda rest, folder: ctypes.string_at(0) and None,
    "sigsegv": lambda rest, folder: faulthandler._sigsegv(),
    "exit_now": lambda rest, folder: os._exit(int(rest)),
    "sys_exit": lambda rest, folder: sys.exit(int(rest)),
    "raise": _raise,
    "allocate": _allocate,
    "close_output": _close_output,
    "block_output": _block_output,
    "deaf": _deaf,
    "environment": _environment,
    "until": _until,
    "deaf_to_questions": _deaf_to_questions,
    "fault_on_abort": _fault_on_abort,
    "stick": lambda rest, folder: sum(itertools.repeat(1)) and None,
    "babble": _babble,
    "later": _later,
    "nothing": lambda rest, folder: None,
}


def take_job(folder: Path) -> Path | None:
    """Claim the oldest file."""
    for path in sorted((folder / "jobs").iterdir()):
        with contextlib.suppress(OSError):
            return path.rename(folder / "claimed" / path.name)
    return None


def stick(folder: Path, state: str) -> None:
    """Hang when a file says that it is to be in this state; once."""
    path = folder / f"stick_{state}"
    if path.exists():
        path.unlink()
        time.sleep(600)


def boot(folder: Path, name: str) -> int | None:
    """Do what the file `boot` says at each start; an exit code, or None to go on."""
    line = (folder / "boot").read_text() if (folder / "boot").exists() else ""
    with open(folder / "boots", "a") as file:  # only now, or a test could change `boot` before
        file.write(f"{name} {time.monotonic()}\n")
    word, _, rest = line.partition(" ")
    if word == "exit":
        return int(rest)
    if word == "raise":
        raise ImportError("no module named handlers")
    if word == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if word == "sleep":
        time.sleep(float(rest))
    return None


def make_worker(folder: Path, options: dict[str, Any]) -> Callable[[Any], int]:
    """Return the main of a worker."""
    from supervisor.child import JobInterrupted, SoftTimeout
    from supervisor.slot import SlotState

    hard_seconds = options.get("hard_seconds", 60)
    soft_seconds = options.get("soft_seconds")
    version = options.get("version", "")

    def run_job(child: Any, path: Path) -> None:
        slot = child.slot
        slot.begin_batch([(int(path.name), 1)])
        now_ns = time.monotonic_ns()
        if not slot.start(0, hard_ns=now_ns + int(hard_seconds * 1e9)):
            return
        if soft_seconds:
            signal.setitimer(signal.ITIMER_REAL, soft_seconds)
        try:
            with child.interruptible():
                act(path.read_text(), folder)
        except (JobInterrupted, SoftTimeout) as error:
            slot.enter(SlotState.SETTLE)
            slot.finish_failed()
            path.rename(folder / type(error).__name__ / path.name)
        except BaseException as error:
            slot.enter(SlotState.SETTLE)
            slot.finish_failed()
            (folder / "failed" / path.name).write_text(repr(error))
        else:
            slot.finish_ok(0, 1)
            slot.enter(SlotState.SETTLE)
            stick(folder, "SETTLE")
            (folder / "done" / path.name).write_text(f"{os.getpid()}{version}")
        child.rearm()
        slot.end_batch()

    def main(child: Any) -> int:
        code = boot(folder, child.name)
        if code is not None:
            child.slot.note = f"left at boot with code {code}"
            return code
        child.ready()
        while not child.stopping:
            child.slot.enter(SlotState.CLAIM)
            stick(folder, "CLAIM")
            path = take_job(folder)
            if path is not None:
                run_job(child, path)
                continue
            child.slot.enter(SlotState.IDLE)
            select.select([child.wake_fd], [], [], 0.02)
            child.clear_wake()
            if child.reopen_logs:
                child.reopen_logs = False
                (folder / "reopened" / f"{child.name.replace('/', '-')}").touch()
        return 0

    return main


def make_keeper(folder: Path, options: dict[str, Any]) -> Callable[[Any], int]:
    """Return the main of a keeper, which writes down every death and frees its slot."""
    from supervisor.policy import cause_of

    def main(child: Any) -> int:
        if (folder / "keeper_boot").exists():
            child.slot.note = "the database is broken"
            return int((folder / "keeper_boot").read_text())
        child.ready()
        number = 0
        while not child.stopping:
            if (folder / "keeper_hang").exists():
                time.sleep(600)
            for slot in [] if (folder / "keeper_blind").exists() else child.table.dead():
                batch = slot.batch()
                cause = cause_of(slot.cause)
                fact = {
                    "name": slot.name,
                    "pid": slot.pid,
                    "cause": cause and str(cause),
                    "signal": slot.signal,
                    "exit_code": slot.exit_code,
                    "job": slot.job,
                    "running": batch.running if batch else None,
                    "stack": slot.stack_text(),
                    "note": slot.note,
                    "leaked": slot.leaked,
                    "after_seconds": (time.monotonic_ns() - slot.died_ns) / 1e9,
                }
                number += 1
                path = folder / "deaths" / f"{os.getpid()}-{number:04}"
                path.with_suffix(".new").write_text(json.dumps(fact))
                path.with_suffix(".new").rename(path)
                slot.free()
            select.select([child.wake_fd], [], [], 0.5)
            child.clear_wake()
            child.slot.beat()
        note(folder / "keeper_left", f"{child.orphaned} {time.monotonic()}")
        return 0

    return main


def make_web(folder: Path) -> Callable[[Any], int]:
    """Return the main of `web`, which notes when it left."""

    def main(child: Any) -> int:
        child.ready()
        while not child.stopping:
            select.select([child.wake_fd], [], [], 1)
            child.clear_wake()
            child.slot.beat()
        (folder / "web_left").write_text(str(time.monotonic()))
        return 0

    return main


def make_tree(folder: Path, table: Any, lock_fd: int) -> Any:
    """Build the tree from `options.json`, which a test may change before a HUP."""
    from supervisor.supervise import PoolSpec, Tree

    options = json.loads((folder / "options.json").read_text())
    pools = [
        PoolSpec(name=name, processes=processes, main=make_worker(folder, options), **extra)
        for name, processes, extra in options["pools"]
    ]

    def validate() -> int:
        if (folder / "validate").exists():
            act((folder / "validate").read_text(), folder)
        return 0

    return Tree(
        pools=pools,
        keeper=make_keeper(folder, options),
        web=make_web(folder) if options.get("web") else None,
        table=table,
        lock_fd=lock_fd,
        grace_seconds=options.get("grace_seconds", 20),
        boot_seconds=options.get("boot_seconds", 60),
        reload=lambda: make_tree(folder, table, lock_fd),
        validate=validate,
        reopen_logs=(folder / "reopened" / "supervisor").touch,
    )


def take_from_under(path: Path) -> None:
    """Kill and reap the process that a file names, as a library in this process might."""
    if path.exists():
        pid = int(path.read_text())
        path.unlink()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def serve(folder: Path) -> int:
    """Be the supervisor."""
    sys.modules["rich"] = None  # type: ignore[assignment]  # structlog takes it up where it is
    import structlog

    from supervisor.slots import SlotTable, previous_slots, slots_capacity
    from supervisor.supervise import run, sweep

    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str),
        ],
        logger_factory=structlog.WriteLoggerFactory(file=(folder / "log").open("a", buffering=1)),
    )
    options = json.loads((folder / "options.json").read_text())
    for name, value in options.get("constants", {}).items():
        module, _, constant = name.rpartition(".")
        loaded = importlib.import_module(module)
        assert hasattr(loaded, constant), name
        setattr(loaded, constant, value)
    if options.get("fork_hook_seconds"):
        os.register_at_fork(after_in_child=lambda: time.sleep(options["fork_hook_seconds"]))
    if options.get("foreign_wait"):
        os.register_at_fork(before=lambda: take_from_under(folder / "victim"))
    if options.get("thread"):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    lock_fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    path = folder / "tree.slots"
    processes = sum(number for _, number, _ in options["pools"])
    table = SlotTable.create(
        path,
        instance_uuid=str(uuid.uuid4()),
        pools=[name for name, _, _ in options["pools"]],
        capacity=options.get("capacity", slots_capacity(processes)),
    )
    for left in previous_slots(path):
        note(folder / "swept", sweep(SlotTable.attach(left)))
    if options.get("baseline"):
        (folder / "baseline").write_text(str(len(os.listdir("/proc/self/fd"))))
    gc.collect()
    gc.freeze()  # as the service does, so that its processes share memory
    code = run(make_tree(folder, table, lock_fd))
    (folder / "left").write_text(str(time.monotonic()))
    return code


# ---- the test's side ------------------------------------------------------------------------


class Host:
    """A supervisor under test, and everything one can see of it."""

    by_template = False
    """Whether it is forked by a process that has imported everything, instead of executed."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.mark = str(uuid.uuid4())
        boot_seconds = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._began_ticks = int(boot_seconds * os.sysconf("SC_CLK_TCK"))
        for name in ("jobs", "claimed", "done", "failed", "deaths", "reopened", "JobInterrupted",
                     "SoftTimeout"):  # fmt: skip
            (folder / name).mkdir(exist_ok=True)
        self.options = {"pools": [["a", 2, {}]], **options}
        self.configure()
        self.process: subprocess.Popen[bytes] | Copy | None = None
        self._started: list[subprocess.Popen[bytes] | Copy] = []
        self._table: Any = None
        self._job = 0

    def configure(self, **options: Any) -> None:
        """Write the options; a running supervisor reads them at HUP."""
        self.options |= options
        (self.folder / "options.json").write_text(json.dumps(self.options))

    def start(self, *, terminal: int | None = None, **environment: str) -> Host:
        """Start the supervisor, without a terminal unless one is given."""

        def take_terminal() -> None:
            if terminal is not None:
                fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

        environ = {**os.environ, "PYTHONPATH": str(ROOT), MARK: self.mark, **environment}
        with (self.folder / "out").open("ab") as out:
            if self.by_template and terminal is None:
                from tests.process.template import template

                self.process = template("host").start(
                    self.folder, folder=ROOT, environ=environ, out=out.fileno()
                )
            else:
                self.process = subprocess.Popen(
                    [sys.executable, "-X", "faulthandler", __file__, str(self.folder)],
                    stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=ROOT, env=environ,
                    start_new_session=True,  # out of the test's own terminal and group
                    preexec_fn=take_terminal,
                )  # fmt: skip
        self._started.append(self.process)
        self._table = None
        return self

    def started(self) -> Host:
        """Start, and wait until every worker is READY."""
        from tests.conftest import wait_until

        self.start()
        number = sum(processes for _, processes, _ in self.options["pools"])
        enough = "all workers are READY"
        wait_until(lambda: len(self.workers()) == number, what=enough)
        return self

    @property
    def pid(self) -> int:
        """Process id of the supervisor."""
        assert self.process is not None
        return self.process.pid

    @property
    def table(self) -> Any:
        """The slots, attached read-only."""
        from supervisor.slots import SlotTable

        if self._table is None:
            table = SlotTable.attach(self.folder / "tree.slots", writable=False)
            assert table.supervisor_pid == self.pid, "the slots of the run before"
            self._table = table
        return self._table

    def send(self, signum: int) -> None:
        """Signal the supervisor."""
        os.kill(self.pid, signum)

    def wait(self, seconds: float = 20.0) -> int:
        """Wait until the supervisor has left; return its exit code."""
        assert self.process is not None
        return self.process.wait(seconds)

    def stop(self) -> int:
        """Drain, and return the exit code."""
        self.send(signal.SIGTERM)
        return self.wait()

    def put(self, *lines: str) -> list[int]:
        """Add jobs; return their numbers."""
        numbers = []
        for line in lines:
            self._job += 1
            path = self.folder / f"job{self._job}"
            path.write_text(line)
            path.rename(self.folder / "jobs" / f"{self._job:06}")
            numbers.append(self._job)
        return numbers

    def slots(self) -> list[Any]:
        """Return the slots of live processes; none before there is a table."""
        try:
            return [slot for slot in self.table.slots if slot.live]
        except Exception:
            return []

    def workers(self, pool: str = "") -> dict[str, int]:
        """Return the READY workers: name to pid, which is never 0 as that of a freed slot."""
        return {
            slot.name: pid
            for slot in self.slots()
            if slot.kind == 0 and slot.ready_ns and slot.name.startswith(pool) and (pid := slot.pid)
        }

    def running(self, job: int) -> Any:
        """Return the slot that runs a job, None when there is none."""
        return next((s for s in self.slots() if s.state == 4 and s.job == job), None)

    def pid_of(self, name: str) -> int:
        """Return the pid of a READY process, 0 when there is none."""
        return next((s.pid for s in self.slots() if s.name == name and s.ready_ns), 0)

    def names(self, kind: str) -> list[int]:
        """Return the jobs in a folder: done, failed, claimed, JobInterrupted, SoftTimeout."""
        return sorted(int(path.name) for path in (self.folder / kind).iterdir())

    def deaths(self) -> list[dict[str, Any]]:
        """Return what the keeper read from the slots of the dead."""
        paths = sorted(p for p in (self.folder / "deaths").iterdir() if p.suffix != ".new")
        return [json.loads(path.read_text()) for path in paths]

    def events(self, name: str = "") -> list[dict[str, Any]]:
        """Return the log lines of an event."""
        path = self.folder / "log"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines]
        return [line for line in found if not name or line["event"] == name]

    def boots(self) -> int:
        """Return how many workers have begun to boot."""
        path = self.folder / "boots"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def output(self) -> str:
        """Return what the tree wrote to its output."""
        return (self.folder / "out").read_text(errors="replace")

    def all_processes(self) -> list[int]:
        """Return every living process that descends from this supervisor, forked or executed.

        By session (each supervisor leads one) and by the mark in the environment; a process
        title lies over the environment of those that were only forked.
        """
        wanted = f"{MARK}={self.mark}".encode()
        sessions = {one.pid for one in self._started}
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                if fields[0] in "ZX" or int(fields[19]) < self._began_ticks:
                    continue  # ended, or older than the supervisor
                ours = int(fields[3]) in sessions
                if ours or wanted in Path(f"/proc/{name}/environ").read_bytes():
                    found.append(int(name))
        return found

    def clean(self) -> None:
        """Kill whatever is left."""
        from tests.process.template import let_go

        for pid in self.all_processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        let_go(self._started)


def alive(pid: int) -> bool:
    """Say whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(serve(Path(sys.argv[1])))
