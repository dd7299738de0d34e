"""Rules for which operators the compiler fuses into one kernel."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import fx

from tutti.ir.costs import FREE, flat
from tutti.ir.spec import Spec
from tutti.ir.step_graph import Call

aten = torch.ops.aten

# Fusible operators that torch tags neither as pointwise nor as a reduction.
FUSED = {
    aten._to_copy.default, aten.contiguous.default, aten.reshape.default, aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default, aten._softmax.default, aten._softmax_backward_data.default,
    aten._log_softmax.default, aten._log_softmax_backward_data.default, aten.native_dropout.default,
    aten.slice_backward.default, aten.select_backward.default, aten.constant_pad_nd.default, aten.full.default,
    aten.full_like.default, aten.zeros_like.default, aten.ones_like.default, aten.zeros.default, aten.ones.default,
    aten.scalar_tensor.default, aten.arange.default, aten.arange.start, aten.gather.default,
    aten.index.Tensor, aten.expand.default, aten.repeat.default, aten.nll_loss_forward.default,
    aten.nll_loss_backward.default, aten.copy_.default,
}  # fmt: skip


def fuses(node: Call) -> bool:
    """Return whether a call can be fused with others."""
    return _fuses(node.target)


@cache
def _fuses(target: Any) -> bool:
    tags = getattr(target, "tags", ())
    return target in FUSED or torch.Tag.pointwise in tags or torch.Tag.reduction in tags


@cache
def _reduces(target: Any) -> bool:
    return torch.Tag.reduction in getattr(target, "tags", ())


def ends(node: Call) -> bool:
    """Return whether readers of a call start another kernel: it does not fuse, or reduces more than rows."""
    if node.target is operator.getitem:
        return ends(node.args[0])
    if not fuses(node):
        return node.target not in FREE
    if not _reduces(node.target) or not node.all_input_nodes:
        return False
    whole, val = node.all_input_nodes[0].meta["val"].shape, node.meta["val"]
    shape = (val if isinstance(val, Spec) else val[0]).shape
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return not shape or whole[: len(shape)] != shape


def kernels(calls: Iterable[fx.Node]) -> list[list[fx.Node]]:
    """Partition consecutive calls into sets that become one kernel each.

    The depth of a call is the number of kernel-ending calls on the longest path to it. A kernel is a connected set of
    calls of equal depth, so no two kernels wait for each other.
    """
    depth: dict[fx.Node, int] = {}
    root: dict[fx.Node, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while root[node] is not node:
            root[node] = root[root[node]]
            node = root[node]
        return node

    for node in calls:
        before = [x for x in node.all_input_nodes if x in depth]
        depth[node] = max((depth[x] + _between(x, node) for x in before), default=0)
        root[node] = node
        for x in before:
            if joins(node) and joins(x) and depth[x] == depth[node]:
                root[find(node)] = find(x)
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in root:
        groups.setdefault(find(node), []).append(node)
    return list(groups.values())


def _between(maker: fx.Node, reader: fx.Node) -> bool:
    """Return whether a kernel ends between a call and its reader. A scalar with many readers would join all of them."""
    if reader.target is operator.getitem:
        return False
    one = isinstance(maker.meta["val"], Spec) and maker.meta["val"].numel == 1
    return ends(maker) or (one and any(spec.numel > 1 for spec in flat(reader.meta["val"])))


def joins(node: Call) -> bool:
    """Return whether a call can be part of a kernel: it fuses, or is a view."""
    return fuses(node) or node.target in FREE
