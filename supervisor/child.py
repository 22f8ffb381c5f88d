"""Fork a process of the tree, and take its first steps in the one safe order.

Boundary: from the fork to the call of `main`, and what `main` is given. What the
process does is a function passed in; when it is started or ended is
`supervise`'s business. Never imports the queue.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from types import FrameType
from typing import Any, Final

import setproctitle
import structlog

from supervisor import logs, stacks
from supervisor.linux import (
    INSTANCE_VARIABLE,
    TITLE,
    die_with_parent,
    kill_group,
    open_descriptors,
    raise_oom_score,
    start_time,
)
from supervisor.slot import Kind, Slot, SlotState
from supervisor.slots import SlotTable

log = structlog.get_logger("herdsman.child")

PROCESS_FAILED: Final = "process_failed"

ORPHAN_SECONDS: Final = 30.0
"""For the keeper to settle what it can once the supervisor is gone; no statement waits longer."""

_SUPERVISOR_ONLY: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS",
                           "LISTEN_PID", "LISTEN_FDNAMES")  # fmt: skip


class JobInterrupted(BaseException):
    """The supervisor wants the running job back now: release it uncharged."""


class SoftTimeout(BaseException):
    """The running job is past its soft deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What a process is for. `kind` is worker, keeper or web; `main` returns its exit code."""

    name: str
    pool: str
    main: Callable[[Child], int]
    kind: Kind = Kind.WORKER


class _Window:
    """The stretch in which a job may be interrupted; made once, since every job enters it.

    CPython runs signal handlers where a function is entered, a call returns or a loop jumps
    back. So none strikes between the store in `__enter__` and the body, and one that strikes
    as `__exit__` is entered must not raise: nothing would close the stretch.
    """

    __slots__ = ("_child",)

    def __init__(self, child: Child) -> None:
        self._child = child

    def __enter__(self) -> None:
        child = self._child
        child._interruptible = True
        if child.interrupted:
            child._interruptible = False
            raise JobInterrupted

    def __exit__(self, *_: object) -> None:
        self._child._interruptible = False

    @classmethod
    def left(cls, frame: FrameType | None) -> bool:
        """Whether a handler struck as the stretch was left, or struck a handler that did."""
        while frame is not None and frame.f_code is not cls.__exit__.__code__:
            frame = frame.f_back
        return frame is not None


class Child:
    """What `main` is given: its slot, and the wishes of the supervisor as flags.

    Signals never raise outside `interruptible`; they set a flag and make
    `wake_fd` readable, so that a wait on it ends at once.
    """

    def __init__(
        self, role: Role, slot: Slot, table: SlotTable, *, parent_pid: int, news_fd: int
    ) -> None:
        self.name = role.name
        self.pool = role.pool
        self.kind = role.kind
        self._is_worker = role.kind is Kind.WORKER
        self.slot = slot
        self.table = table
        self.wake_fd = -1
        self.reopen_logs = False
        self.interrupted = False
        self._wake_write = -1
        self._parent_pid = parent_pid
        self._terminated = False
        self._interruptible = False
        self._window = _Window(self)
        self._handlers: dict[signal.Signals, Any] = {}
        self._stacks = stacks.Writer()
        self._news_fd = news_fd

    @property
    def orphaned(self) -> bool:
        """Whether the supervisor is gone."""
        return os.getppid() != self._parent_pid

    @property
    def stopping(self) -> bool:
        """Whether to finish what is begun and return.

        A worker stops on TERM, on a drain of the tree, and when it is retired. The
        keeper and `web` outlast a TERM sent to the whole group (platforms do that):
        they stop when the supervisor retires them, or is gone.
        """
        if not self._is_worker:
            return self.slot.retire != 0 or self.orphaned
        return self._terminated or self.slot.retire != 0 or self.table.draining

    def ready(self) -> None:
        """Say that booting is over; the same as entering IDLE for the first time."""
        self.slot.enter(SlotState.IDLE)
        with contextlib.suppress(OSError):
            os.write(self._news_fd, b"r")  # else it is seen at the supervisor's next look

    def clear_wake(self) -> None:
        """Empty `wake_fd`; do it before looking at the flags, so that no wish is missed."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self.wake_fd, 4096)) == 4096:
                pass

    def interruptible(self) -> AbstractContextManager[None]:
        """Let QUIT and ALRM raise JobInterrupted and SoftTimeout, while the slot is in RUN.

        Catch them around the `with`, not inside it: they can also be raised
        while it is entered or left.
        """
        return self._window

    def rearm(self) -> int:
        """Put back signal handlers, mask and alarm after a job; return how many it had replaced."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        replaced = 0
        for signum, handler in self._handlers.items():
            if signal.getsignal(signum) is not handler:
                signal.signal(signum, handler)
                replaced += 1
        if signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False) != self._wake_write:
            replaced += 1
        if replaced:
            self.slot.rearmed += replaced
        return replaced

    # ---- signals ----------------------------------------------------------------------

    def _on_term(self, signum: int, frame: FrameType | None) -> None:
        self._terminated = True
        if self.kind is Kind.KEEPER and self.orphaned:
            # Workers die by themselves now, what they started does not. At once, because
            # the main of the keeper may be waiting for the database. It has a last while.
            kill_groups(self.table)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, ORPHAN_SECONDS)

    def _on_quit(self, signum: int, frame: FrameType | None) -> None:
        self._terminated = self.interrupted = True
        if self._may_raise(frame):
            self._interruptible = False
            raise JobInterrupted

    def _on_alarm(self, signum: int, frame: FrameType | None) -> None:
        if self._may_raise(frame):
            raise SoftTimeout

    def _may_raise(self, frame: FrameType | None) -> bool:
        running = self._interruptible and self.slot.state is SlotState.RUN
        return running and not _Window.left(frame)

    def _on_reopen(self, signum: int, frame: FrameType | None) -> None:
        # Here, and not where the flag is looked at: a job may run for hours before that.
        logs.reopen_again()
        self.reopen_logs = True

    def _on_nothing(self, signum: int, frame: FrameType | None) -> None:
        """Take a signal that means nothing here; SIG_IGN would reach executed programs too."""

    def install(self, wake: tuple[int, int] | None) -> None:
        """Install handlers and the wake descriptor; signals are still masked."""
        if wake is None:
            wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.wake_fd, self._wake_write = wake
        defaults = (signal.SIGCHLD, signal.SIGTTIN, signal.SIGTTOU, signal.SIGTSTP)
        for signum in defaults:
            signal.signal(signum, signal.SIG_DFL)
        handlers: dict[signal.Signals, Any] = {
            signal.SIGTERM: self._on_term,
            signal.SIGINT: self._on_nothing,
            signal.SIGQUIT: self._on_quit,
            signal.SIGHUP: self._on_nothing,
            signal.SIGUSR1: self._on_reopen,
            signal.SIGALRM: self._on_alarm,
            signal.SIGWINCH: self._on_nothing,
            signal.SIGPIPE: signal.SIG_IGN,
            stacks.ASK: self._stacks.on_ask,
        }
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        # Bound methods are made anew at each look; remember the very objects installed.
        self._handlers = {signum: signal.getsignal(signum) for signum in handlers}
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._stacks.open(self.slot.stack_path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """A process just made. `owned` are the descriptors that the supervisor now holds for it."""

    process: ForkProcess
    pid: int
    pidfd: int
    owned: frozenset[int]


def fork(
    role: Role,
    slot: Slot,
    table: SlotTable,
    *,
    close: Iterable[int],
    news_fd: int,
    wake: tuple[int, int] | None = None,
) -> Forked:
    """Fork a process for an opened slot. Raises OSError when the kernel refuses.

    `close` are the descriptors the child must not keep: the instance lock, the
    epoll, the siblings' pidfds. `news_fd` is a
    pipe to the supervisor, written when READY. `wake` is the keeper's pipe. The fork context is
    named, because since Python 3.14 the default is a fork server, whose children
    are not ours.
    """
    context = multiprocessing.get_context("fork")
    process = context.Process(
        target=_first_steps,
        args=(role, slot, table, tuple(close), wake, news_fd, os.getpid()),
        name=role.name,
        daemon=False,
    )
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()  # what is buffered would be written by both sides
    before = open_descriptors()
    # Masked, a signal meant for the child cannot run the supervisor's handler in it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        process.start()
        pid = process.pid
        assert pid is not None
        pidfd = os.pidfd_open(pid)
    except OSError:
        for fd in open_descriptors() - before:
            os.close(fd)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)  # on both sides: whoever is first, the group exists for killpg
    slot.pid, slot.start_time = pid, start_time(pid)
    return Forked(
        process=process, pid=pid, pidfd=pidfd, owned=frozenset(open_descriptors() - before)
    )


def _first_steps(
    role: Role,
    slot: Slot,
    table: SlotTable,
    close: tuple[int, ...],
    wake: tuple[int, int] | None,
    news_fd: int,
    parent_pid: int,
) -> None:
    """Turn the copy of the supervisor into a process of its own, run `main`, and exit."""
    code = 1
    try:
        for fd in close:
            with contextlib.suppress(OSError):
                os.close(fd)
        signal.set_wakeup_fd(-1)  # else our signals would wake the supervisor
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        die_with_parent(signal.SIGTERM if role.kind is Kind.KEEPER else signal.SIGKILL)
        if os.getppid() != parent_pid:  # it died before the line above
            os._exit(0)
        slot.pid, slot.start_time = os.getpid(), start_time()
        child = Child(role, slot, table, parent_pid=parent_pid, news_fd=news_fd)
        child.install(wake)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        random.seed()
        setproctitle.setproctitle(f"{TITLE}{role.name}")
        raise_oom_score()
        for name in _SUPERVISOR_ONLY:
            os.environ.pop(name, None)
        os.environ[INSTANCE_VARIABLE] = table.instance_uuid
        code = _run_main(role, child)
    except BaseException:
        with contextlib.suppress(Exception):
            traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        # Not sys.exit: it joins threads that a handler may have left running for ever.
        os._exit(code & 0xFF)


def _run_main(role: Role, child: Child) -> int:
    slot = child.slot
    try:
        code = role.main(child)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        slot.note = slot.note or f"left by sys.exit({error.code!r})"
    except BaseException as error:
        slot.note = f"{type(error).__name__}: {error}"
        log.error(PROCESS_FAILED, process=role.name, exc_info=True)
        code = 1
    if role.kind is Kind.KEEPER and child.orphaned:
        kill_groups(child.table)
    slot.enter(SlotState.EXIT)
    return int(code or 0)


def kill_groups(table: SlotTable) -> int:
    """Kill the process group of every live slot but ours; return how many.

    The keeper's last duty when the supervisor is gone: workers die by themselves
    then (PDEATHSIG), but not what they started.
    """
    me = os.getpid()
    killed = 0
    for slot in table.slots:
        pid = slot.pid
        if not pid or pid == me or not slot.live:
            continue
        now = start_time(pid)
        # 0: the leader is gone already, and its number stays taken while the group lives.
        if now in (0, slot.start_time) and kill_group(pid):
            killed += 1
    return killed
