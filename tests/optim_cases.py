"""A small network, its batches, and training it in plain PyTorch or as a captured step."""

from __future__ import annotations

import functools

import torch

import tutti

STEPS = 50


class MLP(torch.nn.Module):
    def __init__(self, bias: bool = True):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.inner, self.head = torch.nn.Linear(16, 24, bias), torch.nn.Linear(24, 8, bias)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator) / 4

    def forward(self, x, y):
        return (self.head(torch.tanh(self.inner(x))) - y).square().mean()


@functools.cache
def batches(count=STEPS):
    generator = torch.Generator().manual_seed(1)
    draw = functools.partial(torch.randn, generator=generator)
    return [{"x": draw(8, 16), "y": draw(8, 8)} for _ in range(count)]


def eagerly(make, data=None):
    """The parameters after training with `optimizer.step()`."""
    model = MLP()
    optimizer = make(model)
    for batch in data or batches():
        optimizer.zero_grad()
        model(**batch).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def captured(make, plan="single", data=None, **options):
    """A step that has been trained, and its parameters."""
    model = MLP()
    step = tutti.parallelize(model, make(model), batches()[0], cluster="cpu:1" if plan == "single" else "cpu:2",
                             plan=plan, level="O0", **options)  # fmt: skip
    for batch in data or batches():
        step(batch)
    return step, step.state_dict()


def assert_equal(actual, wanted, tolerance=1e-5):
    for name, exact in wanted.items():
        error = ((actual[name] - exact).norm() / exact.norm()).item()
        assert error <= tolerance, f"{name}: relative error {error:.1e}"
