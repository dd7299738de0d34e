"""An engine in a thread of its own, for asynchronous callers.

async with Service(engine) as service:
    async for output in service.stream(Request("Once upon a time")):
        print(output.text)
"""

from __future__ import annotations

import asyncio
import queue
import threading
import traceback
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from tutti.serve.constraints.compiling import Busy, Compiler
from tutti.serve.constraints.constrain import Constraint
from tutti.serve.engine.protocols import Serving
from tutti.serve.engine.request import Output, Request

T = TypeVar("T")
FAILED = "the engine has failed"  # how the errors of requests begin that are not at fault


class Full(Exception):
    """The queue has no room for another request. retry: seconds after which it may have."""

    def __init__(self, retry: float):
        super().__init__(f"the queue is full; retry in {retry:.0f} s")
        self.retry = retry


class Draining(Exception):
    """The service finishes what it has and takes no new requests."""


class Answers:
    """The outputs of some requests as they grow. `close` must be called in the end; it cancels what is unfinished."""

    def __init__(self, service: Service, requests: Sequence[Request]):
        self.service, self.requests = service, requests
        self.loop, self.event = asyncio.get_running_loop(), asyncio.Event()
        self.open = set(range(len(requests)))  # requests that are unfinished
        self._fresh: dict[int, Output] = {}
        self._error: Exception | None = None

    async def changed(self, seconds: float | None = None) -> dict[int, Output]:
        """The newest outputs that have changed, by number of the request; empty if none has after so many seconds.

        Raises ValueError for a request that cannot be served.
        """
        with suppress(TimeoutError):
            await asyncio.wait_for(self.event.wait(), seconds)
        self.event.clear()
        fresh, self._fresh = self._fresh, {}
        if self._error:
            raise self._error
        self.open -= {i for i, x in fresh.items() if x.finished}
        return fresh

    def tell(self, number: int, output: Output | None, error: Exception | None = None) -> None:
        """Called by the engine's thread."""
        with suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self._take, number, output, error)

    def _take(self, number: int, output: Output | None, error: Exception | None) -> None:
        if output:
            self._fresh[number] = output
        self._error = self._error or error
        self.event.set()

    def close(self) -> None:
        """Nobody waits any more."""
        for i, request in enumerate(self.requests):
            if self.service.listeners.pop(request.id, None) and i in self.open:
                self.service.inbox.put(lambda id=request.id: self.service.cancel(id))


def _settle(done: asyncio.Future, result: object, error: Exception | None) -> None:
    """Answer a call whose caller may have left."""
    if not done.done():
        done.set_exception(error) if error else done.set_result(result)


