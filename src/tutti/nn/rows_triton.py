"""Norms, rotary embedding, gated units and writes into a paged cache on a GPU, in Triton: see `tutti.nn.rows`,
`tutti.nn.rows_joined` and `tutti.nn.attention.paged_write`.

They round where the formulas round, and differ from them in the order of sums only. A program computes a row of a
norm, a head of a token, or a block of a gated unit.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

ELEMENTS = 1024  # of a gated unit, in a program


@triton.jit
def _norm(
    x, added, weight, bias, out, width, eps, offset, x_row, added_row,
    WIDTHS: tl.constexpr, ADDED: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, WIDE: tl.constexpr,
    CENTERED: tl.constexpr,
):  # fmt: skip
    """x += added, where ADDED, and its norm."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTHS)
    dtype: tl.constexpr = out.dtype.element_ty
    here = at < width
    full = tl.load(x + row * x_row + at, mask=here, other=0.0).to(tl.float32)
    if ADDED:
        full += tl.load(added + row * added_row + at, mask=here, other=0.0).to(tl.float32)
        total = full.to(dtype)
        tl.store(x + row * x_row + at, total, mask=here)
        full = total.to(tl.float32)
    if CENTERED:
        full = tl.where(here, full - tl.sum(full, 0) / width, 0.0)
    y = full * tl.rsqrt(tl.sum(full * full, 0) / width + eps)
    if WEIGHT:
        w = tl.load(weight + at, mask=here, other=0.0).to(tl.float32)
        y = y * (offset + w) if WIDE else y.to(dtype).to(tl.float32) * w
    if BIAS:
        if not CENTERED:
            y = y.to(dtype).to(tl.float32)
        y += tl.load(bias + at, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, y.to(dtype), mask=here)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # 1 + tanh(z) = 2 sigmoid(2 z)
    else:
        tl.static_assert(ACTIVATION == "relu")
        y = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return y


