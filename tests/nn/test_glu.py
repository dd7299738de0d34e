"""Gated units are what models write, bit for bit."""

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from tutti.nn.activation import ACTIVATIONS
from tutti.nn.glu import glu

ops = torch.ops.tutti
FUNCTIONS = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
}  # fmt: skip


def drawn(dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.randn(3, 8, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(2)]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_bits(dtype, activation):
    gate, up = drawn(dtype)
    ours, expected = glu(gate, up, activation), FUNCTIONS[activation](gate) * up
    grad = torch.randn_like(ours)
    assert torch.equal(ours, expected)
    for a, b in zip(*(torch.autograd.grad(y, (gate, up), grad) for y in (ours, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0 if activation != "relu2" else 0.05)


def test_gradcheck_and_registration():
    gate, up = drawn()
    assert torch.autograd.gradcheck(glu, (gate, up))
    opcheck(ops.glu.default, (gate, up, "silu"))
    opcheck(ops.glu_backward.default, (gate.detach(), gate.detach(), up.detach(), "gelu"))


def test_what_is_unlike():
    with pytest.raises(
        ValueError,
        match=r"gate and up must have one shape and dtype, not torch.float32 \(3,\) and torch.float32 \(4,\)",
    ):
        glu(torch.ones(3), torch.ones(4))
    with pytest.raises(ValueError, match="unknown activation 'swish'"):
        glu(torch.ones(3), torch.ones(3), "swish")
