"""The model is read, never changed: whether its capture succeeds or fails, everything that can be reached from it is
what it was: parameters, buffers, attributes, containers, hooks, modes, the code of its functions, random generators.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import FunctionType, MethodType

import numpy
import pytest
import torch
from torch import nn

import edges
import models
import tutti
from cases import some


def state(root: object, loss: object = None) -> list[tuple]:
    """Identities and contents of all that can be reached from a model, in a fixed order."""
    entries: list[tuple] = []
    seen: set[int] = set()

    def visit(path: str, x: object, depth: int) -> None:
        if isinstance(x, torch.Tensor):
            assert not isinstance(x, torch._subclasses.FakeTensor), f"{path} is a fake tensor"
            entries.append(
                (path, id(x), x.requires_grad, x.device, tuple(x.shape), bytes(str(x.detach().sum()), "ascii"))
            )
            return
        entries.append((path, type(x).__name__, id(x) if not isinstance(x, (int, float, str, MethodType)) else x))
        if id(x) in seen or depth > 6:
            return
        seen.add(id(x))
        if isinstance(x, FunctionType):
            entries.append((path, id(x.__code__)))
            for i, cell in enumerate(x.__closure__ or ()):
                visit(f"{path}.<{i}>", cell.cell_contents, depth + 1)
        elif isinstance(x, dict):
            for key, value in x.items():
                visit(f"{path}.{key}", value, depth + 1)
        elif isinstance(x, (list, tuple)):
            for i, value in enumerate(x):
                visit(f"{path}.{i}", value, depth + 1)
        elif isinstance(x, nn.Module):
            entries.append((path, id(type(x).forward.__code__), x.training))
            visit(path, x.__dict__, 0)
        elif type(x).__module__.startswith(("transformers", "diffusers", "edges")):
            visit(path, getattr(x, "__dict__", {}), depth + 1)

    visit("model", root, 0)
    visit("loss", loss, 0)
    return entries


def unchanged(model: nn.Module, loss: Callable | None, capture: Callable[[], object]) -> None:
    generators = random.getstate(), numpy.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()
    before, dynamic = state(model, loss), {k: v.clone() for k, v in model.state_dict().items()}
    try:
        capture()
    finally:
        after = state(model, loss)
        different = [pair for pair in zip(before, after, strict=False) if pair[0] != pair[1]]
        assert not different and len(before) == len(after), different[:3]
        assert all(torch.equal(dynamic[k], v) for k, v in model.state_dict().items())
        now = random.getstate(), numpy.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()
        assert now == generators


QUICK = ("qwen3", "t5", "qwen3_moe", "swin2sr", "unet2d", "mamba", "lstm")


@pytest.mark.parametrize("name", some(models.MODELS, QUICK))
def test_models_of_the_zoo(name):
    model, batch, loss = models.case(name)
    optimizer = torch.optim.AdamW(model.parameters())
    unchanged(model, loss, lambda: tutti.capture(model, batch, optimizer, loss))


@pytest.mark.parametrize("name", edges.CASES)
def test_models_at_the_edges(name):
    model, batch, loss = edges.CASES[name]()
    optimizer = edges.optimizer_for(model)
    unchanged(model, loss, lambda: tutti.capture(model, batch, optimizer, loss))


class Failing(edges.Net):
    """Changes much, then fails."""

    def __init__(self, how: Callable):
        super().__init__()
        self.how, self.seen, self.table, self.calls = how, [1], {"a": []}, 0
        self.register_buffer("mean", torch.zeros(edges.WIDTH))

    def between(self, x):
        self.calls += 1
        self.seen.append(x)
        self.table["a"].append(x)
        self.mean = x.mean(0)
        self.new = x
        self.up.eval()
        self.down.requires_grad_(False)
        self.register_forward_hook(lambda *args: None)
        self.extra = nn.Linear(2, 2)
        random.random()
        return self.how(self, x)


def raising(model, x):
    raise KeyError("on purpose")


FAILURES = {
    "it raises": (raising, KeyError),
    "it takes values out": (lambda model, x: x * float(x.numpy().max()), ValueError),
    "it asks for a number": (lambda model, x: x * x.sum().item(), ValueError),
    "its buffer changes its shape": (lambda model, x: setattr(model, "mean", x) or x, ValueError),
    "it calls torch.cond": (lambda model, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), ValueError),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("name", FAILURES)
def test_captures_that_fail(name):
    how, error = FAILURES[name]
    model = Failing(how)

    def capture() -> None:
        with pytest.raises(error):
            tutti.capture(model, edges.points(), edges.optimizer_for(model))

    unchanged(model, None, capture)
    assert all(p.requires_grad for p in model.parameters())
