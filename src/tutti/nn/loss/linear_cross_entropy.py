"""A linear layer and the cross-entropy of its logits, which are computed in blocks, twice, and never stored.

    logits = hidden weight^T + bias,    loss of a row = log sum_v exp(logits[v]) - logits[label]

`tutti::linear_logsumexp` is (hidden, weight, bias, labels) -> (lse, picked): the log-sum-exp of each row, and the logit
of its label, 0 for a negative label. `tutti::linear_logsumexp_backward` recomputes the logits; gradients that are not
wanted are None. `tutti::linear_logsumexp_with_gradients` is both in one, and computes the logits once. It requires that
the gradients of the results are known before the results, as for a mean.

| operand | shape | |
|---|---|---|
| hidden | (t, h) | rows |
| weight | (v, h) | of the dtype of hidden |
| bias | (v) or none | |
| labels | (t) int64 | below v |
| lse, picked | (t) | float32 at least |

The first two iterate over blocks of the vocabulary: a block's rows of the gradient of the weight are one product. The
third iterates over rows, which need all of their logits, and accumulates products in float32. Logits are rounded to the
dtype of hidden, like a linear layer's results; everything after is computed in float32 or wider. Blocks over rows, and
gradients computed with the loss: Hsu et al., "Liger kernel" (2024).

With `compiled`, float32 and bfloat16 logits on a CPU are processed by the kernels of `linear_cross_entropy.cpp`, which
is compiled at first use. On a GPU with Triton, the third operator uses the kernel of `linear_cross_entropy_triton.py`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from tutti import compat
from tutti.nn.compiled import has_triton
from tutti.nn.once import differentiable_once

__all__ = ["linear_cross_entropy"]

# Bytes of a block's logits. Blocks that fit the cache of a CPU are 1.5 times slower: their products are too narrow.
# Elementwise work between products is tiled to fit the cache: a quarter of the time on a CPU. Each further block of
# rows costs a pass over the gradient of the weight in float32, so blocks are large on a GPU, and whole tiles of its
# products.
BLOCK = {"cpu": 64 << 20, "cuda": 1 << 31}
TILE = {"cpu": 1 << 20, "cuda": 1 << 28}
MULTIPLE = {"cpu": 1, "cuda": 256}
FEWEST = 256  # minimum rows, or vocabulary entries, of a block
SOURCE = Path(__file__).with_suffix(".cpp")
DTYPES = torch.float32, torch.bfloat16  # dtypes of the compiled kernels

_library = torch.library.Library("tutti", "FRAGMENT")
_operands = "Tensor hidden, Tensor weight, Tensor? bias, Tensor labels"
_compiled = "bool compiled=False"
_library.define(f"linear_logsumexp({_operands}, *, {_compiled}) -> (Tensor, Tensor)")
_library.define(
    f"linear_logsumexp_backward(Tensor grad_lse, Tensor grad_picked, {_operands}, Tensor lse, bool[3] wanted, "
    f"*, {_compiled}) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    f"linear_logsumexp_with_gradients(Tensor grad_lse, Tensor grad_picked, {_operands}, bool[3] wanted, "
    f"*, {_compiled}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
ops = torch.ops.tutti


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Equals `F.cross_entropy(F.linear(hidden, weight, bias).float(), labels, ...)` for class labels.

    hidden: (..., h). weight: (v, h). labels: (...), integers. bias: (v) or None. reduction: "mean", "sum" or "none".
    Raises ValueError if shapes or the dtype of labels do not fit, IndexError for a label of v or more on a CPU.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"linear_cross_entropy: unknown reduction {reduction!r}; expected one of mean, sum, none")
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1:] != weight.shape[1:]:
        raise ValueError(
            f"linear_cross_entropy: expected hidden (..., h), weight (v, h) and labels (...), not "
            f"{tuple(hidden.shape)}, {tuple(weight.shape)} and {tuple(labels.shape)}"
        )
    if labels.is_floating_point() or labels.is_complex():
        raise ValueError(f"linear_cross_entropy: labels must be integers, not {labels.dtype}")
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    rows = labels.reshape(-1).long()
    counted = rows != ignore_index
    classes = torch.where(counted, torch.where(rows < 0, len(weight), rows), -1)  # no class: below 0 are those left out
    lse, picked = ops.linear_logsumexp(hidden.reshape(-1, hidden.shape[-1]), weight, bias, classes)
    loss = torch.where(counted, lse - picked, 0)
    if reduction == "none":
        return loss.reshape(labels.shape)
    return loss.sum() / counted.sum() if reduction == "mean" else loss.sum()


def use_kernels(graph: fx.Graph) -> None:
    """Use the compiled kernels for the losses of a graph on a CPU, in place. Starts their compilation."""
    places = {ops.linear_logsumexp: 0, ops.linear_logsumexp_backward: 2, ops.linear_logsumexp_with_gradients: 2}
    replaced = [node
             for target, hidden in places.items()
             for node in graph.find_nodes(op="call_function", target=target.default)
             if node.args[hidden].meta["val"].dtype in DTYPES]  # fmt: skip
    if replaced:
        threading.Thread(target=_compile, name="tutti compiler", daemon=True).start()
    for node in replaced:
        node.kwargs = {**node.kwargs, "compiled": True}


def _compile() -> None:
    with suppress(Exception):  # raised again where they are called
        _kernels()


@cache
def _kernels() -> ctypes.CDLL:
    library = compat.compile_cpp(SOURCE.read_text())
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    block = [pointer, *[integer] * 4, pointer, pointer]
    library.reduce.argtypes = [*block, pointer, pointer]
    library.differentiate.argtypes = [*block, pointer, pointer, integer, pointer, integer]
    library.reduce.restype = library.differentiate.restype = None
    return library


def _block(logits: Tensor, column: Tensor, here: Tensor) -> tuple[int, ...]:
    """The kernels' arguments that describe a tile."""
    half = logits.dtype == torch.bfloat16
    return logits.data_ptr(), half, *logits.shape, logits.stride(0), column.data_ptr(), here.data_ptr()


