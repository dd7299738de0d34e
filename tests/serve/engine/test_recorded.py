"""Recorded steps give what steps give, from memory that stays in place: shown with a recorder that calls again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import zoo
from tutti.serve import Engine, Sampling
from tutti.serve.engine.recorded import Recorded

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], list(range(20, 50))]
MEMORY = 1 << 22  # bytes of a cache
GREEDY = Sampling(max_tokens=12, temperature=0, ignore_end=True, logprobs=2)


class CallsAgain:
    """Records the function itself. The memory of arguments begins with garbage."""

    def __init__(self, error: str = ""):
        self.records = self.replays = self.waits = 0
        self.error = error

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        if self.error:
            raise RuntimeError(self.error)
        run()
        run()
        self.records += 1

        def replay() -> None:
            self.replays += 1
            run()

        return replay

    def buffers(self, size: int) -> tuple[Tensor, Tensor]:
        return torch.full((size,), 7, dtype=torch.uint8), torch.full((size,), 9, dtype=torch.uint8)

    def send(self, host: Tensor, device: Tensor) -> Callable[[], None]:
        device.copy_(host)

        def wait() -> None:
            self.waits += 1

        return wait


def engine(recorder: CallsAgain | None = None, **options) -> Engine:
    llm = Engine(zoo.llama(2).eval(), memory=MEMORY, self_check=False, **options)
    llm.runner.recorder = recorder
    return llm


def test_an_engine_generates_the_same_with_recorded_steps():
    recorder = CallsAgain()
    ours = engine(recorder, most=4, budget=16)
    got, wanted = ours.generate(PROMPTS, GREEDY), engine(most=4, budget=16).generate(PROMPTS, GREEDY)
    assert [x.completions[0] for x in got] == [x.completions[0] for x in wanted]
    assert recorder.replays == ours.steps
    assert recorder.records == len(ours.runner.recorded) == len(ours.runner.ready)


def test_steps_are_recorded_once_and_again_when_the_weights_have_moved():
    recorder = CallsAgain()
    ours = engine(recorder)
    ours.generate(PROMPTS, GREEDY)
    records = recorder.records
    other = zoo.llama(2).eval()
    with torch.no_grad():
        for x in other.parameters():
            x.mul_(1.5)
    ours.update(other.state_dict())  # in place
    outputs = ours.generate(PROMPTS, GREEDY)
    assert recorder.records == records
    assert [x.tokens for x in outputs] == [
        x.tokens for x in Engine(other, memory=MEMORY, self_check=False).generate(PROMPTS, GREEDY)
    ]
    stored = ours.runner.store.parts[0]
    name = next(x for x in stored if x.startswith("param:"))
    stored[name] = stored[name].clone()
    ours.update(other.state_dict())
    assert not ours.runner.recorded
    ours.generate(PROMPTS, GREEDY)
    assert recorder.records == 2 * records


def test_an_engine_that_cannot_record_says_so_and_works():
    ours = engine(CallsAgain("operation not permitted when stream is capturing"))
    with pytest.warns(UserWarning, match="without CUDA graphs.*not permitted"):
        got = ours.generate(PROMPTS, GREEDY)
    assert [x.tokens for x in got] == [x.tokens for x in engine().generate(PROMPTS, GREEDY)]
    assert ours.runner.recorder is None


def test_arguments_of_all_dtypes_arrive_and_the_host_waits_before_it_writes_again():
    recorder, results = CallsAgain(), torch.zeros(8, 3)

    def step(a: Tensor, more: dict[str, Tensor]) -> Tensor:
        return a[:, None] * more["x"].float() + more["flag"][:, None]

    def arguments(seed: int):
        generator = torch.Generator().manual_seed(seed)
        a = torch.randint(9, (5,), generator=generator)
        x = torch.randn(5, 3, generator=generator).bfloat16()
        return a, {"x": x, "flag": torch.rand(5, generator=generator) > 0.5}

    recorded = Recorded(step, arguments(0), recorder, results)
    for seed in range(1, 4):
        got = recorded(*arguments(seed))
        assert torch.equal(got, step(*arguments(seed)))
        assert got.data_ptr() == results.data_ptr()
        assert recorder.waits == seed
