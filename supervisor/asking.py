"""Ask a running supervisor for something, and see that it took note.

The words go into the shared records, a signal says "look"; see `wishes`, which answers. The
process signalled is held by a pidfd first and its start time compared then, so that no other
process can be meant.

Boundary: the asking side; what becomes of a request is the supervisor's business.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from supervisor.linux import start_time
from supervisor.pool import Pool, Wish
from supervisor.slots import Slot, SlotsError, SlotTable, find_slots

NOTE_SECONDS: Final = 5.0
"""The supervisor looks at least once a second; one that has not after five hangs."""
POLL_SECONDS: Final = 0.02
_KIND_BITS: Final = 8


class NotAsked(Exception):
    """The request reached nobody; the text says why, and what to do."""


def attach(database: str, instance: str) -> SlotTable:
    """Return the records of a living, working supervisor, writable; close them after use.

    Raises NotAsked when there is none, when it shuts down, or when its records are not ours.
    """
    path = find_slots(database, instance)
    if path is None:
        raise NotAsked(_nobody(database, instance))
    try:
        table = SlotTable.attach(path)
    except SlotsError as error:
        if not os.access(path, os.R_OK | os.W_OK):
            owner = _owner(path)
            raise NotAsked(f"{path} belongs to {owner}: run this command as that user") from error
        raise NotAsked(str(error)) from error
    started = start_time(table.supervisor_pid)
    if not started or started != table.supervisor_start_time or not table.same_boot:
        table.close()
        raise NotAsked(_nobody(database, instance))
    if table.draining:
        table.close()
        raise NotAsked(f"supervisor {instance} is shutting down; it takes no requests any more")
    return table


def _nobody(database: str, instance: str) -> str:
    return (
        f"no supervisor {instance} runs on {database}; start it with `herdsman run`, or name "
        "another --instance"
    )


def _owner(path: Path) -> str:
    import pwd

    try:
        uid = os.stat(path).st_uid
        return f"user {pwd.getpwuid(uid).pw_name}"
    except (OSError, KeyError):
        return "another user"


def ring(table: SlotTable) -> None:
    """Have the supervisor look now. Raises NotAsked when it is gone, or not ours to signal."""
    pid = table.supervisor_pid
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError as error:
        raise NotAsked("the supervisor has just ended") from error
    try:
        if start_time(pid) != table.supervisor_start_time:
            raise NotAsked("the supervisor has just ended")
        signal.pidfd_send_signal(fd, signal.SIGWINCH)
    except ProcessLookupError as error:
        raise NotAsked("the supervisor has just ended") from error
    except PermissionError as error:
        raise NotAsked(f"process {pid} is not ours to signal; run this as its user") from error
    finally:
        os.close(fd)


def ask_pool(table: SlotTable, pool: Pool, wish: Wish, seconds: float = NOTE_SECONDS) -> None:
    """Ask for a whole pool, and wait until the supervisor has taken note. Raises NotAsked."""
    number = (max(pool.wish, pool.granted) >> _KIND_BITS) + 1
    word = number << _KIND_BITS | wish
    pool.wish = word
    ring(table)
    if not wait_for(lambda: pool.granted >> _KIND_BITS >= number, seconds):
        raise NotAsked(
            f"the supervisor did not take note of it within {seconds:g} s: it hangs, or is of "
            "another version; see `herdsman why`"
        )


def ask_slot(table: SlotTable, slot: Slot) -> None:
    """Ask for the process of one record to be replaced, in its turn. Raises NotAsked."""
    slot.wish = slot.epoch
    ring(table)


def wait_for(fact: Callable[[], bool], seconds: float) -> bool:
    """Wait until a fact is true, at most so long; say whether it is."""
    deadline = time.monotonic() + seconds
    while not fact():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True
