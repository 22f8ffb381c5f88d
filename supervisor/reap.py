"""Find and end what processes left behind: strangers, orphans, survivors of a crash.

Boundary: reads /proc, waits for and kills processes that no seat owns. It starts
nothing and decides nothing about seats.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from supervisor.linux import INSTANCE_VARIABLE, TITLE, children, kill_group, start_time, stat_of
from supervisor.slot import SlotState
from supervisor.slots import SlotTable

_SWEEP_ROUNDS: Final = 3
_ENVIRON_BYTES_MAX: Final = 1024 * 1024
_OOM_WINDOW_NS: Final = 5_000_000_000
"""The kernel counts a kill before the death can be seen, and a death is seen within a turn."""
_OOM_READINGS_MAX: Final = 64
_REAP_MAX: Final = 1000
"""Strangers reaped in one turn of the loop: a fork bomb must not stop supervision."""


class OomCounter:
    """Counts the kernel's out-of-memory kills in our control group."""

    def __init__(self, path: str | None = None) -> None:
        self._path = path or _oom_file()
        self._seen = self._read()
        self._noted: deque[tuple[int, int]] = deque(maxlen=_OOM_READINGS_MAX)

    def note(self, now_ns: int) -> None:
        """Take a reading; kills that were in one of some seconds ago explain no death of now."""
        self._noted.append((now_ns, self._read()))
        while self._noted and now_ns - self._noted[0][0] >= _OOM_WINDOW_NS:
            self._seen = max(self._seen, self._noted.popleft()[1])

    def _read(self) -> int:
        if self._path is None:
            return 0
        try:
            with open(self._path, encoding="ascii") as file:
                for line in file:
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        except (OSError, ValueError):
            return 0
        return 0

    def grew(self) -> bool:
        """Say whether there was a kill that no earlier call has accounted for."""
        if self._read() > self._seen:
            self._seen += 1
            return True
        return False


def _oom_file() -> str | None:
    """Return the file that counts kills: cgroup v2, v1, else of the whole host."""
    candidates = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text("utf-8", "replace").splitlines()
        for _, controllers, path in (line.split(":", 2) for line in lines):
            if not controllers:
                candidates.append(f"/sys/fs/cgroup{path}/memory.events")
            elif "memory" in controllers.split(","):
                candidates.append(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
    candidates.append("/proc/vmstat")
    return next((path for path in candidates if os.access(path, os.R_OK)), None)


def reap_strangers(is_ours: Callable[[int], bool], on_ours: Callable[[int], None]) -> int:
    """Reap every dead child that no seat owns; return how many.

    They come to us as PID 1 and as subreaper. Only looked at first (WNOWAIT),
    because reaping one of our own here would lose its cause of death.
    """
    reaped = 0
    for _ in range(_REAP_MAX):
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return reaped
        if found is None:
            return reaped
        if is_ours(found.si_pid):
            on_ours(found.si_pid)
            continue
        with contextlib.suppress(ChildProcessError):
            os.waitpid(found.si_pid, os.WNOHANG)
        reaped += 1
    return reaped


def count_group(group: int) -> int:
    """Return how many orphans of a dead group leader are left in its group.

    They are our children from the moment their parent died (we are a subreaper).
    """
    count = 0
    for pid in children():
        with contextlib.suppress(OSError):
            count += pid != group and os.getpgid(pid) == group
    return count


def kill_strays(is_ours: Callable[[int], bool], rounds: int = 20) -> int:
    """Kill the adopted processes, and those that come to us as they die; return how many."""
    killed = 0
    for _ in range(rounds):
        strays = [pid for pid in children() if not is_ours(pid)]
        if not strays:
            break
        for pid in strays:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)  # our own unreaped child: its number is its own
                killed += 1
        _wait_gone(strays, 0.5)
        reap_strangers(is_ours, lambda pid: None)
    return killed


def _wait_gone(pids: list[int], seconds: float) -> bool:
    """Wait until processes are dead, at most so long."""
    deadline = time.monotonic() + seconds
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            continue
        try:
            left = max(0.0, deadline - time.monotonic())
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            if not poll.poll(left * 1000):
                return False
        finally:
            os.close(fd)
    return True


def sweep(table: SlotTable, instance_uuid: str | None = None, seconds: float = 5.0) -> int:
    """Kill what a crashed supervisor left running; return how many processes.

    The recorded processes whose start time still matches, what they forked, and
    everything that carries the instance in its environment: programs a handler
    executed. Call it while holding the instance lock, before new workers start.
    """
    instance_uuid = instance_uuid or table.instance_uuid
    killed = 0
    if table.same_boot:
        gone = []
        for slot in table.slots:
            pid = slot.pid
            if not pid or slot.state in (SlotState.FREE, SlotState.DEAD):
                continue
            if start_time(pid) == slot.start_time:  # else its number may be another's by now
                killed += kill_group(pid)
                gone.append(pid)
        gone += _kill(forks := _forked(table.path))
        killed += len(forks)
        _wait_gone(gone, seconds)
    for _ in range(_SWEEP_ROUNDS):
        marked = _marked(instance_uuid)
        if not marked:
            break
        killed += len(_kill(marked))
        _wait_gone(marked, seconds / _SWEEP_ROUNDS)
    return killed


def _kill(pids: list[int]) -> list[int]:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return pids


def _forked(records: Path) -> list[int]:
    """Return the processes that were forked in a tree and have executed nothing since.

    Whatever group or session they are in by now, they have the title of the process they come
    from, and its mapping of the records; readers of the records have only that.
    """
    ending = f" {os.path.realpath(records)}"
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if int(name) == os.getpid():
                continue
            if not Path(f"/proc/{name}/cmdline").read_bytes().startswith(TITLE.encode()):
                continue
            mapped = Path(f"/proc/{name}/maps").read_text("utf-8", "surrogateescape")
            if any(line.endswith(ending) for line in mapped.splitlines()):
                found.append(int(name))
    return found


def _marked(instance_uuid: str) -> list[int]:
    """Return processes of our user started with the instance in their environment."""
    wanted = f"{INSTANCE_VARIABLE}={instance_uuid}".encode()
    spare = _ancestors()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in spare:
            continue
        try:
            if os.stat(f"/proc/{name}").st_uid != os.geteuid():
                continue
            with open(f"/proc/{name}/environ", "rb") as file:
                if wanted in file.read(_ENVIRON_BYTES_MAX).split(b"\0"):
                    found.append(int(name))
        except OSError:
            continue
    return found


def _ancestors() -> set[int]:
    """Return our own pid and those above it: a supervisor started by a job spares its parents."""
    spare = {0, 1}
    pid = os.getpid()
    while pid not in spare:
        spare.add(pid)
        fields = stat_of(pid)
        if not fields:
            break
        pid = int(fields[1])
    return spare
