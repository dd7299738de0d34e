"""The cross-entropy of a linear layer in one operator (`nn.loss.linear_cross_entropy`): rows and classes can be split.

Each rank computes the log-sum-exp over its classes and the logit of the label, if it has that class; three numbers for
each row are reduced.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from tutti.ir.op_info import FLOPS, LOCAL, SECONDS, SENDS, UNEVEN, WORKSPACE
from tutti.ir.spec import Spec
from tutti.ir.step_graph import Call
from tutti.nn.loss.linear_cross_entropy import BLOCK, FEWEST, TILE
from tutti.ops.indexing.rows import own_rows
from tutti.ops.registry import Cut, rules, shape_of

ops = torch.ops.tutti
FORWARD, BACKWARD = ops.linear_logsumexp.default, ops.linear_logsumexp_backward.default
WITH_GRADIENTS = ops.linear_logsumexp_with_gradients.default


def _rule(node: Call) -> str:
    return f"t h!, v* h!{', v*' if node.args[2] is not None else ''}, t -> =t, =t"


def _backward_rule(node: Call) -> str:
    bias, wanted = node.args[4] is not None, node.args[7]
    outputs = [text if want else "1" for text, want in zip(("t h!", "v* h!", "v*"), wanted, strict=True)]
    outputs[2] = outputs[2] if bias else "1"
    return f"t, t, t h!, v* h!{', v*' if bias else ''}, t, t -> {', '.join(outputs)} | ~01"


rules({FORWARD: _rule, BACKWARD: _backward_rule})


def _own_labels(here, labels: Tensor) -> Tensor:
    """Labels counted from this rank's first class; negative if another rank has the class, or none."""
    own, _ = own_rows(here, "v", labels, elsewhere=-1, beyond=here.size("v"))
    return torch.where(labels < 0, -1, own)


def _local(here, hidden, weight, bias, labels):
    lse, picked = ops.linear_logsumexp(hidden, weight, bias, _own_labels(here, labels))
    top = here.all_reduce(lse, "v", "max")
    total = here.all_reduce((lse - top).exp(), "v", "sum")
    return top + total.log(), here.all_reduce(picked, "v", "sum")


def _local_backward(here, grad_lse, grad_picked, hidden, weight, bias, labels, lse, wanted):
    own = _own_labels(here, labels)
    return ops.linear_logsumexp_backward(grad_lse, grad_picked, hidden, weight, bias, own, lse, wanted)


def _three_numbers_a_row(cut: Cut) -> list[tuple[str, int]]:
    return [("all_reduce", cut.outputs[0].bytes)] * 3


LOCAL |= {FORWARD: _local, BACKWARD: _local_backward}
SENDS[FORWARD] = _three_numbers_a_row


def _flops(node: Call) -> int:
    return 2 * prod(shape_of(node.args[0])) * shape_of(node.args[1])[0]


def _backward_flops(node: Call) -> int:
    """A product for each required gradient. The recomputed logits are not counted."""
    return 2 * prod(shape_of(node.args[2])) * shape_of(node.args[3])[0] * sum(node.args[-1][:2])


def _all_flops(node: Call) -> int:
    return 2 * prod(shape_of(node.args[2])) * shape_of(node.args[3])[0] * (1 + sum(node.args[-1][:2]))


def _seconds(device: Any, call: Any, backward: bool) -> float:
    """The product that makes the logits, one more for each gradient; and reading and writing the logits once."""
    (rows, hidden), (classes, _) = call.shapes()[2 * backward : 2 * backward + 2]
    dtype = device.dtype_with_peak(call.node.args[2 * backward].meta["val"].dtype)
    products = [(rows, hidden, classes)]
    if backward:
        more = [(rows, classes, hidden), (classes, rows, hidden)]
        products += [sizes for sizes, want in zip(more, call.node.args[-1], strict=False) if want]
    taken = sum(device.matmul_seconds(1, *sizes, dtype) for sizes in products)
    return taken + device.stream_seconds(2 * 4 * rows * classes, "exp", torch.float32)


FLOPS |= {FORWARD: _flops, BACKWARD: _backward_flops, WITH_GRADIENTS: _all_flops}
SECONDS[FORWARD] = partial(_seconds, backward=False)
SECONDS |= dict.fromkeys((BACKWARD, WITH_GRADIENTS), partial(_seconds, backward=True))


def _workspace(event: Any) -> int:
    """A block's logits; for one tile of them, a float32 copy and the exponentials."""
    hidden, weight = (operand.spec for operand in event.reads[:2])
    size = hidden.dtype.itemsize
    width = _width(weight, hidden)
    return size * width * hidden.shape[0] + (2 if size < 4 else 1) * _tile(hidden.shape[0], width, size)


def _backward_workspace(event: Any) -> int:
    """A block's logits, and the gradient of the input, summed in float32."""
    hidden, weight = (operand.spec for operand in event.reads[2:4])
    size = hidden.dtype.itemsize
    width = _width(weight, hidden)
    block = size * width * hidden.shape[0]
    if size >= 4:
        return block
    tile = _tile(hidden.shape[0], width, size)
    return block + ((4 - size) * hidden.numel + max(tile, _product(hidden)) if _wanted(event)[0] else tile)


def _all_workspace(event: Any) -> int:
    """A block's logits, and the gradient of the weight, summed over blocks in float32."""
    hidden, weight = (operand.spec for operand in event.reads[2:4])
    size = hidden.dtype.itemsize
    width = _width(hidden, weight)
    block, tile = size * width * weight.shape[0], _tile(width, weight.shape[0], size)
    if size >= 4:
        return block + tile
    if width == hidden.shape[0] or not _wanted(event)[1]:
        return block + 2 * tile
    return block + (4 - size) * weight.numel + max(2 * tile, _product(weight))


def _wanted(event: Any) -> Any:
    """Return which of the gradients of hidden, weight and bias are computed."""
    return event.node.args[-1]


def _width(cut: Spec, across: Spec) -> int:
    """Rows of a block."""
    return min(cut.shape[0], max(FEWEST, BLOCK["cpu"] // (cut.dtype.itemsize * max(1, across.shape[0]))))


def _product(like: Spec) -> int:
    """Bytes of a summand of a float32 sum, and of the tile that is copied."""
    rows, columns = like.shape
    return like.dtype.itemsize * like.numel + _tile(rows, columns, like.dtype.itemsize)


def _tile(rows: int, columns: int, size: int) -> int:
    """Bytes of a tile, in float32 or wider."""
    return max(4, size) * columns * min(rows, max(1, TILE["cpu"] // (4 * max(1, columns))))


WORKSPACE |= {FORWARD: _workspace, BACKWARD: _backward_workspace, WITH_GRADIENTS: _all_workspace}

UNEVEN |= dict.fromkeys((FORWARD, BACKWARD), True)