class Service:
    """Runs an engine (or `Replicas`) in a thread. Other threads compile schemas and grammars before.

    limit: requests and calls that are unfinished at once; more are refused. observe: called after each step, in the
    thread, with the engine and the outputs that changed.
    """

    def __init__(
        self, engine: Serving, limit: int = 256, observe: Callable[[Serving, list[Output]], None] | None = None
    ):
        self.engine, self.limit, self.observe = engine, limit, observe
        self.listeners: dict[str, tuple[Answers, int]] = {}  # who waits for a request, and its number there
        self.inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.draining = self.ended = False
        self.calls: set[asyncio.Future] = set()
        self.thread = threading.Thread(target=self._run, name="tutti engine", daemon=True)
        self.compiler = Compiler(engine.constraints, limit)

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    def stop(self) -> None:
        """End the thread. Unfinished requests end with an error."""
        self.draining = True
        self.compiler.stop()
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
        while (self.listeners or self.calls) and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.05)

    def submit(self, requests: Sequence[Request]) -> Answers:
        """Start requests. Raises Full and Draining, and ValueError for a constraint that is too large."""
        if any(x.id in self.listeners for x in requests) or len({x.id for x in requests}) < len(requests):
            raise ValueError("there is a request with this id already")
        self._admit(len(requests))
        answers = Answers(self, requests)
        for i, request in enumerate(requests):
            self.listeners[request.id] = answers, i
        try:
            for i, request in enumerate(requests):
                self._start(request, answers, i)
        except BaseException:
            answers.close()
            raise
        return answers

    def _admit(self, count: int) -> None:
        """Raise Draining or Full if so many more requests cannot be taken."""
        if self.draining or self.ended:
            raise Draining("the server is shutting down")
        if (unfinished := len(self.listeners) + len(self.calls)) + count > self.limit:
            raise Full(max(1.0, unfinished / 32))

    def _start(self, request: Request, answers: Answers, number: int) -> None:
        """Add a request to the engine, after its constraint is compiled."""

        def done(constraint: Constraint | None, error: Exception | None) -> None:
            if error:
                answers.tell(number, None, Full(5) if isinstance(error, Busy) else error)
            else:
                self.inbox.put(lambda: self._add(request, answers, number, constraint))

        if request.sampling.constraint is None:
            return done(None, None)
        try:
            self.compiler.submit(*request.sampling.constraint, lambda: request.id in self.listeners, done)
        except Busy as error:
            raise Full(5) from error

    async def stream(self, request: Request) -> AsyncGenerator[Output]:
        """The output of a request, each time it has changed; the last one is finished. Leaving the loop cancels it.

        Raises Full and Draining, and ValueError for a request that cannot be served.
        """
        answers = self.submit([request])
        try:
            while answers.open:
                for output in (await answers.changed()).values():
                    yield output
        finally:
            answers.close()

    async def complete(self, request: Request) -> Output:
        """The finished output of a request. Raises as `stream` does."""
        return [x async for x in self.stream(request)][-1]

    async def call(self, function: Callable[[Serving], T]) -> T:
        """`function(engine)`, computed in the engine's thread between steps; dropped if the caller leaves before.

        Raises Full and Draining.
        """
        self._admit(1)
        loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def run() -> None:
            if done.cancelled():
                return
            try:
                result = function(self.engine)
            except Exception as error:
                loop.call_soon_threadsafe(_settle, done, None, error)
            else:
                loop.call_soon_threadsafe(_settle, done, result, None)

        self.calls.add(done)
        try:
            self.inbox.put(run)
            return await done
        finally:
            self.calls.discard(done)

    # -- the threads ----------------------------------------------------------------------------------------------

    def _add(self, request: Request, answers: Answers, number: int, constraint: Constraint | None) -> None:
        """Add a request to the engine, which finds its constraint compiled as long as that is held here."""
        if request.id not in self.listeners:  # nobody waits any more
            return
        try:
            self.engine.add(request)
        except Exception as error:
            answers.tell(number, None, error)

    def cancel(self, id: str) -> None:
        """End a request. Called in the thread."""
        if (output := self.engine.cancel(id)) and self.observe:
            self.observe(self.engine, [output])

    def _run(self) -> None:
        try:
            while self._read():
                try:
                    changed = self.engine.step()
                except Exception as error:  # what runs is lost, others can be served
                    traceback.print_exc()
                    changed = self.engine.fail(f"{FAILED}: {error}")
                self._tell(changed)
        finally:
            self.ended = True
            over = Draining("the server has stopped")
            for answers, number in list(self.listeners.values()):
                answers.tell(number, None, over)
            for done in list(self.calls):
                done.get_loop().call_soon_threadsafe(_settle, done, None, over)

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
            if not self.engine.busy and self.observe:
                self.observe(self.engine, [])

    def _tell(self, changed: list[Output]) -> None:
        for output in changed:
            if listener := self.listeners.get(output.id):
                shown = [replace(x, tokens=list(x.tokens), logprobs=list(x.logprobs)) for x in output.completions]
                listener[0].tell(listener[1], replace(output, completions=shown))
        if self.observe:
            self.observe(self.engine, changed)
