"""LSTM layers: the batch can be split; time and features cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tutti.nn.lstm  # noqa: F401  (registers the operators)
from tutti.ir.op_info import CONTIGUOUS, FLOPS, WORKSPACE
from tutti.ir.step_graph import Call
from tutti.ops.registry import rules, shape_of

ops = torch.ops.tutti
WEIGHTS = "u! i!, u! h!, u!, u!"


def _weights(node: Call) -> str:
    """Without biases, torch passes zeros of the weights' shapes."""
    biases = ["u!" if len(b.meta["val"].shape) == 1 else f"u! {c}!" for b, c in zip(node.args[3:5], "ih", strict=True)]
    return f"u! i!, u! h!, {', '.join(biases)}"


def _state(layer: Call) -> str:
    return "b h!" if len(layer.meta["val"].shape) == 2 else "1 b h!"


def _layer(node: Call) -> str:
    state = _state(node.args[5])
    return f"t! b i!, {_weights(node)}, {state}, {state} -> t! b h!, {state}, {state}"


def _backward(node: Call) -> str:
    state = _state(node.args[5])
    gradients = [line for line, g in zip(("t! b h!", state, state), node.args[7:10], strict=True) if g is not None]
    linear = "".join(str(7 + i) for i in range(len(gradients)))
    inputs = ", ".join([f"t! b i!, {_weights(node)}, {state}, {state}", *gradients])
    return f"{inputs} -> t! b i!, {WEIGHTS}, {state}, {state} | ~{linear}"


rules({ops.lstm_layer.default: _layer, ops.lstm_layer_backward.default: _backward})
CONTIGUOUS |= {ops.lstm_layer.default: tuple(range(7)), ops.lstm_layer_backward.default: tuple(range(8))}


def _products(products: int) -> Callable[[Call], int]:
    """`products` times the matrix products of the forward pass: (input + state) x four gates, for each step."""

    def flops(node: Call) -> int:
        (time, batch, features), hidden = shape_of(node.args[0]), shape_of(node.args[5])[-1]
        return products * 2 * time * batch * (features + hidden) * 4 * hidden

    return flops


FLOPS |= {ops.lstm_layer.default: _products(1), ops.lstm_layer_backward.default: _products(2)}

# Bytes that oneDNN allocates, by formulas fitted to what torch's allocator saw at a dozen shapes in float32: the
# workspace within 6 %, scratch memory within 20 %.
BLOCK = 16  # numbers of a row of states
ROOM = 16 << 10


def lstm_workspace(shape: tuple[int, ...], width: int) -> int:
    """Gates and states of every step, kept for the backward pass. shape: (time, batch, features)."""
    time, batch, features = shape
    states = 4 * (time + 1) * batch * -(-max(features, width) // BLOCK) * BLOCK
    return int(2 * _gates(shape, width) + 6.6 * states + 5 * 4096)


def _gates(shape: tuple[int, ...], width: int) -> int:
    return 16 * shape[0] * shape[1] * width


def _lstm(event: Any) -> tuple[tuple[int, ...], int, int]:
    """Shape of the input, hidden size, and bytes of the weights."""
    shape, width = event.reads[0].spec.shape, event.reads[2].spec.shape[-1]
    return shape, width, 16 * width * (shape[-1] + width)


def lstm_training(event: Any) -> int:
    shape, width, weights = _lstm(event)
    return _gates(shape, width) + weights + ROOM


def lstm_forward(event: Any) -> int:
    shape, width, _ = _lstm(event)
    return lstm_training(event) + lstm_workspace(shape, width)


def lstm_backward_kept(event: Any) -> int:
    shape, width, weights = _lstm(event)
    return int(_gates(shape, width) + 1.7 * weights + ROOM)


def lstm_backward(event: Any) -> int:
    """The backward pass recomputes the forward pass, and keeps its workspace."""
    shape, width, _ = _lstm(event)
    time, batch, _ = shape
    return lstm_backward_kept(event) + lstm_workspace(shape, width) + 4 * (time + 2) * batch * width


WORKSPACE |= {
    ops.lstm_layer.default: lstm_forward,
    ops.lstm_layer_training.default: lstm_training,
    ops.lstm_layer_backward.default: lstm_backward,
    ops.lstm_layer_backward_kept.default: lstm_backward_kept,
}
