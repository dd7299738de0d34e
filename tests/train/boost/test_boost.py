"""Levels, names and options of Boost, and several algorithms together."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from resnets import BasicBlock, ResNet
from tutti.train.boost import LEVELS, Boost
from tutti.train.boost.boost import Boosted, combined
from tutti.train.boost.grad_freeze import split


def test_levels():
    assert not Boost.parse(None).algorithms and not Boost.parse("O0").algorithms
    for level, options in LEVELS.items():
        algorithms = Boost.parse(level).algorithms
        assert list(algorithms) == list(options) == ([] if level == "O0" else ["less_bn", "layer_skip"])
        assert all(getattr(algorithms[name], key) == x for name, values in options.items() for key, x in values.items())


def test_each_level_leaves_out_more():
    """Shares of the layers of a Transformer, on average over a run."""
    layer = torch.nn.TransformerEncoderLayer(4, 1, 4, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    batch, shares = (torch.ones(2, 3, 4),), []
    for level in ("O1", "O2", "O3"):
        boost = Boost.parse(level)
        boost.prepare_model(copy.deepcopy(model), batch, lambda model, batch: model(batch[0]).sum(), steps=100)
        assert list(boost.algorithms) == ["layer_skip"] and list(boost.left_out) == ["less_bn"]
        shares.append(sum(len(boost.algorithms["layer_skip"].skipped(i)) for i in range(100)) / 1200)
    assert 0 < shares[0] < shares[1] < shares[2] < 0.5


def test_a_level_without_the_number_of_steps():
    boost, net = Boost.parse("O1"), ResNet(BasicBlock, (1,), width=4, classes=4)
    boost.prepare_model(net, (torch.randn(8, 3, 4, 4), torch.arange(8) % 4), loss)
    assert list(boost.algorithms) == ["less_bn"] and "needs the number of steps" in boost.left_out["layer_skip"]


def test_names_and_options():
    boost = Boost.parse({"adasum": {"parts": 4}, "grad_freeze": {}})
    assert list(boost.algorithms) == ["grad_freeze", "adasum"] and boost.algorithms["adasum"].parts == 4
    assert Boost.parse(boost) is boost


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("O9", "boost is 'O9'; it may be O0, O1, O2, O3"),
        ("grad_freeze", r"or a list of algorithms; write boost=\['grad_freeze'\]"),
        (["gradfreeze"], "'gradfreeze' is no algorithm of boost; the nearest is 'grad_freeze'"),
        ({"grad_freeze": {"p": 1}}, "grad_freeze has no option 'p'; it has groups, kind, full_share, seed"),
        ({"adasum": {"parts": 6}}, "parts is 6; adasum needs a power of two"),
    ],
)
def test_errors(value, message):
    with pytest.raises(ValueError, match=message):
        Boost.parse(value)


def test_divisions_are_combined():
    assert combined([{}, {"a": 0, "b": 1}]) == {"a": 0, "b": 1}
    assert combined([{"a": 0, "b": 1, "c": 1}, {"c": 2}]) == {"a": 0, "b": 1, "c": 2}


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def together(cluster, plan):
    """A residual network after three steps with three algorithms."""
    torch.manual_seed(0)
    model = ResNet(BasicBlock, (1,), width=4, classes=4)
    batch = torch.randn(8, 3, 4, 4), torch.arange(8) % 4
    boost = Boost.parse(["less_bn", "grad_freeze", "adasum"])
    boost.prepare_model(model, batch, loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = boost.make_step(model, optimizer, batch, loss=loss, cluster=cluster, plan=plan, level="O0", clip_norm=1.0)
    before = step.state_dict()
    losses = [step(batch).item() for _ in range(3)]
    assert isinstance(step, Boosted) and step.steps == 3 and losses[-1] < losses[0]
    index = boost.algorithms["grad_freeze"].index(1)
    assert 0 < index < len(split(model, 10)) and len(step.recaptures) == 2
    assert all(not torch.equal(step.state_dict()[name], before[name]) for name, _ in model.named_parameters())
    return step.state_dict()


def test_three_algorithms():
    together("cpu:1", "single")


@pytest.mark.slow
def test_three_algorithms_under_a_plan():
    sharded = together("cpu:2", "zero3")
    for name, exact in together("cpu:1", "single").items():
        torch.testing.assert_close(sharded[name], exact, rtol=1e-4, atol=1e-5)


def test_level_0_is_a_plain_step():
    model = torch.nn.Linear(2, 2)
    batch = (torch.ones(2, 2), torch.zeros(2, dtype=torch.int64))
    step = Boost.parse("O0").make_step(model, torch.optim.SGD(model.parameters(), lr=0.1), batch, loss=loss,
                                       cluster="cpu:1", level="O0")  # fmt: skip
    assert type(step).__name__ == "Step" and step(batch).ndim == 0
