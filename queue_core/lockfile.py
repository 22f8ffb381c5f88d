"""Keep others out with flock: around a write for a moment, around a database for a life.

flock is freed by the kernel when its holder dies, however it dies, so a lock is
never stale. It belongs to an open file description, which forked children
share: a child closes its copy and never unlocks.

Boundary: lock files only; what is done under a lock is the caller's.
"""

from __future__ import annotations

import _thread
import fcntl
import json
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

NETWORK_FILESYSTEMS: Final = frozenset((
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "fuse.beegfs", "fuse.ceph", "fuse.ceph-fuse",
    "fuse.davfs", "fuse.gcsfuse", "fuse.glusterfs", "fuse.goofys", "fuse.juicefs", "fuse.mfs",
    "fuse.mount-s3", "fuse.rclone", "fuse.s3fs", "fuse.sshfs", "fuse.vmhgfs-fuse", "gfs2",
    "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "pvfs2", "smb3",
    "smbfs", "vboxsf", "virtiofs", "vmhgfs",
))  # fmt: skip
"""Types on which two kernels can see one file, and SQLite's shared memory does not reach both."""

_COMMAND_CHARS_MAX: Final = 80
_TRIES: Final = 3
_IDLE_SECONDS: Final = 5.0
_POLL_SECONDS_MAX: Final = 0.01
_PROBE_GRACE_SECONDS: Final = 0.2
_OPEN_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class FileLock:
    """An exclusive lock on a file, waited for with a deadline.

    One thread at a time may use an instance. Waiting is blocking flock, which
    the kernel ends the moment the lock is free; that call takes no deadline, so
    a helper thread makes it, and unlocks at once what comes after its caller gave up.
    `held`, to be read only, says whether this instance holds the lock.
    """

    __slots__ = ("_fd", "_helper", "held", "path")

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd, self.held, self._helper = -1, False, _Helper()

    def acquire(self, timeout_seconds: float) -> bool:
        """Take the lock; return False when it did not come free in time.

        With a timeout of 0 or less nothing is waited for. A lock held already,
        because an exception kept the caller from releasing it, is simply held.
        Raises OSError when the file cannot be opened or locked.
        """
        if self.held:
            return True
        deadline = 0.0
        wait: _Wait | None = None
        # A signal handler may raise after any call below, also between the kernel's yes and
        # the next line. CPython runs handlers only when a call returns, a function is entered
        # or a loop jumps back; so each first call in the handling below is made for certain.
        try:
            for renewed in (False, True):
                fd = self._opened()
                if self._helper.fds or not _try_lock(fd, _TRIES if timeout_seconds > 0 else 1):
                    if timeout_seconds <= 0:
                        return False
                    deadline = deadline or time.monotonic() + timeout_seconds
                    wait = _Wait()
                    if not self._queue_up(fd, wait, deadline):
                        return False
                if renewed or os.fstat(fd).st_nlink:
                    break
                self.close()  # somebody removed the file: the lock of a nameless file locks no one
            self.held = True
            return True
        except BaseException:
            try:
                if wait is not None:
                    wait.decided.acquire(blocking=False)
            finally:
                if self._fd >= 0:
                    fcntl.flock(self._fd, fcntl.LOCK_UN)
            raise

    def release(self) -> None:
        """Give the lock back; does nothing when it is not held.

        A signal handler that raises on entry here leaves the lock held, and
        `held` true: call it where such signals are deferred, or call it again.
        """
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        self.held = False

    def close(self) -> None:
        """Close the descriptor; the file is opened again when next used.

        Nothing is unlocked: a held lock goes with its last descriptor.
        """
        fd, self._fd, self.held = self._fd, -1, False
        if fd >= 0 and not self._helper.leave():
            os.close(fd)

    def abandon(self) -> None:
        """In a forked child: close what was inherited, and leave the parent's lock alone."""
        inherited = {self._fd, *self._helper.fds} - {-1}
        self._fd, self.held, self._helper = -1, False, _Helper()
        for fd in inherited:
            os.close(fd)

    def _opened(self) -> int:
        if self._fd < 0:
            self._fd = self._helper.take_back()
        if self._fd < 0:
            self._fd = os.open(self.path, _OPEN_FLAGS, 0o600)
        return self._fd

    def _queue_up(self, fd: int, wait: _Wait, deadline: float) -> bool:
        if not self._helper.ask(fd, wait):
            return _poll_lock(fd, deadline)
        left = min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
        if wait.ready.acquire(timeout=left):
            if wait.error is not None:
                raise wait.error
            return True
        # Whoever takes `decided` first has it his way: here the lock may have come just now.
        return not wait.decided.acquire(blocking=False)


