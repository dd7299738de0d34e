"""Who may ask, how much, and how often."""

from __future__ import annotations

import hmac
import time
from collections import OrderedDict
from collections.abc import Sequence

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tutti.serve.server.errors import Refused, body_of

CLIENTS = 10_000  # whose rates are remembered
DISCARDED = 64 << 20  # bytes


class BodyLimit:
    """ASGI middleware: bodies of more than `most` bytes are refused with 413."""

    def __init__(self, app: ASGIApp, most: int):
        self.app, self.most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        said = dict(scope["headers"]).get(b"content-length", b"0")
        if said.isdigit() and int(said) > self.most:
            await _discard(receive)
            return await self._refuse(scope, receive, send)
        body = bytearray()
        while True:  # read the body here, so that one without a length is limited too
            message = await receive()
            body += message.get("body", b"")
            if len(body) > self.most:
                await _discard(receive)
                return await self._refuse(scope, receive, send)
            if message["type"] != "http.request" or not message.get("more_body"):
                break
        first = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        await self.app(scope, replay, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        from fastapi.responses import JSONResponse

        error = Refused(413, f"the body is larger than {self.most} bytes")
        status, body, headers = body_of(error)
        await JSONResponse(body, status, {**headers, "Connection": "close"})(scope, receive, send)


async def _discard(receive: Receive) -> None:
    """Read a body that is refused, up to a limit: clients that still write do not see the answer."""
    size, more = 0, True
    while more and size < DISCARDED:
        message = await receive()
        size += len(message.get("body", b""))
        more = message["type"] == "http.request" and message.get("more_body", False)


class Access:
    """Checks keys and rates.

    keys: who may ask; empty: everybody. rate: requests of a key or address in a minute; 0: as many as it likes.
    Raises ValueError for a key that no header can hold, such as an empty one.
    """

    def __init__(self, keys: Sequence[str] = (), rate: float = 0):
        for i, key in enumerate(keys):
            if not key or key.strip() != key or not key.isprintable():
                raise ValueError(f"API key {i} is empty, or has spaces around it or a control character: requests "
                                 "cannot send it; is a variable of the shell empty?")  # fmt: skip
        self.keys, self.rate = [x.encode() for x in keys], rate
        self.left: OrderedDict[bytes, tuple[float, float]] = OrderedDict()  # requests left, and when that was

    def check(self, request: Request) -> str:
        """The account of a request: the number of its key, or an empty text where there are no keys.

        Raises Refused with 401 or 429.
        """
        token = request.headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1")
        matching = [i for i, key in enumerate(self.keys) if hmac.compare_digest(token, key)]
        if self.keys and not matching:
            raise Refused(401, "the API key is missing or wrong: send the header 'Authorization: Bearer KEY'")
        if self.rate:
            who = token if self.keys else (request.client.host if request.client else "").encode()
            self._count(who)
        return f"key {matching[0]}" if matching else ""

    def _count(self, who: bytes) -> None:
        now = time.monotonic()
        most = max(1.0, self.rate)
        left, then = self.left.pop(who, (most, now))
        left = min(most, left + (now - then) * self.rate / 60)
        self.left[who] = max(0.0, left - 1), now
        if len(self.left) > CLIENTS:
            self.left.popitem(last=False)
        if left < 1:
            self.left[who] = left, now
            raise Refused(429, f"more than {self.rate:g} requests in a minute", retry=(1 - left) * 60 / self.rate)
