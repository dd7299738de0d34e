"""Elementwise operators write over an operand that is no longer read, or directly into the target of a copy.

Softmaxes over the last dim and their gradients count as elementwise: their kernels read a row before writing it. They
assume a contiguous output, whatever its strides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tutti.ir.spec import Spec
from tutti.ir.step_graph import Call
from tutti.lower.collectives import COLLECTIVES, wait
from tutti.lower.memory.aliasing import TURNING, looks, root_of
from tutti.lower.memory.transfers import TRANSFERS

aten = torch.ops.aten

# operator -> its out= variant, and the name of that argument
INTO: dict[Any, tuple[Any, str]] = {
    aten.add.Tensor: (aten.add.out, "out"),
    aten.sub.Tensor: (aten.sub.out, "out"),
    aten.mul.Tensor: (aten.mul.out, "out"),
    aten.div.Tensor: (aten.div.out, "out"),
    aten.maximum.default: (aten.maximum.out, "out"),
    aten.minimum.default: (aten.minimum.out, "out"),
    aten.where.self: (aten.where.self_out, "out"),
    aten.addcmul.default: (aten.addcmul.out, "out"),
    aten.addcdiv.default: (aten.addcdiv.out, "out"),
    aten.pow.Tensor_Scalar: (aten.pow.Tensor_Scalar_out, "out"),
    aten.clamp.default: (aten.clamp.out, "out"),
    aten.neg.default: (aten.neg.out, "out"),
    aten.exp.default: (aten.exp.out, "out"),
    aten.log.default: (aten.log.out, "out"),
    aten.sqrt.default: (aten.sqrt.out, "out"),
    aten.rsqrt.default: (aten.rsqrt.out, "out"),
    aten.reciprocal.default: (aten.reciprocal.out, "out"),
    aten.sin.default: (aten.sin.out, "out"),
    aten.cos.default: (aten.cos.out, "out"),
    aten.tanh.default: (aten.tanh.out, "out"),
    aten.erf.default: (aten.erf.out, "out"),
    aten.sigmoid.default: (aten.sigmoid.out, "out"),
    aten.silu.default: (aten.silu.out, "out"),
    aten.gelu.default: (aten.gelu.out, "out"),
    aten.silu_backward.default: (aten.silu_backward.grad_input, "grad_input"),
    aten.gelu_backward.default: (aten.gelu_backward.grad_input, "grad_input"),
    aten.tanh_backward.default: (aten.tanh_backward.grad_input, "grad_input"),
    aten.sigmoid_backward.default: (aten.sigmoid_backward.grad_input, "grad_input"),
    aten.threshold_backward.default: (aten.threshold_backward.grad_input, "grad_input"),
    aten._softmax.default: (aten._softmax.out, "out"),
    aten._log_softmax.default: (aten._log_softmax.out, "out"),
    aten._softmax_backward_data.default: (aten._softmax_backward_data.out, "grad_input"),
    aten._log_softmax_backward_data.default: (aten._log_softmax_backward_data.out, "out"),
}
PLACE: dict[Any, str] = dict(INTO.values())  # operator -> name of the argument it writes into
DIM: dict[Any, int] = {  # operator on rows -> position of its dim argument
    aten._softmax.default: 1,
    aten._log_softmax.default: 1,
    aten._softmax_backward_data.default: 2,
    aten._log_softmax_backward_data.default: 2,
}
DENSE = {  # operators with a new, contiguous result
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.nll_loss_backward.default,
    aten.embedding.default,
}  # fmt: skip
FRESH = {*DENSE, *INTO, *PLACE, aten._to_copy.default}  # operators with a new result, besides pointwise ones
WHOLE = {  # views of all elements of a storage, each once
    aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
    aten.permute.default, aten.transpose.int, aten.t.default,
}  # fmt: skip


def write_over(graph: fx.Graph) -> None:
    """Make elementwise operators reuse the memory of an operand whose last use they are."""
    node: Call
    for node in list(graph.nodes):
        if node.target is aten.copy_.default:
            _make_there(graph, node)
    roots, last = _lives(graph)
    for node in list(graph.nodes):
        if node.target in INTO and _row_by_row(node):
            for x in dict.fromkeys(node.all_input_nodes):
                if _may_go(x, node, roots, last):
                    _write_into(node, x)
                    break


def _make_there(graph: fx.Graph, copy: Call) -> None:
    """Write a value directly into the place it would be copied to."""
    place, value = copy.args
    if (
        place.op != "placeholder"
        or value.target not in INTO
        or value.target in DIM
        or value.meta["val"] != place.meta["val"]
    ):
        return
    if any(root_of(x) is place for x in value.all_input_nodes if x is not place):
        return  # in another order
    between = value.next
    while between is not copy:
        if between.target is wait or any(root_of(x) is place for x in between.all_input_nodes):
            return  # an asynchronous collective or transfer may still read it
        between = between.next
    _write_into(value, place)
    copy.replace_all_uses_with(value)
    graph.erase_node(copy)


def _lives(graph: fx.Graph) -> tuple[dict[fx.Node, fx.Node], dict[fx.Node, fx.Node]]:
    """For each value, the call that allocated its memory; for each such call, the last reader of that memory."""
    roots: dict[fx.Node, fx.Node] = {}
    last: dict[fx.Node, fx.Node] = {}
    node: Call
    for node in graph.nodes:
        reads = node.all_input_nodes
        looks_at = reads[0] if reads and looks(node) else node.kwargs.get(PLACE.get(node.target))
        roots[node] = roots[looks_at] if looks_at is not None else node
        last.update((roots[x], node) for x in reads)
    return roots, last


def _row_by_row(node: Call) -> bool:
    """Return whether a call works row by row: False for a softmax over another dim than the last."""
    rank = len(node.meta["val"].shape)
    return node.target not in DIM or node.args[DIM[node.target]] % rank == rank - 1


def _may_go(x: fx.Node, node: Call, roots: dict[fx.Node, fx.Node], last: dict[fx.Node, fx.Node]) -> bool:
    """Return whether a call may overwrite an operand, a view of a whole storage that no later call reads.

    The elements of operand, storage and result must be in one order.
    """
    root: Call = roots[x]
    if root.op != "call_function" or last[root] is not node or not isinstance(root.meta.get("val"), Spec):
        return False
    if root.target not in FRESH and torch.Tag.pointwise not in getattr(root.target, "tags", ()):
        return False
    way = _way(x, root)
    if x.meta["val"] != node.meta["val"] or not way <= WHOLE:
        return False
    if node.target in DIM and (root.target not in DENSE or way & TURNING):
        return False
    others = [y for y in node.all_input_nodes if y is not x and roots[y] is root]
    return not others and not _sent(root, roots)


def _way(x: fx.Node, root: fx.Node) -> set[Any]:
    """Return the operators of the views between a value and the call that allocated its memory."""
    views = set()
    while x is not root:
        views.add(x.target)
        x = x.all_input_nodes[0]
    return views


def _sent(root: fx.Node, roots: dict[fx.Node, fx.Node]) -> bool:
    """Return whether a collective or transfer reads the storage: it may still be in flight."""
    todo = [root]
    while todo:
        for user in todo.pop().users:
            if user.target in COLLECTIVES or user.target in TRANSFERS:
                return True
            if roots[user] is root:
                todo.append(user)
    return False


def _write_into(node: Call, place: fx.Node) -> None:
    node.target, name = INTO[node.target]
    node.kwargs = {**node.kwargs, name: place}
