"""Run the whole service as an operator does, and look at it from outside.

A `Service` is `python -m supervisor run` over a configuration and handlers of its own: a
test puts jobs through the library, sends signals, and reads slots, pages and the handlers'
notes. The web listens on a port that the system chooses.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from queue_core import Job, Queue, State
from supervisor.cli import main
from supervisor.slot import Kind, Slot, SlotState
from supervisor.slots import SlotsError, SlotTable, find_slots, slots_path
from tests.conftest import wait_until
from tests.process.template import Copy, let_go, template

ROOT = Path(__file__).resolve().parents[2]
MARK = "HERDSMAN_TEST_SERVICE"
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("HERDSMAN")},
    "PYTHONPATH": str(ROOT),
}

HANDLERS = '''
"""Do what a payload says, word by word, and write down what was begun and ended."""
import contextlib
import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path

from queue_core import Reject, Retry, Snooze

FOLDER = Path(__file__).parent


def note(*words):
    """Append a line in one write, so that those of several processes do not mix.

    A kill can cut it where it crosses a page: then the break before the next one ends it.
    """
    descriptor = os.open(FOLDER / "notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, ("\\n" + " ".join(map(str, words)) + " .\\n").encode())
    os.close(descriptor)


def begun(job_id):
    """Say whether a job was begun before: `run` grows with claims, not with starts."""
    notes = FOLDER / "notes"
    lines = notes.read_text().splitlines() if notes.exists() else []
    return any(line.startswith(f"begin {job_id} ") for line in lines)


def wait(name):
    """Wait until a test makes a file."""
    while not (FOLDER / name).exists():
        time.sleep(0.002)


def hold_gil(seconds):
    """Sleep in C without giving the interpreter back; a signal only ends the call."""
    until = time.monotonic() + float(seconds)
    while (left := until - time.monotonic()) > 0:
        ctypes.PyDLL(None).usleep(int(left * 1e6))


def deaf(seconds):
    """Swallow every interruption."""
    until = time.monotonic() + float(seconds)
    while time.monotonic() < until:
        with contextlib.suppress(BaseException):
            time.sleep(0.05)


def child(name):
    """Start a program that outlives this job, then wait."""
    note("child", subprocess.Popen(["sleep", "600"]).pid)
    wait(name)


ACTIONS = {
    "wait": wait,
    "hold_gil": hold_gil,
    "child": child,
    "deaf": deaf,
    "sleep": lambda seconds: time.sleep(float(seconds)),
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def work(payload, job):
    """Do one job; the first word says what, "once" that it does so the first time only."""
    words = payload.split()
    if words[0] == "once":
        words = ["nothing"] if begun(job.id) else words[1:]
    note("begin", job.id, job.run, os.getpid())
    result = None
    if words[0] == "retry":
        result = Retry(error="not yet", after_seconds=float(words[1]))
    elif words[0] == "reject":
        result = Reject(error="never")
    elif words[0] == "snooze":
        result = Snooze(after_seconds=float(words[1]))
    elif words[0] == "raise":
        raise ValueError("as the payload wished")
    elif words[0] != "nothing":
        ACTIONS[words[0]](*words[1:])
    note("end", job.id, job.run, os.getpid())
    return result
'''

CHANGED = """
import importlib
import sys

for name, value in {constants}.items():
    module, _, constant = name.partition("__")
    found = importlib.import_module(f"supervisor.{{module}}")
    assert hasattr(found, constant), name
    setattr(found, constant, value)
sys.argv = ["herdsman", *sys.argv[sys.argv.index("supervisor") + 1 :]]
from supervisor.cli import main

main()
"""
"""The service, started by a script that changes constants first; what is forked has them too."""

CONFIG = """\
database = {database}
grace = "{grace}"

[web]
listen = "{listen}"

[logs]
file = "service.log"
format = "json"

[defaults]
backoff = {{ base = "50ms", jitter = 0 }}
{extra}
[handlers.work]
python = "service_handlers:work"
timeout = "{timeout}"
max_attempts = {max_attempts}

