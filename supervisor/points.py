"""Examine the host and the place of a database: each point well or not, with what to do next.

Boundary: looks and changes nothing; the points of configuration and database are `doctor`'s.
"""

from __future__ import annotations

import os
import resource
import select
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Final

from queue_core.lockfile import NETWORK_FILESYSTEMS, filesystem_type, flock_excludes
from supervisor import host
from supervisor.linux import is_tmpfs
from supervisor.reasons import FREE_BYTES_LOW, FREE_BYTES_OUT, FREE_INODES_LOW
from supervisor.settings import Settings
from supervisor.slots import SlotsError, slots_path

DESCRIPTORS_MIN: Final = 1024
SYSTEMCTL_SECONDS: Final = 3.0
PRIVATE_MODES: Final = 0o077
OVERLAYS: Final = frozenset({"overlay", "aufs"})


class Status(StrEnum):
    """How a point stands. INFO is worth knowing and needs nothing."""

    OK = "ok"
    INFO = "info"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One thing examined: what was seen, and what to do about it ("" when nothing)."""

    name: str
    status: Status
    seen: str
    next: str = ""


def well(name: str, seen: str) -> Point:
    """Return a point that is well."""
    return Point(name=name, status=Status.OK, seen=seen)


# ---- host -----------------------------------------------------------------------------


def kernel() -> Iterator[Point]:
    """See whether the kernel has what supervising needs."""
    if hasattr(os, "pidfd_open") and hasattr(select, "epoll"):
        yield well("kernel", f"{os.uname().sysname} {os.uname().release} has pidfds and epoll")
    else:
        yield Point(
            name="kernel", status=Status.FAIL, seen="no pidfds here: `herdsman run` cannot work",
            next="use Linux 5.3 or later; the library works everywhere",
        )  # fmt: skip


def package() -> Point:
    """See whether two distributions install a package of our name over each other."""
    owners = sorted(set(metadata.packages_distributions().get("supervisor", [])))
    strangers = [name for name in owners if name != "herdsman"]
    if strangers:
        return Point(
            name="package", status=Status.FAIL,
            seen=f"the import package supervisor is installed by {' and '.join(owners)}: their "
            "files lie over each other",
            next=f"uninstall {strangers[0]} here, or give it an environment of its own, then "
            "reinstall herdsman",
        )  # fmt: skip
    return well("package", "no other distribution installs an import package supervisor")


def descriptors(settings: Settings) -> Point:
    """See whether the limit of open files is enough for the workers."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes = sum(pool.processes for pool in settings.pools.values())
    wanted = max(DESCRIPTORS_MIN, 64 + 8 * processes)
    if soft < wanted and soft != resource.RLIM_INFINITY:
        return Point(
            name="open files", status=Status.WARN,
            seen=f"the limit is {soft}, {processes} workers may need {wanted}",
            next="raise LimitNOFILE in the unit, or ulimit -n",
        )  # fmt: skip
    return well("open files", f"the limit is {soft}")


