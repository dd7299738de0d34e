"""Attention over a paged cache on a GPU, in Triton: see `tutti.nn.paged_attention`.

A program has a tile of tokens of one sequence and the query heads of one key head. It sees the keys in blocks, counted
from the start of the sequence, by the online softmax, in float32.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

ROWS, KEYS = 16, 64  # at least, of a tile; of a block


@triton.jit
def _attend(
    query, keys, values, tables, starts, lengths, sinks, bias, out, scale, softcap, window, distances,
    query_token, query_head, key_slot, key_head, value_slot, value_head, out_token, out_head, table,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, WIDTHS: tl.constexpr, VALUE_WIDTHS: tl.constexpr,
    CAUSAL: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    sequence, tile, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    last, length = tl.load(starts + sequence + 1), tl.load(lengths + sequence)
    begin = tl.load(starts + sequence) + tile * TOKENS
    if begin < last:
        row = tl.arange(0, ROWS)
        token, head = begin + row // GROUP, group * GROUP + row % GROUP
        here = (row < TOKENS * GROUP) & (token < last)
        own = length - (last - token)  # the position
        d, e = tl.arange(0, WIDTHS), tl.arange(0, VALUE_WIDTHS)
        q = tl.load(query + token[:, None] * query_token + head[:, None] * query_head + d[None, :],
                    mask=here[:, None] & (d < WIDTH)[None, :], other=0.0)  # fmt: skip
        most = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        o = tl.zeros([ROWS, VALUE_WIDTHS], tl.float32)
        end, first = length, 0
        if CAUSAL:
            end = tl.minimum(length, length - last + begin + TOKENS)
            if window > 0:
                first = tl.maximum(0, length - last + begin - window + 1) // KEYS * KEYS
        for j in range(first, end, KEYS):
            at = j + tl.arange(0, KEYS)
            cached = at < end
            slot = tl.load(tables + sequence * table + at // BLOCK, mask=cached, other=0) * BLOCK + at % BLOCK
            slot = slot.to(tl.int64)
            k = tl.load(keys + slot[:, None] * key_slot + group * key_head + d[None, :],
                        mask=cached[:, None] & (d < WIDTH)[None, :], other=0.0)  # fmt: skip
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            if CAPPED:
                s = softcap * (2 * tl.sigmoid(2 * s / softcap) - 1)  # softcap tanh(s / softcap)
            if BIAS:
                distance = tl.minimum(tl.maximum(own[:, None] - at[None, :], 0), distances - 1)
                s += tl.load(bias + head[:, None] * distances + distance, mask=here[:, None], other=0.0)
            seen = here[:, None] & cached[None, :]
            if CAUSAL:
                seen = seen & (at[None, :] <= own[:, None])
                if window > 0:
                    seen = seen & (at[None, :] > own[:, None] - window)
            s = tl.where(seen, s, float("-inf"))
            top = tl.maximum(most, tl.max(s, 1))
            shift = tl.where(top == float("-inf"), 0.0, top)
            p, fades = tl.exp(s - shift[:, None]), tl.exp(most - shift)
            v = tl.load(values + slot[:, None] * value_slot + group * value_head + e[None, :],
                        mask=cached[:, None] & (e < VALUES)[None, :], other=0.0)  # fmt: skip
            total = total * fades + tl.sum(p, 1)
            o = o * fades[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            most = top
        if SINKS:
            sink = tl.load(sinks + head, mask=here, other=0.0)
            top = tl.maximum(most, sink)
            fades = tl.exp(most - top)
            o, total = o * fades[:, None], total * fades + tl.exp(sink - top)
        o = o / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + token[:, None] * out_token + head[:, None] * out_head + e[None, :], o.to(out.dtype.element_ty),
                 mask=here[:, None] & (e < VALUES)[None, :])  # fmt: skip


def attend(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, starts: Tensor, lengths: Tensor, *, block: int,
    scale: float, window: int, softcap: float, sinks: Tensor | None, bias: Tensor | None, causal: bool,
) -> Tensor:  # fmt: skip
    """`tutti::paged_attention` for float32, bfloat16 and float16."""
    query, keys, values = (x if x.stride(2) == 1 else x.contiguous() for x in (query, keys, values))
    tables, starts, lengths = (x.to(torch.int32).contiguous() for x in (tables, starts, lengths))
    (tokens, heads, width), (_, groups, value_width) = query.shape, values.shape
    out = query.new_zeros((tokens, heads, value_width))
    if not tokens:
        return out
    group = heads // groups
    each = max(1, ROWS // group)  # tokens of a tile
    grid = len(lengths), triton.cdiv(tokens, each), groups
    _attend[grid](  # pyright: ignore[reportIndexIssue]
        query, keys, values, tables, starts, lengths, None if sinks is None else sinks.float().contiguous(),
        None if bias is None else bias.float().contiguous(), out, scale, softcap, window,
        0 if bias is None else bias.shape[1], *query.stride()[:2], *keys.stride()[:2], *values.stride()[:2],
        *out.stride()[:2], tables.stride(0), GROUP=group, TOKENS=each,
        ROWS=max(ROWS, triton.next_power_of_2(each * group)), KEYS=KEYS, BLOCK=block, WIDTH=width, VALUES=value_width,
        WIDTHS=max(16, triton.next_power_of_2(width)), VALUE_WIDTHS=max(16, triton.next_power_of_2(value_width)),
        CAUSAL=causal, CAPPED=softcap != 0.0, SINKS=sinks is not None, BIAS=bias is not None,
    )  # fmt: skip
    return out
