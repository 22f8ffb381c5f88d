"""Map paths to answers.

Boundary: HTTP in, documents out; what the documents say is `status` and
`metrics`, who may ask is `guard`. Endpoints that read the database run in
threads, so that `/livez` answers while they wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from supervisor.metrics import render
from supervisor.web import page
from supervisor.web.guard import Guard, Hosts
from supervisor.web.sources import Sources

LIVEZ: Final = "/livez"
THREADS_MAX: Final = 16
"""Answers that may wait for the database at once; each wait has a limit of its own."""

Answer = Callable[[Request], Response]
Endpoint = Callable[[Request], Awaitable[Response]]


def application(sources: Sources, *, hosts: Hosts, token: bytes | None) -> ASGIApp:
    """Return the whole application behind its guard."""
    registries = sources.registries
    # Not Starlette's threads: what they come with takes 1.3 MB. And not the loop's own, whose
    # end it would wait for; the process ends with theirs.
    threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="answer")
    routes = [
        Route("/", _threaded(threads, _dashboard(sources))),
        Route("/api/status", _threaded(threads, _status(sources))),
        Route("/metrics", _threaded(threads, _metrics(registries.everything))),
        Route("/metrics/database", _threaded(threads, _metrics(registries.database))),
        Route("/metrics/process", _threaded(threads, _metrics(registries.process))),
        Route(LIVEZ, _livez(sources)),
        Route("/readyz", _threaded(threads, _readyz(sources))),
        Route("/static/{name}", _static),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={HTTPException: _refused, Exception: _broken},
        max_body_size=0,
    )
    app.router.redirect_slashes = False
    return Guard(app, hosts=hosts, token=token, open_paths=(LIVEZ,))


def _threaded(threads: ThreadPoolExecutor, answer: Answer) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        return await asyncio.get_running_loop().run_in_executor(threads, answer, request)

    return endpoint


def _metrics(registry: CollectorRegistry) -> Answer:
    def metrics(request: Request) -> Response:
        body, content_type = render(registry, request.headers.get("accept"))
        # Set as it is: the class would add a charset to a type that names its own.
        return Response(body, headers={"Content-Type": content_type})

    return metrics


def _dashboard(sources: Sources) -> Answer:
    def dashboard(request: Request) -> Response:
        return HTMLResponse(page.dashboard(sources.document()))

    return dashboard


def _status(sources: Sources) -> Answer:
    def status(request: Request) -> Response:
        return JSONResponse(sources.document())

    return status


def _livez(sources: Sources) -> Endpoint:
    async def livez(request: Request) -> Response:
        # The slots alone, on the loop's own thread: no database, no queue for a thread.
        facts = sources.look() if sources.look else None
        if facts is None:
            return _health(request, ["no supervisor runs here"])
        age_seconds = facts.supervisor_age_seconds
        silent = [] if facts.alive else [f"the supervisor has been silent for {age_seconds:.0f} s"]
        return _health(request, silent)

    return livez


def _readyz(sources: Sources) -> Answer:
    def readyz(request: Request) -> Response:
        return _health(request, sources.not_ready())

    return readyz


def _health(request: Request, reasons: list[str]) -> Response:
    code = 503 if reasons else 200
    if "application/json" in request.headers.get("accept", ""):
        document = {"schema_version": 1, "ok": not reasons, "reasons": reasons}
        return JSONResponse(document, status_code=code)
    return PlainTextResponse("".join(f"{line}\n" for line in reasons or ["ok"]), status_code=code)


async def _static(request: Request) -> Response:
    # A closed list of names, not a folder: no path can lead out of it.
    found = page.assets().get(request.path_params["name"])
    if found is None:
        raise HTTPException(404)
    content, content_type = found
    return Response(
        content, headers={"Content-Type": content_type, "Cache-Control": "max-age=86400"}
    )


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = "there is nothing here; try /" if error.status_code == 404 else error.detail
    return PlainTextResponse(text + "\n", status_code=error.status_code, headers=error.headers)


async def _broken(request: Request, error: Exception) -> Response:
    return PlainTextResponse("something broke here; the log says what\n", status_code=500)
