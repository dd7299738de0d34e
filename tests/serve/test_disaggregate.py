"""Prompts on one engine, generation on another: tokens as by one engine alone."""

from __future__ import annotations

import socket
import time

import pytest
import tiny

from tutti.serve import Disaggregated, Engine, Remote, Request, Sampling, generate_for

LENGTHS = (5, 40, 21)


def engine(plan: str = "single", devices: int = 1, **options) -> Engine:
    return Engine(tiny.model(), tokenizer=tiny.tokenizer(), plan=plan, cluster=f"cpu:{devices}",
                  **{"blocks": 32, "budget": 32, "most": 4, **options})  # fmt: skip


def requests() -> list[Request]:
    plain = [Request(x, Sampling(max_tokens=12, temperature=0, ignore_end=True)) for x in tiny.prompts(*LENGTHS)]
    several = Request([1, 2, 3], Sampling(max_tokens=6, n=3, seed=1, ignore_end=True, logprobs=0))
    bound = Request("a", Sampling(max_tokens=20, regex="[ab]{4,9}x", seed=2))
    beams = Request([4, 5], Sampling(max_tokens=5, beams=3))
    once = Request([7, 8], Sampling(max_tokens=1, temperature=0))
    return [*plain, several, bound, beams, once]


def tokens(outputs) -> list:
    return [[(x.tokens, x.text, x.finish, len(x.logprobs)) for x in output.completions] for output in outputs]


@pytest.fixture(scope="module")
def alone() -> list:
    """What one engine answers."""
    return tokens(engine().generate(requests()))


@pytest.mark.parametrize("prompts, generation", [
    ({}, {}), ({"plan": "tp2", "devices": 2}, {"plan": "pp2", "devices": 2}), ({}, {"blocks": 8, "longest": 100}),
])  # fmt: skip
def test_in_one_process(prompts, generation, alone):
    made = Disaggregated(engine(**prompts), engine(**generation))
    assert tokens(made.generate(requests())) == alone
    assert made.bytes and made.generation.steps > 5  # pyright: ignore
    assert made.prompts.pool.used == made.generation.pool.used == 0  # pyright: ignore


def test_requests_on_their_way_can_be_cancelled():
    made = Disaggregated(engine(), engine(blocks=4, longest=60))
    first, second = (Request(x, Sampling(max_tokens=15, ignore_end=True)) for x in tiny.prompts(40, 40))
    outputs = [made.add(first), made.add(second)]
    while not made.generation.arriving:  # pyright: ignore
        made.step()
    made.cancel(second.id)
    while made.busy:
        made.step()
    assert [x.completions[0].finish for x in outputs] == ["length", "cancelled"]


def _generate(port: int) -> None:
    generate_for(engine("tp4", 4), ("127.0.0.1", port), b"secret")


def test_between_processes(pool):
    """The generating engine is a job of four processes; this process computes the prompts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for pipe in pool.pipes:
        pipe.send((_generate, (port,)))
    end = time.monotonic() + 120
    while True:
        try:
            remote = Remote(("127.0.0.1", port), b"secret")
            break
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.2)
    made = Disaggregated(engine(), remote)
    found = tokens(made.generate(requests()))
    made.step()
    remote.close()
    assert [pipe.recv() for pipe in pool.pipes] == [(True, None)] * 4
    assert found == tokens(engine().generate(requests()))