@triton.jit
def _glu(gate, up, out, width, gate_row, up_row, ELEMENTS: tl.constexpr, ACTIVATION: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    dtype: tl.constexpr = out.dtype.element_ty
    here = at < width
    g = tl.load(gate + row * gate_row + at, mask=here, other=0.0).to(tl.float32)
    y = activated(g, ACTIVATION).to(dtype).to(tl.float32)
    y *= tl.load(up + row * up_row + at, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, y.to(dtype), mask=here)


@triton.jit
def _turn(x, cos, sin, out, HALF: tl.constexpr, HALVES: tl.constexpr):
    """One row (2 HALF) by (x1 c1 - x2 s1, x2 c2 + x1 s2)."""
    at = tl.arange(0, HALVES)
    dtype: tl.constexpr = out.dtype.element_ty
    here = at < HALF
    x1, x2 = tl.load(x + at, mask=here, other=0.0), tl.load(x + HALF + at, mask=here, other=0.0)
    c1, c2 = tl.load(cos + at, mask=here, other=0.0), tl.load(cos + HALF + at, mask=here, other=0.0)
    s1, s2 = tl.load(sin + at, mask=here, other=0.0), tl.load(sin + HALF + at, mask=here, other=0.0)
    first = _product(x1, c1, dtype) - _product(x2, s1, dtype)
    second = _product(x2, c2, dtype) + _product(x1, s2, dtype)
    tl.store(out + at, first.to(dtype), mask=here)
    tl.store(out + HALF + at, second.to(dtype), mask=here)


@triton.jit
def _product(a, b, dtype: tl.constexpr):
    """Rounded, in float32."""
    return (a.to(tl.float32) * b.to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def _rotary(x, cos, sin, out, x0, x1, x2, cos0, cos1, cos2, sin0, sin1, sin2, out0, out1, out2, second,
            HALF: tl.constexpr, HALVES: tl.constexpr):  # fmt: skip
    a, b, c = tl.program_id(0).to(tl.int64), tl.program_id(1) // second, tl.program_id(1) % second
    _turn(x + a * x0 + b * x1 + c * x2, cos + a * cos0 + b * cos1 + c * cos2, sin + a * sin0 + b * sin1 + c * sin2,
          out + a * out0 + b * out1 + c * out2, HALF, HALVES)  # fmt: skip


@triton.jit
def _copy(x, out, WIDTH: tl.constexpr, WIDTHS: tl.constexpr):
    at = tl.arange(0, WIDTHS)
    tl.store(out + at, tl.load(x + at, mask=at < WIDTH), mask=at < WIDTH)


@triton.jit
def _write(cache, values, slots, slot_stride, head_stride, token_stride, value_stride, WIDTH: tl.constexpr,
           WIDTHS: tl.constexpr):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    if slot >= 0:
        _copy(values + token * token_stride + head * value_stride, cache + slot * slot_stride + head * head_stride,
              WIDTH, WIDTHS)  # fmt: skip


@triton.jit
def _rotary_write(
    q, k, v, cos, sin, keys, values, slots, out, heads, groups, q_token, q_head, k_token, k_head, v_token, v_head,
    cos_token, sin_token, key_slot, key_head, value_slot, value_head, HALF: tl.constexpr, HALVES: tl.constexpr,
    WIDTH: tl.constexpr, WIDTHS: tl.constexpr,
):  # fmt: skip
    """Process a head of a token: rotate one of queries, rotate and write one of keys, or write one of values."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos += token * cos_token
    sin += token * sin_token
    if head < heads:
        _turn(q + token * q_token + head * q_head, cos, sin, out + (token * heads + head) * 2 * HALF, HALF, HALVES)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            own = head - heads
            if own < groups:
                _turn(k + token * k_token + own * k_head, cos, sin, keys + slot * key_slot + own * key_head, HALF,
                      HALVES)  # fmt: skip
            else:
                own -= groups
                _copy(v + token * v_token + own * v_head, values + slot * value_slot + own * value_head, WIDTH, WIDTHS)


def norm(x: Tensor, added: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float,
         wide: bool, centered: bool) -> Tensor:  # fmt: skip
    """The norm of the last dim of x (..., width), after `x += added`. x is contiguous if something is added."""
    width = x.shape[-1]
    rows, more = x.reshape(-1, width), None if added is None else added.reshape(-1, width)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    more = more if more is None or more.stride(1) == 1 else more.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    widths = triton.next_power_of_2(width)
    if out.numel():
        _norm[len(rows),](  # pyright: ignore[reportIndexIssue]
            rows, more, weight, bias, out, width, eps, offset, rows.stride(0), 0 if more is None else more.stride(0),
            WIDTHS=widths, ADDED=more is not None, WEIGHT=weight is not None, BIAS=bias is not None, WIDE=wide,
            CENTERED=centered, num_warps=max(1, min(8, widths // 256)),
        )  # fmt: skip
    return out


def glu(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) * up, (..., width)."""
    width = gate.shape[-1]
    gates, ups = (x if x.stride(1) == 1 else x.contiguous() for x in (gate.reshape(-1, width), up.reshape(-1, width)))
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        _glu[len(gates), triton.cdiv(width, ELEMENTS)](  # pyright: ignore[reportIndexIssue]
            gates, ups, out, width, gates.stride(0), ups.stride(0), ELEMENTS=ELEMENTS, ACTIVATION=activation
        )
    return out


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (a, b, c, width), rotated; with the strides of x."""
    x, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, cos, sin))
    out = torch.empty_like(x)
    cos, sin = cos.expand(x.shape), sin.expand(x.shape)
    half = x.shape[3] // 2
    if out.numel():
        _rotary[x.shape[0], x.shape[1] * x.shape[2]](  # pyright: ignore[reportIndexIssue]
            x, cos, sin, out, *x.stride()[:3], *cos.stride()[:3], *sin.stride()[:3], *out.stride()[:3], x.shape[2],
            HALF=half, HALVES=triton.next_power_of_2(half), num_warps=1,
        )  # fmt: skip
    return out


def write(cache: Tensor, values: Tensor, slots: Tensor) -> None:
    """cache[slots[i]] = values[i], where slots[i] >= 0."""
    values = values if values.stride(2) == 1 else values.contiguous()
    tokens, heads, width = values.shape
    if values.numel():
        _write[tokens, heads](  # pyright: ignore[reportIndexIssue]
            cache, values, slots, *cache.stride()[:2], *values.stride()[:2], WIDTH=width,
            WIDTHS=triton.next_power_of_2(width), num_warps=1,
        )  # fmt: skip


def rotary_write(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, slots: Tensor
) -> Tensor:
    """`tutti::rotary_write`; the result is contiguous as (tokens, heads, width)."""
    q, k, v, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v, cos, sin))
    (_, heads, tokens, width), (_, groups, value_width) = q.shape, v.shape
    out = torch.empty((tokens, heads, width), dtype=q.dtype, device=q.device)
    if tokens:
        _rotary_write[tokens, heads + 2 * groups](  # pyright: ignore[reportIndexIssue]
            q, k, v, cos, sin, keys, values, slots, out, heads, groups, q.stride(2), q.stride(1), k.stride(2),
            k.stride(1), *v.stride()[:2], cos.stride(2), sin.stride(2), *keys.stride()[:2], *values.stride()[:2],
            HALF=width // 2, HALVES=triton.next_power_of_2(width // 2), WIDTH=value_width,
            WIDTHS=triton.next_power_of_2(value_width), num_warps=1,
        )  # fmt: skip
    return out.transpose(0, 1)[None]
