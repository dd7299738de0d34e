"""Optimizers on vectors of weights, against torch's."""

import pytest
import torch

from tutti.rl.core.descent import Adam, RMSProp, clipped, moved_towards

CASES = [
    (Adam(1e-2, eps=1e-5), lambda p: torch.optim.Adam(p, 1e-2, eps=1e-5)),
    (Adam(1e-2, (0.5, 0.9), decay=0.1), lambda p: torch.optim.AdamW(p, 1e-2, (0.5, 0.9), weight_decay=0.1)),
    (RMSProp(1e-2, eps=1e-3), lambda p: torch.optim.RMSprop(p, 1e-2, eps=1e-3)),
]


@pytest.mark.parametrize(("ours", "theirs"), CASES)
def test_steps_are_those_of_torch(ours, theirs):
    torch.manual_seed(0)
    weights = torch.randn(20)
    p = torch.nn.Parameter(weights.clone())
    optimizer, state = theirs([p]), ours.init(weights)
    for _ in range(20):
        p.grad = torch.randn(20)
        weights, state = ours.step(weights, p.grad, state)
        optimizer.step()
    torch.testing.assert_close(weights, p.detach(), rtol=1e-5, atol=1e-6)


def test_tensorflows_rmsprop_adds_eps_within_the_root():
    one = RMSProp(0.1, eps=0.01, inside=True)
    state = one.init(torch.zeros(1))
    weights, state = one.step(torch.zeros(1), torch.ones(1), state)
    torch.testing.assert_close(weights, -0.1 / torch.tensor([0.99 + 0.01 + 0.01]).sqrt())


def test_clipping_is_that_of_torch():
    p = torch.nn.Parameter(torch.zeros(5))
    for size in (0.1, 10.0):
        p.grad = torch.full((5,), size)
        ours = clipped(p.grad.clone(), 1.0)
        torch.nn.utils.clip_grad_norm_([p], 1.0)
        torch.testing.assert_close(ours, p.grad)


def test_slow_average():
    torch.testing.assert_close(moved_towards(torch.tensor(1.0), torch.tensor(3.0), 0.25), torch.tensor(1.5))
