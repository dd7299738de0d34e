"""The mixture of `tutti.nn.experts.experts` for few tokens on a CPU, such as those of a decoding step.

`tutti::experts_rows` has the arguments and the result of `tutti::experts`. It reads the weights of the chosen experts
only, each once, and the bits of a token do not depend on the other tokens (`linear_rows.cpp`).
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from tutti.nn.experts.experts import TENSORS
from tutti.nn.experts.gate import gate_of
from tutti.nn.linear import linear_rows
from tutti.nn.linear.weight_kinds import SAME

ops = torch.ops.tutti

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define(f"experts_rows({TENSORS}, str activation, int first, int total) -> Tensor")


def cpu(x, index, weight, up, down, up_bias, down_bias, activation, first, total):
    """The operator on a CPU."""
    kinds = {t.dtype for t in (x, up, down, up_bias, down_bias) if t is not None}
    if len(kinds) > 1 or x.dtype not in linear_rows.DTYPES:
        return ops.experts(x, index, weight, up, down, up_bias, down_bias, activation, first, total, "", -1)
    (tokens, k), flat = index.shape, index.flatten()
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < total:
        raise IndexError(f"experts_rows: an index is out of range; there are {total} experts")
    expert, order = (flat - first).sort(stable=True)
    if len(up) < total:
        here = (expert >= 0) & (expert < len(up))
        expert, order = expert[here], order[here]
    linear, rest = linear_rows.kernels().linear_groups, (expert, SAME, 0, 0, linear_rows.tiles())
    rows = linear(x[order // k], up, None, None, _contiguous(up_bias), *rest)
    rows = gate_of(activation).forward(rows, down.shape[2])
    rows = linear(rows, down, None, None, _contiguous(down_bias), *rest)
    each = rows.new_zeros((tokens * k, x.shape[1]), dtype=torch.float32)
    each[order] = rows.float() * weight.flatten()[order].unsqueeze(1)
    return _sum(each.view(tokens, k, x.shape[1])).to(x.dtype)


def _contiguous(bias: Tensor | None) -> Tensor | None:
    return bias if bias is None else bias.contiguous()


def _sum(each: Tensor) -> Tensor:
    """Over choices, in their order."""
    first, *rest = each.unbind(1)
    for part in rest:
        first = first + part
    return first


_library.impl("experts_rows", cpu, "CPU")
_library.impl("experts_rows", lambda *args: ops.experts(*args, "", -1), "CUDA")
torch.library.register_fake("tutti::experts_rows", lambda x, *rest: x.new_empty(x.shape))


def use(graph: fx.Graph) -> None:
    """Use this operator for the mixtures of a graph, in place. Starts the compilation of the kernels."""
    replaced = [node for node in graph.find_nodes(op="call_function", target=ops.experts.default)
             if node.args[0].meta["val"].dtype in linear_rows.DTYPES]  # fmt: skip
    if replaced:
        linear_rows.compile_ahead()
    for node in replaced:
        node.target, node.args = ops.experts_rows.default, node.args[:10]
