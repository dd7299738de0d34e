"""Linear layers with weights of 2 and 3 bits against their formula; bits that depend on nothing else."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from tutti import compat
from tutti.nn.compiled import source
from tutti.nn.linear import linear_bits, linear_int4, linear_rows

ops = torch.ops.tutti
BITS = pytest.mark.parametrize("bits", [2, 3])
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
BOUND = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


def drawn(m, n, k, dtype, bits, group=64, zeros=True):
    """x, the parts of a weight, and a bias."""
    torch.manual_seed(0)
    codes = torch.randint(2**bits, (n, k)).to(torch.uint8)
    scales = (torch.rand(n, k // group) + 0.1) / k**0.5
    offsets = torch.randint(2**bits, (n, k // group)).to(torch.uint8) if zeros else None
    return torch.randn(m, k).to(dtype), (linear_bits.pack(codes, bits), scales, offsets), torch.randn(n).to(dtype)


def close(actual, wanted, bound):
    assert actual.shape == wanted.shape
    assert (actual.double() - wanted.double()).norm() <= bound * wanted.double().norm()


@BITS
def test_packing(bits):
    q = torch.randint(2**bits, (3, 128)).to(torch.uint8)
    packed = linear_bits.pack(q, bits)
    assert packed.shape == (3, 128 * bits // 8)
    assert torch.equal(linear_bits.unpack(packed, bits), q)
    block = packed.shape[1] // 2
    assert packed[1, block + 2] == sum((int(q[1, 64 + 2 + 16 * j]) & 3) << 2 * j for j in range(4))
    if bits == 3:
        assert packed[2, 16 + 5] == sum((int(q[2, 40 + i]) >> 2) << i for i in range(8))


@BITS
@BOTH
@pytest.mark.parametrize("m, n, group", [(1, 50, 64), (4, 72, 32), (33, 50, 128)])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.starts
def test_equals_its_dequantized_weight(m, n, group, zeros, dtype, bits):
    x, weight, bias = drawn(m, n, 1280, dtype, bits, group, zeros)
    w = linear_bits.dequantize(*weight, bits=bits)
    close(ops.linear_bits(x, *weight, bias, bits=bits), F.linear(x.double(), w.to(dtype).double(), bias.double()),
          BOUND[dtype])  # fmt: skip
    rounded = ops.linear_bits(x, *weight, bias, bits=bits, rounded=True)
    close(rounded, F.linear(x.double(), w.double(), bias.double()), 0.01)
    close(rounded, linear_bits.reference(x, *weight, bias, bits=bits, rounded=True), BOUND[dtype] / 2)


@BITS
@BOTH
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.starts
def test_a_row_does_not_depend_on_the_others(dtype, rounded, bits):
    x, weight, bias = drawn(40, 70, 640, dtype, bits)
    whole = ops.linear_bits(x, *weight, bias, bits=bits, rounded=rounded)
    for part in (slice(0, 1), slice(5, 7), slice(5, 8), slice(3, 20), slice(39, 40)):
        assert torch.equal(ops.linear_bits(x[part], *weight, bias, bits=bits, rounded=rounded), whole[part])


@BITS
@BOTH
@pytest.mark.starts
def test_without_special_instructions_or_tiles(monkeypatch, dtype, bits):
    x, weight, bias = drawn(5, 50, 192, dtype, bits)
    own = [ops.linear_bits(x, *weight, bias, bits=bits, rounded=rounded) for rounded in (False, True)]
    monkeypatch.setattr(linear_bits, "tiles", lambda: False)
    monkeypatch.setattr(linear_rows, "tiles", lambda: False)
    close(ops.linear_bits(x, *weight, bias, bits=bits), own[0], BOUND[dtype])
    close(ops.linear_bits(x, *weight, bias, bits=bits, rounded=True), own[1], BOUND[dtype])
    general = compat.compile_operators("#define TUTTI_GENERIC\n" + source(linear_rows.SOURCE), "tutti_generic")
    monkeypatch.setattr(linear_bits, "kernels", lambda: general)
    monkeypatch.setattr(linear_rows, "rounds", general.rounds)
    close(ops.linear_bits(x, *weight, bias, bits=bits), own[0], BOUND[dtype])


def test_registration():
    x, weight, bias = drawn(3, 8, 128, torch.float32, 3)
    opcheck(ops.linear_bits.default, (x, *weight, bias), {"bits": 3})
    opcheck(ops.linear_bits.default, (x.double(), *weight, None), {"bits": 3, "rounded": True})


def test_what_does_not_fit():
    x, (packed, scales, zeros), _ = drawn(3, 8, 128, torch.float32, 2)
    with pytest.raises(ValueError, match="4 bits; expected 2 or 3"):
        ops.linear_bits(x, packed, scales, zeros, bits=4)
    with pytest.raises(ValueError, match="groups of 64 along 96 numbers"):
        linear_bits.pack(torch.zeros(2, 96), 2)
    with pytest.raises(ValueError, match=r"weight \(8, 32\) torch.uint8.*expected \(m, k\), \(n, k 3 / 8\)"):
        ops.linear_bits(x, packed, scales, zeros, bits=3)
    with pytest.raises(ValueError, match="with zeros of uint8"):
        ops.linear_bits(x, packed, scales, scales, bits=2)


@pytest.mark.parametrize("bits, group", [(2, 64), (3, 128), (4, 32), (4, 64), (4, 128)])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.starts
def test_few_rows_have_the_bits_of_many(bits, group, zeros):
    """Some processors have kernels of their own for one and two rows."""
    linear = ops.linear_int4 if bits == 4 else partial(ops.linear_bits, bits=bits)
    for n, dtype, rounded in itertools.product((17, 64), (torch.float32, torch.bfloat16), (False, True)):
        x, weight, bias = drawn(20, n, 640, dtype, min(bits, 3), group, zeros)
        if bits == 4:
            weight = linear_int4.pack(torch.randint(16, (n, 640)).to(torch.uint8)), *weight[1:]
        whole = linear(x, *weight, bias, rounded=rounded)
        for part in (slice(0, 1), slice(3, 5), slice(7, 10), slice(10, 14)):
            assert torch.equal(linear(x[part], *weight, bias, rounded=rounded), whole[part])
