"""Biases in bodies of compiled loops: added by the kernel that reads the product.

`addmm` on a CPU first copies the bias into its result. For the small layers of such loops that takes as long as a tenth
of the product. Inductor turns a product and a sum back into `addmm`, but not a difference.
"""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten


def take_biases_out(graph: fx.Graph) -> None:
    """Replace `addmm` of float32 by a product minus the negative bias, which has the same value, in place."""
    for node in graph.find_nodes(op="call_function", target=aten.addmm.default):
        bias, x, weight = node.args
        if node.kwargs or node.meta["val"].dtype != torch.float32:
            continue
        with graph.inserting_before(node):
            product = graph.call_function(aten.mm.default, (x, weight))
            negative = graph.call_function(aten.neg.default, (bias,))
            node.replace_all_uses_with(graph.call_function(aten.sub.Tensor, (product, negative)))
        graph.erase_node(node)
