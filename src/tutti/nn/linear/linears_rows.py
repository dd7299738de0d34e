"""Linear layers of one x for few rows, together: on a GPU, where a launch of one of them does not fill the device.

| operator | is |
|---|---|
| linears_rows(x, weights, biases) | `tutti::linear_rows` of each weight (n, k), and bias (n) or None |
| gated_rows(x, gate, up, activation) | `tutti.nn.glu` of the layers `gate` and `up` (n, k): (rows, n) |

x is (rows, k). On a GPU with Triton, up to 64 rows are computed in one launch; else the layers one by one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tutti.nn import glu, rows

MOST, ROWS = 3, 64  # layers and rows of a launch

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define("linears_rows(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor[]")
_library.define("gated_rows(Tensor x, Tensor gate, Tensor up, str activation) -> Tensor")


def linears_reference(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    return [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def gated_reference(x: Tensor, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return glu.forward(F.linear(x, gate), F.linear(x, up), activation)


def _kernels(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> Any:
    """The module of Triton kernels, if they fit."""
    fits = 0 < len(x) <= ROWS and len(weights) <= MOST and all(w.is_contiguous() for w in weights)
    if not fits or not rows.triton_kernels(x, *weights, *biases) or len({b is None for b in biases}) > 1:
        return None
    from tutti.nn.linear import linear_rows_triton

    return linear_rows_triton


def linears_on_gpu(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    if (kernels := _kernels(x, weights, biases)) and (tile := kernels.tile_of(len(x), weights)):
        return kernels.linears(x, weights, biases, tile)
    return linears_reference(x, weights, biases)


def gated_on_gpu(x: Tensor, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    fits = activation in rows.GATES and (kernels := _kernels(x, [gate, up], []))
    if fits and (tile := kernels.tile_of(len(x), [gate, up], gated=True)):
        return kernels.gated(x, gate, up, activation, tile)
    return gated_reference(x, gate, up, activation)


_library.impl("linears_rows", linears_reference, "CPU")
_library.impl("linears_rows", linears_on_gpu, "CUDA")
_library.impl("gated_rows", gated_reference, "CPU")
_library.impl("gated_rows", gated_on_gpu, "CUDA")
torch.library.register_fake("tutti::linears_rows", linears_reference)
torch.library.register_fake("tutti::gated_rows", gated_reference)
