"""Replace operators such as `zeros_like(x)`, which read only the shape and dtype of x, by ones without operand.

Otherwise x would be kept alive until then, and with several devices be sent to where the new tensor is used. The
gradient of a slice without elements (the part of a head that rotary embeddings leave as it is, where they rotate all of
it) is such an operator, too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from tutti.ir.spec import Spec
from tutti.ir.step_graph import BACKWARD, Call

aten = torch.ops.aten

NUMBER: dict[object, Callable[[Call], object]] = {
    aten.zeros_like.default: lambda node: 0,
    aten.ones_like.default: lambda node: 1,
    aten.full_like.default: lambda node: node.args[1],
    aten.new_zeros.default: lambda node: 0,
    aten.new_ones.default: lambda node: 1,
    aten.new_full.default: lambda node: node.args[2],
    aten.fill.Scalar: lambda node: node.args[1],
    aten.slice_backward.default: lambda node: 0,
}
UNDEFINED = {aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default}


def make_without_operands(graph: fx.Graph, device: torch.device) -> None:
    """Replace these operators in place. Outside the backward pass, tensors of one element are kept: they are free, and
    may be on the host."""
    for node in graph.nodes:
        if node.target not in NUMBER and node.target not in UNDEFINED:
            continue
        if node.target is aten.slice_backward.default and 0 not in node.args[0].meta["val"].shape:
            continue
        spec: Spec = node.meta["val"]
        if spec.shape == () and node.meta.get("phase") != BACKWARD:
            continue
        number = NUMBER.get(node.target)
        node.args = (list(spec.shape), number(node)) if number else (list(spec.shape),)
        node.target = aten.full.default if number else aten.empty.memory_format
        node.kwargs = {"dtype": spec.dtype, "device": device, "pin_memory": False}
