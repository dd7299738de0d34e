"""LSTM layers: the batch can be split; time and features cannot."""

from __future__ import annotations

import torch

import tutti.nn.lstm  # noqa: F401  (registers the operators)
from tutti.ir.step_graph import Call
from tutti.ops.registry import CONTIGUOUS, rules

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
    given = ", ".join([f"t! b i!, {_weights(node)}, {state}, {state}", *gradients])
    return f"{given} -> t! b i!, {WEIGHTS}, {state}, {state} | ~{linear}"


rules({ops.lstm_layer.default: _layer, ops.lstm_layer_backward.default: _backward})
CONTIGUOUS |= {ops.lstm_layer.default: tuple(range(7)), ops.lstm_layer_backward.default: tuple(range(8))}
