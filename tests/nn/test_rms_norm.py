"""The fused norm is what models write, bit for bit; its gradients are those of autograd."""

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from tutti.nn.rms_norm import rms_norm, rms_norm_and_input

ops = torch.ops.tutti


def llama(x, weight, eps, dtype):
    full = x.to(dtype)
    normal = full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + eps)
    return normal.to(x.dtype) if weight is None else weight * normal.to(x.dtype)


def gemma(x, weight, eps, dtype):
    full = x.to(dtype)
    normal = full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + eps)
    return (normal * (1.0 + weight.to(dtype))).to(x.dtype)


def torchs(x, weight, eps, dtype):
    return F.rms_norm(x, x.shape[-1:], weight, eps)


WAYS = {"llama": (llama, 0.0, False), "gemma": (gemma, 1.0, True), "torch": (torchs, 0.0, True)}


def drawn(dtype, weighted=True):
    torch.manual_seed(0)
    x = torch.randn(3, 5, 8, dtype=torch.float64).to(dtype).requires_grad_()
    return x, torch.randn(8, dtype=torch.float64).to(dtype).requires_grad_() if weighted else None


@pytest.mark.parametrize("way", WAYS)
def test_float64(way):
    reference, offset, wide = WAYS[way]
    x, weight = drawn(torch.float64)
    ours, expected = rms_norm(x, weight, 1e-6, offset, wide), reference(x, weight, 1e-6, torch.float64)
    torch.testing.assert_close(ours, expected)
    grad = torch.randn_like(ours)
    torch.testing.assert_close(*(torch.autograd.grad(y, (x, weight), grad) for y in (ours, expected)))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-6, offset, wide), (x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["llama", "gemma"])
def test_bits(way, dtype):
    reference, offset, wide = WAYS[way]
    x, weight = drawn(dtype)
    ours, expected = rms_norm(x, weight, 1e-6, offset, wide), reference(x, weight, 1e-6, torch.float32)
    grad = torch.randn_like(ours)
    assert torch.equal(ours, expected)
    for a, b in zip(*(torch.autograd.grad(y, (x, weight), grad) for y in (ours, expected)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_residual_stream(dtype):
    """What is read again: the same bits, and one operator for both gradients."""
    x, weight = drawn(dtype)
    ours, expected = (
        rms_norm_and_input(x, weight, 1e-6),
        (llama(x, weight, 1e-6, torch.float32), torch.ops.aten.alias(x)),
    )
    grads = [torch.randn_like(y) for y in ours]
    for a, b in zip(*(torch.autograd.grad(y, (x, weight), grads) for y in (ours, expected)), strict=True):
        assert torch.equal(a, b)


def test_weights_of_another_dtype():
    (x, _), (_, weight) = drawn(torch.bfloat16), drawn(torch.float32)
    ours, expected = rms_norm(x, weight, 1e-6), llama(x, weight, 1e-6, torch.float32)
    assert ours.dtype == torch.float32 and torch.equal(ours, expected)
    for a, b in zip(*(torch.autograd.grad(y.sum(), (x, weight)) for y in (ours, expected)), strict=True):
        assert torch.equal(a, b)


def test_only_what_learns_has_a_gradient():
    x, weight = drawn(torch.float32)
    y, rstd = ops.rms_norm(x.detach(), weight, 1e-6, 0.0, False)
    assert not rstd.requires_grad and rstd.shape == (3, 5, 1)
    y.sum().backward()
    gx, gw = ops.rms_norm_backward(torch.ones_like(x), x, weight, rstd, 0.0, False, [False, True])
    assert gx is None and torch.equal(gw, weight.grad)


def test_registration():
    for weighted in (True, False):
        opcheck(ops.rms_norm.default, (*drawn(torch.float32, weighted), 1e-6, 0.0, False))
    x, weight = (t.detach() for t in drawn(torch.float32))
    opcheck(ops.rms_norm_backward.default, (x, x, weight, torch.ones(3, 5, 1), 1.0, True, [True, True]))


def test_a_weight_of_another_size():
    with pytest.raises(ValueError, match=r"weight \(7,\) for x \(\); it must be \(\)"):
        rms_norm(torch.randn(()), torch.randn(7), 1e-6)
    with pytest.raises(ValueError, match=r"weight \(7,\) for x \(3, 5, 8\); it must be \(8,\)"):
        rms_norm(torch.ones(3, 5, 8), torch.ones(7), 1e-6)


def test_an_offset_takes_a_wide_product():
    with pytest.raises(ValueError, match="offset=1 needs wide=True: it is added to the weight in float32"):
        rms_norm(torch.randn(3, 8), torch.ones(8), 1e-6, offset=1)
