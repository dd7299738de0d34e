"""Prompts and generation apart: one engine computes prompts, another generates from their KV caches.

    engine = Disaggregated(Engine(model, ...), Engine(model, ...))             # in one process
    engine = Disaggregated(Engine(model, ...), Remote(("10.0.0.2", 7000), key))  # the other calls `generate_for`

Both may have any plan. Blocks of the cache are sent whole, and split as the receiver's plan says.
"""

from __future__ import annotations

from collections.abc import Iterable
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Protocol

from tutti.serve.engine import Carried, Engine
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

    def cancel(self, id: str, reason: str = "cancelled") -> None:
        """End a request."""
        ...


class Remote:
    """An engine in another process, which calls `generate_for`. address, key: of its listener."""

    def __init__(self, address: tuple[str, int], key: bytes):
        self.connection: Connection = Client(address, authkey=key)
        self.outputs: dict[str, Output] = {}

    @property
    def busy(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self.outputs)

    def take_over(self, carried: Carried) -> Output:
        """Send a request with its cache."""
        self.connection.send(("take_over", carried))
        self.outputs[carried.output.id] = carried.output
        return carried.output

    def step(self) -> list[Output]:
        """Wait for the next outputs."""
        changed = []
        for made in self.connection.recv() if self.outputs else ():
            output = self.outputs[made.id]
            vars(output).update(vars(made))
            changed.append(output)
            if output.finished:
                del self.outputs[made.id]
        return changed

    def cancel(self, id: str, reason: str = "cancelled") -> None:
        """End a request; its last output comes with the next step."""
        if id in self.outputs:
            self.connection.send(("cancel", (id, reason)))

    def close(self) -> None:
        """End `generate_for`."""
        self.connection.send(None)
        self.connection.close()


def generate_for(engine: Engine, address: tuple[str, int], key: bytes) -> None:
    """Generate for the `Remote` that connects, until it closes. In a job of several processes, rank 0 listens."""
    if not engine.runner.leads:
        engine.runner.follow()
        return
    with Listener(address, authkey=key) as listener, listener.accept() as connection:
        gone: list[Output] = []
        while True:
            while connection.poll(0 if engine.busy or gone else None):
                try:
                    told = connection.recv()
                except EOFError:
                    told = None
                if told is None:
                    engine.runner.release(None)
                    return
                kind, what = told
                if kind == "take_over":
                    engine.take_over(what)
                elif job := engine.jobs.get(what[0]):
                    engine.cancel(*what)
                    gone.append(job.output)
            changed, gone = [*gone, *(engine.step() if engine.busy else ())], []
            if changed:
                connection.send(changed)


class Disaggregated:
    """Two engines as one, with the methods of an engine. A request moves after its first token."""

    def __init__(self, prompts: Engine, generation: Generating):
        self.prompts, self.generation = prompts, generation
        self.bytes = 0  # of the caches that were sent

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

    def cancel(self, id: str, reason: str = "cancelled") -> None:
        """As `Engine.cancel`."""
        self.prompts.cancel(id, reason)
        self.generation.cancel(id, reason)

    @property
    def busy(self) -> bool:
        """Whether a request is unfinished."""
        return self.prompts.busy or self.generation.busy

    def generate(self, requests: Iterable[Any], sampling: Sampling | None = None) -> list[Output]:
        """As `Engine.generate`."""
        outputs = [self.add(x if isinstance(x, Request) else Request(x, sampling or Sampling())) for x in requests]
        while not all(x.finished for x in outputs):
            self.step()
        return outputs
