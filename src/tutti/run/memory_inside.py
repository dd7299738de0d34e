"""What is allocated inside of operators on a CPU, as far as it was measured: by oneDNN's convolutions and LSTMs, and by
losses that make their logits in blocks.

Their layouts are their own. The formulas were fitted to what torch's allocator saw for float32 at a dozen shapes: of a
convolution's gradient within 6 %, of an LSTM's workspace within 6 %, of its scratch within 20 %.
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
    from tutti.run.simulated.replay import Event

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


def linear_loss(first: int, rows: bool) -> Callable[[Event], int]:
    """A block's logits, three tiles for what is made of them, and a gradient of the weight that is a sum over blocks.
    first: the place of its input among the operands; rows: whether blocks are of rows."""

    def inside(event: Event) -> int:
        hidden, weight = (operand.spec for operand in event.reads[first : first + 2])
        count, across = (hidden.shape[0], weight.shape[0]) if rows else (weight.shape[0], hidden.shape[0])
        size = hidden.dtype.itemsize
        width = min(count, max(FEWEST, LOGITS["cpu"] // (size * max(1, across))))
        tile = min(width * across, max(across if rows else width, TILE["cpu"] // 4))
        summed = (4 + size) * weight.numel if rows and size < 4 and width < count else 0
        return size * width * across + 3 * 4 * tile + summed

    return inside


# operator -> bytes that it allocates for itself while it runs
INSIDE: dict[Any, Callable[[Event], int]] = {
    aten.convolution_backward.default: convolution_backward,
    ops.lstm_layer.default: lstm_forward,
    ops.lstm_layer_training.default: lstm_training,
    ops.lstm_layer_backward.default: lstm_backward,
    ops.lstm_layer_backward_kept.default: lstm_backward_kept,
    ops.linear_logsumexp.default: linear_loss(0, rows=False),
    ops.linear_logsumexp_backward.default: linear_loss(2, rows=False),
    ops.linear_logsumexp_with_gradients.default: linear_loss(2, rows=True),
}
