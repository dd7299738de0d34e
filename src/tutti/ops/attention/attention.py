"""Fused attention, split over batch and heads; over the sequence as a ring; over the keys alone by merging.

Heads: with grouped queries, over groups or within each group. If neighbours are split over the sequence, the reshards
to heads and back are the all-to-alls of DeepSpeed Ulysses (Jacobs et al. 2023).

Sequence, with as many queries as keys: each rank keeps its queries, and blocks of keys and values circulate (Ring
Attention, Liu et al. 2023); partial results are merged by their log-sum-exp. Under a causal mask, contiguous parts
leave the first rank idle most of the time. Parts of every k-th token (a split with `outer = length / k`) are balanced
to a token (Striped Attention, Brandon et al. 2023), without extra traffic if the whole network is split so; all ranks
then run equal Programs, whose communication can be hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tutti.nn.attention.fused
import tutti.nn.attention.striped_attention  # noqa: F401  (registers the operators)
from tutti.ir.op_info import CONTIGUOUS, DENSE, FLOPS, LOCAL, SENDS, UNEVEN, WORK
from tutti.ir.step_graph import Call
from tutti.ops.registry import Cut, operands, rules, shape_of
from tutti.ops.spatial.halo import pad

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
STRIPED = torch.ops.tutti.striped_attention.default
STRIPED_BACKWARD = torch.ops.tutti.striped_attention_backward.default
ROWS = 2  # the token dim of queries, keys and values


def _lines(q: Call, k: Call, mask: list[Call], causal: bool, backward: bool) -> tuple[dict[str, str], dict[str, int]]:
    """Dims of each operand; g groups of r query heads share a key head. Also the sizes that shapes do not determine."""
    (_, heads, queries, _), (_, groups, keys, _) = q.meta["val"].shape, k.meta["val"].shape
    if queries == keys and not _one_column(mask):
        rows, columns, seen = "s@", "s@", "t!"
    else:
        rows, columns = "s!" if causal else "s", "t!" if causal else "t" if backward else "t@"
        seen = columns
    names = ["b", "(g r)", rows, seen]
    masks = [
        " ".join("1" if n == 1 else c for c, n in zip(names[4 - len(shape) :], shape, strict=True))
        for shape in (m.meta["val"].shape for m in mask)
    ]
    lines = {
        "q": f"b (g r) {rows} d!", "k": f"b g {columns} d!", "v": f"b g {columns} e!",
        "out": f"b (g r) {rows} e!", "lse": f"b (g r) {rows}", "mask": "".join(f", {m}" for m in masks),
    }  # fmt: skip
    return lines, {"g": groups, "r": heads // groups}


def _one_column(mask: list[Call]) -> bool:
    return any(m.meta["val"].shape[-1] == 1 for m in mask)


def _attention(node: Call):
    q, k, _, *mask = operands(node)
    at, sizes = _lines(q, k, mask, causal(node.args, 4), backward=False)
    return f"{at['q']}, {at['k']}, {at['v']}{at['mask']} -> {at['out']}, ={at['lse']}", sizes


def _attention_backward(node: Call):
    _, q, k, _, _, _, *mask = operands(node)
    at, sizes = _lines(q, k, mask, causal(node.args, 7), backward=True)
    inputs = f"{at['out']}, {at['q']}, {at['k']}, {at['v']}, {at['out']}, {at['lse']}{at['mask']}"
    return f"{inputs} -> {at['q']}, {at['k']}, {at['v']} | ~0", sizes


def causal(args: tuple, position: int) -> bool:
    return len(args) > position and args[position] is True


def is_causal(node: Call) -> bool:
    """Whether a call is fused attention under a causal mask, in the forward pass."""
    return node.target is FORWARD and causal(node.args, 4)


rules({FORWARD: _attention, BACKWARD: _attention_backward})
DENSE |= {FORWARD: (0, 1, 2), BACKWARD: (0, 1, 2, 3, 4)}
CONTIGUOUS[BACKWARD] = (5,)


class ScoreBlock(NamedTuple):
    """Queries that attend to keys: to all of them, or, if square and causal, to those at or before their position."""

    rows: slice
    columns: slice
    causal: bool


def blocks(digits: list[tuple[int, str | None]], here: dict[str, int], there: dict[str, int]) -> list[ScoreBlock]:
    """What the tokens of one part attend to in another part, under a causal mask.

    digits: the sequence as a mixed-radix number, most significant first: (size, axis that holds the digit or None).
    here, there: the digits that the parts of the queries and of the keys hold. The rest counts the local tokens.
    """
    while digits and digits[0][1] is not None:
        axis = str(digits[0][1])
        if here[axis] != there[axis]:
            n = prod(size for size, splitting_axis in digits if splitting_axis is None)
            return [ScoreBlock(slice(0, n), slice(0, n), False)] if there[axis] < here[axis] else []
        digits = digits[1:]
    if not digits:
        return [ScoreBlock(slice(0, 1), slice(0, 1), False)]
    (n, _), *inner = digits
    axes = [str(axis) for _, axis in inner if axis is not None]
    if len(axes) == len(inner):  # local tokens are a single run with a constant stride
        if [there[a] for a in axes] <= [here[a] for a in axes]:
            return [ScoreBlock(slice(0, n), slice(0, n), True)]
        return [ScoreBlock(slice(1, n), slice(0, n - 1), True)] if n > 1 else []
    size, blocks_found = prod(s for s, axis in inner if axis is None), []
    for i in range(n):
        rows = slice(i * size, (i + 1) * size)
        if i:
            blocks_found.append(ScoreBlock(rows, slice(0, i * size), False))
        for block in blocks(inner, here, there):
            blocks_found.append(ScoreBlock(_moved(block.rows, i * size), _moved(block.columns, i * size), block.causal))
    return blocks_found


def _moved(s: slice, by: int) -> slice:
    return slice(s.start + by, s.stop + by)


def _seen(here, causal: bool, rows: int, columns: int, source: int) -> list[ScoreBlock]:
    """The blocks of part `source`'s keys that this part's queries attend to. columns: number of keys if not split."""
    columns = here.size("s", source) if here.axes("s") else columns
    if not causal:
        return [ScoreBlock(slice(0, rows), slice(0, columns), False)]
    if not here.even("s"):  # contiguous
        own = here.part("s")
        return [ScoreBlock(slice(0, rows), slice(0, columns), own == source)] if source <= own else []
    return blocks(here.digits("s"), here.coordinates("s", here.part("s")), here.coordinates("s", source))


def _padded(here, kv: Tensor) -> Tensor:
    """Keys and values with as many rows as the largest part: all ranks send equally many."""
    return kv if here.even("s") else pad(kv, ROWS, 0, here.size("s", 0) - kv.shape[ROWS])


def _cut(x: Tensor, s: slice, dim: int = ROWS) -> Tensor:
    return x if s == slice(0, x.shape[dim]) else x.narrow(dim, s.start, s.stop - s.start)


def _masked(here, mask: Tensor | None, source: int, block: ScoreBlock) -> Tensor | None:
    """The part of a mask for the keys of part `source`. The mask has all columns, and this part's rows or one row."""
    if mask is None:
        return None
    mask = _cut(here.select(mask, mask.ndim - 1, "s", source), block.columns, mask.ndim - 1)
    return mask if mask.shape[-2] == 1 else _cut(mask, block.rows, mask.ndim - 2)


