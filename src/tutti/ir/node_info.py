"""NodeInfo: the entries in `meta` of a node of a StepGraph or a Program.

`fx.Node.meta` is a plain dict. This is its type; `tests/ir/test_node_info.py` checks captured and lowered graphs
against it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from torch import fx

    from tutti.ir.spec import Spec


class NodeInfo(TypedDict, total=False):
    """Every node of a StepGraph has `val`, `phase`, `path` and `label`, except the output node.

    val: shape and dtype of the result, or of each result.
    phase: "forward", "backward" or "update".
    path: path of the module that called the operator.
    label: equal for corresponding nodes of repeated layers. Plans name nodes and inputs by it.
    name: unique name of a call in the graph.
    flops, bytes: FLOPs and bytes of the full, unsplit operator.

    Set at capture:
    checkpoint: the region of `torch.utils.checkpoint` that contains the node.

    Set by variants of the graph (`lower.variants.vary`):
    slice: chunk of the sequence.
    copy: part of the batch, if it is split to overlap computation and communication.
    of: the operation of the label before the graph was unrolled.
    joins: whether a sum joins the shares of chunks or copies.
    recompute: name of the forward call that this call repeats.

    Set by lowering:
    input: name of the StepGraph's input that a placeholder stands for.
    read_later: whether the tensor of a placeholder is read after this part of the graph, which must not write into it.
    names: names of the outputs; the output node has it.
    tier: where the result is stored, if not on the device.
    host: tier whose processor computes the call.
    unit: position in the order that hides communication (`analysis.overlap`).
    inside: the calls that a compiled function replaces.
    """

    val: Spec | tuple[Spec | None, ...] | None
    phase: str
    path: str
    label: str
    name: str
    flops: int
    bytes: int
    checkpoint: str | int | None
    slice: int
    copy: int
    of: str
    joins: bool
    recompute: str
    input: str
    read_later: bool
    names: list[str]
    tier: str
    host: str
    unit: int
    inside: list[fx.Node]
