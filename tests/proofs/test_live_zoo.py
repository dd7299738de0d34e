"""After steps under a random plan, the user's own model and optimizer have the values of plain PyTorch's.

One further step of plain PyTorch on the user's model and optimizer then gives what it gives on a model that has only
known plain PyTorch. Each model, on a plan drawn from all that the rules allow.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import models
import tutti
from cases import some

QUICK = ("mixture", "lstm")
STEPS = 3
TOLERANCE = 1e-5  # of the norm of a tensor


def plain_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any, loss: Callable | None) -> float:
    optimizer.zero_grad()
    output = loss(model, batch) if loss else model(**batch)
    value = getattr(output, "loss", output)
    value.backward()
    optimizer.step()
    return value.item()


def without_dropout(model: torch.nn.Module) -> torch.nn.Module:
    """Dropout draws other numbers than torch does."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "dropout_prob", "attn_dropout"):
            if isinstance(vars(module).get(name), float):
                setattr(module, name, 0.0)
    return model


def assert_alike(own: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> None:
    assert own.keys() == plain.keys()
    for name, x in plain.items():
        if x.is_floating_point():
            assert (own[name] - x).norm() <= TOLERANCE * x.norm() + 1e-6, name  # some gradients are 0 but for rounding
        else:
            assert torch.equal(own[name], x), name


def moments(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = optimizer.state_dict()["state"]
    return {f"{i}.{kind}": x for i, kinds in state.items() for kind, x in kinds.items()}


@pytest.mark.parametrize("name", some(models.MODELS, QUICK))
def test_model_and_optimizer_are_those_of_plain_pytorch(name):
    model, batch, loss = models.case(name)
    plain_model = without_dropout(copy.deepcopy(without_dropout(model)))
    optimizer, plain_optimizer = (torch.optim.SGD(x.parameters(), lr=0.05, momentum=0.9) for x in (model, plain_model))
    graph = tutti.capture(model, batch, optimizer, loss)
    plan = tutti.random_plan(graph, 4, seed=len(name))
    step = tutti.parallelize(model, optimizer, batch, loss=loss, plan=plan, cluster="cpu:4", level="O0")
    for _ in range(STEPS):
        value, expected = step(batch).item(), plain_step(plain_model, plain_optimizer, batch, loss)
        assert value == pytest.approx(expected, rel=TOLERANCE)
    assert_alike(dict(model.state_dict()), plain_model.state_dict())
    assert_alike(moments(optimizer), moments(plain_optimizer))
    value, expected = (plain_step(*pair, batch, loss) for pair in ((model, optimizer), (plain_model, plain_optimizer)))
    assert value == pytest.approx(expected, rel=TOLERANCE)
    assert_alike(dict(model.state_dict()), plain_model.state_dict())
    assert step(batch).item() == pytest.approx(plain_step(plain_model, plain_optimizer, batch, loss), rel=TOLERANCE)
