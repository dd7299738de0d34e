"""Fused attention: causal, masked, grouped queries, other numbers of keys than queries."""

from math import inf

import torch

from tutti.check.samples.sample import Draw, samples

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default

# torch 2.11 gives the log-sum-exp of float64 in float32 (and says float64 on fake tensors): parts of the keys are then
# joined in float32, which is not as exact as float64 must be
EXACT = FORWARD(*[torch.zeros(1, 1, 1, 1, dtype=torch.float64)] * 3)[1].dtype == torch.float64


def drawn(d: Draw):
    """q, k, v, whether causal, keyword arguments."""
    batch, groups, r, width = d.pick([1, 2]), d.pick([1, 2, 3]), d.pick([1, 2]), d.pick([2, 4])
    queries = d.pick([4, 6, 8, 12])
    keys = d.pick([queries, queries, 4, 6])
    causal = keys == queries and d.flag()
    dtype = d.dtype() if EXACT else d.pick([torch.float32, torch.bfloat16])
    q = d.floats(batch, groups * r, queries, width, dtype=dtype)
    k, v = (d.floats(batch, groups, keys, width, dtype=dtype) for _ in range(2))
    mask = None
    if not causal and d.flag():
        mask = d.floats(d.pick([1, batch]), d.pick([1, groups * r]), d.pick([1, queries]), keys, dtype=dtype)
        if d.flag():  # some queries see nothing of a block, or nothing at all
            mask = mask.masked_fill(d.floats(*mask.shape) > 0, -inf)
    return q, k, v, causal, {"attn_mask": mask, "scale": d.pick([None, 0.5])}


@samples(FORWARD)
def attention(d: Draw):
    q, k, v, causal, more = drawn(d)
    return (q, k, v, 0.0, causal), more


@samples(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def attention_backward(d: Draw):
    q, k, v, causal, more = drawn(d)
    out, lse = FORWARD(q, k, v, 0.0, causal, **more)
    return (d.floats(*out.shape, dtype=out.dtype), q, k, v, out, lse, 0.0, causal), more
