"""A paged cache: sequences of several lengths, some without tokens, and tokens of none; and whole sequences."""

import torch

from tutti.check.samples.sample import Draw, samples
from tutti.nn.attention.paged_write import rounded

ops = torch.ops.tutti
SLOTS, BLOCK = 24, 4


@samples(ops.paged_attention.default)
def paged_attention(d: Draw):
    groups, r, width, value_width = d.size((1, 2, 3)), d.size((1, 2)), d.size((2, 4)), d.size((2, 4))
    dtype, causal = d.dtype(), d.flag()
    counts = [d.pick([0, 1, 3]) for _ in range(2)]
    lengths = torch.tensor([count + d.pick([0, 2, 5]) for count in counts], dtype=torch.int32)
    starts = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32)
    tables = torch.randperm(SLOTS // BLOCK, generator=torch.Generator().manual_seed(d.between(0, 9)))
    query = d.floats(sum(counts) + 2, groups * r, width, dtype=dtype)
    keys = d.floats(SLOTS, groups, width, dtype=dtype)
    values = d.floats(SLOTS, groups, value_width, dtype=dtype)
    if d.flag():
        stored = d.pick([torch.int8, torch.uint8])
        keys, values = rounded(keys, stored), rounded(values, stored)
    options = {"block": BLOCK, "scale": 0.5, "window": d.pick([0, 3]) if causal else 0, "softcap": d.pick([0.0, 2.0]),
               "sinks": d.floats(groups * r, dtype=dtype) if d.flag() else None,
               "bias": d.floats(groups * r, 3, dtype=dtype) if causal and d.flag() else None, 
               "causal": causal}  # fmt: skip
    return (query, keys, values, tables.view(2, -1)[:, :2].int().contiguous(), starts, lengths), options


@samples(ops.sequence_attention.default)
def sequence_attention(d: Draw):
    rows, t, groups, r = d.size((1, 2, 4)), d.size((1, 3)), d.size((1, 2, 3)), d.size((1, 2))
    width, value_width, dtype = d.size((2, 4)), d.size((2, 4)), d.dtype()
    query = d.floats(rows, t, groups * r, width, dtype=dtype)
    key = d.floats(rows, t, groups, width, dtype=dtype)
    value = d.floats(rows, t, groups, value_width, dtype=dtype)
    options = {"scale": 0.5, "window": d.pick([0, 2]), "softcap": d.pick([0.0, 2.0]),
               "sinks": d.floats(groups * r, dtype=dtype) if d.flag() else None,
               "bias": d.floats(groups * r, 3, dtype=dtype) if d.flag() else None}  # fmt: skip
    return (query, key, value), options


@samples(ops.paged_write.default)
def paged_write(d: Draw):
    heads, width = d.sizes(2, (1, 2, 4, 6))
    dtype, tokens = d.dtype(), d.size((1, 2, 4))
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(d.between(0, 9)))[:tokens]
    slots = torch.where(d.booleans(tokens), slots, -1)
    cache = d.floats(SLOTS, heads, width, dtype=dtype)
    cache = rounded(cache, d.pick([torch.int8, torch.uint8])) if width % 2 == 0 and d.flag() else cache
    return (cache, d.floats(tokens, heads, width, dtype=dtype), slots), {}
