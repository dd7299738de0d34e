"""The rotary embedding is what models write, bit for bit, and its backward pass turns back."""

import pytest
import torch
from torch.library import opcheck

from tutti.nn.rotary import rotary

ops = torch.ops.tutti


def written_out(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def drawn(dtype=torch.float64, angles=(1, 1, 5, 8)):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64).to(dtype).requires_grad_()
    phase = torch.randn(angles, dtype=torch.float64)
    return x, phase.cos().to(dtype), phase.sin().to(dtype)


@pytest.mark.parametrize("angles", [(5, 8), (1, 1, 5, 8), (2, 1, 5, 8)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_bits(dtype, angles):
    x, cos, sin = drawn(dtype, angles)
    ours, expected = rotary(x, cos, sin), written_out(x, cos, sin)
    grad = torch.randn_like(ours)
    assert torch.equal(ours, expected)
    assert torch.equal(*(torch.autograd.grad(y, x, grad)[0] for y in (ours, expected)))


def test_gradcheck_and_registration():
    x, cos, sin = drawn()
    assert torch.autograd.gradcheck(lambda x: rotary(x, cos, sin), (x,))
    opcheck(ops.rotary.default, (x, cos, sin))
    opcheck(ops.rotary_backward.default, (x.detach(), cos, sin))


def test_turning_by_an_angle_and_back():
    """Where both halves have the same angles, a rotation, whose gradient is its inverse."""
    x, _, _ = drawn()
    phase = torch.randn(5, 4, dtype=torch.float64).repeat(1, 2)
    y = rotary(x, phase.cos(), phase.sin())
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(ops.rotary_backward(y, phase.cos(), phase.sin()), x)


@pytest.mark.parametrize("shape", [(5, 6), (4, 8), (2, 1, 2, 5, 8)])
def test_angles_that_do_not_fit(shape):
    x, _, _ = drawn()
    with pytest.raises(ValueError, match=r"rotary: cos \(.*\) and sin \(.*\) for x \(2, 3, 5, 8\)"):
        rotary(x, torch.ones(shape), torch.ones(shape))


def test_angles_that_want_a_gradient():
    x, cos, sin = drawn()
    with pytest.raises(ValueError, match="cos and sin get no gradients"):
        rotary(x, cos.requires_grad_(), sin)
    with torch.no_grad():
        assert rotary(x, cos, sin).isfinite().all()
