"""Schemes: codes, scales and zeros against their definition, streams of bits against the package that reads them."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

from tutti.nn.linear.linear_int4 import dequantize_int4, quantize_int4
from tutti.nn.linear.linear_int8 import dequantize_int8, quantize_int8
from tutti.nn.quantized.scheme import Parts, Scheme, pack_bits, unpack_bits

SCHEMES = [
    Scheme(bits, group, symmetric) for bits in (2, 3, 4, 5, 8) for group in (None, 16) for symmetric in (True, False)
]


def weight(n=5, k=64, seed=0):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_codes_are_the_nearest(scheme):
    w = weight()
    parts = scheme.quantize(w)
    dequantized = scheme.dequantize(parts)
    for code in range(2**scheme.bits):
        other = scheme.dequantize(Parts(torch.full_like(parts.codes, code), parts.scales, parts.zeros))
        assert bool(((dequantized - w).abs() <= (other - w).abs() + 1e-6).all())
    assert float((dequantized - w).abs().max()) <= float(parts.scales.abs().max()) * 1.01


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_range_of_each_group_is_just_covered(scheme):
    parts = scheme.quantize(weight())
    assert parts.scales.shape == (5, scheme.groups(64))
    codes = parts.codes.unflatten(1, (parts.scales.shape[1], -1)).long()
    most = 2**scheme.bits - 1
    if not scheme.symmetric:
        assert bool((codes.amin(2) <= 1).all()) and bool((codes.amax(2) >= most - 1).all())
    elif scheme.bits == 8:
        assert bool(((codes - 128).abs().amax(2) == 127).all())
    else:
        assert bool((codes.amin(2) == 0).all())


def test_as_the_operators_round():
    w = weight(6, 128)
    assert torch.equal(Scheme(8, None).rounded(w), dequantize_int8(*quantize_int8(w)))
    for zeros in (False, True):
        assert torch.equal(Scheme(4, 32, not zeros).rounded(w), dequantize_int4(*quantize_int4(w, 32, zeros)))


def test_scales_are_numbers_of_the_dtype_they_are_saved_in():
    w = weight().bfloat16()
    for scheme in (Scheme(4, 16), Scheme(8, None), Scheme(3, 16, False), Scheme(kind="float8", bits=8, group=None)):
        scales = scheme.quantize(w).scales
        assert torch.equal(scales, scales.bfloat16().float())
    scales = Scheme(4, 16, scales="float16").quantize(weight()).scales
    assert torch.equal(scales, scales.half().float())


def test_groups_of_zeros():
    w = torch.zeros(2, 32)
    for scheme in SCHEMES:
        assert torch.equal(scheme.rounded(w), w)


def test_float8():
    w = weight() * 100
    scheme = Scheme(8, None, kind="float8")
    parts = scheme.quantize(w)
    assert parts.codes.dtype == torch.float8_e4m3fn and float(parts.codes.float().abs().max()) == 448
    assert bool(((scheme.dequantize(parts) - w).abs() <= w.abs() / 16 + parts.scales * 2**-9).all())


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("k", [1, 7, 32, 45, 96])
def test_streams_of_bits_are_those_of_compressed_tensors(bits, k):
    codes = torch.randint(0, 2**bits, (3, k), generator=torch.Generator().manual_seed(k)).to(torch.uint8)
    packed = pack_bits(codes, bits)
    signed = (codes.int() - 2 ** (bits - 1)).to(torch.int8)
    assert torch.equal(packed.view(torch.int32), pack_to_int32(signed, bits))
    assert torch.equal(unpack_bits(packed, bits, k), codes)
    assert torch.equal(unpack_from_int32(packed.view(torch.int32), bits, torch.Size((3, k))), signed)


def test_bytes():
    assert Scheme(4, 64).bytes((10, 128)) == 10 * 64 + 20 * 4
    assert Scheme(4, 64, scales="float16").bytes((10, 128)) == 10 * 64 + 20 * 2
    assert Scheme(3, 32, False).bytes((8, 64), torch.bfloat16) == 8 * 24 + 16 * 2 + 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(bits=1), "expected 2 to 8 bits"),
        (dict(bits=4, kind="float8"), "8 of float8"),
        (dict(group=0), "expected a positive number"),
        (dict(bits=8, group=None, symmetric=False, kind="float8"), "float8 has no zeros"),
        (dict(activations="int8"), "needs bits=8, group=None"),
        (dict(scales="int4"), "expected one of float16"),
    ],
)
def test_what_does_not_fit_together(options, message):
    with pytest.raises(ValueError, match=message):
        Scheme(**options)


def test_groups_that_do_not_divide():
    with pytest.raises(ValueError, match=r"x.y has 96 inputs, which groups of 64 do not divide: use groups of 32"):
        Scheme(4, 64).check("x.y", 96)
    with pytest.raises(ValueError, match="use a scale for each output"):
        Scheme(4, 64).check("x.y", 9)
