"""Prompts and generation apart: one engine computes prompts, another generates from their KV caches.

    engine = Disaggregated(Engine(model, ...), Engine(model, ...))             # in one process
    engine = Disaggregated(Engine(model, ...), Remote(("10.0.0.2", 7000), key))  # the other calls `generate_for`

Both may have any plan. Blocks of the cache are sent whole, and split as the receiver's plan says.
"""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Protocol

from tutti.serve.engine import Carried, Engine, served
from tutti.serve.request import Output, Request, Sampling


class Generating(Protocol):
    """What generates from the caches of others: an engine, or `Remote`."""

    @property
    def busy(self) -> bool:
        """Whether a request is unfinished."""
        ...

    def take_over(self, carried: Carried) -> Output:
        """Go on with a request."""
        ...

    def step(self) -> list[Output]:
        """The outputs that have changed."""
        ...

    def cancel(self, id: str, reason: str = "cancelled") -> Output | None:
        """End a request."""
        ...


class Channel:
    """Messages over a connection. A thread reads what comes, so that a sender never waits for one that sends."""

    def __init__(self, connection: Connection):
        self.connection, self.came = connection, queue.SimpleQueue[Any]()
        self.thread = threading.Thread(target=self._read, name="tutti channel", daemon=True)
        self.thread.start()

    def send(self, what: Any) -> None:
        """Send an object. Tensors travel as their bytes."""
        self.connection.send_bytes(pickle.dumps(what))

    def take(self, wait: bool) -> list[Any]:
        """What has come. wait: until there is something. None says that the other side has closed."""
        found = [self.came.get()] if wait else []
        while not self.came.empty():
            found.append(self.came.get())
        return found

    def _read(self) -> None:
        try:
            while True:
                self.came.put(pickle.loads(self.connection.recv_bytes()))
        except (EOFError, OSError):
            self.came.put(None)

    def close(self) -> None:
        """Tell the other side, which then closes the connection."""
        with suppress(OSError):
            self.send(None)
        self.thread.join(10)
        self.connection.close()


class Remote:
    """An engine in another process, which calls `generate_for`. address, key: of its listener."""

    def __init__(self, address: tuple[str, int], key: bytes):
        self.channel = Channel(Client(address, authkey=key))
        self.outputs: dict[str, Output] = {}

    @property
    def busy(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self.outputs)

    def take_over(self, carried: Carried) -> Output:
        """Send a request with its cache."""
        self.channel.send(("take_over", carried))
        self.outputs[carried.output.id] = carried.output
        return carried.output

    def step(self) -> list[Output]:
        """Wait for the next outputs. Raises ConnectionError if the other process has ended."""
        if not self.outputs:
            return []
        changed = {}
        for told in self.channel.take(wait=True):
            if told is None:
                raise ConnectionError("the process that generates has ended")
            for made in told:
                output = self.outputs[made.id]
                behind = output.arrival - made.arrival  # of the clocks
                vars(output).update(vars(made), arrival=output.arrival, times=[x + behind for x in made.times])
                changed[made.id] = output
        for id, output in changed.items():
            if output.finished:
                del self.outputs[id]
        return list(changed.values())

    def cancel(self, id: str, reason: str = "cancelled") -> Output | None:
        """End a request; its last output comes with the next step."""
        if id in self.outputs:
            self.channel.send(("cancel", (id, reason)))
        return None

    def close(self) -> None:
        """End `generate_for`."""
        self.channel.close()


def generate_for(engine: Engine, address: tuple[str, int], key: bytes) -> None:
    """Generate for the `Remote` that connects, until it closes. In a job of several processes, rank 0 listens."""
    if not engine.runner.leads:
        engine.runner.follow()
        return
    try:
        with Listener(address, authkey=key) as listener, listener.accept() as connection:
            _generate_for(engine, Channel(connection))
    finally:
        engine.runner.release(None)


def _generate_for(engine: Engine, channel: Channel) -> None:
    while True:
        changed: list[Output] = []
        for told in channel.take(wait=not engine.busy):
            if told is None:
                return
            kind, what = told
            if kind == "take_over":
                engine.take_over(what)
            elif output := engine.cancel(*what):
                changed.append(output)
        changed += engine.step() if engine.busy else []
        if changed:
            channel.send(changed)


class Disaggregated:
    """Two engines as one, with the methods of an engine. A request moves after its first token."""

    def __init__(self, prompts: Engine, generation: Generating):
        self.prompts, self.generation = prompts, generation
        self.bytes = 0  # of the caches that were sent
        self.constraints = prompts.constraints
        if isinstance(generation, Engine):
            generation.constraints = self.constraints

    def add(self, request: Request) -> Output:
        """As `Engine.add`."""
        return self.prompts.add(request)

    def step(self) -> list[Output]:
        """A step of each engine that has requests."""
        changed = self.prompts.step() if self.prompts.busy else []
        for output in changed:
            if output.id in self.prompts.jobs and (carried := self.prompts.hand_on(output.id)):
                self.bytes += carried.bytes
                self.generation.take_over(carried)
        return [*changed, *(self.generation.step() if self.generation.busy else ())]

    def cancel(self, id: str, reason: str = "cancelled") -> Output | None:
        """As `Engine.cancel`."""
        return self.prompts.cancel(id, reason) or self.generation.cancel(id, reason)

    @property
    def busy(self) -> bool:
        """Whether a request is unfinished."""
        return self.prompts.busy or self.generation.busy

    def generate(self, requests: Iterable[Any], sampling: Sampling | None = None) -> list[Output]:
        """As `Engine.generate`."""
        return served(self, requests, sampling)
