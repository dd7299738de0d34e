"""The router: several workers behind one port.

Each worker is a server with an engine of its own: a process that the router starts (`Process`), a server that runs
elsewhere (`Remote`), or an actor of Ray (`ray_replica`). A request goes to the worker that has seen most of its prompt
before, unless that one is much busier than another (`replicas.route`). A worker that ends is started again; what it had
not begun to answer is sent to another.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tutti.serve.apart.replicas import route
from tutti.serve.server.answers import event
from tutti.serve.server.errors import Refused, body_of
from tutti.serve.server.hosts import Hosts
from tutti.serve.server.limits import Access

CHUNK = 64  # characters of a prompt that are compared at once
BEGINNING = 1 << 17  # characters of a prompt that are compared
REMEMBERED = 20_000  # chunks of a worker
PARENT = "TUTTI_ROUTER"  # environment variable: the router's process id, with which a worker ends
HOP = {"connection", "transfer-encoding", "content-length", "keep-alive", "host", "content-encoding"}


class Worker:
    """What a router knows of a worker. Subclasses define `begin`, `url`, `alive`, `ask_to_end` and `end`."""

    def __init__(self):
        self.seen: OrderedDict[bytes, None] = OrderedDict()
        self.load = self.starts = 0
        self.ready, self.next_start = False, 0.0

    def start(self) -> None:
        """Start it. What it had cached is gone."""
        self.begin()
        self.seen.clear()
        self.ready, self.starts = False, self.starts + 1
        self.next_start = time.monotonic() + min(60, 2**self.starts)  # one that cannot start is tried less and less

    def begin(self) -> None:
        """Start what it consists of. Returns at once."""
        raise NotImplementedError

    @property
    def url(self) -> str:
        """Where it listens, or "" if that is not known yet."""
        raise NotImplementedError

    @property
    def alive(self) -> bool:
        """Whether it runs, as far as is known."""
        raise NotImplementedError

    def ask_to_end(self) -> None:
        """Let it finish what it has and end. Returns at once."""

    def end(self, seconds: float) -> None:
        """Wait for its end so many seconds, then end it."""

    def seen_chunks(self, chunks: Sequence[bytes]) -> int:
        """Number of leading chunks of a prompt that it has seen."""
        return next((i for i, x in enumerate(chunks) if x not in self.seen), len(chunks))

    def remember(self, chunks: Sequence[bytes]) -> None:
        """It is given a prompt."""
        for x in chunks:
            self.seen[x] = None
            self.seen.move_to_end(x)
        while len(self.seen) > REMEMBERED:
            self.seen.popitem(last=False)


class Process(Worker):
    """A worker process. command: starts it; "{port}" in it is replaced."""

    def __init__(self, command: Sequence[str], threads: int):
        super().__init__()
        self.command, self.threads = command, threads
        self.process: subprocess.Popen[bytes] | None = None
        self.port = 0

    def begin(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        environment = {"OMP_NUM_THREADS": str(self.threads), **os.environ, PARENT: str(os.getpid())}
        command = [x.replace("{port}", str(self.port)) for x in self.command]
        self.process = subprocess.Popen(command, env=environment)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def ask_to_end(self) -> None:
        if self.process and self.alive:
            self.process.send_signal(signal.SIGTERM)

    def end(self, seconds: float) -> None:
        if self.process:
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()


class Remote(Worker):
    """A server that somebody else starts, and starts again when it ends."""

    def __init__(self, url: str):
        super().__init__()
        parts = httpx.URL(url)
        if parts.scheme not in ("http", "https") or not parts.host or parts.path not in ("", "/"):
            raise ValueError(f"the replica {url!r} is not the address of a server, such as http://node-1:8001")
        self.address = url.rstrip("/")

    def begin(self) -> None:
        pass

    @property
    def url(self) -> str:
        return self.address

    @property
    def alive(self) -> bool:
        return self.starts > 0


def processes(command: Sequence[str], count: int) -> list[Process]:
    """So many worker processes, which share the cores of this machine."""
    threads = max(1, (os.cpu_count() or 1) // count)
    return [Process(command, threads) for _ in range(count)]


def chunks_of(body: bytes) -> list[bytes]:
    """Digests of the beginnings of a request's prompt."""
    try:
        fields = json.loads(body)
        text = json.dumps(fields.get("messages") or fields.get("prompt") or "")
    except (ValueError, AttributeError, RecursionError):
        return []
    chunks, state, text = [], hashlib.blake2b(digest_size=8), text[:BEGINNING]
    for i in range(0, len(text) - CHUNK + 1, CHUNK):
        state.update(text[i : i + CHUNK].encode())
        chunks.append(state.digest())
    return chunks