def _knows(logits: Tensor) -> bool:
    return logits.device.type == "cpu" and logits.dtype in DTYPES


def forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, compiled: bool = False
) -> tuple[Tensor, Tensor]:
    """The operator `tutti::linear_logsumexp`."""
    _check_labels(labels, weight)
    lse, picked = _rows(hidden, -torch.inf), _rows(hidden, 0.0)
    for block in _blocks(len(weight), hidden):
        logits = _logits(hidden, weight, bias, block)
        column, here = _columns(labels, block)
        for rows in _tiles(logits):
            _reduce(logits[rows], column[rows], here[rows], lse[rows], picked[rows], compiled)
        del logits  # before there are others
    return lse, picked


def backward(
    grad_lse: Tensor,
    grad_picked: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    lse: Tensor,
    wanted: list[bool],
    compiled: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Its gradients. That of a logit is softmax times grad_lse, plus grad_picked for the label's logit."""
    gh = hidden.new_zeros(hidden.shape, dtype=lse.dtype) if wanted[0] else None
    gw = weight.new_empty(weight.shape) if wanted[1] else None
    gb = bias.new_empty(bias.shape) if bias is not None and wanted[2] else None
    for block in _blocks(len(weight), hidden):
        grad = _logits(hidden, weight, bias, block)
        column, here = _columns(labels, block)
        for rows in _tiles(grad):
            _differentiate(grad[rows], column[rows], here[rows], lse[rows], grad_lse[rows], grad_picked[rows], compiled)
        if gh is not None:
            part = weight[block]
            _add_product(gh, grad, part)
        if gw is not None:
            torch.mm(grad.t(), hidden, out=gw[block])
        if gb is not None:
            gb[block] = grad.sum(0)
        del grad
    return None if gh is None else gh.to(hidden.dtype), gw, gb


def with_gradients(
    grad_lse: Tensor,
    grad_picked: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    wanted: list[bool],
    compiled: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """lse, picked, and the gradients of hidden, weight and bias."""
    _check_labels(labels, weight)
    lse, picked = _rows(hidden, -torch.inf), _rows(hidden, 0.0)
    gh = hidden.new_empty(hidden.shape) if wanted[0] else None
    blocks = list(_blocks(len(hidden), weight))
    gw = weight.new_zeros(weight.shape, dtype=lse.dtype if len(blocks) > 1 else None) if wanted[1] else None
    gb = bias.new_zeros(bias.shape, dtype=lse.dtype) if bias is not None and wanted[2] else None
    whole = slice(0, len(weight))
    column, here = _columns(labels, whole)
    for block in blocks:
        part = hidden[block]
        grad = _logits(part, weight, bias, whole)
        in_triton = _in_triton(grad)
        if in_triton:
            gradients = [g[block].to(lse.dtype).contiguous() for g in (grad_lse, grad_picked)]
            in_triton(grad, labels[block].contiguous(), *gradients, lse[block], picked[block])
        for tiled in () if in_triton else _tiles(grad):
            rows = slice(block.start + tiled.start, block.start + tiled.stop)
            _reduce(grad[tiled], column[rows], here[rows], lse[rows], picked[rows], compiled)
            gradients = grad_lse[rows], grad_picked[rows]
            _differentiate(grad[tiled], column[rows], here[rows], lse[rows], *gradients, compiled)
        if gh is not None:
            torch.mm(grad, weight, out=gh[block])
        if gw is not None:
            _add_product(gw, grad.t(), part, afresh=not block.start)
        if gb is not None:
            gb += grad.sum(0)
        del grad
    return lse, picked, gh, None if gw is None else gw.to(weight.dtype), None if gb is None else gb.to(weight.dtype)


def _in_triton(logits: Tensor) -> Callable[..., None] | None:
    """The kernel of `linear_cross_entropy_triton`, where it runs."""
    if logits.device.type == "cpu" or not has_triton():
        return None
    from tutti.nn.loss.linear_cross_entropy_triton import DTYPES, differentiate

    return differentiate if logits.dtype in DTYPES else None


def _reduce(logits: Tensor, column: Tensor, here: Tensor, lse: Tensor, picked: Tensor, compiled: bool) -> None:
    """Add a tile's logits to lse, and those of labels to picked. column: column of each label in the block; here:
    whether the label is there."""
    if compiled and _knows(logits):
        _kernels().reduce(*_block(logits, column, here), lse.data_ptr(), picked.data_ptr())
        return
    tile = logits.to(lse.dtype)
    lse.copy_(torch.logaddexp(lse, tile.logsumexp(1)))
    picked.copy_(torch.where(here, tile.gather(1, column.unsqueeze(1)).squeeze(1), picked))


def _differentiate(
    logits: Tensor, column: Tensor, here: Tensor, lse: Tensor, grad_lse: Tensor, grad_picked: Tensor, compiled: bool
) -> None:
    """Replace a tile's logits by their gradients."""
    if compiled and _knows(logits):
        output_gradients, lse = [g.to(lse.dtype) for g in (grad_lse, grad_picked)], lse.contiguous()
        gradients = [n for g in output_gradients for n in (g.data_ptr(), g.stride(0))]
        _kernels().differentiate(*_block(logits, column, here), lse.data_ptr(), *gradients)
        return
    tile = logits.to(lse.dtype).sub_(lse.unsqueeze(1)).exp_().mul_(grad_lse.unsqueeze(1))
    tile.scatter_add_(1, column.unsqueeze(1), torch.where(here, grad_picked, 0).unsqueeze(1))
    if tile.dtype != logits.dtype:
        logits.copy_(tile)


def _add_product(total: Tensor, a: Tensor, b: Tensor, afresh: bool = False) -> None:
    """Add a b to a total, which may have a wider dtype. afresh: overwrite the total."""
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=int(not afresh))
        return
    product = a @ b
    for rows in _tiles(product):  # a sum of two dtypes makes a copy of one
        total[rows].add_(product[rows])


def _check_labels(labels: Tensor, weight: Tensor) -> None:
    """Raise IndexError for a label of v or more, on a CPU."""
    if labels.device.type == "cpu" and labels.numel() and int(labels.max()) >= len(weight):
        raise IndexError(f"a label is out of range: classes are 0 to {len(weight) - 1}, or ignore_index")


def _blocks(count: int, across: Tensor) -> Iterator[slice]:
    """Slices of range(count) whose products with all rows of `across` are a block."""
    kind = across.device.type
    width = BLOCK[kind] // (across.element_size() * max(1, len(across))) // MULTIPLE[kind] * MULTIPLE[kind]
    return _slices(count, max(FEWEST, width))


def _tiles(logits: Tensor) -> Iterator[slice]:
    return _slices(len(logits), max(1, TILE[logits.device.type] // (4 * max(1, logits.shape[1]))))


def _slices(count: int, width: int) -> Iterator[slice]:
    for start in range(0, count, width):
        yield slice(start, min(start + width, count))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, block: slice) -> Tensor:
    return F.linear(hidden, weight[block], None if bias is None else bias[block])


def _columns(labels: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """The column of each label in the block, and whether it is there. Raises ValueError if labels are not int64."""
    if labels.dtype != torch.int64:
        raise ValueError(f"linear_cross_entropy: labels are {labels.dtype}; as an operand they are int64")
    return (labels - block.start).clamp(0, block.stop - block.start - 1), (labels >= block.start) & (
        labels < block.stop
    )


def _rows(hidden: Tensor, value: float) -> Tensor:
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    return torch.full(hidden.shape[:1], value, dtype=dtype, device=hidden.device)


def _fake(hidden, weight, bias, labels, compiled=False):
    return _rows(hidden, 0.0), _rows(hidden, 0.0)


def _fake_backward(grad_lse, grad_picked, hidden, weight, bias, labels, lse, wanted, compiled=False):
    operands = zip((hidden, weight, bias), wanted, strict=True)
    return tuple(x.new_empty(x.shape) if x is not None and want else None for x, want in operands)


def _fake_with_gradients(grad_lse, grad_picked, hidden, weight, bias, labels, wanted, compiled=False):
    lse, picked = _fake(hidden, weight, bias, labels)
    return lse, picked, *_fake_backward(grad_lse, grad_picked, hidden, weight, bias, labels, lse, wanted)


def _save(ctx, inputs, keyword_only_inputs, output) -> None:
    ctx.save_for_backward(*inputs, output[0])


def _gradients(ctx, grad_lse, grad_picked):
    *operands, lse = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:3])
    return *ops.linear_logsumexp_backward(grad_lse, grad_picked, *operands, lse, wanted), None


for _name, _run, _like in (
    ("linear_logsumexp", forward, _fake),
    ("linear_logsumexp_backward", backward, _fake_backward),
    ("linear_logsumexp_with_gradients", with_gradients, _fake_with_gradients),
):
    for _device in ("CPU", "CUDA"):  # of the dtypes that are given, in a backward pass within autocast too
        _library.impl(_name, torch.autocast(_device.lower(), enabled=False)(_run), _device)
    torch.library.register_fake(f"tutti::{_name}", _like)
torch.library.register_autograd("tutti::linear_logsumexp", _gradients, setup_context=_save)
differentiable_once("linear_cross_entropy", "linear_logsumexp_backward", "linear_logsumexp_with_gradients")
