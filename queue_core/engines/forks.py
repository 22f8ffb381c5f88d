"""Tell open files about a fork, so that nothing that must not cross it does.

Boundary: keeps the list and calls; what is closed is each file's own affair.
`os.register_at_fork` cannot be undone, so it is done once for all files, which
are held weakly.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

from queue_core.engines import deferral


class Forkable(Protocol):
    """Something with connections or descriptors that belong to one process."""

    def before_fork(self) -> None:
        """Wait for what is running, and close."""
        ...

    def after_fork_in_parent(self) -> None:
        """Go on."""
        ...

    def after_fork_in_child(self) -> None:
        """Start afresh; drop what could not be closed."""
        ...


_files: weakref.WeakSet[Forkable] = weakref.WeakSet()
_forking = threading.local()  # two threads may fork at once, and each has its own fork to end


def watch(file: Forkable) -> None:
    """Tell this object about every fork while it lives."""
    _files.add(file)


def _before() -> None:
    _forking.files = []
    with deferral.held():  # Python swallows what a handler raises in here, and forks all the same
        # In one order for all threads, or two forks at once could wait for each other.
        for file in sorted(_files, key=id):
            file.before_fork()
            _forking.files.append(file)


def _after_in_parent() -> None:
    with deferral.held():
        while _forking.files:
            _forking.files.pop().after_fork_in_parent()


def _after_in_child() -> None:
    deferral.reset()
    while _forking.files:
        _forking.files.pop().after_fork_in_child()


os.register_at_fork(
    before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child
)