class Router:
    """Forwards requests to workers.

    most: largest body in bytes. access: checks keys and rates. host, hosts: the address that it binds to and further
    names, which are checked without keys.
    """

    def __init__(self, workers: Sequence[Worker], most: int, access: Access, host: str = "127.0.0.1",
                 hosts: Sequence[str] = ()):  # fmt: skip
        self.access = access
        self.middleware = [] if access.keys else [Middleware(Hosts, bound=host, allowed=hosts)]
        self.workers = list(workers)
        self.most, self.draining = most, False
        self.client: httpx.AsyncClient | None = None

    def application(self) -> Starlette:
        """The application. It starts and ends the workers."""

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
            self.client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=5), limits=limits)
            for worker in self.workers:
                worker.start()
            watch = asyncio.create_task(self._watch())
            yield
            self.draining = True
            watch.cancel()
            await asyncio.to_thread(self._end)
            await self.client.aclose()

        methods = ["GET", "POST"]
        return Starlette(lifespan=lifespan, middleware=self.middleware, routes=[
            Route("/health", self.health), Route("/metrics", self.metrics), Route("/live", self.live),
            Route("/{path:path}", self.forward, methods=methods),
        ])  # fmt: skip

    # -- workers --------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Start workers that have ended again, and notice which are ready."""
        assert self.client
        while True:
            for worker in self.workers:
                if not worker.alive:
                    if time.monotonic() >= worker.next_start:
                        worker.start()
                else:
                    worker.ready = bool(worker.url) and await self._is_healthy(worker.url)
            await asyncio.sleep(0.2)

    async def _is_healthy(self, url: str) -> bool:
        assert self.client
        try:
            return (await self.client.get(f"{url}/health", timeout=5)).status_code == 200
        except httpx.HTTPError:
            return False

    def _end(self, seconds: float = 60) -> None:
        """Let workers finish what they have."""
        for worker in self.workers:
            worker.ask_to_end()
        end = time.monotonic() + seconds
        for worker in self.workers:
            worker.end(max(0.1, end - time.monotonic()))

    # -- routes ---------------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        """200 if a worker is ready."""
        ready = sum(x.ready and x.alive for x in self.workers)
        state = "draining" if self.draining else "ok" if ready else "starting"
        report = {"status": state, "workers": len(self.workers), "ready": ready,
                "restarts": sum(max(0, x.starts - 1) for x in self.workers)}  # fmt: skip
        return JSONResponse(report, 200 if state == "ok" else 503)

    async def metrics(self, request: Request) -> Response:
        """The metrics of all workers, each with its number as a label."""
        texts = await self._each("/metrics")
        lines = [_labelled(line, i) for i, text in texts for line in text.text.splitlines()]
        return PlainTextResponse("\n".join(dict.fromkeys(lines)) + "\n", media_type="text/plain; version=0.0.4")

    async def live(self, request: Request) -> Response:
        """What the page draws, summed over workers."""
        answers = [x.json() for _, x in await self._each("/live")]
        if not answers:
            return JSONResponse({"model": "", "recent": []})
        latest = [x["recent"] for x in answers if x["recent"]]
        length = min(map(len, latest), default=0)
        merged = []
        for rows in zip(*(x[-length:] for x in latest), strict=True) if length else ():
            row = {key: sum(x[key] for x in rows) for key in ("running", "waiting", "rate")}
            row |= {"time": rows[0]["time"], "cache": max(x["cache"] for x in rows),
                    "latency": max(x["latency"] for x in rows)}  # fmt: skip
            merged.append(row)
        return JSONResponse({"model": answers[0]["model"], "recent": merged})

    async def _each(self, path: str) -> list[tuple[int, httpx.Response]]:
        """The answers of all workers that give one."""
        assert self.client
        answers = []
        for i, worker in enumerate(self.workers):
            if worker.ready:
                try:
                    answers.append((i, await self.client.get(worker.url + path)))
                except httpx.HTTPError:
                    continue
        return answers

    async def forward(self, request: Request) -> Response:
        """Send a request to a worker, and its answer back."""
        if request.url.path.startswith("/v1"):
            try:
                self.access.check(request)
            except Refused as error:
                return _refused(error)
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > self.most:
                return _refused(Refused(413, f"the body is larger than {self.most} bytes"))
        chunks = chunks_of(body) if request.method == "POST" else []
        tried: set[int] = set()
        while True:
            able = [i for i, x in enumerate(self.workers) if x.ready and x.alive and i not in tried]
            if self.draining or not able:
                return _refused(Refused(503, "no worker is ready", retry=5))
            chosen = able[route([self.workers[i].seen_chunks(chunks) * CHUNK for i in able],
                                [self.workers[i].load for i in able])]  # fmt: skip
            worker = self.workers[chosen]
            tried.add(chosen)
            worker.remember(chunks)
            worker.load += 1
            try:
                answer = await self._send(worker, request, body)
            except (ValueError, httpx.InvalidURL) as error:
                worker.load -= 1
                return _refused(Refused(400, f"the path or a header cannot be sent on: {error}"))
            except httpx.HTTPError:  # it has not begun to answer
                worker.load -= 1
                worker.ready = False
                continue
            except BaseException:
                worker.load -= 1
                raise
            headers = {k: v for k, v in answer.headers.items() if k.lower() not in HOP}
            return _Forwarded(worker, self._pieces(answer), answer.status_code, headers)

    async def _send(self, worker: Worker, request: Request, body: bytes) -> httpx.Response:
        assert self.client
        query = request.scope.get("query_string", b"")
        path = request.scope["raw_path"] + (b"?" + query if query else b"")
        headers = [(k, v) for k, v in request.headers.raw if k.decode("latin-1").lower() not in HOP]
        url = httpx.URL(worker.url).copy_with(raw_path=path)
        forwarded = self.client.build_request(request.method, url, content=body, headers=headers)
        task = asyncio.ensure_future(self.client.send(forwarded, stream=True))
        while not (await asyncio.wait({task}, timeout=0.25))[0]:
            if await request.is_disconnected():
                task.cancel()
                await asyncio.wait({task})
                raise asyncio.CancelledError
        return task.result()

    async def _pieces(self, answer: httpx.Response) -> AsyncIterator[bytes]:
        try:
            async for piece in answer.aiter_raw():
                yield piece
        except httpx.HTTPError as error:
            if "event-stream" in answer.headers.get("content-type", ""):
                yield event(body_of(Refused(502, f"the worker has ended: {error!r}"))[1]).encode()
        finally:
            await answer.aclose()


