"""Operators of `tutti.nn.rows` that are joined with their neighbours on a GPU, where a launch takes as long as a row.

| operator | is |
|---|---|
| add_norm_rows(x, added, ...) | x += added, then the norm of x |
| rotary_write(q, k, v, cos, sin, keys, values, slots) | the rotated q; the rotated k, and v, go to a paged cache |

Shapes of `rotary_write`: q (1, heads, tokens, width), k (1, key_heads, tokens, width), v (tokens, key_heads,
value_width), cos and sin (1, 1, tokens, width), slots as in `tutti.nn.attention.paged_write`.
"""

from __future__ import annotations

import torch

from tutti.nn import rotary, rows
from tutti.nn.attention import paged_write

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define(
    "add_norm_rows(Tensor(a!) x, Tensor added, Tensor? weight, Tensor? bias, float eps, float offset, bool wide, "
    "bool centered) -> Tensor"
)
_library.define(
    "rotary_write(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) keys, Tensor(b!) values, "
    "Tensor slots) -> Tensor"
)


def add_norm_reference(x, added, weight, bias, eps, offset, wide, centered):
    return rows.norm_reference(x.add_(added), weight, bias, eps, offset, wide, centered)


def rotary_write_reference(q, k, v, cos, sin, keys, values, slots):
    paged_write.reference(keys, rotary.forward(k, cos, sin)[0].transpose(0, 1), slots)
    paged_write.reference(values, v, slots)
    return rotary.forward(q, cos, sin)


def _add_norm_on_gpu(x, added, *rest):
    if (kernels := rows.triton_kernels(x, added, *rest[:2])) and x.is_contiguous():
        return kernels.norm(x, added, *rest)
    return add_norm_reference(x, added, *rest)


def _rotary_write_on_gpu(*args):
    if kernels := rows.triton_kernels(*args[:7]):
        return kernels.rotary_write(*args)
    return rotary_write_reference(*args)


_library.impl("add_norm_rows", add_norm_reference, "CPU")
_library.impl("add_norm_rows", _add_norm_on_gpu, "CUDA")
_library.impl("rotary_write", rotary_write_reference, "CPU")
_library.impl("rotary_write", _rotary_write_on_gpu, "CUDA")
torch.library.register_fake("tutti::add_norm_rows", lambda x, *rest: x.new_empty(x.shape))
torch.library.register_fake("tutti::rotary_write", lambda q, *rest: q.new_empty(q.shape))
