"""One server that tests of requests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tiny
from web import Running

from tutti.serve import Engine
from tutti.serve.server.app import Options


@pytest.fixture(scope="session")
def running() -> Iterator[Running]:
    """A tiny Llama, at most six requests of 20 kB at once."""
    engine = Engine(tiny.model(), tokenizer=tiny.tokenizer(), plan="single", blocks=64, budget=64, most=8)
    server = Running(engine, Options("tiny", queue=6, body=20_000))
    yield server
    server.stop()