class _Forwarded(StreamingResponse):
    """The answer of a worker, which has one request less afterwards, also if the client has left before it begins."""

    def __init__(self, worker: Worker, pieces: AsyncIterator[bytes], status: int, headers: dict[str, str]):
        super().__init__(pieces, status, headers)
        self.worker = worker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.worker.load -= 1


def _refused(error: Refused) -> Response:
    status, body, headers = body_of(error)
    return JSONResponse(body, status, headers)


def _labelled(line: str, number: int) -> str:
    """A line of Prometheus's format with the label of a worker."""
    if line.startswith("#") or not line:
        return line
    name, labels, value = re.fullmatch(r"(\w+)(?:\{(.*)\})?(\s.*)", line).groups()  # pyright: ignore
    return f'{name}{{{labels + "," if labels else ""}worker="{number}"}}{value}'


def end_with_the_router() -> None:
    """Called in a worker: end it when the router's process has ended."""
    import threading

    if parent := os.environ.get(PARENT):

        def watch() -> None:
            while os.getppid() == int(parent):
                time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=watch, name="tutti router watch", daemon=True).start()


def worker_command(arguments: Sequence[str]) -> list[str]:
    """The command of a worker. arguments: words after `tutti serve`, without those of the router."""
    return [sys.executable, "-m", "tutti.cli", "serve", *arguments, "--host", "127.0.0.1", "--port", "{port}"]