def systemd() -> Iterator[Point]:
    """Look at the unit this runs in, as in its ExecStartPre; elsewhere there is nothing to see."""
    if not os.environ.get("INVOCATION_ID"):
        return
    try:
        unit = Path("/proc/self/cgroup").read_text().strip().rpartition("/")[2]
        done = subprocess.run(
            ["systemctl", "show", unit, "-p", "KillMode", "-p", "OOMPolicy", "-p", "Type"],
            capture_output=True, text=True, timeout=SYSTEMCTL_SECONDS, check=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        yield Point(
            name="systemd", status=Status.INFO, seen="the unit's settings cannot be read here"
        )
        return
    yield from judge_unit(dict(line.split("=", 1) for line in done.stdout.split() if "=" in line))


def judge_unit(shown: dict[str, str]) -> Iterator[Point]:
    """Judge what systemctl shows of a unit."""
    wanted = {"KillMode": "mixed", "OOMPolicy": "continue"}
    wrong = {key: shown[key] for key, value in wanted.items() if shown.get(key, value) != value}
    if not wrong:
        yield well("systemd", "KillMode=mixed and OOMPolicy=continue")
        return
    seen = ", ".join(f"{key}={value}" for key, value in wrong.items())
    better = " and ".join(f"{key}={wanted[key]}" for key in wrong)
    yield Point(
        name="systemd", status=Status.WARN,
        seen=f"{seen}: a stop or an out-of-memory kill hits more processes than it must",
        next=f"set {better} in the unit",
    )  # fmt: skip


# ---- the place ------------------------------------------------------------------------


def place(path: Path) -> Iterator[Point]:
    """See what the database lies on, and whether locks work there."""
    folder = path.parent
    if not folder.is_dir():
        yield Point(
            name="folder", status=Status.WARN, seen=f"{folder} does not exist yet",
            next="`herdsman run` or the first put makes it",
        )  # fmt: skip
        return
    kind = filesystem_type(folder)
    if kind in NETWORK_FILESYSTEMS:
        yield Point(
            name="filesystem", status=Status.FAIL,
            seen=f"{folder} is on a network filesystem ({kind}), where locks cannot be trusted",
            next="put the database on a local disk",
        )  # fmt: skip
    elif is_tmpfs(folder):
        yield Point(
            name="filesystem", status=Status.WARN,
            seen=f"{folder} is in memory: a reboot takes every job with it",
            next="put the database on a disk",
        )  # fmt: skip
    elif kind in OVERLAYS:
        yield Point(
            name="filesystem", status=Status.INFO,
            seen=f"{folder} is in a container's own layer: it goes with the container",
            next="mount a volume there if the jobs are to stay",
        )  # fmt: skip
    else:
        yield well("filesystem", kind or "of unknown type")
    try:
        excludes = flock_excludes(folder)
    except OSError as error:
        yield Point(
            name="locks", status=Status.FAIL,
            seen=f"{folder} cannot be written: {error.strerror}",
            next="give the folder to the user of the service",
        )  # fmt: skip
        return
    if excludes:
        yield well("locks", f"flock keeps others out in {folder}")
    else:
        yield Point(
            name="locks", status=Status.FAIL, seen=f"flock does not keep others out in {folder}",
            next="use a local disk; from SQLite 3.51.3 on HERDSMAN_NO_FLOCK=1 is safe too",
        )  # fmt: skip


def files(path: Path) -> Iterator[Point]:
    """See that all files of the database have one owner, and are nobody else's to read."""
    names = ["", "-wal", "-shm", ".lock", ".bells"]
    found = {}
    for name in names:
        try:
            found[f"{path}{name}"] = os.lstat(f"{path}{name}")
        except OSError:
            continue
    if not found:
        return
    owners = {one.st_uid for one in found.values()}
    if len(owners) > 1:
        first = found.get(str(path))
        owner = first.st_uid if first else min(owners)
        other = next(name for name, one in found.items() if one.st_uid != owner)
        yield Point(
            name="owners", status=Status.FAIL,
            seen=f"{other} belongs to user {found[other].st_uid}, {path} to {owner}: somebody ran "
            "a command as another user",
            next=f"chown {owner} {other}",
        )  # fmt: skip
    elif owners != {os.geteuid()} and os.geteuid():
        yield Point(
            name="owners", status=Status.FAIL,
            seen=f"{path} belongs to user {owners.pop()}, you are {os.geteuid()}",
            next="run this as that user",
        )  # fmt: skip
    else:
        yield well("owners", f"all files belong to user {next(iter(owners))}")
    readable = [n for n, one in found.items() if stat.S_IMODE(one.st_mode) & PRIVATE_MODES]
    if readable:
        mode = stat.S_IMODE(found[readable[0]].st_mode)
        yield Point(
            name="modes", status=Status.WARN,
            seen=f"{readable[0]} has mode {mode:04o}: others can see payloads or get in the way",
            next=f"chmod go= {readable[0]}",
        )  # fmt: skip
    else:
        yield well("modes", "no file is open to other users")


def room(path: Path) -> Iterator[Point]:
    """See how much is free on the disk."""
    room = host.room(path)
    if room is None:
        return
    seen = f"{room.free_bytes // 2**20} MiB of {room.total_bytes // 2**20} are free"
    low = room.free_bytes < FREE_BYTES_LOW
    few = room.free_inodes is not None and room.free_inodes < FREE_INODES_LOW
    if few:
        seen += f", {room.free_inodes} inodes"
    if low or few:
        out = room.free_bytes < FREE_BYTES_OUT
        yield Point(
            name="disk", status=Status.FAIL if out else Status.WARN, seen=seen,
            next="free space, or shorten keep_done and keep_dead",
        )  # fmt: skip
    else:
        yield well("disk", seen)


def slots(settings: Settings) -> Point:
    """See where the records shared by all processes lie."""
    try:
        path = slots_path(settings.database, settings.instance)
    except SlotsError as error:
        return Point(name="slots", status=Status.FAIL, seen=str(error), next="remove those files")
    if is_tmpfs(path.parent):
        return well("slots", f"the shared records lie in memory, in {path.parent}")
    return Point(
        name="slots", status=Status.INFO,
        seen=f"the shared records lie on a disk, in {path.parent}: no tmpfs can be written",
        next="mount a tmpfs on /run, or give this user one",
    )  # fmt: skip
