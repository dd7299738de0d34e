"""Linear layers for few rows."""

import torch

from tutti.check.samples.sample import Draw, samples
from tutti.nn.linear import linear_bits
from tutti.nn.linear.linear_int4 import pack
from tutti.nn.quantized.quantized_linear import QuantizedLinear
from tutti.nn.quantized.scheme import FLOAT8, Scheme, pack_bits

ops = torch.ops.tutti


@samples(ops.linear_rows.default)
def linear_rows(d: Draw):
    (m, n, k), dtype = d.sizes(3), d.dtype()
    bias = d.floats(n, dtype=dtype) if d.flag() else None
    return (d.floats(m, k, dtype=dtype), d.floats(n, k, dtype=dtype), bias), {}


def kinds(d: Draw):
    """The dtype of x, and whether it is rounded: in bfloat16 that makes no difference to be seen."""
    return d.pick([(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)])


@samples(ops.linear_int8.default)
def linear_int8(d: Draw):
    (m, n, k), (dtype, rounded) = d.sizes(3), kinds(d)
    bias = d.floats(n, dtype=dtype) if d.flag() else None
    weight = d.integers(n, k, low=-127, below=128).to(torch.int8), 10 * d.floats(n, dtype=torch.float32)
    return (d.floats(m, k, dtype=dtype), *weight, bias), {"rounded": rounded}


@samples(ops.linear_int4.default)
def linear_int4(d: Draw):
    (m, n), k, (dtype, rounded) = d.sizes(2), d.pick([128, 256]), kinds(d)
    groups = n, k // d.pick([32, 64, 128])
    weight = pack(d.integers(n, k, below=16).to(torch.uint8)), 10 * d.floats(*groups, dtype=torch.float32)
    zeros = d.integers(*groups, below=16).to(torch.uint8) if d.flag() else None
    bias = d.floats(n, dtype=dtype) if d.flag() else None
    return (d.floats(m, k, dtype=dtype), *weight, zeros, bias), {"rounded": rounded}


@samples(ops.linear_bits.default)
def few_bits(d: Draw):
    (m, n), k, (dtype, rounded), bits = d.sizes(2), d.pick([128, 256]), kinds(d), d.pick([2, 3])
    groups = n, k // d.pick([32, 64, 128])
    codes = d.integers(n, k, below=2**bits).to(torch.uint8)
    weight = linear_bits.pack(codes, bits), 10 * d.floats(*groups, dtype=torch.float32)
    zeros = d.integers(*groups, below=2**bits).to(torch.uint8) if d.flag() else None
    bias = d.floats(n, dtype=dtype) if d.flag() else None
    return (d.floats(m, k, dtype=dtype), *weight, zeros, bias), {"bits": bits, "rounded": rounded}


@samples(ops.linear_codes.default)
def codes(d: Draw):
    (m, n), k, dtype = d.sizes(2), d.pick([48, 64, 128]), d.pick([torch.float32, torch.bfloat16])
    groups, bits = (n, d.pick([1, 2, 4])), d.pick([3, 5, 6, 8])
    float8 = bits == 8 and d.flag()
    codes = d.floats(n, k, dtype=torch.float32).to(FLOAT8) if float8 else d.integers(n, k, below=2**bits)
    weight = codes if float8 else pack_bits(codes.to(torch.uint8), bits), 10 * d.floats(*groups, dtype=torch.float32)
    zeros = None if float8 or d.flag() else d.integers(*groups, below=2**bits).to(torch.uint8)
    bias = d.floats(n, dtype=dtype) if d.flag() else None
    return (d.floats(m, k, dtype=dtype), *weight, zeros, bias), {"bits": bits}


@samples(ops.linear_experts.default)
def experts(d: Draw):
    (m, n, count), k, (dtype, rounded) = d.sizes(3), d.pick([128, 256]), kinds(d)
    scheme = d.pick([Scheme(8, None), Scheme(4, 32), Scheme(3, 64, False), Scheme(2, 64), Scheme(5, 64, False),
                     Scheme(8, None, kind="float8")])  # fmt: skip
    layer = QuantizedLinear(k, count * n, scheme)
    layer.load(d.floats(count * n, k, dtype=torch.float32))
    q, scales = (x.data.unflatten(0, (count, n)) for x in (layer.q, layer.scales))
    zeros = None if layer.zeros is None else layer.zeros.data.unflatten(0, (count, n))
    scales = 10 * d.floats(*scales.shape, dtype=torch.float32)
    options = {"layout": layer.layout, "bits": scheme.bits, "rounded": rounded and layer.layout != "bits"}
    return (d.floats(m, k, dtype=dtype), d.integers(m, below=count), q, scales, zeros), options
