"""Networks whose weights are one vector, against modules."""

import pytest
import torch
from torch import nn

from tutti.rl.networks.networks import GAIN, Ensemble, Network, mlp


def test_a_network_computes_what_its_module_does():
    torch.manual_seed(5)
    module = mlp([4, 8, 3], "relu", norm=True)
    net = Network(lambda: mlp([4, 8, 3], "relu", norm=True))
    x = torch.randn(6, 4)
    torch.testing.assert_close(net(net.init(5), x), module(x), rtol=0, atol=0)
    assert net.size == sum(p.numel() for p in module.parameters())


def test_first_weights_depend_on_the_seed_only():
    net = Network(lambda: mlp([4, 8, 3]))
    before = torch.random.get_rng_state()
    one = net.init(1)
    torch.manual_seed(99)
    assert torch.equal(one, net.init(1)) and not torch.equal(one, net.init(2))
    torch.random.set_rng_state(before)


def test_an_ensemble_is_its_members():
    both = Ensemble(lambda: mlp([4, 8, 1]), 3)
    weights, x = both.init(2), torch.randn(5, 4)
    for i in range(3):
        torch.testing.assert_close(both(weights, x)[i], both.one(weights[i], x))


def test_orthogonal_weights():
    first, last = (m for m in mlp([16, 16, 16], "tanh", GAIN, 0.01) if isinstance(m, nn.Linear))
    torch.testing.assert_close(first.weight @ first.weight.T, 2 * torch.eye(16), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last.weight @ last.weight.T, 1e-4 * torch.eye(16), rtol=1e-4, atol=1e-8)


def test_what_cannot_be():
    with pytest.raises(ValueError, match="cannot have buffers"):
        Network(lambda: nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match="not one of tanh, relu"):
        mlp([2, 2], "gelu")


@pytest.mark.parametrize("many", [False, True])
def test_layers_in_bfloat16_have_float32_weights_and_outputs(many):
    def make():
        return mlp([3, 32, 2])

    net = Ensemble(make, 2) if many else Network(make)
    weights, x = net.init(0), torch.randn(5, 3)
    exact = net(weights, x)
    net.compute_in(torch.bfloat16)
    rounded = net(weights, x)
    gradient = torch.func.grad(lambda w: net(w, x).square().sum())(weights)
    assert rounded.dtype == gradient.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.02)
