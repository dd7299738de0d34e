"""Criteria: modules of the loss with buffers or trained parameters are state of the step, wherever they are held."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tutti
from tutti.tracing.criteria import WithCriteria, with_criteria

X, Y = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 4


class Margin(nn.Module):
    """A classifier with weights of its own, a batch norm, and a count."""

    def __init__(self):
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.randn(4, 8)), nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, h, y):
        self.calls.add_(1)
        return F.cross_entropy(self.norm(h) @ self.weight.t(), y) * (1 + 0.1 * self.calls)


class Loss:
    """An object that is called. It refers to the model too."""

    def __init__(self, model, criterion):
        self.model, self.parts = model, {"criteria": [criterion]}

    def __call__(self, model, batch):
        return self.parts["criteria"][0](model(batch[0]), batch[1])


class Wrapper(nn.Module):
    """A module that holds both, with a loss as a method."""

    def __init__(self, model, criterion):
        super().__init__()
        self.inner, self.criterion = model, criterion

    def loss(self, model, batch):
        return self.criterion(model(batch[0]), batch[1])


def in_closure(model, criterion):
    return lambda m, b: criterion(m(b[0]), b[1])


def as_default(model, criterion):
    return lambda m, b, c=criterion: c(m(b[0]), b[1])


GLOBAL = {}


def in_global(model, criterion):
    GLOBAL["criterion"] = criterion
    return lambda m, b: GLOBAL["criterion"](m(b[0]), b[1])


class Called:
    def __call__(self, model, batch):
        return self.criterion(model(batch[0]), batch[1])


class Inheriting(Called):
    def __init__(self, model, criterion):
        self.criterion = criterion


def as_partial(model, criterion):
    return partial(lambda c, m, b: c(m(b[0]), b[1]), criterion)


PLACES = {
    "partial": as_partial, "inherited call": Inheriting,
    "closure": in_closure, "default": as_default, "global": in_global, "object": Loss,
    "method": lambda model, criterion: Wrapper(model, criterion).loss,
}  # fmt: skip


def parts():
    torch.manual_seed(0)
    model, criterion = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8, bias=False)), Margin()
    return model, criterion, torch.optim.AdamW([*model.parameters(), *criterion.parameters()], lr=0.05)


CASES = [*((place, "dp2") for place in PLACES), ("closure", "zero3"), ("closure", "tp2"), ("object", "pp2")]


@pytest.mark.parametrize(("place", "plan"), CASES)
def test_it_trains_with_the_model(place, plan):
    model, criterion, optimizer = parts()
    expected = []
    for _ in range(3):
        value = criterion(model(X), Y)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        expected.append(value.item())
    ours, own, optimizer = parts()
    loss = PLACES[place](ours, own)
    step = tutti.parallelize(ours, optimizer, (X, Y), loss=loss, cluster="cpu:2", plan=plan, level="O0")
    assert [step((X, Y)).item() for _ in range(3)] == pytest.approx(expected, rel=1e-5)
    state = step.training_state()
    assert state["buffer:loss.0.calls"] == 3
    torch.testing.assert_close(state["param:loss.0.weight"], criterion.weight.data, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state["buffer:loss.0.norm.running_mean"], criterion.norm.running_mean)
    assert list(step.state_dict()) == ["0.weight", "0.bias", "2.weight"], "the model's own"


def test_a_checkpoint_has_it(tmp_path):
    step = tutti.parallelize(*model_and_optimizer(), (X, Y), loss=LOSS, cluster="cpu:2", plan="dp2", level="O0")
    step((X, Y))
    checkpoints = tutti.Checkpoints(tmp_path)
    step.save(checkpoints)
    folder = checkpoints.wait()
    expected = [step((X, Y)).item() for _ in range(2)]
    again = tutti.parallelize(*model_and_optimizer(), (X, Y), loss=LOSS, cluster="cpu:2", plan="zero3", level="O0")
    again.load(folder)
    assert [again((X, Y)).item() for _ in range(2)] == pytest.approx(expected, rel=1e-5)


def model_and_optimizer():
    global LOSS
    model, criterion, optimizer = parts()
    LOSS = in_closure(model, criterion)
    return model, optimizer


LOSS = None


def test_what_a_step_does_not_change_stays_a_constant():
    model, teacher, optimizer = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert with_criteria(model, lambda m, b: m(b[0]) - teacher(b[0]), optimizer) is model
    assert with_criteria(model, lambda m, b: model(b[0]).mean(), optimizer) is model
    root = with_criteria(model, lambda m, b: m(b[0]) - teacher.train()(b[0]), optimizer)
    assert root is model or isinstance(root, WithCriteria)


def test_state_that_a_step_cannot_keep_says_what_to_do():
    class Centers(nn.Module):
        def __init__(self):
            super().__init__()
            self.centers = torch.zeros(8)

        def forward(self, h):
            self.centers = self.centers + h.detach().mean(0)
            return (h - self.centers).square().mean()

    model, criterion = nn.Linear(8, 8), Centers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"centers', a tensor of an object outside of the model: make it a buffer"):
        tutti.parallelize(model, optimizer, (X,), loss=lambda m, b: criterion(m(b[0])), cluster="cpu:2", plan="dp2")


def test_a_model_with_a_module_of_that_name_says_what_to_do():
    model, criterion = nn.ModuleDict({"loss": nn.Linear(8, 8)}), Margin()
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
    with pytest.raises(ValueError, match=r"give nn\.ModuleList\(\[model, criterion\]\) as the model"):
        with_criteria(model, lambda m, b: criterion(m["loss"](b[0]), b[1]), optimizer)
