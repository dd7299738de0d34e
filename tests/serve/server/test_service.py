"""An engine in a thread: what it compiles for one request does not delay others."""

from __future__ import annotations

import asyncio
import threading

import pytest
import tiny

from tutti.serve import Engine, Request, Sampling
from tutti.serve.constraints.constrain import LARGEST
from tutti.serve.server.service import Service

REGEX = Sampling(regex="[ab]{3}", max_tokens=8)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny.model(), tokenizer=tiny.tokenizer(), plan="single", blocks=16, budget=16, most=2)


@pytest.fixture
def compiles(engine, monkeypatch) -> threading.Event:
    """No constraint is compiled before it is set."""
    go, compile = threading.Event(), engine.constraints.compile
    engine.constraints.cache.clear()

    def wait(*what):
        assert go.wait(60)
        return compile(*what)

    monkeypatch.setattr(engine.constraints, "compile", wait)
    return go


def test_others_generate_while_a_constraint_is_compiled(engine, compiles):
    async def main() -> str:
        async with Service(engine) as service:
            constrained = asyncio.create_task(service.complete(Request([1, 2], REGEX)))
            await asyncio.sleep(0)
            plain = await asyncio.wait_for(service.complete(Request([1, 2], Sampling(max_tokens=4))), 30)
            assert plain.finished and not constrained.done()
            compiles.set()
            return (await constrained).text

    text = asyncio.run(main())
    assert len(text) == 3 and set(text) <= {"a", "b"}


def test_a_request_that_is_cancelled_while_it_is_compiled_never_begins(engine, compiles):
    async def main() -> None:
        async with Service(engine) as service:
            constrained = asyncio.create_task(service.complete(Request([1, 2], REGEX)))
            await asyncio.sleep(0)
            constrained.cancel()
            await asyncio.gather(constrained, return_exceptions=True)
            compiles.set()
            assert (await service.complete(Request([1, 2], REGEX))).finished

    begun = engine.steps
    asyncio.run(main())
    assert engine.steps - begun <= 3 and engine.pool.used == 0


def test_a_large_constraint_is_refused_and_the_others_are_kept(engine):
    with pytest.raises(ValueError, match=f"at most {LARGEST} can be compiled"):
        engine.prepare(Request([1], Sampling(regex="a" * (LARGEST + 1))))
    engine.prepare(Request([1], REGEX))
    before = engine.constraints.compilations
    engine.generate([Request([1], REGEX)])
    assert engine.constraints.compilations == before
