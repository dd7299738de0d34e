"""Measure this process's computation: matrix products over shapes, memory and elementwise work over bytes.

Each figure is a median over a window of time. Several processes call the same functions at once, so that they share
cores, caches and memory as when a plan runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import cycle, product

import torch
from torch.nn import functional as F

import tutti.nn.adam  # noqa: F401  (registers the operators)

aten = torch.ops.aten
DTYPES = ("float32", "bfloat16")
Figure = Callable[[], object]
REPEATS = 20
TURNS, COLD, MOST = 4, 16, 1 << 25  # rotated operands: usual, memory-bound; and their bytes in total


def in_turn(make: Callable[[], Figure], count: float, turns: int = TURNS) -> Figure:
    """Run several copies of one figure in rotation, on separate operands, keeping their results for a round.

    In a step, an operator's operands are seldom in the cache where the operator before left them; one figure in a loop
    would find them in the nearest cache. count: bytes that one copy touches.
    """
    figures = [make() for _ in range(max(1, min(turns, int(MOST / count))))]
    results = [figure() for figure in figures]
    order = cycle(range(len(figures)))

    def run() -> None:
        i = next(order)
        results[i] = figures[i]()

    return run


def again(device: torch.device) -> Figure:
    """A small operator, `REPEATS` times."""
    a, b = (torch.ones(8, device=device) for _ in range(2))
    return lambda: [torch.add(a, b) for _ in range(REPEATS)]


def small(device: torch.device) -> tuple[int, Figure]:
    """The number of small operators, and a run of them, as Programs call them."""
    a, b = (torch.ones(8, device=device) for _ in range(2))

    calls = (
        lambda: aten.add.Tensor(a, b),
        lambda: aten.mul.Scalar(a, 2.0),
        lambda: aten.sum.dim_IntList(a, [0]),
        lambda: aten.neg.default(a),
        lambda: aten.cat.default([a, b]),
        lambda: aten.mul.Tensor(a, b),
        lambda: aten.rsqrt.default(a),
        lambda: aten.relu.default(a),
    )
    return len(calls), lambda: [call() for call in calls]


def sweep(device: torch.device) -> Figure:
    """Fill the caches with other data, like the work before an operator in a step."""
    x = torch.ones(SWEPT // 8, device=device)
    return lambda: x + 1.0


SWEPT = 1 << 23  # bytes, read and written


def matmul(shape: tuple[int, int, int], dtype: str, device: torch.device, transposed: bool = False) -> Figure:
    """(m x k) @ (k x n), the second operand transposed in memory like a linear layer's weight; or the first, as in its
    gradient."""
    m, k, n = shape
    sizes = ((k, m), (k, n)) if transposed else ((m, k), (n, k))
    a, b = (torch.ones(s, dtype=getattr(torch, dtype), device=device) for s in sizes)
    return (lambda: a.t() @ b) if transposed else (lambda: a @ b.t())


LAYERS = ((512, 1024, 512), (512, 1024, 2048), (1024, 2048, 512))  # shapes that measure the cost of transposed operands


BATCH, SMALL = 64, (64, 64, 64)  # products per operator, to measure the cost of a call


def batched(dtype: str, device: torch.device) -> Figure:
    """The same number of small products in one operator."""
    m, k, n = SMALL
    a, w = (torch.ones(BATCH, *s, dtype=getattr(torch, dtype), device=device) for s in ((m, k), (n, k)))
    return lambda: a @ w.mT


def shapes(sizes: tuple[int, ...], most: float) -> list[tuple[int, int, int]]:
    """All shapes of these sizes that take at most so many FLOPs."""
    return [(m, k, n) for m, k, n in product(sizes, repeat=3) if 2 * m * k * n <= most]


ROW, NARROW = 512, 64  # elements of a row: of families that work on rows, and of an embedding


def _rows(count: int, dtype: torch.dtype, device: torch.device, tensors: int) -> tuple[torch.Tensor, ...]:
    """This many tensors, which take `count` bytes together with the result."""
    rows = max(1, count // (dtype.itemsize * ROW * (tensors + 1)))
    return tuple(torch.full((rows, ROW), 0.5, dtype=dtype, device=device) for _ in range(tensors))


def _unary(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Figure]:
    def make(count: int, dtype: torch.dtype, device: torch.device) -> Figure:
        (x,) = _rows(count, dtype, device, 1)
        return lambda: function(x)

    return make


def _update(count: int, dtype: torch.dtype, device: torch.device) -> Figure:
    """An Adam update: reads a parameter, its gradient and two moments, writes all but the gradient."""
    numbers = max(1, count // (7 * dtype.itemsize))
    x, grad, first, second = (torch.full((numbers,), 0.5, dtype=dtype, device=device) for _ in range(4))
    step, rate = torch.ones((), device=device), torch.tensor(1e-3, device=device)
    options = dict(beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, decoupled=True, maximize=False)

    def run() -> torch.Tensor:
        torch.ops.tutti.adam_.default([x], [grad], [first], [second], step, rate, **options)
        return x

    return run


def _sum(count: int, dtype: torch.dtype, device: torch.device) -> Figure:
    (x,) = _rows(2 * count, dtype, device, 1)  # almost nothing is written
    return lambda: x.sum(0)


def _compare(count: int, dtype: torch.dtype, device: torch.device) -> Figure:
    rows = max(1, count // ((dtype.itemsize + 1) * ROW))  # written as bools
    x = torch.ones(rows, ROW, dtype=dtype, device=device)
    return lambda: x < 0.5


def _where(count: int, dtype: torch.dtype, device: torch.device) -> Figure:
    rows = max(1, count // ((3 * dtype.itemsize + 1) * ROW))
    x, y = (torch.full((rows, ROW), value, dtype=dtype, device=device) for value in (0.5, 0.0))
    mask = torch.rand(rows, ROW, device=device) < 0.5
    return lambda: torch.where(mask, x, y)


def _pool(count: int, dtype: torch.dtype, device: torch.device) -> Figure:
    images = max(1, count // (9 * dtype.itemsize * ROW // 2))  # bytes read by 16 x 16 windows of 3 x 3
    x = torch.rand(images, 1, 32, 32, device=device).to(dtype)
    return lambda: aten.max_pool2d_with_indices.default(x, [3, 3], [2, 2], [1, 1])[0]


def _table(count: int, dtype: torch.dtype, device: torch.device) -> Figure:
    rows = max(1, count // (dtype.itemsize * NARROW * 3))  # reads the gradient and the sum, writes the sum
    grad = torch.full((rows, NARROW), 0.5, dtype=dtype, device=device)
    order = torch.randperm(rows, device=device)
    return lambda: aten.embedding_dense_backward.default(grad, order, rows, -1, False)


def _add(count: int, dtype: torch.dtype, device: torch.device) -> Figure:
    a, b = _rows(count, dtype, device, 2)
    return lambda: a + b


def _index(count: int, dtype: torch.dtype, device: torch.device) -> Figure:
    (x,) = _rows(count, dtype, device, 1)
    order = torch.randperm(len(x), device=device)
    return lambda: x.index_select(0, order)


def _scatter(count: int, dtype: torch.dtype, device: torch.device) -> Figure:
    x, into = _rows(count, dtype, device, 2)  # reads x and the sum, writes the sum
    order = torch.randperm(len(x), device=device)
    return lambda: into.index_add_(0, order, x)


# The work of each family on `count` bytes, read and written.
FAMILIES: Mapping[str, Callable[[int, torch.dtype, torch.device], Figure]] = {
    "add": _add,
    "update": _update,
    "sum": _sum,
    "compare": _compare,
    "where": _where,
    "exp": _unary(torch.exp),
    "tanh": _unary(torch.tanh),
    "erf": _unary(torch.erf),
    "gelu": _unary(F.gelu),
    "silu": _unary(F.silu),
    "softmax": _unary(lambda x: torch.softmax(x, -1)),
    "norm": _unary(lambda x: F.layer_norm(x, (ROW,))),
    "index": _index,
    "scatter": _scatter,
    "table": _table,
    "pool": _pool,
    "transpose": _unary(lambda x: x.t().contiguous()),
}


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _convolution(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x, w, padding=1)


# Other work on matrices: what is called, its operands, and its FLOPs, forward and backward. Causal attention of 8 heads
# of 64 over 512 positions; a convolution of 64 channels, 3 x 3, over 8 images of 32 x 32.
_HEADS, _IMAGES = (2, 8, 512, 64), (8, 64, 32, 32)
_OTHERS: Mapping[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...], float, float]] = {
    "attention": (_attention, (_HEADS,) * 3, 2.0 * 2 * 8 * 512 * 512 * 64, 5.0 * 2 * 8 * 512 * 512 * 64),
    "convolution": (_convolution, (_IMAGES, (64, 64, 3, 3)), 18.0 * 8 * 64 * 64 * 32**2, 36.0 * 8 * 64 * 64 * 32**2),
}
OTHERS = tuple(name + suffix for name in _OTHERS for suffix in ("", "_backward"))


def other(name: str, dtype: str, device: torch.device) -> tuple[Figure, float]:
    """A run of this work, and its FLOPs (half of the matrix products under a causal mask)."""
    call, shapes, forward, backward = _OTHERS[name.removesuffix("_backward")]
    tensors = [torch.rand(s, device=device).to(getattr(torch, dtype)) for s in shapes]
    if not name.endswith("_backward"):
        return lambda: call(*tensors), forward
    output = call(*(t.requires_grad_() for t in tensors))
    grad = torch.ones_like(output)
    return lambda: torch.autograd.grad(output, tensors, grad, retain_graph=True), backward
