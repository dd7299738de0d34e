"""Random operators are functions of seed, step and position."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tutti


class Drawing(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.weight, self.draw = nn.Parameter(torch.ones(64, 32)), draw

    def forward(self, x):
        return self.draw(self.weight * x).mean()


def gradient(draw, seed=0, x=None):
    """What `draw` makes of ones, times 2048: the gradient of the weight before any step."""
    x = torch.ones(64, 32) if x is None else x
    model = Drawing(draw)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = tutti.parallelize(model, optimizer, (x,), cluster="cpu:1", plan="single", level="O0", seed=seed)
    return step.gradients((x,))["weight"] * 2048, step


def test_dropout_keeps_its_share_and_scales_it():
    factors, _ = gradient(lambda h: F.dropout(h, 0.25, training=True))
    assert factors.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert (factors > 0).float().mean().item() == pytest.approx(0.75, abs=0.04)


def test_seed_and_step_choose_the_numbers():
    draw = lambda h: F.dropout(h, 0.5, training=True)  # noqa: E731
    first, step = gradient(draw)
    assert torch.equal(first, gradient(draw)[0])
    assert not torch.equal(first, gradient(draw, seed=1)[0])
    step((torch.ones(64, 32),))
    assert not torch.equal(first, step.gradients((torch.ones(64, 32),))["weight"] * 2048)


def test_each_operator_draws_its_own_numbers():
    both, _ = gradient(lambda h: F.dropout(h, 0.5, training=True) * 0 + h * (torch.rand_like(h) < torch.rand_like(h)))
    assert both.mean().item() == pytest.approx(0.5, abs=0.05)


def test_microbatches_draw_their_own_numbers():
    model, x = Drawing(lambda h: F.dropout(h, 0.5, training=True)), torch.ones(2, 1, 32).expand(2, 64, 32)
    model.forward = lambda x: model.draw(model.weight * x[0]).mean()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = tutti.parallelize(model, optimizer, (x,), cluster="cpu:1", plan="single", level="O0", accumulate=2)
    assert set((step.gradients((x,))["weight"] * 2048).unique().tolist()) == {0.0, 1.0, 2.0}


@pytest.mark.parametrize(
    ("draw", "mean", "variance"),
    [
        (torch.rand_like, 1 / 2, 1 / 12),
        (torch.randn_like, 0, 1),
        (lambda h: torch.rand(64, 32), 1 / 2, 1 / 12),
        (lambda h: torch.randn(64, 32), 0, 1),
        (lambda h: torch.empty(64, 32).uniform_(-1, 3), 1, 16 / 12),
        (lambda h: torch.empty(64, 32).normal_(2, 0.5), 2, 1 / 4),
        (lambda h: torch.bernoulli(torch.full_like(h, 0.3)), 0.3, 0.21),
        (lambda h: torch.randint(2, 6, (64, 32)).float(), 3.5, 15 / 12),
        (lambda h: torch.randint(4, (64, 32)).float(), 1.5, 15 / 12),
        (lambda h: torch.empty(64, 32).exponential_(2), 1 / 2, 1 / 4),
        (lambda h: torch.empty(64, 32).log_normal_(0, 0.5), math.exp(0.125), (math.exp(0.25) - 1) * math.exp(0.25)),
        (lambda h: torch.empty(64, 32).geometric_(0.5), 2, 2),
        (lambda h: torch.empty(64, 32).cauchy_().atan(), 0, math.pi**2 / 12),
        (lambda h: torch.normal(torch.full((64, 32), 2.0), torch.full((64, 32), 0.5)), 2, 1 / 4),
        (lambda h: torch.normal(torch.full((64, 32), 2.0), 0.5), 2, 1 / 4),
        (lambda h: torch.normal(2.0, torch.full((64, 32), 0.5)), 2, 1 / 4),
        (lambda h: F.gumbel_softmax(torch.zeros(64, 32, 4), hard=True).argmax(-1), 1.5, 15 / 12),
        (lambda h: torch.randperm(2048).view(64, 32) / 2048, 1 / 2, 1 / 12),
        (lambda h: torch.multinomial(torch.tensor([1.0, 2.0, 1.0]), 2048, True).view(64, 32), 1, 1 / 2),
        (lambda h: torch.distributions.Categorical(torch.ones(64, 32, 4)).sample(), 1.5, 15 / 12),
    ],
)
def test_distributions(draw, mean, variance):
    drawn, _ = gradient(lambda h: h * draw(h).detach())
    assert drawn.mean().item() == pytest.approx(mean, abs=0.1)
    assert drawn.var().item() == pytest.approx(variance, rel=0.1)


def test_permutations_and_draws_without_replacement_have_each_number_once():
    drawn, _ = gradient(lambda h: h * torch.randperm(2048).view(64, 32))
    assert drawn.flatten().sort().values.tolist() == list(range(2048)) != drawn.flatten().tolist()
    drawn, _ = gradient(lambda h: h * torch.multinomial(torch.ones(64, 32), 32))
    assert (drawn.sort(1).values == torch.arange(32)).all()
    weights = torch.tensor([0.0, 1.0, 3.0]).expand(64, 3)
    drawn, _ = gradient(lambda h: h * torch.multinomial(weights, 2).repeat(1, 16))
    assert (drawn.sort(1).values[:, ::16] == torch.tensor([1, 2])).all(), "a weight of zero is never drawn"


@pytest.mark.parametrize(("weight", "replaced"), [(0.0, False), (0.0, True), (math.nan, True)])
def test_a_category_that_cannot_be_drawn_is_out_of_range(weight, replaced):
    weights = torch.tensor([weight, weight, 0.0]).expand(64, 3)
    drawn, _ = gradient(lambda h: h * torch.multinomial(weights, 1, replaced))
    assert (drawn == 3).all()
    with pytest.raises(RuntimeError, match="index 3 is out of bounds"):
        gradient(lambda h: h * torch.ones(64, 3).gather(1, torch.multinomial(weights, 1, replaced)))


def test_an_operator_without_a_counter_based_form_is_refused():
    with pytest.raises(ValueError, match=r"calls aten.poisson.default .* would depend on the device; draw with"):
        tutti.capture(Drawing(lambda h: h * torch.poisson(torch.ones(64, 32))), (torch.ones(64, 32),))
