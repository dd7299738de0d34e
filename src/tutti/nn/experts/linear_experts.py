"""Linear layers of several experts with quantized weights: y[i] = x[i] W[expert[i]]^T.

| operand | shape | |
|---|---|---|
| x | (m, k) | floating |
| expert | (m) int64 | 0 to E - 1 |
| weight | (E, n, size) | of each expert as `layout` says |
| scales | (E, n, groups) float32 | (E, n) for "int8" |
| zeros | (E, n, groups) uint8 or none | |

layout is one of those of `tutti.nn.quantized.quantized_linear`: "int8", "int4" and "low" are the weights of
`linear_int8`, `linear_int4` and `linear_bits`, "bits" and "float8" those of `linear_codes`. `rounded` is theirs. On a
CPU, float32 and bfloat16 are computed by `linear_rows.cpp`, the rows of an expert at once; a row's bits do not depend
on the others.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tutti.nn.linear import linear_bits, linear_codes, linear_int4, linear_int8
from tutti.nn.linear.linear_rows import DTYPES, digits, kernels, rounds, tiles
from tutti.nn.linear.weight_kinds import CODES, FLOAT8, INT4, INT8

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define(
    "linear_experts(Tensor x, Tensor expert, Tensor weight, Tensor scales, Tensor? zeros=None, *, str layout, "
    "int bits, bool rounded=False) -> Tensor"
)


def kind_of(layout: str, bits: int) -> int:
    """The kind of weight of `linear_rows.cpp`. Raises ValueError for an unknown layout."""
    kinds = {"int8": INT8, "int4": INT4, "low": linear_bits.KINDS.get(bits), "float8": FLOAT8, "bits": CODES + 8 * bits}
    if (kind := kinds.get(layout)) is None:
        raise ValueError(f"linear_experts: layout {layout!r} with {bits} bits; expected one of {', '.join(kinds)}")
    return kind


def reference(x, expert, weight, scales, zeros=None, *, layout, bits, rounded=False):
    """The operator in plain PyTorch, an expert at a time."""
    _check(x, expert, weight, scales, zeros, layout, bits)
    out = x.new_empty(len(x), weight.shape[1])
    if layout in ("bits", "float8"):
        multiply = partial(linear_codes.reference, bits=bits)
    elif layout == "low":
        multiply = partial(linear_bits.reference, bits=bits, rounded=rounded)
    else:
        multiply = partial({"int8": linear_int8, "int4": linear_int4}[layout].reference, rounded=rounded)
    for e in expert.unique().tolist():
        own = expert == e
        of_zeros = [] if layout == "int8" else [None if zeros is None else zeros[e]]
        out[own] = multiply(x[own], weight[e], scales[e], *of_zeros)
    return out


def _check(x: Any, expert: Any, weight: Any, scales: Any, zeros: Any, layout: str, bits: int) -> None:
    kind_of(layout, bits)
    k = x.shape[-1]
    size = k if layout in ("int8", "float8") else 4 * -(-k * bits // 32)
    fits = len(x.shape) == 2 and len(weight.shape) == 3 and expert.shape == x.shape[:1]
    fits = fits and weight.shape[2] == size and len(scales.shape) == 2 + (layout != "int8")
    if not fits or scales.shape[:2] != weight.shape[:2] or expert.dtype != torch.int64:
        raise ValueError(
            f"linear_experts: x {tuple(x.shape)}, expert {tuple(expert.shape)} {expert.dtype}, weight "
            f"{tuple(weight.shape)} and scales {tuple(scales.shape)}: expected (m, k), (m) int64, (E, n, {size}) and "
            "(E, n, groups)"
        )
    if zeros is not None and (zeros.shape, zeros.dtype) != (scales.shape, torch.uint8):
        raise ValueError(f"linear_experts: zeros {tuple(zeros.shape)} {zeros.dtype}; expected {tuple(scales.shape)}")
    if layout in ("int4", "low"):
        linear_int4.check_group("linear_experts", k, k // max(1, scales.shape[2]))
    elif layout != "int8" and (not scales.shape[2] or k % scales.shape[2]):
        raise ValueError(f"linear_experts: {scales.shape[2]} groups along {k} numbers")


def cpu(x, expert, weight, scales, zeros=None, *, layout, bits, rounded=False):
    """The operator on a CPU."""
    if x.dtype not in DTYPES or (rounded and not rounds()):
        return reference(x, expert, weight, scales, zeros, layout=layout, bits=bits, rounded=rounded)
    _check(x, expert, weight, scales, zeros, layout, bits)
    group = 0 if layout == "int8" else x.shape[1] // scales.shape[2]
    exact = layout in ("bits", "float8")
    of_row, order = expert.sort(stable=True)
    sorted_rows = kernels().linear_groups(x[order], weight, scales, zeros, None, of_row, kind_of(layout, bits), group,
                                          0 if exact else digits(x, rounded), tiles())  # fmt: skip
    out = torch.empty_like(sorted_rows)
    out[order] = sorted_rows
    return out


_library.impl("linear_experts", cpu, "CPU")
_library.impl("linear_experts", reference, "CUDA")
torch.library.register_fake(
    "tutti::linear_experts",
    lambda x, expert, weight, scales, zeros=None, *, layout, bits, rounded=False: x.new_empty(len(x), weight.shape[1]),
)
