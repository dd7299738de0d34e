"""Calls of a function with fixed arguments skip the executor's queues, and have its results."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tutti
from tutti.exec.single_part import SinglePart

X = (torch.arange(32.0).reshape(4, 8) / 32).sin()


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x, factor):
        return self.norm(self.layer(x)) * factor


def lifted(plan: str, level: str = "O0", trained: bool = False):
    torch.manual_seed(0)
    model = Counted()
    optimizer = torch.optim.Adam(model.parameters(), 0.1) if trained else None

    def run(x, options):
        y = model(x, options["factor"])
        if optimizer is not None:
            optimizer.zero_grad()
            y.square().mean().backward()
            optimizer.step()
        return {"y": y.detach(), "total": y.detach().sum(), "text": "a constant"}

    store = tutti.Store(model=model, **({"optimizer": optimizer} if trained else {}))
    return tutti.function(run, X, {"factor": torch.tensor(2.0)}, store=store, plan=plan, level=level,
                          cluster="cpu:1" if plan == "single" else "cpu:2")  # fmt: skip


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1"])
def test_fixed_calls_have_the_results_of_ordinary_ones(level, trained):
    expected, fn = lifted("single", level, trained), lifted("single", level, trained)
    call = fn.fixed(X, {"factor": torch.tensor(2.0)})
    assert SinglePart.of(fn._executor, fn._inputs(fn.graph, fn._flat((X, {"factor": X[0, 0]}), {}).inputs))
    for i in range(3):
        options = {"factor": torch.tensor(float(i))}
        want, got = expected(X + i, options), call(X + i, options)
        assert got["text"] == want["text"] and torch.equal(got["y"], want["y"]) and got["total"] == want["total"]
    for want, got in zip(expected.store.parts, fn.store.parts, strict=True):
        assert want.keys() == got.keys() and all(got[name].equal(x) for name, x in want.items())
    assert fn.calls == 3


def test_it_is_not_for_several_devices():
    expected, fn = lifted("single"), lifted("dp")
    inputs = fn._inputs(fn.graph, fn._flat((X, {"factor": X[0, 0]}), {}).inputs)
    assert SinglePart.of(fn._executor, inputs) is None
    options = {"factor": torch.tensor(2.0)}
    torch.testing.assert_close(fn.fixed(X, options)(X, options)["y"], expected(X, options)["y"])
