"""Say where the shared file of a supervisor lies, and where a crashed one's went.

Boundary: names and places; what is in the file is `slots`'. Folders such as
/dev/shm are open to everyone, so a name taken by another user is not believed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from supervisor.linux import is_tmpfs

_PREVIOUS_MAX: Final = 8
"""Runs that crashed before their keeper had dealt with the run before; the last place is reused."""


class SlotsError(Exception):
    """The shared records cannot be created or read; the message says what and where."""


def _stem(database: str | Path, instance: str) -> str:
    real = os.path.realpath(os.fspath(database))
    return hashlib.sha256(f"{real}\0{instance}".encode()).hexdigest()[:20]


def _folders(database: str | Path) -> Iterator[Path]:
    """Yield where the records may lie, best first."""
    for folder in (Path(f"/run/user/{os.geteuid()}"), Path("/run"), Path("/dev/shm")):
        if is_tmpfs(folder) and os.access(folder, os.W_OK | os.X_OK):
            yield folder
    yield Path(os.path.realpath(os.fspath(database))).parent


def slots_path(database: str | Path, instance: str = "") -> Path:
    """Return where the supervisor of this database and instance creates its records.

    The first folder that is a tmpfs and where no other user has taken the name.
    """
    name = f"herdsman-{os.geteuid()}-{_stem(database, instance)}.slots"
    for folder in _folders(database):
        path = folder / name
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return path
        except OSError:
            continue
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
            return path
    raise SlotsError(f"every place for {name} is taken by another user; remove those files")


def find_slots(database: str | Path, instance: str = "") -> Path | None:
    """Return the records of a running or crashed supervisor of this database, if any.

    Only files of ours, of root, or of the database's owner are believed.
    """
    trusted = {0, os.geteuid()}
    with contextlib.suppress(OSError):
        trusted.add(os.stat(database).st_uid)
    stem = _stem(database, instance)
    for uid in sorted(trusted, key=lambda uid: uid != os.geteuid()):
        folders = [Path(f"/run/user/{uid}"), Path("/run"), Path("/dev/shm"), *_folders(database)]
        for folder in folders:
            path = folder / f"herdsman-{uid}-{stem}.slots"
            try:
                found = os.lstat(path)
            except OSError:
                continue
            if stat.S_ISREG(found.st_mode) and found.st_uid == uid:
                return path
    return None


def previous_slots(path: str | Path) -> list[Path]:
    """Return the records that crashed supervisors left under this path, oldest first."""
    path = Path(path)
    found = [path.with_name(f"{path.name}.prev{at}") for at in range(_PREVIOUS_MAX)]
    return [one for one in found if one.is_file()]


def set_aside(path: Path) -> None:
    """Keep the records of a crashed run for the keeper of this one."""
    names = [path.with_name(f"{path.name}.prev{at}") for at in range(_PREVIOUS_MAX)]
    target = next((one for one in names if not one.exists()), names[-1])
    shutil.rmtree(stacks_of(target), ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        os.rename(stacks_of(path), stacks_of(target))
    os.replace(path, target)


def stacks_of(path: Path) -> Path:
    """Return the folder that holds the stack files of a slot file."""
    return path.with_name(path.name + ".stacks")
