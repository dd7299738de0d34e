"""The Yee update of one component on a GPU, in Triton: see `problem` for the arrays and `elsewhere` for the loop.

A program has BLOCK places of one shot. They are independent: E changes after all of H.
"""

from __future__ import annotations

from itertools import chain

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from tutti.science.em.fdtd.grid import changing
from tutti.science.em.fdtd.problem import Problem, direction, source

BLOCK = 256


@triton.jit
def _term(
    other, psi, w, decay, drive, at, whole, shot, i, j, k, here, N0, N1, N2, STRIDE, ROWS,
    D: tl.constexpr, H: tl.constexpr, MINUS: tl.constexpr, LAYER: tl.constexpr,
):  # fmt: skip
    if H:
        change = tl.load(other + whole + STRIDE, mask=here, other=0.0) - tl.load(other + whole, mask=here, other=0.0)
    else:
        change = tl.load(other + whole, mask=here, other=0.0) - tl.load(other + whole - STRIDE, mask=here, other=0.0)
    if D == 0:
        line = i
    elif D == 1:
        line = j
    else:
        line = k
    y = tl.load(w + line, mask=here, other=0.0) * change
    if MINUS:
        y = -y
    out = y
    if LAYER:
        row = tl.load(at + line, mask=here, other=-1).to(tl.int64)
        inside = here & (row >= 0)
        if D == 0:
            to = ((shot * ROWS + row) * N1 + j) * N2 + k
        elif D == 1:
            to = ((shot * N0 + i) * ROWS + row) * N2 + k
        else:
            to = ((shot * N0 + i) * N1 + j) * ROWS + row
        old = tl.load(psi + to, mask=inside, other=0.0)
        new = tl.load(decay + row, mask=inside, other=0.0) * old + tl.load(drive + row, mask=inside, other=0.0) * y
        tl.store(psi + to, new, mask=inside)
        out = tl.where(inside, y + new, y)
    return out


@triton.jit
def _update(
    x, other0, other1, psi0, psi1, a, b, w0, decay0, drive0, at0, w1, decay1, drive1, at1,
    N0, N1, N2, STRIDE0, STRIDE1, ROWS0, ROWS1, FROM0, TO0, FROM1, TO1, FROM2, TO2,
    D0: tl.constexpr, D1: tl.constexpr, H: tl.constexpr, HAS0: tl.constexpr, HAS1: tl.constexpr,
    LAYER0: tl.constexpr, LAYER1: tl.constexpr, KEEP: tl.constexpr, GAIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    shot = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    k = place % N2
    j = (place // N2) % N1
    i = place // (N2 * N1)
    here = (i >= FROM0) & (i < TO0) & (j >= FROM1) & (j < TO1) & (k >= FROM2) & (k < TO2)
    whole = shot * N0 * N1 * N2 + place
    if HAS0 and HAS1:
        cur = _term(other0, psi0, w0, decay0, drive0, at0, whole, shot, i, j, k, here, N0, N1, N2, STRIDE0,
                    ROWS0, D0, H, False, LAYER0)  # fmt: skip
        cur += _term(other1, psi1, w1, decay1, drive1, at1, whole, shot, i, j, k, here, N0, N1, N2, STRIDE1,
                     ROWS1, D1, H, True, LAYER1)  # fmt: skip
    elif HAS0:
        cur = _term(other0, psi0, w0, decay0, drive0, at0, whole, shot, i, j, k, here, N0, N1, N2, STRIDE0,
                    ROWS0, D0, H, False, LAYER0)  # fmt: skip
    else:
        cur = _term(other1, psi1, w1, decay1, drive1, at1, whole, shot, i, j, k, here, N0, N1, N2, STRIDE1,
                    ROWS1, D1, H, True, LAYER1)  # fmt: skip
    value = tl.load(x + whole, mask=here, other=0.0)
    if KEEP:
        value = tl.load(a + place, mask=here, other=0.0) * value
    gain = tl.load(b + place, mask=here, other=0.0) if GAIN else tl.load(b)
    tl.store(x + whole, value + gain * cur, mask=here)


def update(problem: Problem, state: list[Tensor], h: int, p: int) -> None:
    """Advance component p of E (h = 0) or H (1) and its psi in place; poles and sources not."""
    strides = (problem.array[1] * problem.array[2], problem.array[2], 1)
    d = [direction(h, p, t) for t in (0, 1)]
    has = [problem.present[3 * (1 - h) + source(h, p, t)] for t in (0, 1)]
    x, a, b = state[3 * h + p], problem.a[3 * h + p], problem.b[3 * h + p]
    other = [state[3 * (1 - h) + source(h, p, t)] if has[t] else x for t in (0, 1)]
    psi = [state[6 + 6 * h + 2 * p + t] for t in (0, 1)]
    layer = [bool(y.numel()) for y in psi]
    lines = [problem.packed[12 * h + 4 * d[t] : 12 * h + 4 * d[t] + 4] for t in (0, 1)]
    rows = [len(y[1]) for y in lines]
    safe = [[y if y.numel() else x for y in line] for line in lines]
    spans = chain(*changing(problem.array, 3 * h + p))
    cells = strides[0] * problem.array[0]
    _update[(triton.cdiv(cells, BLOCK), problem.shots)](  # pyright: ignore
        x, *other, *(y if y.numel() else x for y in psi), a if a.numel() else x, b, *safe[0], *safe[1],
        *problem.array, strides[d[0]], strides[d[1]], *rows, *spans, D0=d[0], D1=d[1],
        H=bool(h), HAS0=has[0], HAS1=has[1], LAYER0=layer[0], LAYER1=layer[1], KEEP=bool(a.numel()), GAIN=b.numel() > 1,
        BLOCK=BLOCK)  # fmt: skip


def works(device: torch.device) -> bool:
    return device.type == "cuda"