class _Wait:
    """One caller's wait: `decided` is taken by the helper to grant, by the caller to give up."""

    __slots__ = ("decided", "error", "ready")

    def __init__(self) -> None:
        self.decided, self.ready = threading.Lock(), threading.Lock()
        self.ready.acquire()
        self.error: OSError | None = None


class _Helper:
    """Block in flock for a caller, in a thread that ends when nothing is asked of it.

    `fds` holds the descriptor it is asked to lock, until it will not touch it
    any more. While it is there the caller must not lock by itself: both would
    hold one lock, and the helper, finding itself late, would unlock it for both.
    """

    __slots__ = ("closing", "fds", "left", "mutex", "serving", "wait", "wake")

    def __init__(self) -> None:
        self.mutex, self.wake, self.serving = (threading.Lock() for _ in range(3))
        self.wake.acquire()  # `serving` is held by the one thread that serves
        self.fds: list[int] = []
        self.wait: _Wait | None = None
        self.left = False  # the caller closed: the descriptor is the helper's to close
        self.closing = False

    def ask(self, fd: int, wait: _Wait) -> bool:
        """Lock `fd` for this wait, in place of any wait before; False when no thread can start."""
        with self.mutex:
            self.wait = wait
            self.closing = False
            if not self.fds:
                self.fds.append(fd)
            if not self.serving.locked():
                try:  # not threading.Thread: a signal handler raising in start() breaks the thread
                    _thread.start_new_thread(self.run, ())
                except RuntimeError:  # out of threads, or the interpreter is shutting down
                    self.fds.clear()
                    return False
            if self.wake.locked():
                self.wake.release()
        return True

    def leave(self) -> bool:
        """Take over the caller's descriptor if a wait is still running on it; else end."""
        with self.mutex:
            self.closing = True
            self.left = bool(self.fds)
            if self.wake.locked():
                self.wake.release()
            return self.left

    def take_back(self) -> int:
        """Return the descriptor taken over by `leave`, to go on with its wait; -1 without one."""
        with self.mutex:
            if not self.left:
                return -1
            self.left = self.closing = False
            return self.fds[0]

    def run(self) -> None:
        """Serve waits until idle or closed."""
        if not self.serving.acquire(blocking=False):
            return
        # Signals belong to the threads that are there to be interrupted.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            while True:
                woken = self.wake.acquire(timeout=_IDLE_SECONDS)
                if self.fds:
                    self._serve(self.fds[0])
                with self.mutex:
                    # Ending and being asked exclude each other: `ask` looks under this mutex.
                    if not self.fds and (self.closing or (not woken and self.wake.locked())):
                        self.serving.release()
                        return
        except BaseException:
            self.serving.release()
            raise

    def _serve(self, fd: int) -> None:
        error: OSError | None = None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError as raised:
            error = raised
        with self.mutex:
            wait = self.wait
            if wait is not None and error is not None:
                wait.error = error
            elif wait is None or not wait.decided.acquire(blocking=False):
                fcntl.flock(fd, fcntl.LOCK_UN)
            self.wait = None
            # Emptied before closing: a child forked in between must not close a stranger's file.
            self.fds.clear()
            if self.left:
                os.close(fd)
            self.left = False
        if wait is not None:
            wait.ready.release()


def _try_lock(fd: int, tries: int = _TRIES) -> bool:
    """Try a few times at once: most holds last for less than a switch between threads."""
    for _ in range(tries):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        return True
    return False


