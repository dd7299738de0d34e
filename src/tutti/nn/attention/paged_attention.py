"""Attention over a paged cache of keys and values (Kwon et al., "PagedAttention", 2023).

    out[i, h] = sum_j p_j values[slot(s, j), g],    p = softmax_j(cap(scale query[i, h] . keys[slot(s, j), g]) + b)
    g = h / group,    slot(s, j) = tables[s, j / block] block + j mod block,    cap(x) = softcap tanh(x / softcap) or x
    b = bias[h, min(p - j, n - 1)] or 0

| operand | shape | |
|---|---|---|
| query | (tokens, heads, width) | tokens of all sequences, one sequence after another |
| keys | (slots, key_heads, width) | heads = group key_heads |
| values | (slots, key_heads, value_width) | |
| tables | (sequences, n) int32 | numbers of the cache blocks of each sequence |
| starts | (sequences + 1) int32 | the first token of each sequence |
| lengths | (sequences) int32 | cached tokens of the sequence, those of this call included |
| sinks | (heads) or none | a logit in the denominator of the softmax, without a value |
| bias | (heads, n) or none | added to the logits, by distance; the last is that of all larger distances |
| out | (tokens, heads, value_width) | |

Token i of sequence s has the position p = lengths[s] - (starts[s + 1] - i). It sees the keys at positions up to p, of
which only the last `window`, if that is not 0; with `causal=False` all lengths[s] keys, without window and bias. Tokens
from starts[-1] on are padding, and their results are zero.

Keys and values may be of int8 or int4 as `tutti.nn.attention.paged_write` rounds them, (slots, key_heads,
`row_size(width)`) of int8 or uint8.

On a CPU, float32 and bfloat16 are computed in float32 by `paged.cpp`, which is compiled at first use. The bits
of a token's result depend on its query, the keys and values that it sees, and their positions only: not on other
sequences, on the part of the prompt that is computed at once, on the cache blocks or on the number of threads, as long
as keys and values are finite. On a GPU
with Triton, the kernel is that of `paged_attention_triton.py`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tutti.nn.compiled import has_triton, operators

SOURCE = Path(__file__).with_name("paged.cpp")
SCALE = 4  # bytes of a scale after the numbers of a row of int8; of a scale and a least number of int4
GROUP = 64  # numbers of a row of int4 that share these
ROUNDED = torch.int8, torch.uint8  # dtypes of caches of int8 and int4
DTYPES = torch.float32, torch.bfloat16  # dtypes of the compiled kernel

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define(
    "paged_attention(Tensor query, Tensor keys, Tensor values, Tensor tables, Tensor starts, Tensor lengths, *, "
    "int block, float scale, int window=0, float softcap=0.0, Tensor? sinks=None, "
    "Tensor? bias=None, bool causal=True) -> Tensor"
)


def reference(
    query, keys, values, tables, starts, lengths, *,
    block, scale, window=0, softcap=0.0, sinks=None, bias=None, causal=True,
):  # fmt: skip
    """The operator in plain PyTorch, a sequence at a time."""
    _check(query, keys, values, window, bias, causal)
    out = _fake(query, keys, values).zero_()
    if keys.dtype in ROUNDED:
        keys, values = unrounded(keys), unrounded(values)
    wide = torch.promote_types(query.dtype, torch.float32)
    bounds = starts.tolist()
    for table, first, last, length in zip(tables, bounds[:-1], bounds[1:], lengths.tolist(), strict=True):
        at = torch.arange(length, device=query.device)
        slots = table[at // block] * block + at % block
        q = query[first:last].to(wide).unflatten(1, (keys.shape[1], -1))
        logits = torch.einsum("qhgd,khd->hgqk", q, keys[slots].to(wide)) * scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        if causal:
            own = at[length - (last - first) :, None]
            if bias is not None:
                logits += bias.to(wide).view(*logits.shape[:2], -1)[..., (own - at).clamp(0, bias.shape[1] - 1)]
            unseen = (at > own) | (at <= own - window) if window else at > own
            logits = logits.masked_fill(unseen, -torch.inf)
        if sinks is not None:
            sink = sinks.to(wide).view(keys.shape[1], -1, 1, 1)
            logits = torch.cat([logits, sink.expand(*logits.shape[:3], 1)], -1)
        weights = logits.softmax(-1)[..., :length]
        out[first:last] = torch.einsum("hgqk,khd->qhgd", weights, values[slots].to(wide)).flatten(1, 2).to(out.dtype)
    return out


def unrounded(x: Tensor) -> Tensor:
    """Rows of int8 or int4 with their scales (..., size) as float32 (..., width)."""
    if x.dtype == torch.int8:
        return x[..., :-SCALE].float() * x[..., -SCALE:].contiguous().view(torch.float32)
    width = numbers(x.shape[-1], x.dtype)
    of_groups = x[..., width // 2 :].contiguous().view(torch.float16).float().unflatten(-1, (-1, 2))
    groups = []
    for g, codes in enumerate(x[..., : width // 2].split(GROUP // 2, -1)):
        scale, least = of_groups[..., g, :1], of_groups[..., g, 1:]
        groups.append(torch.cat([codes & 15, codes >> 4], -1) * scale + least)
    return torch.cat(groups, -1)


def row_size(width: int, dtype: torch.dtype) -> int:
    """Elements of a row of a cache with so many numbers. Raises ValueError for odd rows of int4."""
    if dtype == torch.uint8:
        if width % 2:
            raise ValueError(f"a cache of int4 has rows of {width} numbers; expected an even number: use int8")
        return width // 2 + SCALE * -(-width // GROUP)
    return width + (SCALE if dtype == torch.int8 else 0)


def numbers(size: int, dtype: torch.dtype) -> int:
    """The numbers of a row of a cache: the inverse of `row_size`; 0 if there is none."""
    if dtype != torch.uint8:
        return size - (SCALE if dtype == torch.int8 else 0)
    groups = -(-size // (GROUP // 2 + SCALE))
    width = 2 * (size - SCALE * groups)
    return width if width > 0 and row_size(width, dtype) == size else 0


def width_of(cache: Any) -> int:
    """The numbers of a row of a cache."""
    return numbers(cache.shape[2], cache.dtype)


def _check(query: Any, keys: Any, values: Any, window: int, bias: Any, causal: bool) -> None:
    heads, groups = query.shape[1], keys.shape[1]
    if query.shape[2] != width_of(keys) or width_of(values) < 1 or keys.shape[:2] != values.shape[:2] or heads % groups:
        raise ValueError(
            f"paged_attention: query {tuple(query.shape)}, keys {tuple(keys.shape)} and values {tuple(values.shape)}: "
            "expected (tokens, heads, width), (slots, key_heads, width) and (slots, key_heads, value_width), with "
            "heads a multiple of key_heads; of int8 and int4, rows of `row_size` bytes"
        )
    if (window or bias is not None) and not causal:
        raise ValueError("paged_attention: a window and a bias need causal=True")


def _fake(query: Tensor, keys: Tensor, values: Tensor, *rest: object, **options: object) -> Tensor:
    return query.new_empty((*query.shape[:2], width_of(values)))


@cache
def kernels() -> Any:
    """The compiled operators: see the end of `paged.cpp`."""
    return operators(SOURCE)


def compiled(
    query: Any, keys: Any, values: Any, tables: Any, starts: Any, lengths: Any, block: int, scale: float, window: int,
    softcap: float, sinks: Any, bias: Any, causal: bool,
) -> tuple | None:  # fmt: skip
    """The compiled operator and its arguments for tensors, or Specs; None if they do not fit."""
    if keys.dtype != values.dtype or keys.dtype not in (query.dtype, *ROUNDED) or query.dtype not in DTYPES:
        return None
    _check(query, keys, values, window, bias, causal)
    args = query, keys, values, tables, starts, lengths, block, scale, window, softcap, sinks, bias, causal
    return kernels().paged_attention.default, args


def cpu(
    query, keys, values, tables, starts, lengths, *,
    block, scale, window=0, softcap=0.0, sinks=None, bias=None, causal=True,
):  # fmt: skip
    """The operator on a CPU."""
    rest = block, scale, window, softcap, sinks, bias, causal
    if call := compiled(query, keys, values, tables, starts, lengths, *rest):
        op, args = call
        return op(*args)
    return reference(query, keys, values, tables, starts, lengths, block=block, scale=scale, window=window,
                     softcap=softcap, sinks=sinks, bias=bias, causal=causal)  # fmt: skip


def _cuda(query, keys, values, tables, starts, lengths, *, window=0, softcap=0.0, sinks=None, bias=None, causal=True,
          **rest):  # fmt: skip
    options = {"window": window, "softcap": softcap, "sinks": sinks, "bias": bias, "causal": causal, **rest}
    alike = query.dtype == keys.dtype == values.dtype and query.dtype in (*DTYPES, torch.float16)
    if not alike or not has_triton():
        return reference(query, keys, values, tables, starts, lengths, **options)
    from tutti.nn.attention.paged_attention_triton import attend

    _check(query, keys, values, window, bias, causal)
    return attend(query, keys, values, tables, starts, lengths, **options)


_library.impl("paged_attention", cpu, "CPU")
_library.impl("paged_attention", _cuda, "CUDA")
torch.library.register_fake("tutti::paged_attention", _fake)
