"""Gradient freezing: its sequences, its groups, and steps that train the last groups only."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

import tutti
from tutti.train.boost import Boost
from tutti.train.boost.grad_freeze import GradFreeze, sequence, split


def test_the_sequence_of_kind_1_is_that_of_mindspore():
    """`GradientFreeze(10, 1, 0.7, 20).generate_freeze_index_sequence(5, 1, 0.7, 20)` after numpy.random.seed(0)."""
    wanted = [0, 2, 0, 0, 1, 0, 0, 1, 0, 0, 2, 0, 0, 0, 2, 0, 0, 1, 0, 0]
    assert list(islice(sequence(5, 1, 0.7, seed=0), 20)) == wanted


def test_the_sequence_of_kind_0_is_that_of_mindspore():
    assert list(islice(sequence(5, 0, 0.7), 26)) == [*[0] * 9, 1, 2, 3, 4] * 2


@pytest.mark.parametrize("kind", [0, 1])
def test_shares(kind):
    indices = list(islice(sequence(10, kind, 0.7), 3000))
    assert indices.count(0) / 3000 == pytest.approx(0.7, abs=0.01)
    partial = [i for i in indices if i]
    if kind == 1:  # index j with weight groups - j
        assert [partial.count(j) / len(partial) for j in (1, 5, 9)] == pytest.approx([9 / 45, 5 / 45, 1 / 45], abs=0.03)


def test_one_group_freezes_nothing():
    assert list(islice(sequence(1, 1, 0.7), 5)) == [0] * 5


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(6))
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator) / 3

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def test_groups_keep_layers_together():
    names = split(Net(), 3)
    assert names == [
        [f"layers.{i}.{kind}" for i in pair for kind in ("weight", "bias")] for pair in ((0, 1), (2, 3), (4, 5))
    ]
    assert [len(part) for part in split(Net(), 2)] == [4, 8]
    assert len(split(Net(), 10)) == 3


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(8, 8, generator=generator)} for _ in range(count)]


OPTIMIZERS = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1),
}


def plainly(make, count):
    """Plain PyTorch: parameters that a step freezes have no gradient."""
    model = Net()
    optimizer, groups = make(model), split(model, 3)
    params = dict(model.named_parameters())
    for batch, index in zip(batches(count), sequence(3, 1, 0.5, seed=3), strict=False):
        optimizer.zero_grad()
        model(**batch).backward()
        for name in [name for part in groups[:index] for name in part]:
            params[name].grad = None
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}


def boosted(make, plan, level="O0", **options):
    model = Net()
    boost = Boost.parse({"grad_freeze": {"groups": 3, "full_share": 0.5, "seed": 3}})
    boost.prepare_model(model, batches(1)[0])
    return boost.make_step(model, make(model), batches(1)[0], cluster="cpu:2", plan=plan, level=level, **options)


@pytest.mark.parametrize(("name", "plan"), [("AdamW", "zero3"), ("SGD", "tp2")])
def test_equals_plain_training_without_the_gradients(name, plan):
    step = boosted(OPTIMIZERS[name], plan)
    for batch in batches(12):
        step(batch)
    for key, exact in plainly(OPTIMIZERS[name], 12).items():
        assert (step.state_dict()[key] - exact).norm() <= 1e-5 * exact.norm()


def test_with_microbatches_clipping_and_skipped_steps():
    """The norm that is clipped is that of the gradients of the trained groups."""
    states = {}
    for plan, accumulate in (("dp", 1), ("zero3", 2)):
        step = boosted(OPTIMIZERS["AdamW"], plan, clip_norm=1e-3, accumulate=accumulate, max_nonfinite_steps=2)
        for i, batch in enumerate(batches(8)):
            step({"x": batch["x"] * torch.nan} if i == 3 else batch)
        assert step.skipped == 1
        states[accumulate] = step.state_dict()
    model = Net()
    optimizer, params, groups = OPTIMIZERS["AdamW"](model), dict(model.named_parameters()), split(model, 3)
    for i, (batch, index) in enumerate(zip(batches(8), sequence(3, 1, 0.5, seed=3), strict=False)):
        optimizer.zero_grad()
        model(**batch).backward()
        for name in [name for part in groups[:index] for name in part]:
            params[name].grad = None
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        if i != 3:
            optimizer.step()
    for state in states.values():
        for name, p in params.items():
            torch.testing.assert_close(state[name], p.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_compiled():
    step = boosted(OPTIMIZERS["AdamW"], "zero3", level="O2")
    for batch in batches(12):
        step(batch)
    for key, exact in plainly(OPTIMIZERS["AdamW"], 12).items():
        assert (step.state_dict()[key] - exact).norm() <= 1e-5 * exact.norm()


def test_each_suffix_is_captured_once():
    """Two partial sets of three groups, and the full one with its counts of updates."""
    step = boosted(OPTIMIZERS["AdamW"], "dp")
    for batch in batches(20):
        step(batch)
    assert len(step.recaptures) == 3
    before = list(step.recaptures)
    step.evaluate(batches(1)[0])
    assert step.recaptures == before


def test_a_suffix_has_a_shorter_backward_pass():
    step = boosted(OPTIMIZERS["SGD"], "dp")
    executables = step._executables
    for batch in batches(20):
        step(batch)
    flops = {len(graph.gradient_names): graph.flops for graph, _ in executables.plans.values()}
    assert sorted(flops) == [4, 8, 12] and flops[4] < 0.7 * flops[12] and flops[8] < 0.9 * flops[12]


def test_resumes():
    whole, first, second = (boosted(OPTIMIZERS["AdamW"], plan) for plan in ("dp", "dp", "zero3"))
    for batch in batches(10):
        whole(batch)
    for batch in batches(5):
        first(batch)
    second.load_training_state(first.training_state())
    for batch in batches(10)[5:]:
        second(batch)
    for key, exact in whole.state_dict().items():
        torch.testing.assert_close(second.state_dict()[key], exact, rtol=1e-5, atol=1e-6)


def test_errors():
    with pytest.raises(ValueError, match="kind is 2; it may be 0"):
        GradFreeze(kind=2)
    with pytest.raises(ValueError, match="full_share is 1; it must be at least 0 and less than 1"):
        GradFreeze(full_share=1)
    step = tutti.parallelize(model := Net(), OPTIMIZERS["SGD"](model), batches(1)[0], cluster="cpu:2", plan="pp2",
                             level="O0")  # fmt: skip
    with pytest.raises(ValueError, match="train_only does not work with a pipeline"):
        step.train_only(["layers.5.weight"])
    step = tutti.parallelize(model, OPTIMIZERS["SGD"](model), batches(1)[0], cluster="cpu:1", level="O0")
    with pytest.raises(ValueError, match=r"'layers.9.weight' is no parameter that requires gradients"):
        step.train_only(["layers.9.weight"])
    with pytest.raises(ValueError, match="names is empty"):
        step.train_only([])
