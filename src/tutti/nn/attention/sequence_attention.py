"""Causal attention of whole sequences with the bits that attention over a cache gives, token by token.

    out[b, i, h] = sum_j<=i p_j value[b, j, g],    as in `tutti.nn.attention.paged_attention`

| operand | shape | |
|---|---|---|
| query | (rows, t, heads, width) | heads = group key_heads |
| key | (rows, t, key_heads, width) | |
| value | (rows, t, key_heads, value_width) | |
| sinks, bias | | as in `paged_attention` |
| out | (rows, t, heads, value_width) | |

It is `paged_attention` of a cache whose blocks are the rows. There is no formula for gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.nn.attention import paged_attention

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define(
    "sequence_attention(Tensor query, Tensor key, Tensor value, *, float scale, int window=0, float softcap=0.0, "
    "Tensor? sinks=None, Tensor? bias=None) -> Tensor"
)


def forward(query: Tensor, key: Tensor, value: Tensor, **options) -> Tensor:
    """The operator. options: those of `paged_attention`."""
    rows, t = query.shape[:2]
    tables = torch.arange(rows, dtype=torch.int32, device=query.device).unsqueeze(1)
    starts = torch.arange(0, (rows + 1) * t, t, dtype=torch.int32, device=query.device)
    flat = (x.flatten(0, 1).contiguous() for x in (query, key, value))
    out = torch.ops.tutti.paged_attention(*flat, tables, starts, torch.full_like(starts[1:], t), block=t, **options)
    return out.unflatten(0, (rows, t))


_library.impl("sequence_attention", forward, "CPU")
_library.impl("sequence_attention", forward, "CUDA")
torch.library.register_fake(
    "tutti::sequence_attention",
    lambda query, key, value, **options: query.new_empty((*query.shape[:3], paged_attention.width_of(value[0]))),
)
