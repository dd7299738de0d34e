"""What to compute again: the integer program against every choice, on graphs drawn at random."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from torch import fx

from tutti.ir.spec import Spec
from tutti.ir.step_graph import BACKWARD, FORWARD, StepGraph
from tutti.plan.search.recompute import Activations


def drawn(seed: int, size: int = 7) -> StepGraph:
    """A forward pass of operators that read one or two before them, and a backward pass that reads some of them."""
    draw = random.Random(seed)
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta = {"val": Spec((4,), torch.float32), "label": "batch:x", "path": "", "phase": FORWARD}
    nodes = [x]
    for i in range(size):
        read = draw.sample(nodes, min(len(nodes), draw.choice([1, 1, 2])))
        node = graph.call_function(torch.ops.aten.add.Tensor, (read[0], read[-1]))
        layer = "" if draw.random() < 0.2 else f"layers.{i * 2 // size}"
        node.meta = {"val": Spec((draw.randint(1, 9),), torch.float32), "phase": FORWARD, "path": layer,
                     "label": f"f{i}", "flops": draw.randint(1, 9)}  # fmt: skip
        nodes.append(node)
    for i, node in enumerate(draw.sample(nodes[1:], 4)):
        back = graph.call_function(torch.ops.aten.neg.default, (node,))
        back.meta = {
            "val": node.meta["val"],
            "phase": BACKWARD,
            "path": node.meta["path"],
            "label": f"b{i}",
            "flops": 0,
        }
    graph.output(())
    return StepGraph(graph, {"batch:x": x}, {})


def best(activations: Activations, memory: float) -> float | None:
    """The least seconds of all choices that keep at most so much."""
    labels, least = list(activations.nodes), None
    for states in product((None, "keep", "recompute"), repeat=len(labels)):
        state = dict(zip(labels, states, strict=True))
        kept_bytes = sum(activations.bytes[x] for x in labels if state[x] == "keep")
        if kept_bytes > memory or any(
            state[x] is None or (state[x] == "recompute" and x in activations.fixed) for x in activations.needed
        ):
            continue
        if any(state[y] == "recompute" and (state[x] is None or (state[x] == "recompute" and
                                                                 (x, y) in activations.across))
               for x, y in activations.inside | activations.across):  # fmt: skip
            continue
        cost = sum(activations.example[x].meta["flops"] for x in labels if state[x] == "recompute")
        least = cost if least is None else min(least, cost)
    return least


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_that_keeps_as_little_costs_less(seed):
    activations = Activations(drawn(seed))
    for share in (1.0, 0.7, 0.4, 0.2):
        memory = share * activations.whole
        again = activations.recompute(memory, lambda node: node.meta["flops"])
        expected = best(activations, memory)
        if expected is not None:
            assert sum(activations.example[x].meta["flops"] for x in again) == expected


def test_all_that_fits_is_kept():
    activations = Activations(drawn(0))
    assert activations.recompute(activations.whole, lambda node: 1.0) == ()
