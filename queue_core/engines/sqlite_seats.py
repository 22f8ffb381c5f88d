"""Make and open what the board consists of: a file, and a named pipe for each seat.

All of it is 0600 in a folder that is 0700. Whoever sees the file sees it with its token.

Boundary: files by name; what is written in them is `sqlite_board`'s.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path
from typing import Final

_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_TOKEN_BYTES: Final = 8


def open_board(path: Path, bytes_: int, token_at: int, *, create: bool) -> tuple[int, str] | None:
    """Return a descriptor of the board and its token; None where there is none, unless created.

    Raises OSError.
    """
    try:
        fd = os.open(path, _FLAGS)
    except FileNotFoundError:
        if not create:
            return None
        _make(path, token_at)
        fd = os.open(path, _FLAGS)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(0, "is not a file")
        os.ftruncate(fd, bytes_)
        return fd, os.pread(fd, _TOKEN_BYTES, token_at).hex()
    except BaseException:
        os.close(fd)
        raise


def _make(path: Path, token_at: int) -> None:
    """Make the board, unless somebody is faster."""
    folder = path.parent
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    for old in folder.glob("board*"):  # of another boot or version
        if old != path:
            old.unlink(missing_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".board") as made:  # 0600
        os.pwrite(made.fileno(), os.urandom(_TOKEN_BYTES), token_at)
        with contextlib.suppress(FileExistsError):
            os.link(made.name, path)


def pipe_name(folder: Path, seat: int) -> str:
    """Return the path of a seat's pipe."""
    return f"{folder}/seat{seat:02d}"


def open_pipe(folder: Path, seat: int) -> int:
    """Return a descriptor of a seat's pipe, made if it is not there. Raises OSError."""
    path = pipe_name(folder, seat)
    try:
        fd = os.open(path, _FLAGS | os.O_NONBLOCK)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        fd = os.open(path, _FLAGS | os.O_NONBLOCK)
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(0, "is not a pipe")
    return fd
