"""What is allocated inside of operators on a CPU, as far as it was measured: by oneDNN's convolutions and LSTMs, and by
losses that make their logits in blocks.

Layouts of oneDNN are its own; formulas for them were fitted to what torch's allocator saw for float32 at a dozen
shapes: of a convolution's gradient within 6 %, of an LSTM's workspace within 6 %, of its scratch within 20 %. Those for
losses count what is made, within 5 %. What oneDNN takes for a product in bfloat16 depends on the processor (none, or a
copy of an operand or of the result in float32, or all of them) and is not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

import torch

import tutti.nn.lstm  # noqa: F401  (registers the operators)
from tutti.nn.linear_cross_entropy import BLOCK as LOGITS
from tutti.nn.linear_cross_entropy import FEWEST, TILE

if TYPE_CHECKING:
    from tutti.analysis.replay import Event
    from tutti.ir.step_graph import Spec

aten, ops = torch.ops.aten, torch.ops.tutti
BLOCK = 16  # channels, or numbers of a row of states
ROOM = 16 << 10  # bytes


def _up(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def convolution_backward(event: Event) -> int:
    """Copies of image and gradient with their channels in blocks. There are none of images whose channels lie
    together, that need no gradient, or under kernels of one pixel."""
    gradient, image, kernel = (operand.spec for operand in event.reads[:3])
    wanted: Any = event.node.args[10]
    if not event.reads[1].contiguous or not wanted[0] or set(kernel.shape[2:]) == {1}:
        return 0
    return sum(x.shape[0] * _up(x.shape[1]) * prod(x.shape[2:]) * x.dtype.itemsize for x in (gradient, image))


def lstm_workspace(shape: tuple[int, ...], width: int) -> int:
    """Gates and states of every step, that the forward pass hands the backward pass. shape: (time, batch, features)."""
    time, batch, features = shape
    states = 4 * (time + 1) * batch * _up(max(features, width))
    return int(2 * _gates(shape, width) + 6.6 * states + 5 * 4096)


def _gates(shape: tuple[int, ...], width: int) -> int:
    return 16 * shape[0] * shape[1] * width


def _lstm(event: Event) -> tuple[tuple[int, ...], int, int]:
    """Shape of the input, hidden width, and bytes of the weights."""
    shape, width = event.reads[0].spec.shape, event.reads[2].spec.shape[-1]
    return shape, width, 16 * width * (shape[-1] + width)


def lstm_training(event: Event) -> int:
    shape, width, weights = _lstm(event)
    return _gates(shape, width) + weights + ROOM


def lstm_forward(event: Event) -> int:
    shape, width, _ = _lstm(event)
    return lstm_training(event) + lstm_workspace(shape, width)


def lstm_backward_kept(event: Event) -> int:
    shape, width, weights = _lstm(event)
    return int(_gates(shape, width) + 1.7 * weights + ROOM)


def lstm_backward(event: Event) -> int:
    """It runs the forward pass again, and keeps what that makes."""
    shape, width, _ = _lstm(event)
    time, batch, _ = shape
    return lstm_backward_kept(event) + lstm_workspace(shape, width) + 4 * (time + 2) * batch * width


def linear_loss(event: Event) -> int:
    """A block's logits; of a tile of them a copy in float32, and the exponentials."""
    hidden, weight = (operand.spec for operand in event.reads[:2])
    size = hidden.dtype.itemsize
    width = _width(weight, hidden)
    return size * width * hidden.shape[0] + (2 if size < 4 else 1) * _tile(hidden.shape[0], width, size)


def linear_loss_backward(event: Event) -> int:
    """A block's logits, and a gradient of the input that is a sum in float32."""
    hidden, weight = (operand.spec for operand in event.reads[2:4])
    size = hidden.dtype.itemsize
    width = _width(weight, hidden)
    block = size * width * hidden.shape[0]
    if size >= 4:
        return block
    tile = _tile(hidden.shape[0], width, size)
    return block + ((4 - size) * hidden.numel + max(tile, _product(hidden)) if _wanted(event)[0] else tile)


def linear_loss_with_gradients(event: Event) -> int:
    """A block's logits, and a gradient of the weight that is a sum over blocks in float32."""
    hidden, weight = (operand.spec for operand in event.reads[2:4])
    size = hidden.dtype.itemsize
    width = _width(hidden, weight)
    block, tile = size * width * weight.shape[0], _tile(width, weight.shape[0], size)
    if size >= 4:
        return block + tile
    if width == hidden.shape[0] or not _wanted(event)[1]:
        return block + 2 * tile
    return block + (4 - size) * weight.numel + max(2 * tile, _product(weight))


def _wanted(event: Event) -> Any:
    """Which gradients: of hidden, weight, and bias."""
    return event.node.args[-1]


def _width(cut: Spec, across: Spec) -> int:
    """Rows in a block of what is cut."""
    return min(cut.shape[0], max(FEWEST, LOGITS["cpu"] // (cut.dtype.itemsize * max(1, across.shape[0]))))


def _product(like: Spec) -> int:
    """Bytes of what is added to a sum in float32, of which a tile is copied."""
    rows, columns = like.shape
    return like.dtype.itemsize * like.numel + _tile(rows, columns, like.dtype.itemsize)


def _tile(rows: int, columns: int, size: int) -> int:
    """Bytes of a tile, in float32 at least."""
    return max(4, size) * columns * min(rows, max(1, TILE["cpu"] // (4 * max(1, columns))))


# operator -> bytes that it allocates for itself while it runs
INSIDE: dict[Any, Callable[[Event], int]] = {
    aten.convolution_backward.default: convolution_backward,
    ops.lstm_layer.default: lstm_forward,
    ops.lstm_layer_training.default: lstm_training,
    ops.lstm_layer_backward.default: lstm_backward,
    ops.lstm_layer_backward_kept.default: lstm_backward_kept,
    ops.linear_logsumexp.default: linear_loss,
    ops.linear_logsumexp_backward.default: linear_loss_backward,
    ops.linear_logsumexp_with_gradients.default: linear_loss_with_gradients,
}
