"""Nodes carry nothing but what `NodeInfo` describes."""

from __future__ import annotations

from typing import get_type_hints

import pytest
import torch

import tutti
import zoo
from tutti.ir.node_info import NodeInfo
from tutti.ir.spec import Spec

HINTS = get_type_hints(NodeInfo, localns={"fx": torch.fx, "Spec": Spec})
PLANS = [("single", 1), ("tp2xzero3", 4), ("tp2xsplits2", 2), ("zero3xrecompute", 2), ("offload2", 1), ("pp2", 2)]


def check(node, complete: bool) -> None:
    unknown = {key for key in node.meta if key not in HINTS}
    assert not unknown, f"{node.format_node()} carries {unknown}"
    if complete and node.op != "output":
        assert {"val", "phase", "path", "label"} <= node.meta.keys(), node.format_node()
    plain = {key: hint for key, hint in HINTS.items() if isinstance(hint, type)}
    for key in plain.keys() & node.meta.keys():
        assert isinstance(node.meta[key], plain[key]), f"{key} of {node.format_node()} is {node.meta[key]!r}"


@pytest.mark.parametrize(("plan", "devices"), PLANS)
def test_nodes_carry_what_is_described(plan, devices):
    model, batch = zoo.llama(2), zoo.tokens(4)
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"accumulate": 2} if plan == "pp2" else {}
    step = tutti.parallelize(model, optimizer, batch, cluster=f"cpu:{devices}", plan=plan, level="O0", **options)
    step(batch)
    for node in step.graph.nodes:
        check(node, complete=True)
    (executor,) = step._executables.executors.values()
    for part in executor.parts.values():
        for program in part.programs:
            for node in program.graph.nodes:
                check(node, complete=False)  # passes add calls without a result