def _in_stripes(here, causal: bool, mask: Tensor | None) -> bool:
    """Whether the parts of a causal sequence are every k-th token: all ranks then compute alike."""
    if not causal or mask is not None or not here.even("s") or here.parts("s") < 2:
        return False
    first, *others = (axis for _, axis in here.digits("s"))
    return first is None and all(axis is not None for axis in others)


def _follows(here, source: int) -> bool:
    """Whether the tokens of part `source` come after this part's at the same places of two stripes."""
    axes = [axis for _, axis in here.digits("s") if axis is not None]
    there, own = here.coordinates("s", source), here.coordinates("s", here.part("s"))
    return [there[axis] for axis in axes] > [own[axis] for axis in axes]


def _local(here, q, k, v, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    if here.axes("t"):
        return _merged_over_keys(here, q, k, v, attn_mask, scale)
    out = lse = None
    rows, parts = q.shape[ROWS], here.parts("s")
    kv = _padded(here, torch.cat([k, v], -1))
    stripes = _in_stripes(here, is_causal, attn_mask)
    for step in range(parts):
        source = (here.part("s") - step) % parts
        if stripes:
            k, v = kv.split([q.shape[-1], v.shape[-1]], -1)
            new, sums = STRIPED(q, k, v, _follows(here, source), scale)
            out, lse = (new.to(sums.dtype), sums) if out is None or lse is None else _merge(out, lse, new, sums)
        for block in [] if stripes else _seen(here, is_causal, rows, k.shape[ROWS], source):
            k, v = _cut(kv, block.columns).split([q.shape[-1], v.shape[-1]], -1)
            new, sums = _over(_cut(q, block.rows), k, v, block.causal, _masked(here, attn_mask, source, block), scale)
            before, after = block.rows.start, rows - block.rows.stop
            new = pad(new.to(sums.dtype), ROWS, before, after)
            sums = torch.constant_pad_nd(sums, [before, after], -inf) if before or after else sums
            out, lse = (new, sums) if out is None or lse is None else _merge(out, lse, new, sums)
        if step + 1 < parts:
            kv = here.ppermute(kv, "s", 1, edge=None)
    assert out is not None and lse is not None
    return out, torch.where(lse == -inf, 0.0, lse)


def _over(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float | None):
    """Attention over some keys, and its log-sum-exp: -inf if a query attends to none of them (the kernel returns 0)."""
    out, lse = FORWARD(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    if mask is not None:
        nothing = (~mask if mask.dtype == torch.bool else mask == -inf).all(-1)
        lse = torch.where(nothing, -inf, lse)
    return out, lse


def _merge(out: Tensor, lse: Tensor, new: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over two sets of keys."""
    both = torch.logaddexp(lse, sums)
    seen = torch.where(both == -inf, 0.0, both)  # a query may have had no keys yet
    weights = [(s - seen).exp().unsqueeze(-1) for s in (lse, sums)]
    return out * weights[0] + new * weights[1], both


def _merged_over_keys(here, q, k, v, mask, scale):
    """Attention over a part of the keys: a partial sum, weighted by this part's share of the denominator."""
    out, lse = _over(q, k, v, False, mask, scale)
    top = here.all_reduce(lse, "t", "max")
    top = torch.where(top == -inf, 0.0, top)
    both = top + here.all_reduce((lse - top).exp(), "t", "sum").log()
    share = torch.where(lse == -inf, 0.0, (lse - both).exp())
    return out * share.unsqueeze(-1), torch.where(both == -inf, 0.0, both)


def _local_backward(here, grad, q, k, v, out, lse, dropout_p, is_causal, *, attn_mask=None, scale=None):
    """Keys and values circulate as in the forward pass. Their gradients go directly to the part that owns them."""
    rows, k_rows, parts, wide = q.shape[ROWS], k.shape[ROWS], here.parts("s"), lse.dtype
    gq = torch.zeros_like(q, dtype=wide)
    kv = _padded(here, torch.cat([k, v], -1))
    gkv = torch.zeros_like(kv, dtype=wide)
    widths = [k.shape[-1], v.shape[-1]]
    stripes = _in_stripes(here, is_causal, attn_mask)
    for step in range(parts):
        source = (here.part("s") - step) % parts
        own = torch.zeros_like(gkv)
        if stripes:
            k, v = kv.split(widths, -1)
            part, gk, gv = STRIPED_BACKWARD(grad, q, k, v, out, lse, _follows(here, source), scale)
            gq, own = gq + part.to(wide), torch.cat([gk, gv], -1).to(wide)
        for block in [] if stripes else _seen(here, is_causal, rows, k.shape[ROWS], source):
            k, v = _cut(kv, block.columns).split(widths, -1)
            g, x, y = (_cut(t, block.rows) for t in (grad, q, out))
            part, gk, gv = BACKWARD(
                g, x, k, v, y, _cut(lse, block.rows).contiguous(), 0.0, block.causal,
                attn_mask=_masked(here, attn_mask, source, block), scale=scale,
            )  # fmt: skip
            gq = gq + pad(part.to(wide), ROWS, block.rows.start, rows - block.rows.stop)
            after = gkv.shape[ROWS] - block.columns.stop
            own = own + pad(torch.cat([gk, gv], -1).to(wide), ROWS, block.columns.start, after)
        gkv = gkv + (here.ppermute(own.to(q.dtype), "s", -step, edge=None).to(wide) if step else own)
        if step + 1 < parts:
            kv = here.ppermute(kv, "s", 1, edge=None)
    return gq, *gkv.narrow(ROWS, 0, k_rows).split(widths, -1)


LOCAL |= {FORWARD: _local, BACKWARD: _local_backward}
UNEVEN |= {FORWARD: True, BACKWARD: True}


def _ring(times: int, k: int):
    """Keys and values make k - 1 hops; in the backward pass so do their gradients."""

    def sends(cut: Cut) -> list[tuple[str, int]]:
        if cut.factor == "t":
            return [("all_reduce", cut.outputs[1].bytes)] * 2
        return [("ppermute", times * (cut.inputs[k].bytes + cut.inputs[k + 1].bytes))] * (cut.k - 1)

    return sends


SENDS |= {FORWARD: _ring(1, 1), BACKWARD: _ring(2, 2)}


def _busiest(position: int):
    """Under a causal mask, the last of k contiguous parts attends to the keys of all others."""

    def work(node: Any, factor: str, outer: int, k: int) -> float:
        return (2 * k - 1) / k if factor == "s" and outer == 1 and causal(node.args, position) else 1.0

    return work


WORK |= {FORWARD: _busiest(4), BACKWARD: _busiest(7)}


def attention_flops(products: int, backward: bool, causal_at: int) -> Callable[[Call], int]:
    """`products` matrix products of (queries x keys) per head, half of each under a causal mask.

    causal_at: position of the `is_causal` argument.
    """

    def flops(node: Call) -> int:
        q, k, v = node.args[1:4] if backward else node.args[:3]
        batch, heads, queries, dim = shape_of(q)
        keys, value_dim = shape_of(k)[2], shape_of(v)[3]
        causal = node.args[causal_at] if len(node.args) > causal_at else False
        return products * batch * heads * queries * keys * (dim + value_dim) // (2 if causal is True else 1)

    return flops


FLOPS |= dict.fromkeys((FORWARD, torch.ops.tutti.attention.default), attention_flops(2, False, 4))
FLOPS |= dict.fromkeys((BACKWARD, torch.ops.tutti.attention_backward.default), attention_flops(5, True, 7))
FLOPS[STRIPED] = lambda node: attention_flops(2, False, 0)(node) // 2
FLOPS[STRIPED_BACKWARD] = lambda node: attention_flops(5, True, 0)(node) // 2
