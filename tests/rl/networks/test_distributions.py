"""Distributions of actions, against torch.distributions."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import distributions as D

from tutti.rl.core import keys
from tutti.rl.networks.distributions import (
    Bernoulli,
    Categorical,
    MultiCategorical,
    TanhGaussian,
    distribution_for,
    masked,
)

BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 5.0], np.float32))


def gaussian(outputs):
    mean, log = outputs.chunk(2, -1)
    return D.Independent(D.Normal(mean, log.exp()), 1)


CASES = {
    "categorical": (spaces.Discrete(4), 4, lambda x: D.Categorical(logits=x)),
    "bernoulli": (spaces.MultiBinary(3), 3, lambda x: D.Independent(D.Bernoulli(logits=x), 1)),
    "gaussian": (BOX, 4, gaussian),
}


@pytest.mark.parametrize("name", CASES)
def test_equal_those_of_torch(name):
    space, size, theirs = CASES[name]
    ours = distribution_for(space)
    assert ours.size == size
    torch.manual_seed(0)
    old, new = torch.randn(2, 50, size)
    action = ours.sample(new, keys.make(1))
    assert action.shape == theirs(new).sample().shape
    torch.testing.assert_close(ours.log_prob(new, action), theirs(new).log_prob(action.to(_wanted(action))))
    torch.testing.assert_close(ours.entropy(new), theirs(new).entropy())
    torch.testing.assert_close(ours.kl(old, new), D.kl_divergence(theirs(old), theirs(new)), rtol=1e-4, atol=1e-5)
    assert ours.zero((7,)).shape == (7, *action.shape[1:]) and ours.zero((7,)).dtype == action.dtype


def _wanted(action):
    return torch.float32 if action.ndim > 1 else torch.int64


def test_several_categories_are_independent():
    d, outputs = MultiCategorical((2, 3)), torch.randn(10, 5)
    action = d.sample(outputs, keys.make(0))
    parts = [Categorical(2), Categorical(3)], outputs.split([2, 3], -1), action.unbind(-1)
    torch.testing.assert_close(
        d.log_prob(outputs, action), sum(p.log_prob(x, a) for p, x, a in zip(*parts, strict=True))
    )
    torch.testing.assert_close(d.entropy(outputs), sum(p.entropy(x) for p, x, _ in zip(*parts, strict=True)))
    assert isinstance(distribution_for(spaces.MultiDiscrete([2, 3])), MultiCategorical)


def test_tanh_of_a_normal_number():
    torch.manual_seed(0)
    d = TanhGaussian(BOX)
    outputs = torch.randn(200, 4).clamp(max=2)  # larger log standard deviations are clipped
    action, log_prob = d.sample_with_log_prob(outputs, keys.make(2))
    mean, log = outputs.chunk(2, -1)
    theirs = D.Independent(D.TransformedDistribution(D.Normal(mean, log.exp()), D.TanhTransform()), 1)
    inside = (action.abs() < 0.98).all(-1)  # the inverse of tanh loses digits near 1
    torch.testing.assert_close(log_prob[inside], theirs.log_prob(action)[inside], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(d.log_prob(outputs, action)[inside], log_prob[inside], rtol=1e-3, atol=1e-3)
    low, high = torch.tensor([-2.0, 0.0]), torch.tensor([2.0, 5.0])
    for at, bound in ((-1.0, low), (1.0, high)):
        torch.testing.assert_close(d.to_env(torch.full((2,), at)), bound)
        torch.testing.assert_close(d.from_env(bound), torch.full((2,), at))


def test_masked_actions_are_never_drawn():
    mask = torch.tensor([True, False, True]).expand(5000, 3)
    logits = masked(torch.tensor([0.0, 9.0, 0.0]).expand(5000, 3), mask)
    drawn = Categorical(3).sample(logits, keys.make(0))
    assert set(drawn.tolist()) == {0, 2}
    torch.testing.assert_close(Categorical(3).entropy(logits[:1]), torch.tensor([2.0]).log())


def test_actions_of_spaces_that_do_not_start_at_0():
    d = distribution_for(spaces.Discrete(3, start=-1))
    assert d.to_env(torch.tensor([0, 2])).tolist() == [-1, 1] and d.from_env(torch.tensor([-1, 1])).tolist() == [0, 2]


def test_spaces_without_a_distribution():
    with pytest.raises(ValueError, match="no distribution for the action space Text"):
        distribution_for(spaces.Text(3))
    unbounded = spaces.Box(-np.inf, np.inf, (2,))
    with pytest.raises(ValueError, match="is not bounded"):
        distribution_for(unbounded, squashed=True)
    assert distribution_for(unbounded).width == 2 and Bernoulli(2).size == 2