[pools.default]
processes = {processes}
"""


class Service:
    """One supervisor and everything below it; `clean` ends all of it."""

    instance = "main"
    by_template = False
    """Whether it is forked by a process that has imported everything, instead of executed."""

    def __init__(
        self,
        folder: Path,
        *,
        processes: int = 1,
        web: bool = False,
        listen: str = "",
        grace: str = "20s",
        timeout: str = "1m",
        max_attempts: int = 5,
        database: Path | None = None,
        extra: str = "",
    ) -> None:
        """Write configuration and handlers into `folder`; nothing is started yet."""
        self.folder = folder
        self.processes = processes
        self.database = database or folder / "data" / "herdsman.db"
        self.config = folder / "herdsman.toml"
        (folder / "service_handlers.py").write_text(HANDLERS)
        text = CONFIG.format(
            database=json.dumps(str(self.database)),
            listen=listen or ("127.0.0.1:0" if web else "off"),
            grace=grace, timeout=timeout, max_attempts=max_attempts, processes=processes,
            extra=extra,
        )  # fmt: skip
        self.config.write_text(text)
        self.process: subprocess.Popen[bytes] | Copy | None = None
        self._started: list[subprocess.Popen[bytes] | Copy] = []
        self.prefix: tuple[str, ...] = ()
        self._mark = f"{os.getpid()}-{id(self)}-{time.monotonic_ns()}"
        self._began_ticks = int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS_A_SECOND)
        self._slots_path: Path | None = None
        self._tables: dict[int, SlotTable] = {}
        self._queues: list[Queue[Any]] = []

    def teach(self, source: str) -> None:
        """Add to the handlers; before the start."""
        with (self.folder / "service_handlers.py").open("a") as file:
            file.write(source)

    def change(self, **constants: float) -> None:
        """Start it with other constants, each named by its module below `supervisor` and itself.

        `keeper__LOCK_SECONDS=0.5` makes a lesson about five seconds one about half of one.
        """
        script = self.folder / "changed.py"
        script.write_text(CHANGED.format(constants=constants))
        self.prefix = (sys.executable, "-P", str(script))

    # ---- starting and ending ----------------------------------------------------------

    def start(self) -> Service:
        """Start the supervisor, and return without waiting for it."""
        run = ["run", "-c", self.config]
        environ = {**ENVIRONMENT, MARK: self._mark}
        with (self.folder / "out").open("ab") as out:
            if self.by_template and not self.prefix:
                self.process = template("service").start(
                    *run, folder=self.folder, environ=environ, out=out.fileno()
                )
            else:
                self.process = subprocess.Popen(
                    [*self.prefix, sys.executable, "-P", "-m", "supervisor", *run],
                    stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.folder,
                    env=environ,
                    start_new_session=True,  # no terminal, and out of the test's own group
                )  # fmt: skip
        self._started.append(self.process)
        return self

    def started(self) -> Service:
        """Start, and wait until every process is READY."""
        return self.start().ready()

    def ready(self) -> Service:
        """Wait until every process is READY."""
        # An interpreter starts, which takes long: a finer look only takes the processor from it.
        wait_until(self._all_ready, poll_seconds=0.01, what="all processes are READY")
        return self

    def _all_ready(self) -> bool:
        assert self.process is not None
        code = self.process.poll()
        if code is not None:
            raise RuntimeError(f"the service left with exit code {code}: {self.output()}")
        return len(self.workers()) == self.processes and self.pid_of(Kind.KEEPER) > 0

    @property
    def pid(self) -> int:
        """Process id of the supervisor."""
        assert self.process is not None
        return self.process.pid

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

    def all_processes(self) -> list[int]:
        """Return every living process below any supervisor started here.

        By session, and by the mark in the environment: a process title lies over the
        environment of those that were only forked, a session is left by `setsid`.
        """
        wanted = f"{MARK}={self._mark}".encode()
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
        """Kill whatever is left, and remove the records that outlive a killed supervisor."""
        for queue in self._queues:
            queue.close()
        for pid in self.all_processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        let_go(self._started)
        path = find_slots(self.database, self.instance)
        for left in [] if path is None else path.parent.glob(f"{path.name}*"):
            with contextlib.suppress(OSError):
                if left.is_dir():
                    for stack in left.iterdir():
                        stack.unlink()
                    left.rmdir()
                else:
                    left.unlink()

    # ---- what runs --------------------------------------------------------------------

    def slots(self) -> list[Slot]:
        """Return the records of this supervisor's live processes; none before there are any."""
        table = self._tables.get(self.pid)
        if table is None:
            self._slots_path = self._slots_path or slots_path(self.database, self.instance)
            with contextlib.suppress(SlotsError):
                table = SlotTable.attach(self._slots_path, writable=False)
                if table.supervisor_pid != self.pid:
                    return []  # of the run before
                self._tables[self.pid] = table
        return table.live() if table is not None else []

    def workers(self) -> dict[str, int]:
        """Return the READY workers: name to pid, which is never 0 as that of a freed slot."""
        ready = (s for s in self.slots() if s.kind is Kind.WORKER and s.ready_ns)
        return {slot.name: pid for slot in ready if (pid := slot.pid)}

    def pid_of(self, kind: Kind) -> int:
        """Return the pid of the READY keeper or web, 0 when there is none."""
        return next((s.pid for s in self.slots() if s.kind is kind and s.ready_ns), 0)

    def worker_in(self, state: SlotState) -> int:
        """Wait until a worker is in a state; return its pid."""

        def found() -> int:
            workers = (slot for slot in self.slots() if slot.kind is Kind.WORKER)
            return next((slot.pid for slot in workers if slot.state is state), 0)

        return wait_until(found, what=f"a worker is in {state.name}")

    def running(self, job: int) -> Slot | None:
        """Return the record of the worker that is inside a job's handler, None when there is none.

        The slot says so a little before the handler is called: its note is waited for too.
        """
        for slot in self.slots():
            if slot.state is SlotState.RUN and slot.job == job:
                begun = [str(job), str(slot.run), str(slot.pid)]
                return slot if begun in self.notes("begin") else None
        return None

    def kill_running(self, job: int) -> int:
        """Wait until a job runs, and kill its worker; return when, in microseconds."""
        pid = wait_until(lambda: (slot := self.running(job)) and slot.pid, what=f"{job} runs")
        killed_us = time.time_ns() // 1000
        os.kill(pid, signal.SIGKILL)
        return killed_us

    # ---- jobs -------------------------------------------------------------------------

    def queue(self, name: str = "work", **options: Any) -> Queue[Any]:
        """Open a queue of this service's database, closed at the end."""
        queue: Queue[Any] = Queue(self.database, name, **options)
        self._queues.append(queue)
        return queue

    def job(self, job_id: int) -> Job[Any]:
        """Return a job with its ledger."""
        found = self._look().find(job_id)
        assert found is not None, f"job {job_id} is lost"
        return found

    def _look(self) -> Queue[Any]:
        return self._queues[0] if self._queues else self.queue()

    def state(self, job_id: int) -> State:
        """Return where a job stands."""
        return self.job(job_id).state

    def done(self, *ids: int) -> bool:
        """Say whether all of these jobs are done."""
        return all(self.state(job_id) is State.DONE for job_id in ids)

    def outcomes(self, job_id: int) -> list[str]:
        """Return how the attempts of a job ended, first to last."""
        return [str(attempt.outcome) for attempt in self.job(job_id).ledger]

    def warm(self, queue: Queue[Any]) -> None:
        """Have the workers learn that jobs are quick, so that they claim in batches."""
        ids = queue.put_many(["nothing"] * 60 * self.processes)
        wait_until(lambda: self.done(*ids[-self.processes :]) and self.done(*ids))

    def rows(self) -> dict[str, int]:
        """Count the rows of each state over a connection of our own, trusting no counter."""
        with contextlib.closing(
            sqlite3.connect(f"file:{self.database}?mode=ro", uri=True)
        ) as connection:
            found = connection.execute(
                "SELECT state, count(*) FROM job GROUP BY state"
                " UNION ALL SELECT 'done', count(*) FROM done WHERE outcome = 'succeeded'"
                " UNION ALL SELECT 'cancelled', count(*) FROM done WHERE outcome = 'cancelled'"
                " UNION ALL SELECT 'dead', count(*) FROM dead"
            ).fetchall()
        return {str(state): 0 for state in State} | dict(found)

    @contextlib.contextmanager
    def write_lock(self) -> Iterator[None]:
        """Keep everyone else from writing to the database."""
        descriptor = os.open(f"{self.database}.lock", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    # ---- what is told -----------------------------------------------------------------

    def notes(self, word: str) -> list[list[str]]:
        """Return what the handlers wrote down under a word, without that word; no cut line."""
        path = self.folder / "notes"
        lines = path.read_text().splitlines() if path.exists() else []
        whole = [line.split()[:-1] for line in lines if line.endswith(" .")]
        return [words[1:] for words in whole if words[0] == word]

    def runs(self, word: str = "begin") -> Counter[int]:
        """Return how often each job was begun (or ended)."""
        return Counter(int(words[0]) for words in self.notes(word))

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the log's lines of an event; a line being written is left out."""
        path = self.folder / "service.log"
        text = path.read_text() if path.exists() else ""
        found = [json.loads(line) for line in text.split("\n")[:-1]]
        return [line for line in found if line["event"] == name]

    def output(self) -> str:
        """Return what was written to standard output and error."""
        return (self.folder / "out").read_text(errors="replace")

    def get(self, path: str) -> tuple[int, str]:
        """Return status and text of a page; status 0 when nobody answers."""
        listening = self.events("web_listening")
        if not listening:
            return 0, ""
        try:
            with urllib.request.urlopen(listening[-1]["address"] + path, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def make(self, name: str) -> None:
        """Make the file that a handler waits for."""
        (self.folder / name).touch()


Maker = Callable[..., Service]


@contextlib.contextmanager
def services(folder: Path) -> Iterator[Maker]:
    """Yield a function that prepares a service with options; all of them are ended after."""
    made: list[Service] = []

    def make(**options: Any) -> Service:
        own = folder / f"service{len(made)}"
        own.mkdir(mode=0o700)
        made.append(Service(own, **options))
        return made[-1]

    try:
        yield make
    finally:
        for one in made:
            one.clean()


def command(
    *args: object, cwd: Path, prefix: tuple[str, ...] = (), environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one `herdsman` command to its end."""
    return subprocess.run(
        [*prefix, sys.executable, "-P", "-m", "supervisor", *map(str, args)],
        cwd=cwd, env={**ENVIRONMENT, **(environ or {})}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def copied(*args: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run one `herdsman` command to its end in a copy of this process, by its entry point.

    As good as `command` where words and exit code are the lesson, for a tenth of the time: the
    copy has imported everything.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            _be_a_command([str(one) for one in args], cwd, out.fileno(), err.fileno())
        ended = os.pidfd_open(pid)
        try:
            if not select.select([ended], [], [], 60)[0]:
                os.kill(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        finally:
            os.close(ended)
        for file in (out, err):
            file.seek(0)
        told, complained = out.read().decode(), err.read().decode()
    return subprocess.CompletedProcess(["herdsman", *args], code, told, complained)


def _be_a_command(args: list[str], cwd: Path, out: int, err: int) -> NoReturn:
    """Turn the copy into a process as one that was executed, run the command, and exit."""
    code = 1
    try:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(signum, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        for descriptor, standard in ((null, 0), (out, 1), (err, 2)):
            os.dup2(descriptor, standard)
        os.closerange(3, 1 + max(map(int, os.listdir("/proc/self/fd"))))
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(ENVIRONMENT)
        main(args)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def sentence(finished: subprocess.CompletedProcess[str]) -> str:
    """Return the one sentence a command ended with; nothing else may stand on standard error."""
    lines = finished.stderr.splitlines()
    assert len(lines) == 1, finished.stderr
    assert lines[0].startswith("herdsman: ")
    return lines[0]
