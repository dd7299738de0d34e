"""Elementwise operators: operands that broadcast, numbers in their place, and domains in which they are defined."""

import torch

from tutti.check.samples.sample import Draw, samples

aten = torch.ops.aten
F64 = torch.float64


def pair(d: Draw, count: int = 2, whole: tuple[int, ...] | None = None) -> list[tuple[int, ...]]:
    """Shapes that broadcast."""
    whole = d.shape(0, 3) if whole is None else whole
    shapes = [tuple(1 if d.between(0, 3) == 3 else n for n in whole)[d.between(0, 1) :] for _ in range(count - 1)]
    return [whole, *shapes] if d.flag() else [*shapes, whole]


def overloads(names: str) -> list:
    return [getattr(aten, name).default for name in names.split()]


ANY = overloads("""
    abs acosh angle asinh atan ceil celu cos cosh deg2rad elu erf erfc exp exp2 expm1 floor frac gelu hardshrink
    hardsigmoid hardswish hardtanh i0 leaky_relu log_sigmoid_forward mish neg positive rad2deg relu round selu
    sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink square tan tanh trunc clone relu6
""")
POSITIVE = overloads("""
    digamma lgamma log log10 log1p log2 reciprocal rsqrt sqrt
""")
SMALL = overloads("""
    acos asin atanh erfinv logit
""")


@samples(*ANY)
def unary(d: Draw):
    return (d.floats(*d.shape(0, 3), dtype=F64) * 2,), {}


@samples(*POSITIVE)
def unary_of_positive(d: Draw):
    return (d.positive(*d.shape(0, 3)),), {}


@samples(*SMALL)
def unary_of_small(d: Draw):
    return (d.positive(*d.shape(0, 3)) / 1.2,), {}


@samples(aten.isfinite.default, aten.nan_to_num.default)
def special(d: Draw):
    """Infinite numbers and what is no number."""
    return (1 / (d.integers(*d.shape(0, 3), low=-1, below=2).to(F64) * d.pick([1.0, float("nan")])),), {}


@samples(aten.logical_not.default, aten.bitwise_not.default)
def negation(d: Draw):
    return (d.booleans(*d.shape(0, 3)),), {}


@samples(aten.add.Tensor, aten.sub.Tensor)
def sum_(d: Draw):
    a, b = pair(d)
    number = d.between(0, 3) == 3
    return (d.floats(*a, dtype=F64), 1.5 if number else d.floats(*b, dtype=F64)), {"alpha": 2} if d.flag() else {}


@samples(aten.mul.Tensor, aten.div.Tensor, aten.true_divide.Tensor, aten.maximum.default, aten.minimum.default,
         aten.atan2.default, aten.fmax.default, aten.fmin.default, aten.hypot.default, aten.logaddexp.default,
         aten.fmod.Tensor, aten.remainder.Tensor, aten.copysign.Tensor, aten.ldexp.Tensor, aten.max.other,
         aten.min.other, aten.floor_divide.default, aten.clamp_min.Tensor, aten.clamp_max.Tensor,
         aten.heaviside.default)  # fmt: skip
def binary(d: Draw, target):
    a, b = pair(d)
    x, y = d.floats(*a, dtype=F64), d.floats(*b, dtype=F64)
    if target in (aten.mul.Tensor, aten.div.Tensor) and d.between(0, 3) == 3:
        return (x, 1.5), {}
    return (x, torch.where(y.abs() < 0.2, 1.0, y)), {}


@samples(aten.pow.Tensor_Tensor, aten.xlogy.Tensor)
def binary_of_positive(d: Draw):
    a, b = pair(d)
    return (d.positive(*a), d.positive(*b) * d.booleans(*b)), {}  # the logarithm of zero is infinite


@samples(aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor)
def comparison(d: Draw):
    """Numbers of which some are equal."""
    a, b = pair(d, whole=d.shape(1, 3, (4, 6, 12)))
    return (d.floats(*a, dtype=F64).round(), d.floats(*b, dtype=F64).round()), {}


@samples(aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default)
def logical(d: Draw):
    a, b = pair(d)
    return (d.booleans(*a), d.booleans(*b)), {}


