"""Data parallelism: several engines behind one interface.

A request goes to the engine whose prefix cache has most of its prompt, unless that one has much more to do than
another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tutti.serve.cache.blocks import digests
from tutti.serve.engine.engine import Engine, served
from tutti.serve.engine.request import Output, Request, Sampling
from tutti.serve.values import Model, Prompt

SLACK = 4  # requests that an engine may have more than the idlest, and still get one whose prompt it knows


def route(cached: Sequence[int], load: Sequence[int]) -> int:
    """Which engine gets a request. cached: tokens of its prompt in each prefix cache. load: requests of each."""
    idlest = min(load)
    able = [i for i, n in enumerate(load) if n <= idlest + SLACK]
    return max(able, key=lambda i: (cached[i], -load[i], -i))


class Replicas:
    """Engines of the same model. It has the methods of an engine."""

    def __init__(self, engines: Sequence[Engine]):
        if not engines:
            raise ValueError("no engines: give at least one")
        self.engines: Sequence[Engine] = list(engines)
        self.constraints = engines[0].constraints
        for engine in engines[1:]:
            engine.constraints = self.constraints
        self.place: dict[str, Engine] = {}

    @classmethod
    def of(cls, model: Model, count: int, **options: Any) -> Replicas:
        """So many engines with the options of `Engine`."""
        return cls([Engine(model, **options) for _ in range(count)])

    def add(self, request: Request) -> Output:
        """As `Engine.add`."""
        engine = self.engines[
            route([self._cached_tokens(x, request) for x in self.engines], [len(x.jobs) for x in self.engines])
        ]
        output = engine.add(request)
        self.place[request.id] = engine
        return output

    def _cached_tokens(self, engine: Engine, request: Request) -> int:
        """Tokens of a prompt whose blocks the engine has. Sources of encoders do not count."""
        pool = engine.pool
        if engine.runner.encoder is not None and (engine.runner.crosses or request.inputs):
            return 0
        return len(pool.find(digests(engine.tokens(request.prompt), pool.size, request.prefix))) * pool.size

    def step(self) -> list[Output]:
        """A step of each engine that has requests."""
        changed = [x for engine in self.engines if engine.busy for x in engine.step()]
        for output in changed:
            if output.finished:
                self.place.pop(output.id, None)
        return changed

    def cancel(self, id: str, reason: str = "cancelled") -> Output | None:
        """As `Engine.cancel`."""
        engine = self.place.pop(id, None)
        return engine and engine.cancel(id, reason)

    def fail(self, why: str) -> list[Output]:
        """As `Engine.fail`."""
        self.place = {}
        return [x for engine in self.engines for x in engine.fail(why)]

    @property
    def busy(self) -> bool:
        """Whether a request is unfinished."""
        return any(x.busy for x in self.engines)

    def generate(self, requests: Iterable[Request | Prompt], sampling: Sampling | None = None) -> list[Output]:
        """As `Engine.generate`."""
        return served(self, requests, sampling)
