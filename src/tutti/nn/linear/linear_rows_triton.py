"""Linear layers for few rows on a GPU, in Triton: see `tutti.nn.linear.linear_rows` and `tutti.nn.linear.linears_rows`.

The time is that of reading the weights. A program reads some rows of a weight once: for one row of x it multiplies and
adds, for several it uses matrix units. Layers of the same x are computed in one launch, which reads more at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from tutti.nn.rows_triton import activated

Tile = tuple[int, int, int, int]  # rows and columns of a weight that a program reads at once, warps, stages
TOGETHER, GATED, ONE, LARGE = range(4)  # layers of one x, a gated unit, one layer, one with many rows of the weight
MANY = 32768  # rows of a large layer
# rows of x, at most -> the fastest tile of each kind on an H200 (bfloat16, shapes of Llama 1B); None: cuBLAS is faster
TILES: dict[int, tuple[Tile | None, ...]] = {
    1: ((4, 1024, 4, 1), (2, 1024, 4, 1), (2, 1024, 4, 1), (4, 512, 4, 1)),
    16: ((16, 256, 2, 4), (32, 128, 2, 4), None, (64, 128, 4, 4)),
    64: ((16, 128, 4, 4), (64, 128, 4, 3), None, (128, 64, 4, 4)),
}


@triton.jit
def _multiplied(x, w, rows, first, n, width, x_row, ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Rows `first` to `first + N` of w times x: float32 (N, ROWS), or (N, 1) if ROWS = 1."""
    row, column = first + tl.arange(0, N), tl.arange(0, K)
    places = w + row.to(tl.int64)[:, None] * width + column[None, :]
    if ROWS == 1:
        total = tl.zeros([N, K], tl.float32)
        for k in range(0, width, K):
            here = column + k < width
            a = tl.load(x + k + column, mask=here, other=0.0).to(tl.float32)
            b = tl.load(places + k, mask=(row < n)[:, None] & here[None, :], other=0.0).to(tl.float32)
            total += a[None, :] * b
        result = tl.sum(total, 1)[:, None]
    else:
        of_x = tl.arange(0, ROWS)
        result = tl.zeros([N, ROWS], tl.float32)
        for k in range(0, width, K):
            here = column + k < width
            a = tl.load(x + of_x[None, :] * x_row + (k + column)[:, None], mask=(of_x < rows)[None, :] & here[:, None],
                        other=0.0)  # fmt: skip
            b = tl.load(places + k, mask=(row < n)[:, None] & here[None, :], other=0.0)
            result = tl.dot(b, a, result, input_precision="ieee")
    return result


@triton.jit
def _layers(
    x, w0, w1, w2, b0, b1, b2, out, rows, n0, n1, n2, width, x_row, out_row,
    BIAS: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The layers of one x beside each other, (rows, n0 + n1 + n2)."""
    block = tl.program_id(0)
    blocks0, blocks1 = tl.cdiv(n0, N), tl.cdiv(n1, N)
    w, b, n, before = w0, b0, n0, 0
    if block >= blocks0 + blocks1:
        block -= blocks0 + blocks1
        w, b, n, before = w2, b2, n2, n0 + n1
    elif block >= blocks0:
        block -= blocks0
        w, b, n, before = w1, b1, n1, n0
    y = _multiplied(x, w, rows, block * N, n, width, x_row, ROWS, N, K)
    row, of_x = block * N + tl.arange(0, N), tl.arange(0, ROWS)
    if BIAS:
        y += tl.load(b + row, mask=row < n, other=0.0).to(tl.float32)[:, None]
    tl.store(out + of_x[None, :] * out_row + (before + row)[:, None], y.to(out.dtype.element_ty),
             mask=(row < n)[:, None] & (of_x < rows)[None, :])  # fmt: skip


@triton.jit
def _gated(
    x, gate, up, out, rows, n, width, x_row,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """act(x gate^T) * (x up^T), rounded where the formulas round."""
    dtype: tl.constexpr = out.dtype.element_ty
    first = tl.program_id(0) * N
    g = _multiplied(x, gate, rows, first, n, width, x_row, ROWS, N, K).to(dtype).to(tl.float32)
    u = _multiplied(x, up, rows, first, n, width, x_row, ROWS, N, K).to(dtype).to(tl.float32)
    y = activated(g, ACTIVATION).to(dtype).to(tl.float32) * u
    row, of_x = first + tl.arange(0, N), tl.arange(0, ROWS)
    tl.store(out + of_x[None, :] * n + row[:, None], y.to(dtype), mask=(row < n)[:, None] & (of_x < rows)[None, :])


def tile_of(rows: int, weights: Sequence[Tensor], gated: bool = False) -> Tile | None:
    """The tile for so many rows of x, or None: compute the layers with cuBLAS. Tiles of float32 for several rows are
    larger than the shared memory of some devices."""
    if rows > 1 and weights[0].dtype == torch.float32:
        return None
    kind = GATED if gated else TOGETHER if len(weights) > 1 else LARGE if len(weights[0]) >= MANY else ONE
    return next((tiles[kind] for most, tiles in TILES.items() if most >= rows), None)


def _options(rows: int, tile: Tile) -> dict[str, int]:
    n, k, warps, stages = tile
    padded = 1 if rows == 1 else max(16, triton.next_power_of_2(rows))
    return {"ROWS": padded, "N": n, "K": k, "num_warps": warps, "num_stages": stages}


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], tile: Tile) -> list[Tensor]:
    """x (rows, k) times the transposes of weights (n, k), plus biases (n), if all have one: (rows, n) of each.

    At most three weights. The results are parts of one tensor.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    sizes, options = [len(w) for w in weights], _options(len(x), tile)
    out = torch.empty(len(x), sum(sizes), dtype=x.dtype, device=x.device)
    more = 3 - len(weights)
    grid = (sum(triton.cdiv(n, options["N"]) for n in sizes),)
    _layers[grid](  # pyright: ignore[reportIndexIssue]
        x, *weights, *[weights[0]] * more, *biases, *[biases[0]] * more, out, len(x), *sizes, *[0] * more, x.shape[1],
        x.stride(0), out.stride(0), BIAS=biases[0] is not None, **options,
    )  # fmt: skip
    return list(out.split(sizes, 1))


def gated(x: Tensor, gate: Tensor, up: Tensor, activation: str, tile: Tile) -> Tensor:
    """act(x gate^T) * (x up^T): x (rows, k), gate and up (n, k) -> (rows, n)."""
    x = x if x.stride(1) == 1 else x.contiguous()
    out, options = torch.empty(len(x), len(gate), dtype=x.dtype, device=x.device), _options(len(x), tile)
    _gated[triton.cdiv(len(gate), options["N"]),](  # pyright: ignore[reportIndexIssue]
        x, gate, up, out, len(x), len(gate), x.shape[1], x.stride(0), ACTIVATION=activation, **options
    )
    return out
