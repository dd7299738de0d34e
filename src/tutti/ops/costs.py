"""FLOPs and bytes of every node of a StepGraph, unsplit."""

from __future__ import annotations

from tutti.ir.costs import FREE, flat
from tutti.ir.op_info import FLOPS
from tutti.ir.step_graph import StepGraph


def annotate_costs(step: StepGraph) -> None:
    """Write `flops` (a multiply-add counts two) and `bytes` (each input read and output written once)."""
    for node in step.graph.nodes:
        flops, moved = 0, 0
        if node.op == "call_function" and node.target not in FREE:
            operands = [n.meta["val"] for n in node.all_input_nodes]
            moved = sum(s.bytes for s in flat(operands)) + sum(s.bytes for s in flat(node.meta["val"]))
            formula = FLOPS.get(node.target)
            flops = formula(node) if formula else sum(s.numel for s in flat(node.meta["val"]))
        node.meta["flops"], node.meta["bytes"] = flops, moved
