"""Report which norms, activations, rotary embeddings, losses etc. of a graph are fused operators, and which are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

import tutti.ops  # noqa: F401  (fills the table of operators)
from tutti.ir.op_info import FLOPS
from tutti.ir.step_graph import FORWARD, StepGraph

aten, ops = torch.ops.aten, torch.ops.tutti

FUSED: dict[str, tuple[Any, ...]] = {
    "norm": (
        ops.rms_norm.default, aten.native_layer_norm.default, aten.native_group_norm.default,
        aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit_no_training.default,
        aten._native_batch_norm_legit.no_stats,
    ),
    "activation": (ops.glu.default, aten.gelu.default, aten.silu.default, aten.relu.default, aten.mish.default),
    "rotary": (ops.rotary.default,),
    "loss": (
        ops.linear_logsumexp.default, aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
        aten.binary_cross_entropy.default,
    ),
    "attention": tuple(t for t in FLOPS if "attention" in str(t) and "backward" not in str(t)),
    "experts": (ops.experts.default, ops.experts_training.default, aten._grouped_mm.default),
}  # fmt: skip

# Operators that indicate a decomposed one.
TELLING: dict[Any, str] = {
    aten.rsqrt.default: "norm",
    aten.erf.default: "activation",
    aten.tanh.default: "activation",
    aten.sigmoid.default: "activation",
    aten.nll_loss_forward.default: "loss",
    aten.nll_loss2d_forward.default: "loss",
    aten._softmax.default: "softmax",
    aten._safe_softmax.default: "softmax",
}
COMBINED = {aten.mul.Tensor, aten.add.Tensor}  # operators that combine with another to an activation


def fused(graph: StepGraph) -> dict[str, Counter[str]]:
    """Count the fused operators of each family in the forward pass."""
    by_family: dict[str, Counter[str]] = {}
    for family, targets in FUSED.items():
        counts = Counter(_name(n) for n in graph.calls if n.target in targets and n.meta["phase"] == FORWARD)
        if counts:
            by_family[family] = counts
    return by_family


def left_over(graph: StepGraph) -> Iterator[tuple[str, str, str]]:
    """(family, module, operator) of operators that seem to be parts of a decomposed one."""
    for node in graph.calls:
        family = "" if node.meta["phase"] != FORWARD else TELLING.get(node.target, "")
        if family == "activation" and not any(user.target in COMBINED for user in node.users):
            continue
        if node.target is aten.cat.default and any(_is_negated(x) for x in node.all_input_nodes):
            family = "rotary" if node.meta["phase"] == FORWARD else ""
        if family:
            yield family, node.meta["path"], _name(node)


def _is_negated(node: fx.Node) -> bool:
    return node.target is aten.neg.default


def _name(node: fx.Node) -> str:
    return str(node.target).removesuffix(".default")
