"""Quantized linear layers of several experts against the operators of one."""

import pytest
import torch
from torch.library import opcheck

from tutti.nn.experts import linear_experts
from tutti.nn.quantized.quantized_linear import QuantizedLinear
from tutti.nn.quantized.scheme import Scheme

ops = torch.ops.tutti
SCHEMES = pytest.mark.parametrize("scheme", [
    Scheme(8, None), Scheme(8, None, activations="int8"), Scheme(4, 32, False), Scheme(3, 64), Scheme(2, 64, False),
    Scheme(5, 16, False), Scheme(8, None, kind="float8"),
], ids=str)  # fmt: skip


def drawn(m, dtype, scheme, count=4, n=24, k=128):
    """The operands and options of the operator, and the layers."""
    torch.manual_seed(0)
    layers = [QuantizedLinear(k, n, scheme, dtype=dtype) for _ in range(count)]
    for x in layers:
        x.load(torch.randn(n, k))
    q, scales, zeros = (None if getattr(layers[0], name) is None else torch.stack([getattr(x, name) for x in layers])
                        for name in ("q", "scales", "zeros"))  # fmt: skip
    options = {"layout": layers[0].layout, "bits": scheme.bits, "rounded": scheme.activations == "int8"}
    expert = torch.randint(count - 1, (m,))  # the last has no row
    return (torch.randn(m, k).to(dtype), expert, q, scales, zeros), options, layers


@SCHEMES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m", [1, 37])
@pytest.mark.starts
def test_equals_the_layers_one_by_one(m, dtype, scheme):
    operands, options, layers = drawn(m, dtype, scheme)
    x, expert = operands[:2]
    y = ops.linear_experts(*operands, **options)
    wanted = torch.cat([layers[e](x[i : i + 1]) for i, e in enumerate(expert.tolist())])
    assert torch.equal(y, wanted), "also in bits: a row does not depend on the others"
    plain = linear_experts.reference(*operands, **options)
    assert (plain.float() - y.float()).norm() <= (1e-2 if dtype == torch.bfloat16 else 1e-5) * y.float().norm()


def test_registration():
    operands, options, _ = drawn(5, torch.float32, Scheme(4, 32))
    opcheck(ops.linear_experts.default, operands, options)
    empty = operands[0][:0], operands[1][:0], *operands[2:]
    assert ops.linear_experts(*empty, **options).shape == (0, 24)


def test_what_does_not_fit():
    (x, expert, *weight), options, _ = drawn(5, torch.float32, Scheme(4, 32))
    with pytest.raises(ValueError, match=r"expert .* torch\.int32"):
        ops.linear_experts(x, expert.int(), *weight, **options)
    with pytest.raises(IndexError, match="group 4 of 4"):
        ops.linear_experts(x, expert + 4 - expert, *weight, **options)
    with pytest.raises(ValueError, match="layout 'low' with 4 bits"):
        ops.linear_experts(x, expert, *weight, **{**options, "layout": "low"})
    with pytest.raises(ValueError, match=r"weight \(4, 24, 64\).*expected .*\(E, n, 32\)"):
        ops.linear_experts(x[:, :64], expert, *weight, **options)
