"""Which names a server answers to.

A page on the web can make its own name point to 127.0.0.1 (DNS rebinding), and read what a server answers there. The
browser then sends that name as `Host`: a server without API keys answers to its own names only.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from ipaddress import ip_address

from starlette.types import ASGIApp, Receive, Scope, Send

from tutti.serve.server.errors import Refused, body_of

LOCAL = "localhost", "127.0.0.1", "::1"
ANY = "0.0.0.0", "::", ""  # bound to all addresses


class Hosts:
    """ASGI middleware: requests for other hosts are refused with 400.

    bound: the address that the server binds to. allowed: further names; "*" is any. A server that is bound to all
    addresses also answers to its machine's name and to any address written in numbers, which no name points to.
    """

    def __init__(self, app: ASGIApp, bound: str, allowed: Sequence[str] = ()):
        self.app, self.bound = app, bound
        self.names = {name_of(x) for x in (*LOCAL, bound, *allowed) if x}
        if bound in ANY:
            self.names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self.answers(dict(scope["headers"]).get(b"host", b"").decode("latin-1")):
            return await self.app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        from fastapi.responses import JSONResponse

        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
        status, body, headers = body_of(Refused(400, f"this server does not answer to the host {host!r}; start it with "
                                                     "--allowed-hosts and this name, or with --keys"))  # fmt: skip
        await JSONResponse(body, status, headers)(scope, receive, send)

    def answers(self, host: str) -> bool:
        """Whether a `Host` header names this server."""
        name = name_of(host)
        return name in self.names or "*" in self.names or (self.bound in ANY and _is_address(name))


def name_of(host: str) -> str:
    """The name in a `Host` header, without port and brackets."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return (host if host.count(":") > 1 else host.partition(":")[0]).removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
