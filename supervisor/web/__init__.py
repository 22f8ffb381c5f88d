"""Serve metrics, health and the dashboard from a forked child of the supervisor.

    server.py   bind, run uvicorn until told to stop
    guard.py    who may ask: host, token, method; headers of every answer
    app.py      routes
    status.py   facts of database and slots → one document, and what is wrong
    page.py     the document → HTML

Boundary: reads the queue and the slots, changes neither. Only `serve` is called
from outside, and it alone imports the web stack, so that workers and the
supervisor never carry it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from supervisor.child import Child
    from supervisor.settings import Settings

__all__ = ["serve"]


def serve(child: Child, settings: Settings, database: str) -> int:
    """Be the `web` process: serve until the supervisor wants it to stop; return the exit code.

    1 means that the address or the token could not be used; the slot's note says why.
    """
    from supervisor.web.server import run

    return run(child, settings, database)
