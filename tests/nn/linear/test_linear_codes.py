"""Linear layers with weights in any scheme against their formula; bits that depend on nothing else."""

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from tutti import compat
from tutti.nn.compiled import source
from tutti.nn.linear import linear_codes, linear_rows
from tutti.nn.quantized.quantized_linear import QuantizedLinear
from tutti.nn.quantized.scheme import Scheme

ops = torch.ops.tutti
SCHEMES = pytest.mark.parametrize("scheme", [
    Scheme(bits=5, group=24), Scheme(bits=6, group=None), Scheme(bits=7, group=48, symmetric=False),
    Scheme(bits=8, group=16), Scheme(bits=8, group=None, symmetric=False), Scheme(bits=3, group=16, symmetric=False),
    Scheme(bits=8, group=None, kind="float8"), Scheme(bits=8, group=48, kind="float8"),
], ids=str)  # fmt: skip
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
BOUND = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


def drawn(m, n, k, dtype, scheme):
    """x, a layer, and its weight in double."""
    torch.manual_seed(0)
    layer = QuantizedLinear(k, n, scheme, torch.nn.Parameter(torch.randn(n).to(dtype), False), dtype)
    layer.load(torch.randn(n, k) / k**0.5)
    return torch.randn(m, k).to(dtype), layer, layer.dequantize().to(dtype).double()


def close(actual, wanted, bound):
    assert actual.shape == wanted.shape
    assert (actual.double() - wanted.double()).norm() <= bound * wanted.double().norm()


@SCHEMES
@BOTH
@pytest.mark.parametrize("m, n, k", [(1, 50, 1296), (4, 72, 48), (33, 5, 144)])
@pytest.mark.starts
def test_equals_its_dequantized_weight(m, n, k, dtype, scheme):
    x, layer, w = drawn(m, n, k, dtype, scheme)
    y = layer(x)
    close(y, F.linear(x.double(), w, layer.bias.double()), BOUND[dtype])
    close(y, linear_codes.reference(x, layer.q, layer.scales, layer.zeros, layer.bias, bits=scheme.bits),
          BOUND[dtype])  # fmt: skip
    for part in (slice(0, 1), slice(1, 20)):
        assert torch.equal(layer(x[part]), y[part]), "a row does not depend on the others"


@SCHEMES
@BOTH
@pytest.mark.starts
def test_without_special_instructions_or_tiles(monkeypatch, dtype, scheme):
    x, layer, _ = drawn(5, 50, 1296, dtype, scheme)
    own = layer(x)
    monkeypatch.setattr(linear_codes, "tiles", lambda: False)
    close(layer(x), own, BOUND[dtype])
    general = compat.compile_operators("#define TUTTI_GENERIC\n" + source(linear_rows.SOURCE), "tutti_generic")
    monkeypatch.setattr(linear_codes, "kernels", lambda: general)
    close(layer(x), own, BOUND[dtype])


def test_all_numbers_of_float8():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[None]
    eye = torch.eye(256)
    eye[:, [127, 255]] = 0
    codes = torch.where(codes.isnan().any(0), torch.zeros(()).to(codes.dtype), codes)
    y = ops.linear_codes(eye, codes, torch.ones(1, 1), bits=8)
    assert torch.equal(y[:, 0], codes[0].float())


@pytest.mark.starts
def test_registration():
    x, layer, _ = drawn(3, 8, 96, torch.float32, Scheme(bits=5, group=48, symmetric=False))
    operands = x.requires_grad_(), layer.q, layer.scales, layer.zeros, layer.bias
    opcheck(ops.linear_codes.default, operands, {"bits": 5})
    ops.linear_codes(*operands, bits=5).sum().backward()
    close(x.grad, layer.dequantize().sum(0).expand(3, -1), 1e-6)


def test_what_does_not_fit():
    x, layer, _ = drawn(3, 8, 96, torch.float32, Scheme(bits=5, group=48))
    with pytest.raises(ValueError, match=r"weight \(8, 60\) torch.uint8.*expected \(m, k\), \(n, 72\) of uint8"):
        ops.linear_codes(x, layer.q, layer.scales, bits=6)
    with pytest.raises(ValueError, match="with zeros of uint8"):
        ops.linear_codes(x, layer.q, layer.scales, layer.scales, bits=5)
