"""Ask the kernel about processes, and have it do what the standard library cannot.

Boundary: single questions and single system calls, each with its fallback where
/proc or prctl(2) is missing; nothing is decided here.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import sys
import uuid
from pathlib import Path
from typing import Final

INSTANCE_VARIABLE: Final = "HERDSMAN_INSTANCE_UUID"
"""Set in every child, so that what a handler executes can be found after we are gone."""
TITLE: Final = "herdsman: "
"""How the title of each process begins; what it forks keeps the title."""
_PR_SET_PDEATHSIG: Final = 1  # prctl(2)
_PR_SET_CHILD_SUBREAPER: Final = 36
_IN_NONBLOCK, _IN_CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC  # inotify_init1(2)
_IN_MODIFY_ONCE: Final = 0x2 | 0x80000000  # IN_MODIFY | IN_ONESHOT, inotify(7)
_OOM_SCORE_STEP: Final = 500
"""The kernel is to kill a worker, which is replaced, before the supervisor, which is not."""
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_TICK_US: Final = 1_000_000 // os.sysconf("SC_CLK_TCK")
_libc: Final = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def resident_bytes(pid: int | str = "self") -> int:
    """Return the resident memory of a process; 0 when it cannot be read."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0


def proportional_bytes(pid: int) -> int:
    """Return the memory of a process, what it shares divided by the sharers; else the resident."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except (OSError, IndexError, ValueError):
        pass
    return resident_bytes(pid)


def stat_of(pid: int | str = "self") -> list[bytes]:
    """Return the fields of /proc/PID/stat from the state on; none when there is no such process.

    The command name before them may hold blanks and brackets, so they are counted from its end.
    Source: proc_pid_stat(5), whose field n is at n - 3 here.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def cpu_us(pid: int | str = "self") -> int:
    """Return the processor time a process has used, in microseconds; 0 when there is none."""
    fields = stat_of(pid)
    return (int(fields[11]) + int(fields[12])) * _TICK_US if fields else 0


def state_of(pid: int) -> str:
    """Return the letter of a process's state (R runs or could, S and D wait, T is stopped).

    "?" when there is no such process.
    """
    fields = stat_of(pid)
    return fields[0].decode() if fields else "?"


def catches(pid: int, signum: int) -> bool:
    """Whether a process has a handler for a signal, and its main thread does not block it.

    Source: proc_pid_status(5), SigCgt and SigBlk.
    """
    masks = {"SigCgt": 0, "SigBlk": -1}
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name in masks:
                    masks[name] = int(value, 16)
    except (OSError, ValueError):
        return False
    return bool((masks["SigCgt"] & ~masks["SigBlk"]) >> (signum - 1) & 1)


def has_open(pid: int, path: str) -> bool:
    """Whether a process has this very file open, whatever name it was opened by."""
    try:
        wanted = os.stat(path)
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for name in names:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(f"/proc/{pid}/fd/{name}"), wanted):
                return True
    return False


def start_time(pid: int | str = "self") -> int:
    """Return when a process started, in clock ticks since boot; 0 when there is none."""
    fields = stat_of(pid)
    return int(fields[19]) if fields else 0


def wall_seconds(ticks: int) -> float | None:
    """Return the wall time of a moment that is given in clock ticks since boot; None if unknown.

    By the kernel's own note of when the host booted, so that every process says the same; it
    moves only when the clock is set.
    """
    try:
        with open("/proc/stat", "rb") as file:
            for line in file:
                if line.startswith(b"btime "):
                    return int(line.split()[1]) + ticks * _TICK_US / 1_000_000
    except (OSError, IndexError, ValueError):
        pass
    return None


def children(pid: int | str = "self") -> list[int]:
    """Return the pids of a process's children, adopted ones too. Raises OSError."""
    found: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
            found += [int(pid) for pid in file.read().split()]
    return found


def open_descriptors() -> set[int]:
    """Return the open descriptors of this process."""
    with os.scandir("/proc/self/fd") as entries:
        numbers = {int(entry.name) for entry in entries}
    return {fd for fd in numbers if _is_open(fd)}  # the scan's own one is closed by now


def _is_open(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_GETFD)
    except OSError:
        return False
    return True


def thread_count() -> int:
    """Return how many threads this process has."""
    return len(os.listdir("/proc/self/task"))


def has_terminal() -> bool:
    """Say whether this process has a controlling terminal, which sends HUP when it goes."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def become_subreaper() -> None:
    """Adopt the orphans of our descendants, so that what jobs leave behind is seen."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(signum: signal.Signals) -> None:
    """Have the kernel send us a signal when the thread that forked us ends."""
    if _libc is not None and _libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")


def raise_oom_score() -> None:
    """Offer this process to the out-of-memory killer before its parent."""
    path = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):
        path.write_text(str(min(1000, int(path.read_text()) + _OOM_SCORE_STEP)))


def open_watch() -> int:
    """Return a descriptor for `watch_once`; -1 where the kernel has none to give."""
    return -1 if _libc is None else int(_libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC))


def watch_once(fd: int, path: str) -> bool:
    """Make `fd` readable at the next write to a file; say whether that will be."""
    return _libc is not None and _libc.inotify_add_watch(fd, os.fsencode(path), _IN_MODIFY_ONCE) > 0


def kill_group(pid: int) -> bool:
    """Kill a whole process group; say whether there was one."""
    if pid <= 1:
        return False
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError as error:
        return error.errno == errno.EPERM
    return True


def is_tmpfs(folder: Path) -> bool:
    """Say whether a folder lies on a tmpfs, from the kernel's own table of mounts."""
    try:
        device = os.stat(folder).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                fields = line.split()
                if fields[2] == wanted:
                    return fields[fields.index("-") + 1] in ("tmpfs", "ramfs")
    except (OSError, ValueError, IndexError):
        return False
    return False


def boot_id() -> bytes:
    """Return the 16 bytes that name this boot of the kernel; zeros where there is none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return uuid.UUID(file.read().strip()).bytes
    except (OSError, ValueError):
        return bytes(16)
