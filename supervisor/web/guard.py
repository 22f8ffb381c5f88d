"""Decide who may ask, and put the protective headers on every answer.

Boundary: an ASGI layer around the whole application; knows no route but the
open ones it is given, and no content.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Collection
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ANSWER_SECONDS_MAX: Final = 30.0
"""Longest time one answer may take, the sending included: a client that stops reading ends."""
METHODS: Final = ("GET", "HEAD")

SECURITY_HEADERS: Final = {
    # No inline script or style: text from a job that slipped through escaping could not run.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}?)\.?(?::\d{1,5})?")


def host_of(header: str | None) -> str | None:
    """Return the host of a Host header, lower case, without port; None when it is malformed."""
    match = _HOST.fullmatch(header or "")
    return match[1].lower() if match else None


def is_address(host: str) -> bool:
    """Say whether a host is an IP address and not a name."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


class Hosts:
    """The names this server answers to.

    A page of another site can point its own name at this address (DNS
    rebinding) and read what it gets; its browser still sends that name.
    """

    __slots__ = ("_addresses", "_names")

    def __init__(self, bound: str) -> None:
        plain = bound.strip("[]").lower()
        own = f"[{plain}]" if ":" in plain else plain
        self._names = {"localhost", "127.0.0.1", "[::1]", own}
        # Bound to every address: each of them is ours. An address cannot be rebound.
        self._addresses = is_address(plain) and ipaddress.ip_address(plain).is_unspecified
        if self._addresses:
            self._names.add(socket.gethostname().lower())

    def __contains__(self, host: str) -> bool:
        return host in self._names or (self._addresses and is_address(host))


def sent_token(header: str | None) -> bytes | None:
    """Return the token of an Authorization header: Bearer, or the password of Basic."""
    scheme, _, rest = (header or "").partition(" ")
    rest = rest.strip()
    if scheme.lower() == "bearer" and rest:
        return rest.encode("utf-8", "surrogateescape")
    if scheme.lower() == "basic":
        try:
            _, colon, password = base64.b64decode(rest, validate=True).partition(b":")
        except (binascii.Error, ValueError):
            return None
        return password if colon else None
    return None


class Guard:
    """Refuse what is not ours to answer, and bound and harden what is."""

    def __init__(
        self, app: ASGIApp, *, hosts: Hosts, token: bytes | None, open_paths: Collection[str]
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._token = token
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it."""
        if scope["type"] != "http":
            return

        async def hardened(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        answer = self.refusal(scope) or self._app
        # The reads behind an answer have shorter limits of their own; what is left to be
        # late is a client that does not take it. Returning early closes the connection.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                await answer(scope, receive, hardened)

    def refusal(self, scope: Scope) -> Response | None:
        """Return why a request is refused; None when it is not."""
        headers = Headers(scope=scope)
        trusted = self._token is not None and self._authorised(headers)
        host = host_of(headers.get("host"))
        # Who has the token is no rebound page, whatever name a proxy gave us.
        if not trusted and (host is None or host not in self._hosts):
            return _refuse(400, "this server does not answer to that host name; use localhost")
        if scope["method"] not in METHODS:
            return _refuse(405, "only GET and HEAD work here", Allow=", ".join(METHODS))
        if self._token is not None and not trusted and scope["path"] not in self._open_paths:
            return _refuse(
                401,
                "send the token: Authorization: Bearer, or Basic with it as the password",
                **{"WWW-Authenticate": 'Basic realm="herdsman", charset="UTF-8"'},
            )
        return None

    def _authorised(self, headers: Headers) -> bool:
        given = sent_token(headers.get("authorization"))
        # In constant time: how long a refusal takes tells nothing about the token.
        return given is not None and hmac.compare_digest(given, self._token or b"")


def _refuse(status: int, text: str, **headers: str) -> Response:
    return PlainTextResponse(text + "\n", status_code=status, headers=headers)
