"""Hyperbolic tangent for compiled code: a rational function, which Inductor vectorizes and fuses.

Inductor calls the Sleef library, which takes longer than the matrix products of a small network. With u = x^2 and x
clamped to [-7.8, 7.8],

    tanh(x) = x (a0 + a1 u + ... + a4 u^4) / (1 + b1 u + ... + b4 u^4)

has a relative error of 4e-7 in float32. The coefficients minimize the largest relative error, 6.5e-9 in exact
arithmetic (Lawson's iteration). Values are below 1, so that log(1 - tanh(x)^2) is finite.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

LIMIT = 7.8  # from 7.88 on, float32 rounds the quotient to 1
ABOVE = (0.9999999935703727, 0.1344450266539936, 3.5716036292257705e-3, 2.189475615311233e-5, 1.5230552899713115e-8)
BELOW = (1.0, 0.4677782998558088, 2.6164464152200657e-2, 3.411301263306227e-4, 8.522500907927069e-7)


def expand_tanh(graph: fx.Graph) -> None:
    """Replace tanh of float32 by the rational function, in place."""
    for node in graph.find_nodes(op="call_function", target=aten.tanh.default):
        if node.meta["val"].dtype == torch.float32:  # others keep their kernel
            with graph.inserting_before(node):
                node.replace_all_uses_with(_rational(graph, node.args[0]))
            graph.erase_node(node)


def _rational(graph: fx.Graph, x: Any) -> fx.Node:
    call = graph.call_function

    def polynomial(coefficients: tuple[float, ...]) -> fx.Node:
        *rest, last = coefficients
        total = call(aten.mul.Tensor, (u, last))
        while True:
            total = call(aten.add.Tensor, (total, rest.pop()))
            if not rest:
                return total
            total = call(aten.mul.Tensor, (total, u))

    x = call(aten.clamp.default, (x, -LIMIT, LIMIT))
    u = call(aten.mul.Tensor, (x, x))
    return call(aten.mul.Tensor, (x, call(aten.div.Tensor, (polynomial(ABOVE), polynomial(BELOW)))))
