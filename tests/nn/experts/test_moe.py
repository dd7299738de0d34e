"""The mixture of experts as a module."""

import doctest
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import tutti.nn.experts.moe
from tutti.nn import MoE


def layer_and_input(**options):
    torch.manual_seed(0)
    return MoE(8, 12, 4, 2, **options), torch.randn(3, 10, 8)


def by_hand(layer, x, mask=None):
    """Every expert for every token. mask: (batch, sequence, k), which choices are not dropped."""
    routing = layer.router(x)
    weight = routing.weight if mask is None else routing.weight * mask
    y = torch.zeros_like(x)
    for e in range(4):
        gate, up = (x @ layer.gate_up[e].T).chunk(2, -1)
        share = (weight * (routing.index == e)).sum(-1, keepdim=True)
        y = y + share * ((F.silu(gate) * up) @ layer.down[e].T)
    return y


def test_dropless():
    layer, x = layer_and_input()
    y, aux = layer(x)
    torch.testing.assert_close(y, by_hand(layer, x))
    assert aux.load.sum() == 60 and aux.dropped == 0


def test_capacity_enough_for_all_is_dropless():
    layer, x = layer_and_input(capacity_factor=4.0)
    y, aux = layer(x)
    torch.testing.assert_close(y, by_hand(layer, x))
    assert aux.dropped == 0


@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_dropped_choices_add_nothing(factor):
    layer, x = layer_and_input(capacity_factor=factor)
    y, aux = layer(x)
    index, capacity = layer.router(x).index, -(-10 * 2 * factor // 4)
    mask = torch.zeros(index.shape)
    for b in range(3):
        used = [0] * 4
        for j in range(2):
            for s in range(10):
                e = int(index[b, s, j])
                mask[b, s, j], used[e] = used[e] < capacity, used[e] + 1
    torch.testing.assert_close(y, by_hand(layer, x, mask))
    torch.testing.assert_close(aux.dropped, 1 - mask.mean())
    assert aux.dropped > 0


@pytest.mark.parametrize("factor", [None, 0.75])
def test_gradients(factor):
    layer, x = layer_and_input(capacity_factor=factor, shared=1, dtype=torch.float64)
    x = x.double().requires_grad_()
    names = [name for name, _ in layer.named_parameters() if not name.startswith("router")]  # whose choices jump

    def call(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))[0]

    weights = [layer.get_parameter(name) for name in names]
    assert torch.autograd.gradcheck(lambda *values: call(x.detach(), *values), weights, fast_mode=True)
    call(x, *weights).sum().backward()
    assert x.grad.abs().sum() > 0 and layer.router.weight.grad.abs().sum() > 0


def test_shared_experts_see_every_token():
    layer, x = layer_and_input(shared=2)
    gate, up = (x @ layer.shared_gate_up.weight.T).chunk(2, -1)
    assert gate.shape[-1] == 24
    torch.testing.assert_close(layer(x)[0], by_hand(layer, x) + (F.silu(gate) * up) @ layer.shared_down.weight.T)


@pytest.mark.parametrize("factor", [None, 0.75])
def test_bfloat16(factor):
    layer, x = layer_and_input(capacity_factor=factor, dtype=torch.bfloat16)
    y, aux = layer(x.bfloat16())
    assert y.dtype == torch.bfloat16 and aux.balance.dtype == torch.float32
    y.sum().backward()
    assert all(p.grad.dtype == torch.bfloat16 for p in layer.parameters())


def test_the_example_runs():
    assert doctest.testmod(tutti.nn.experts.moe).failed == 0


def test_a_capacity_of_nothing_is_an_error():
    with pytest.raises(ValueError, match=r"capacity_factor=0: it must be greater than 0, or None for dropless"):
        MoE(8, 12, 4, 2, capacity_factor=0)


def test_the_example_of_the_guide_runs(capsys):
    text = (Path(__file__).parents[3] / "docs/guide/experts.md").read_text()
    (example,) = re.findall(r"```python\n(import torch, tutti\nfrom tutti\.nn import MoE.*?)```", text, re.DOTALL)
    exec(compile(example, "experts.md", "exec"), {"__name__": "guide"})
    loss, kinds = capsys.readouterr().out.split(maxsplit=1)
    assert 0 < float(loss) < 2 and "all_to_all" in kinds
