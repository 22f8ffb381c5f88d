"""Bind the address and run the HTTP server until the supervisor wants it to stop.

Boundary: sockets, uvicorn and the child's wishes; what is answered is `app`.
Imported in the `web` process alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import structlog
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from queue_core import open_engine
from supervisor import catalogue, logs
from supervisor.child import Child
from supervisor.processes import read_processes
from supervisor.settings import Settings
from supervisor.web.app import application
from supervisor.web.guard import ANSWER_SECONDS_MAX, Hosts
from supervisor.web.sources import Opener, Sources

log = structlog.get_logger("herdsman.web")

WEB_LISTENING: Final = "web_listening"
WEB_NOT_STARTED: Final = "web_not_started"
WEB_STOPPED: Final = "web_stopped"

CONNECTIONS_MAX: Final = 100
HEADER_BYTES_MAX: Final = 16 * 1024
HEADER_SECONDS_MAX: Final = 10.0
"""Time a client has to send a request's head once it is connected; then it is cut off."""
GRACE_SECONDS: Final = 2
BEAT_SECONDS: Final = 1.0
TOKEN_BYTES_MAX: Final = 4096


class WebError(Exception):
    """The server cannot start; the text says what, where and what next."""


def run(child: Child, settings: Settings, database: str) -> int:
    """Serve until the supervisor wants the process to stop; return the exit code."""
    try:
        token = read_token(settings.web.token_file)
        listener = bind(settings.web.host, settings.web.port)
    except WebError as error:
        # The supervisor backs off and tries again; the workers go on without us.
        child.slot.note = str(error)
        log.error(WEB_NOT_STARTED, why=str(error))
        return 1
    sources = Sources(
        Opener(lambda: open_engine(database, create=False)),
        catalogue.expected(settings),
        lambda: read_processes(child.table),
        instance=settings.instance,
        engine="sqlite" if "://" not in database else "postgresql",
    )
    app = application(sources, hosts=Hosts(settings.web.host), token=token)
    child.ready()
    log.info(WEB_LISTENING, address=url(listener))

    def beat() -> bool:
        child.clear_wake()
        child.slot.beat()
        if child.reopen_logs:
            child.reopen_logs = False
            if settings.logs.file is not None:
                logs.reopen(settings.logs.file)
        return child.stopping

    serve(app, listener, beat=beat, wake_fd=child.wake_fd)
    log.info(WEB_STOPPED)
    return 0


def serve(
    app: ASGIApp, listener: socket.socket, *, beat: Callable[[], bool], wake_fd: int | None
) -> None:
    """Answer requests until `beat` returns True; it is called every second, and on a wake-up."""
    config = uvicorn.Config(
        app,
        interface="asgi3",
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=CONNECTIONS_MAX,
        timeout_graceful_shutdown=GRACE_SECONDS,
        h11_max_incomplete_event_size=HEADER_BYTES_MAX,
    )
    server = Server(config, beat, wake_fd)
    # Not asyncio.run, which would take SIGINT for itself: signals are the child's.
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(server.serve(sockets=[listener]))
    finally:
        loop.close()


class Server(uvicorn.Server):
    """A server that leaves signals alone: they belong to the process it runs in.

    It also turns once a second and when it is woken, not ten times a second as its base does:
    that was a quarter of what an idle service took of the processor.
    """

    def __init__(
        self, config: uvicorn.Config, beat: Callable[[], bool], wake_fd: int | None
    ) -> None:
        super().__init__(config)
        self._beat = beat
        self._wake_fd = wake_fd

    async def main_loop(self) -> None:
        """Turn until `beat` says that it is over, or a request made the server stop."""
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()
        if self._wake_fd is not None:
            loop.add_reader(self._wake_fd, woken.set)
        try:
            # 0 is the number of a tick at which the base sets the time of the Date header anew.
            while not self._beat() and not await self.on_tick(0):
                timer = loop.call_later(BEAT_SECONDS, woken.set)
                await woken.wait()
                timer.cancel()
                woken.clear()
        finally:
            if self._wake_fd is not None:
                loop.remove_reader(self._wake_fd)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handler."""
        yield


class Connection(H11Protocol):
    """A connection that is cut off when its client is too slow.

    Without this, a client that sends half a request, or reads half an answer,
    holds its place for ever, and CONNECTIONS_MAX of them shut everybody else out.
    """

    _watch: asyncio.TimerHandle | None = None
    _seen: Any = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to watch the client."""
        super().connection_made(transport)
        self._watch = self.loop.call_later(HEADER_SECONDS_MAX, self._check, None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop watching."""
        if self._watch is not None:
            self._watch.cancel()
        super().connection_lost(exc)

    def _check(self, before: object) -> None:
        cycle = self.cycle
        answering = cycle is not None and not cycle.response_complete
        # `before` is what was going on one check ago: the same means no progress since.
        if cycle is before:
            self.transport.abort()
            return
        seconds = ANSWER_SECONDS_MAX + 5.0 if answering else HEADER_SECONDS_MAX
        self._watch = self.loop.call_later(seconds, self._check, cycle)


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises WebError in one sentence."""
    where = f"{host}:{port}"
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_ADDRCONFIG
        )
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise WebError(
            f"web.listen {where} is no address of this machine ({error.strerror}); change it"
        ) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        reason = os.strerror(error.errno or 0).lower()
        raise WebError(
            f"cannot listen on {where}: {reason}; stop what holds it, or change web.listen"
        ) from None
    return listener


def url(listener: socket.socket) -> str:
    """Return the address of a listening socket, as a browser takes it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def read_token(path: Path | None) -> bytes | None:
    """Return the token of a file, None without one. Raises WebError when it is of no use."""
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            token = file.read(TOKEN_BYTES_MAX + 1).strip()
    except OSError as error:
        raise WebError(f"cannot read web.token_file {path}: {error.strerror}") from None
    if not 8 <= len(token) <= TOKEN_BYTES_MAX:
        raise WebError(f"web.token_file {path} holds no token of 8 to 4096 bytes; write one")
    return token
