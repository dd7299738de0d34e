"""A run that an error ends in the middle leaves nothing behind for the next one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tutti
from tutti.exec.messages import ProcessMessages
from tutti.exec.runtimes.runtime import Virtual

X = (torch.arange(64.0).reshape(8, 8) / 64).sin()


def trained(plan: str) -> tutti.Step:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    return tutti.parallelize(
        model, torch.optim.Adam(model.parameters()), (X,), loss=lambda m, b: m(*b).square().mean(), cluster="cpu:2",
        plan=plan, level="O0", accumulate=4,
    )  # fmt: skip


def interrupt(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Raise KeyboardInterrupt once, at a run of a part."""
    run, calls = Virtual.run, []

    def interrupted(self, *args):
        calls.append(args)
        if len(calls) == at:
            raise KeyboardInterrupt
        return run(self, *args)

    monkeypatch.setattr(Virtual, "run", interrupted)


@pytest.mark.parametrize("plan", ["dp", "pp2"])
def test_a_step_after_an_interrupted_one(monkeypatch, plan):
    expected, step = trained(plan), trained(plan)
    interrupt(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        step((X,))
    for _ in range(2):
        assert step((X,)).item() == expected((X,)).item()


def test_a_function_after_an_interrupted_call(monkeypatch):
    def pipelined_forward() -> tutti.Function:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        return tutti.forward(model, (X,), store=tutti.Store(model=model), cluster="cpu:2", plan="pp2")

    expected, forward = pipelined_forward()((X,)), pipelined_forward()
    interrupt(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        forward((X,))
    assert torch.equal(forward((X,)), expected)


def test_processes_that_were_interrupted_say_so():
    mail = object.__new__(ProcessMessages)
    mail.unfinished = False
    mail.begin()
    with pytest.raises(RuntimeError, match="start the job again from a checkpoint"):
        mail.begin()