@samples(aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar)
def comparison_with_number(d: Draw):
    return (d.floats(*d.shape(1, 3, (4, 6, 12)), dtype=F64).round(), d.pick([-1, 0.0, 1])), {}


@samples(aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor)
def bitwise(d: Draw):
    a, b = pair(d)
    dtype = d.pick([torch.bool, torch.int64])
    return (d.integers(*a, below=9).to(dtype), d.integers(*b, below=9).to(dtype)), {}


@samples(aten.bitwise_and.Scalar, aten.bitwise_or.Scalar, aten.bitwise_xor.Scalar)
def bitwise_with_number(d: Draw):
    return (d.integers(*d.shape(0, 3), below=9), d.pick([1, 6])), {}


@samples(aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar, aten.div.Scalar, aten.rsub.Scalar, aten.fmod.Scalar,
         aten.remainder.Scalar, aten.clamp_min.default, aten.clamp_max.default)  # fmt: skip
def with_number(d: Draw):
    return (d.floats(*d.shape(0, 3), dtype=F64), d.pick([0.5, 2])), {}


@samples(aten.pow.Tensor_Scalar)
def power(d: Draw):
    return (d.positive(*d.shape(0, 3)), d.pick([2, 3, -0.5])), {}


@samples(aten.pow.Scalar)
def power_of_number(d: Draw):
    return (2, d.floats(*d.shape(0, 3), dtype=F64)), {}


@samples(aten.clamp.default)
def clamp(d: Draw):
    return (d.floats(*d.shape(0, 3), dtype=F64), d.pick([None, -0.5]), 0.5), {}


@samples(aten.clamp.Tensor)
def clamp_between(d: Draw):
    a, b, c = pair(d, 3)
    return (d.floats(*a, dtype=F64), -d.positive(*b), d.positive(*c)), {}


@samples(aten.div.Tensor_mode)
def rounded_quotient(d: Draw):
    a, b = pair(d)
    return (d.floats(*a, dtype=F64) * 4, d.positive(*b)), {"rounding_mode": d.pick(["floor", "trunc"])}


@samples(aten.threshold.default)
def threshold(d: Draw):
    return (d.floats(*d.shape(0, 3), dtype=F64), 0.5, -1), {}


@samples(aten.lerp.Scalar)
def lerp(d: Draw):
    a, b = pair(d)
    return (d.floats(*a, dtype=F64), d.floats(*b, dtype=F64), 0.25), {}


@samples(aten.lerp.Tensor, aten.addcmul.default, aten.addcdiv.default)
def three(d: Draw):
    a, b, c = pair(d, 3)
    return (d.floats(*a, dtype=F64), d.floats(*b, dtype=F64), d.positive(*c) + 0.5), {}


@samples(aten.where.self)
def where(d: Draw):
    a, b, c = pair(d, 3)
    return (d.booleans(*a), d.floats(*b, dtype=F64), d.floats(*c, dtype=F64)), {}


