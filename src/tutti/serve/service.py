"""An engine in a thread of its own, for asynchronous callers.

async with Service(engine) as service:
    async for output in service.stream(Request("Once upon a time")):
        print(output.text)
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from typing import Any

from tutti.serve.request import Output, Request


class Full(Exception):
    """The queue has no room for another request. retry: seconds after which it may have."""

    def __init__(self, retry: float):
        super().__init__(f"the queue is full; retry in {retry:.0f} s")
        self.retry = retry


class Draining(Exception):
    """The service finishes what it has and takes no new requests."""


@dataclass(eq=False)
class _Listener:
    """Who waits for a request: its newest output, and an event of its loop."""

    loop: asyncio.AbstractEventLoop
    event: asyncio.Event
    output: Output | None = None
    error: Exception | None = None

    def tell(self, output: Output | None, error: Exception | None = None) -> None:
        """Called by the engine's thread."""
        self.output, self.error = output or self.output, error
        self.loop.call_soon_threadsafe(self.event.set)


class Service:
    """Runs an engine (or `Replicas`) in a thread.

    limit: requests that are unfinished at once; more are refused. observe: called after each step, in the thread, with
    the engine and the outputs that changed.
    """

    def __init__(self, engine: Any, limit: int = 256, observe: Callable[[Any, list[Output]], None] | None = None):
        self.engine, self.limit, self.observe = engine, limit, observe
        self.listeners: dict[str, _Listener] = {}
        self.inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.draining = False
        self.failed: Exception | None = None
        self.thread = threading.Thread(target=self._run, name="tutti engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    def stop(self) -> None:
        """End the thread. Unfinished requests end with an error."""
        self.inbox.put(None)
        self.thread.join()

    async def __aenter__(self) -> Service:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)

    async def drain(self, seconds: float = 60) -> None:
        """Take no new requests and wait for the others, for so long at most."""
        self.draining = True
        end = asyncio.get_running_loop().time() + seconds
        while self.listeners and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.05)

    async def stream(self, request: Request) -> AsyncGenerator[Output]:
        """The output of a request, each time it has changed; the last one is finished. Leaving the loop cancels it.

        Raises Full and Draining, and ValueError for a request that cannot be served.
        """
        if self.failed:
            raise self.failed
        if self.draining:
            raise Draining("the server is shutting down")
        if len(self.listeners) >= self.limit:
            raise Full(max(1.0, len(self.listeners) / 32))
        listener = self.listeners[request.id] = _Listener(asyncio.get_running_loop(), asyncio.Event())
        self.inbox.put(lambda: self._add(request, listener))
        try:
            while True:
                await listener.event.wait()
                listener.event.clear()
                if listener.error:
                    raise listener.error
                output = listener.output
                assert output
                yield output
                if output.finished:
                    return
        finally:
            if self.listeners.pop(request.id, None) and not (listener.output and listener.output.finished):
                self.inbox.put(lambda: self.engine.cancel(request.id))

    async def complete(self, request: Request) -> Output:
        """The finished output of a request. Raises as `stream` does."""
        outputs = [x async for x in self.stream(request)]
        return outputs[-1]

    async def call(self, function: Callable[[Any], Any]) -> Any:
        """`function(engine)`, computed in the engine's thread between steps."""
        loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def run() -> None:
            try:
                made = function(self.engine)
            except Exception as error:
                loop.call_soon_threadsafe(done.set_exception, error)
            else:
                loop.call_soon_threadsafe(done.set_result, made)

        self.inbox.put(run)
        return await done

    # -- the thread -----------------------------------------------------------------------------------------------

    def _add(self, request: Request, listener: _Listener) -> None:
        try:
            self.engine.add(request)
        except ValueError as error:
            listener.tell(None, error)

    def _run(self) -> None:
        try:
            while self._read():
                self._tell(self.engine.step())
        except Exception as error:
            self.failed = RuntimeError(f"the engine has failed: {error}")
            self.failed.__cause__ = error
        for listener in list(self.listeners.values()):
            listener.tell(None, self.failed or Draining("the server has stopped"))

    def _read(self) -> bool:
        """Do what the inbox says; wait for it if there is nothing to compute. False: stop."""
        while True:
            try:
                todo = self.inbox.get(block=not self.engine.busy)
            except queue.Empty:
                return True
            if todo is None:
                return False
            todo()

    def _tell(self, changed: list[Output]) -> None:
        for output in changed:
            if listener := self.listeners.get(output.id):
                shown = [replace(x) for x in output.completions]  # the engine goes on with its own
                listener.tell(replace(output, completions=shown))
        if self.observe:
            self.observe(self.engine, changed)
