"""Memory allocated inside operators on a CPU, as measured: oneDNN's convolutions and LSTMs, and losses that compute
logits in blocks.

oneDNN's layouts are internal, so formulas were fitted to what torch's allocator saw for float32 at a dozen shapes:
within 6 % for a convolution's gradient, 6 % for an LSTM's workspace, 20 % for its scratch memory. The formulas for
losses count their buffers, within 5 %. oneDNN's memory for a bfloat16 product depends on the processor (none, or
float32 copies of an operand, of the result, or of all) and is not counted.
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
BLOCK = 16  # channels, or elements of a row of states
ROOM = 16 << 10  # bytes


def _up(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def convolution_backward(event: Event) -> int:
    """Copies of image and gradient with blocked channels. None for channels_last images, images that need no gradient,
    and 1 x 1 kernels."""
    gradient, image, kernel = (operand.spec for operand in event.reads[:3])
    wanted: Any = event.node.args[10]
    if not event.reads[1].contiguous or not wanted[0] or set(kernel.shape[2:]) == {1}:
        return 0
    return sum(x.shape[0] * _up(x.shape[1]) * prod(x.shape[2:]) * x.dtype.itemsize for x in (gradient, image))


def lstm_workspace(shape: tuple[int, ...], width: int) -> int:
    """Gates and states of every step, kept for the backward pass. shape: (time, batch, features)."""
    time, batch, features = shape
    states = 4 * (time + 1) * batch * _up(max(features, width))
    return int(2 * _gates(shape, width) + 6.6 * states + 5 * 4096)


def _gates(shape: tuple[int, ...], width: int) -> int:
    return 16 * shape[0] * shape[1] * width


def _lstm(event: Event) -> tuple[tuple[int, ...], int, int]:
    """Shape of the input, hidden size, and bytes of the weights."""
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
    """The backward pass recomputes the forward pass, and keeps its workspace."""
    shape, width, _ = _lstm(event)
    time, batch, _ = shape
    return lstm_backward_kept(event) + lstm_workspace(shape, width) + 4 * (time + 2) * batch * width


def linear_loss(event: Event) -> int:
    """A block's logits; for one tile of them, a float32 copy and the exponentials."""
    hidden, weight = (operand.spec for operand in event.reads[:2])
    size = hidden.dtype.itemsize
    width = _width(weight, hidden)
    return size * width * hidden.shape[0] + (2 if size < 4 else 1) * _tile(hidden.shape[0], width, size)


def linear_loss_backward(event: Event) -> int:
    """A block's logits, and the gradient of the input, summed in float32."""
    hidden, weight = (operand.spec for operand in event.reads[2:4])
    size = hidden.dtype.itemsize
    width = _width(weight, hidden)
    block = size * width * hidden.shape[0]
    if size >= 4:
        return block
    tile = _tile(hidden.shape[0], width, size)
    return block + ((4 - size) * hidden.numel + max(tile, _product(hidden)) if _wanted(event)[0] else tile)


def linear_loss_with_gradients(event: Event) -> int:
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


def _wanted(event: Event) -> Any:
    """Which gradients are computed: of hidden, weight and bias."""
    return event.node.args[-1]


def _width(cut: Spec, across: Spec) -> int:
    """Rows of a block."""
    return min(cut.shape[0], max(FEWEST, LOGITS["cpu"] // (cut.dtype.itemsize * max(1, across.shape[0]))))


def _product(like: Spec) -> int:
    """Bytes of a summand of a float32 sum, and of the tile that is copied."""
    rows, columns = like.shape
    return like.dtype.itemsize * like.numel + _tile(rows, columns, like.dtype.itemsize)


def _tile(rows: int, columns: int, size: int) -> int:
    """Bytes of a tile, in float32 or wider."""
    return max(4, size) * columns * min(rows, max(1, TILE["cpu"] // (4 * max(1, columns))))


# operator -> bytes that it allocates internally while it runs
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