@samples(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(d: Draw, target):
    whole = d.shape(0, 3)
    mask = d.booleans(*tuple(1 if d.between(0, 3) == 3 else n for n in whole)[d.between(0, 1) :])
    value = d.pick([0, 1.5]) if target is aten.masked_fill.Scalar else d.floats(dtype=F64)
    return (d.floats(*whole, dtype=F64), mask, value), {}


@samples(aten.ones_like.default, aten.zeros_like.default, aten.empty_like.default)
def like(d: Draw):
    return (d.floats(*d.shape(0, 3)),), {"dtype": d.pick([None, torch.int64])}


@samples(aten.fill.Scalar, aten.full_like.default)
def filled(d: Draw):
    return (d.floats(*d.shape(0, 3)), d.pick([0, 1.5])), {}


@samples(aten.fill.Tensor)
def filled_with(d: Draw):
    return (d.floats(*d.shape(0, 3), dtype=F64), d.floats(dtype=F64)), {}


@samples(aten.copy.default)
def copy(d: Draw):
    whole = d.shape(0, 3)
    source = d.floats(*tuple(1 if d.between(0, 3) == 3 else n for n in whole)[d.between(0, 1) :], dtype=F64)
    return (d.floats(*whole, dtype=d.pick([F64, F64, torch.float32])), source), {}


@samples(aten._to_copy.default)
def cast(d: Draw):
    return (d.floats(*d.shape(0, 3), dtype=F64) * 3,), {"dtype": d.pick([F64, torch.float32, torch.int64])}


@samples(aten._conj.default, aten.conj_physical.default)
def conjugate(d: Draw):
    return (torch.view_as_complex(d.floats(*d.shape(0, 3), 2, dtype=F64)),), {}


@samples(aten.polar.default)
def polar(d: Draw):
    shape = d.shape(0, 3)
    return (d.floats(*shape, dtype=F64), d.floats(*shape, dtype=F64)), {}


GRADIENTS = {  # arguments after gradient and operand
    aten.silu_backward.default: (),
    aten.gelu_backward.default: (),
    aten.tanh_backward.default: (),
    aten.sigmoid_backward.default: (),
    aten.threshold_backward.default: (0.5,),
    aten.softplus_backward.default: (1, 20),
    aten.leaky_relu_backward.default: (0.1, False),
    aten.hardtanh_backward.default: (-1, 1),
    aten.hardswish_backward.default: (),
    aten.hardsigmoid_backward.default: (),
    aten.hardshrink_backward.default: (0.5,),
    aten.softshrink_backward.default: (0.5,),
    aten.mish_backward.default: (),
}


@samples(*GRADIENTS)
def gradient(d: Draw, target):
    shape = d.shape(0, 3)
    return (d.floats(*shape, dtype=F64), d.floats(*shape, dtype=F64) * 2, *GRADIENTS[target]), {}


@samples(aten.elu_backward.default)
def elu_backward(d: Draw):
    shape = d.shape(0, 3)
    return (d.floats(*shape, dtype=F64), 1.5, 1, 2, False, d.floats(*shape, dtype=F64)), {}


@samples(aten.complex.default)
def complex_of_parts(d: Draw):
    shape = d.shape(0, 3)
    return (d.floats(*shape, dtype=F64), d.floats(*shape, dtype=F64)), {}


@samples(aten.rrelu_with_noise_backward.default)
def rrelu_backward(d: Draw):
    shape = d.shape(0, 3)
    return (*(d.floats(*shape, dtype=F64) for _ in range(3)), 0.1, 0.3, d.flag(), False), {}


@samples(aten.logit_backward.default)
def logit_backward(d: Draw):
    shape = d.shape(0, 3)
    return (d.floats(*shape, dtype=F64), d.positive(*shape) / 1.2, None), {}


@samples(aten.log_sigmoid_backward.default)
def log_sigmoid_backward(d: Draw):
    x = d.floats(*d.shape(0, 3), dtype=F64)
    return (d.floats(*x.shape, dtype=F64), x, aten.log_sigmoid_forward(x)[1]), {}


@samples(aten.native_dropout_backward.default)
def dropout_backward(d: Draw):
    shape = d.shape(0, 3)
    return (d.floats(*shape, dtype=F64), d.booleans(*shape), 2.0), {}


def slopes(d: Draw):
    """x and a slope for each channel, as `prelu` lays it out."""
    x = d.floats(*d.shape(2, 3), dtype=F64)
    return x, d.floats(x.shape[1], *[1] * (x.ndim - 2), dtype=F64)


@samples(aten._prelu_kernel.default)
def prelu(d: Draw):
    return slopes(d), {}


@samples(aten._prelu_kernel_backward.default)
def prelu_backward(d: Draw):
    x, slope = slopes(d)
    return (d.floats(*x.shape, dtype=F64), x, slope), {}


@samples(aten.glu.default, aten.glu_backward.default)
def glu(d: Draw, target):
    shape = list(d.shape(1, 3))
    dim = d.between(-len(shape), len(shape) - 1)
    half = d.floats(*shape, dtype=F64)
    shape[dim] *= 2
    x = d.floats(*shape, dtype=F64)
    return (x, dim) if target is aten.glu.default else (half, x, dim), {}
