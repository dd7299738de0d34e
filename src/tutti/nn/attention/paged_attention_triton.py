"""Attention over a paged cache on a GPU, in Triton: see `tutti.nn.attention.paged_attention`.

All programs see the keys in blocks, counted from the start of the sequence, by the online softmax, in float32. Two
kernels divide the work:

- Prompts: a program has a tile of tokens of one sequence and the query heads of one key head.
- Decoding: a program has one token and a part of its keys, so that few long sequences occupy the whole device (Dao et
  al., "Flash-Decoding for long-context inference", 2023). A second kernel combines the parts.
"""

from __future__ import annotations

from functools import cache

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

ROWS, PROMPT_ROWS = 16, 64  # of a tile: query heads of a token at least; tokens times heads of a prompt
KEYS = 64  # of a block
MOST_PARTS = 32  # of the keys of a token
DECODING = 2  # tokens a sequence, up to which each token has programs of its own


@triton.jit
def _see(
    q, here, own, head, sequence, group, first, end, most, total, o,
    keys, values, tables, bias, scale, softcap, window, distances, key_slot, key_head, value_slot, value_head, table,
    KEYS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, WIDTHS: tl.constexpr,
    VALUE_WIDTHS: tl.constexpr, CAUSAL: tl.constexpr, CAPPED: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Add the keys from `first` to `end` to a softmax under way: its greatest logit, its sum, and the output."""
    d, e = tl.arange(0, WIDTHS), tl.arange(0, VALUE_WIDTHS)
    for j in range(first, end, KEYS):
        at = j + tl.arange(0, KEYS)
        cached = at < end
        slot = tl.load(tables + sequence * table + at // BLOCK, mask=cached, other=0).to(tl.int64) * BLOCK + at % BLOCK
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
    return most, total, o


@triton.jit
def _prompts(
    query, keys, values, tables, starts, lengths, sinks, bias, out, scale, softcap, window, distances, sequences,
    query_token, query_head, key_slot, key_head, value_slot, value_head, out_token, out_head, table,
    SEQUENCES: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, WIDTHS: tl.constexpr, VALUE_WIDTHS: tl.constexpr,
    CAUSAL: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    tile, group = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, SEQUENCES)
    real = i < sequences
    each = tl.load(starts + i + 1, mask=real, other=0) - tl.load(starts + i, mask=real, other=0)
    upto = tl.cumsum((each + TOKENS - 1) // TOKENS, 0)  # tiles of the sequences up to this one
    sequence = tl.sum((real & (upto <= tile)).to(tl.int32), 0)
    if sequence < sequences:
        before = tl.sum(tl.where(i == sequence - 1, upto, 0), 0)
        last, length = tl.load(starts + sequence + 1), tl.load(lengths + sequence)
        begin = tl.load(starts + sequence) + (tile - before) * TOKENS
        row = tl.arange(0, ROWS)
        token, head = begin + row // GROUP, group * GROUP + row % GROUP
        here = (row < TOKENS * GROUP) & (token < last)
        own = length - (last - token)  # the position
        d, e = tl.arange(0, WIDTHS), tl.arange(0, VALUE_WIDTHS)
        q = tl.load(query + token[:, None] * query_token + head[:, None] * query_head + d[None, :],
                    mask=here[:, None] & (d < WIDTH)[None, :], other=0.0)  # fmt: skip
        most = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        if SINKS:
            most = tl.load(sinks + head, mask=here, other=0.0)
            total += 1.0
        o = tl.zeros([ROWS, VALUE_WIDTHS], tl.float32)
        end, first = length, 0
        if CAUSAL:
            end = tl.minimum(length, length - last + begin + TOKENS)
            if window > 0:
                first = tl.maximum(0, length - last + begin - window + 1) // KEYS * KEYS
        most, total, o = _see(
            q, here, own, head, sequence, group, first, end, most, total, o,
            keys, values, tables, bias, scale, softcap, window, distances, key_slot, key_head, value_slot, value_head,
            table, KEYS, BLOCK, WIDTH, VALUES, WIDTHS, VALUE_WIDTHS, CAUSAL, CAPPED, BIAS,
        )  # fmt: skip
        o = o / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + token[:, None] * out_token + head[:, None] * out_head + e[None, :], o.to(out.dtype.element_ty),
                 mask=here[:, None] & (e < VALUES)[None, :])  # fmt: skip


@triton.jit
def _decode(
    query, keys, values, tables, starts, lengths, sinks, bias, out, logs, scale, softcap, window, distances, sequences,
    query_token, query_head, key_slot, key_head, value_slot, value_head, out_token, out_head, out_part, table,
    SEQUENCES: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, WIDTHS: tl.constexpr, VALUE_WIDTHS: tl.constexpr,
    CAUSAL: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """A part of the keys of a token. logs: the log of the sum of each part, (tokens, heads, parts), if PARTS > 1."""
    token, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i = tl.arange(0, SEQUENCES)
    sequence = tl.sum((tl.load(starts + i + 1, mask=i < sequences, other=2147483647) <= token).to(tl.int32), 0)
    row = tl.arange(0, ROWS)
    head = group * GROUP + row
    d, e = tl.arange(0, WIDTHS), tl.arange(0, VALUE_WIDTHS)
    real = sequence < sequences  # else the token is padding
    here = (row < GROUP) & real
    sequence = tl.minimum(sequence, sequences - 1)
    length = tl.load(lengths + sequence)
    position = length - (tl.load(starts + sequence + 1) - token)
    q = tl.load(query + token * query_token + head[:, None] * query_head + d[None, :],
                mask=here[:, None] & (d < WIDTH)[None, :], other=0.0)  # fmt: skip
    end, first = length, 0
    if CAUSAL:
        end = tl.minimum(length, position + 1)
        if window > 0:
            first = tl.maximum(0, position - window + 1) // KEYS * KEYS
    each = ((end - first + PARTS - 1) // PARTS + KEYS - 1) // KEYS * KEYS
    first = first + part * each
    end = tl.where(real, tl.minimum(end, first + each), first)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS and part == 0:
        most = tl.load(sinks + head, mask=here, other=0.0)
        total += 1.0
    o = tl.zeros([ROWS, VALUE_WIDTHS], tl.float32)
    own = tl.zeros([ROWS], tl.int32) + position
    most, total, o = _see(
        q, here, own, head, sequence, group, first, end, most, total, o,
        keys, values, tables, bias, scale, softcap, window, distances, key_slot, key_head, value_slot, value_head,
        table, KEYS, BLOCK, WIDTH, VALUES, WIDTHS, VALUE_WIDTHS, CAUSAL, CAPPED, BIAS,
    )  # fmt: skip
    o = o / tl.where(total == 0.0, 1.0, total)[:, None]
    in_group = row < GROUP
    tl.store(out + token * out_token + head[:, None] * out_head + part * out_part + e[None, :],
             o.to(out.dtype.element_ty), mask=in_group[:, None] & (e < VALUES)[None, :])  # fmt: skip
    if PARTS > 1:
        log = tl.where(total == 0.0, float("-inf"), most + tl.log(tl.where(total == 0.0, 1.0, total)))
        tl.store(logs + (token * tl.num_programs(1) * GROUP + head) * PARTS + part, log, mask=in_group)


@triton.jit
def _combine(parts, logs, out, out_token, out_head, VALUES: tl.constexpr, VALUE_WIDTHS: tl.constexpr,
             PARTS: tl.constexpr):  # fmt: skip
    """The mean of the parts (tokens, heads, PARTS, VALUES), weighted by the exponentials of their logs."""
    token, head = tl.program_id(0), tl.program_id(1)
    at, e = (token * tl.num_programs(1) + head) * PARTS + tl.arange(0, PARTS), tl.arange(0, VALUE_WIDTHS)
    log = tl.load(logs + at)
    most = tl.max(log, 0)
    weights = tl.exp(log - tl.where(most == float("-inf"), 0.0, most))
    o = tl.load(parts + at[:, None] * VALUES + e[None, :], mask=(e < VALUES)[None, :], other=0.0)
    total = tl.sum(weights, 0)
    o = tl.sum(o * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + token * out_token + head * out_head + e, o.to(out.dtype.element_ty), mask=e < VALUES)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def parts_of(programs: int, multiprocessors: int, longest: int) -> int:
    """Into how many parts the keys of a token are divided: a power of 2 with which the device has two programs for each
    multiprocessor. programs: with one part. longest: keys of a sequence, at most."""
    wanted = min(2 * multiprocessors // programs, -(-longest // KEYS), MOST_PARTS)
    return 1 << (max(wanted, 1).bit_length() - 1)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, starts: Tensor, lengths: Tensor, *, block: int,
    scale: float, window: int, softcap: float, sinks: Tensor | None, bias: Tensor | None, causal: bool,
    parts: int | None = None,
) -> Tensor:  # fmt: skip
    """`tutti::paged_attention` for float32, bfloat16 and float16.

    parts: number of parts that the keys of a token are divided into, a power of 2, where each token has programs of its
    own; by default `parts_of`.
    """
    query, keys, values = (x if x.stride(2) == 1 else x.contiguous() for x in (query, keys, values))
    tables, starts, lengths = (x.to(torch.int32).contiguous() for x in (tables, starts, lengths))
    (tokens, heads, width), (_, groups, value_width), sequences = query.shape, values.shape, len(lengths)
    decoding = tokens <= DECODING * sequences
    out = (query.new_empty if decoding else query.new_zeros)((tokens, heads, value_width))
    if not tokens:
        return out
    group = heads // groups
    options = {
        "SEQUENCES": triton.next_power_of_2(sequences), "GROUP": group, "KEYS": KEYS, "BLOCK": block, "WIDTH": width,
        "VALUES": value_width, "WIDTHS": max(16, triton.next_power_of_2(width)),
        "VALUE_WIDTHS": max(16, triton.next_power_of_2(value_width)), "CAUSAL": causal, "CAPPED": softcap != 0.0,
        "SINKS": sinks is not None, "BIAS": bias is not None,
    }  # fmt: skip
    inputs = (query, keys, values, tables, starts, lengths, None if sinks is None else sinks.float().contiguous(),
              None if bias is None else bias.float().contiguous())  # fmt: skip
    numbers = scale, softcap, window, 0 if bias is None else bias.shape[1], sequences
    strides = *query.stride()[:2], *keys.stride()[:2], *values.stride()[:2]
    if not decoding:
        each = max(1, PROMPT_ROWS // group)  # tokens of a tile
        grid = triton.cdiv(tokens, each) + sequences, groups
        _prompts[grid](  # pyright: ignore[reportIndexIssue]
            *inputs, out, *numbers, *strides, *out.stride()[:2], tables.stride(0), TOKENS=each,
                       ROWS=max(ROWS, triton.next_power_of_2(each * group)), **options)  # fmt: skip
        return out
    count = parts or parts_of(tokens * groups, _multiprocessors(query.device), tables.shape[1] * block)
    shares = out.unsqueeze(2) if count == 1 else query.new_empty((tokens, heads, count, value_width), dtype=torch.float)
    logs = None if count == 1 else query.new_empty((tokens, heads, count), dtype=torch.float)
    _decode[tokens, groups, count](  # pyright: ignore[reportIndexIssue]
        *inputs, shares, logs, *numbers, *strides, *shares.stride()[:3], tables.stride(0), PARTS=count,
        ROWS=max(ROWS, triton.next_power_of_2(group)), **options,
    )  # fmt: skip
    if count > 1:
        _combine[tokens, heads](  # pyright: ignore[reportIndexIssue]
            shares, logs, out, *out.stride()[:2], VALUES=value_width,
                                VALUE_WIDTHS=options["VALUE_WIDTHS"], PARTS=count)  # fmt: skip
    return out