def _poll_lock(fd: int, deadline: float) -> bool:
    """Wait without a helper, in short sleeps of uneven length."""
    while not _try_lock(fd):
        if (left := deadline - time.monotonic()) <= 0:
            return False
        time.sleep(min(left, random.uniform(0.0005, _POLL_SECONDS_MAX)))
    return True


class InstanceLock:
    """The lock a supervisor holds as long as it lives; its holder's liveness is this lock."""

    __slots__ = ("_fd", "path")

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    @classmethod
    def take(cls, path: Path, info: Mapping[str, object]) -> InstanceLock | None:
        """Take the lock and write `info` into the file, for people; None when another holds it.

        Raises OSError when the file cannot be opened. A disk too full for `info` is no fault.
        """
        deadline = time.monotonic() + _PROBE_GRACE_SECONDS
        while True:
            fd = os.open(path, _OPEN_FLAGS, 0o600)
            try:
                taken = _poll_lock(fd, deadline)  # `is_held` may be looking at this moment
                if taken and (os.fstat(fd).st_nlink or time.monotonic() >= deadline):
                    with suppress(OSError):
                        os.ftruncate(fd, 0)
                        os.pwrite(fd, json.dumps(dict(info), default=str).encode() + b"\n", 0)
                    return cls(path, fd)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            if not taken:
                return None

    @staticmethod
    def is_held(path: Path) -> bool:
        """Say whether somebody, this process included, holds the lock; creates nothing.

        Asks the lock itself, as /proc/locks hides holders in other containers. Raises OSError
        when the file is there and cannot be opened.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        try:
            # Shared, so that two who ask at once do not take each other for the holder.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def fileno(self) -> int:
        """Return the descriptor, -1 once closed."""
        return self._fd

    def close_in_child(self) -> None:
        """In a forked child: close the inherited descriptor; the parent keeps the lock."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Give the lock back, also when a child still has the descriptor."""
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        self.close_in_child()


def describe_holder(path: Path) -> str:
    """Say who holds the lock on a file, by /proc/locks, which tells of this PID namespace only."""
    try:
        status = path.stat()
        lines = Path("/proc/locks").read_text("ascii").splitlines()
    except OSError:
        return "an unknown process"
    device = status.st_dev
    wanted = f"{os.major(device):02x}:{os.minor(device):02x}:{status.st_ino}"
    for line in lines:
        fields = line.split()  # number, kind, advisory, mode, pid, device:inode, start, end
        if fields[1:2] == ["FLOCK"] and fields[5:6] == [wanted] and int(fields[4]) > 0:
            return _describe_process(int(fields[4]))
    return "an unknown process"


def _describe_process(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text("utf-8", "replace")
    except OSError:
        return f"process {pid}, which is gone: a process it started still has the lock open"
    words = command.rstrip("\0").replace("\0", " ")
    shown = "".join(letter if letter.isprintable() else "?" for letter in words)
    return f"process {pid} ({shown[:_COMMAND_CHARS_MAX]})" if shown else f"process {pid}"


def flock_excludes(folder: Path) -> bool:
    """Prove on a file of its own that a lock taken in this folder keeps another opener out.

    Raises OSError when the folder cannot be written.
    """
    with tempfile.NamedTemporaryFile(prefix=".flock-", dir=folder) as first:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with open(first.name, "rb+") as second:
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # flock is not known here
            return False
    return False


def filesystem_type(path: Path) -> str:
    """Return the type of the filesystem a path is on, such as "ext4"; "" where none is told."""
    try:
        text = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape")
    except OSError:
        return ""
    return type_in_mountinfo(text, os.path.realpath(path))


def type_in_mountinfo(text: str, real_path: str) -> str:
    """Return the type of the longest mount point over a real path; of equals the last one's."""
    best, found = -1, ""
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        if len(fields := left.split(" ")) < 5 or not right:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        inside = point in ("/", real_path) or real_path.startswith(f"{point}/")
        if inside and len(point) >= best:
            best, found = len(point), right.split(" ")[0]
    return found
