"""Units are an order of a Program's calls in which none waits for a later one, alike for equal layers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import tutti
from cases import slow
from models import case
from programs import program as written_by_hand
from tutti.analysis.passes import improve
from tutti.ir.op_info import FLOPS
from tutti.lower.collectives import COLLECTIVES, all_gather
from tutti.lower.overlap.compute_units import is_view, needs, overwritten, readers_before, units
from tutti.lower.overlap.order import arrange
from tutti.lower.shard import shard
from tutti.lower.variants.unroll import copy
from tutti.plan.planner import Planner
from tutti.plan.variant import Variant


def programs(name: str, plan: str, devices: int, copies: int = 1):
    model, batch, loss = case(name)
    step = tutti.capture(model, batch, torch.optim.AdamW(model.parameters()), loss, clip_norm=1.0)
    step = copy(step.keep([n for n in step.outputs if n not in step.gradient_names]), copies)
    plan_ = Planner(step, tutti.Cluster.parse(f"cpu:{devices}"), variant=Variant(batch_splits=copies)).named(plan)
    return [improve(shard(step, plan_, rank), "O0") for rank in range(devices)]


def alone(node):
    return node.target in FLOPS


@pytest.mark.parametrize(("name", "plan", "copies"), [
    slow("llama", "dp2xtp2", 1), ("qwen3", "dp3xzero3xsplits2", 2), ("mixtral", "ep3", 1),
    slow("t5", "dp3xtp2xzero1", 1),
])  # fmt: skip
def test_no_unit_waits_for_a_later_one(name, plan, copies):
    devices = {"dp2xtp2": 4, "dp3xtp2xzero1": 6}.get(plan, 3)
    program = programs(name, plan, devices, copies)[0]
    graph, calls = program.graph, {n for n in program.graph.nodes if n.op == "call_function"}
    all_units = units(graph, alone)
    assert Counter(n for unit in all_units for n in unit) == Counter(n for n in graph.nodes if n.op == "call_function")
    assert calls <= {n for unit in all_units for n in unit}, "views are copied, nothing is lost"
    for i, before in enumerate(needs(all_units)):
        assert all(j < i for j in before)
    arrange(
        [n for n in graph.nodes if n.op == "placeholder"] + [n for u in all_units for n in u] + [graph.output_node()]
    )
    graph.lint()
    for unit in all_units:
        lone = [n for n in unit if n.target in COLLECTIVES or alone(n)]
        assert len(lone) <= 1 and all(is_view(n) or "getitem" in n.name for n in unit if lone and n not in lone)
        assert len({n.meta.get("copy", 0) for n in unit if not is_view(n)}) <= 1
    at = {n: i for i, unit in enumerate(all_units) for n in unit}
    for update in [n for n in calls if overwritten(n)]:
        readers = [r for x in overwritten(update) for r in readers_before(x, update)]
        assert readers and all(at[r] <= at[update] for r in readers), "who reads what is overwritten comes before"


def test_all_ranks_have_the_same():
    shapes = []
    for program in programs("llama", "dp2xtp2", 4):
        all_units = units(program.graph, alone)
        shapes.append([[str(n.target) for n in unit] for unit in all_units])
    assert all(shape == shapes[0] for shape in shapes)


def test_equal_layers_have_equal_units():
    all_units = units(programs("llama", "tp4", 4)[0].graph, alone)
    layers: dict[str, Counter] = {"0": Counter(), "1": Counter()}
    for unit in all_units:
        paths = {n.meta["path"].split(".")[2] for n in unit if n.meta.get("path", "").startswith("model.layers.")}
        if len(paths) == 1 and unit[-1].meta["phase"] == "forward":
            layers[paths.pop()][tuple(str(n.target) for n in unit)] += 1
    assert layers["0"] and sum((layers["0"] - layers["1"]).values()) <= 2  # the first has no layer before it


def test_views_in_all_layers_do_not_delay_what_they_look_at():
    """A rotary table is made once, and each layer takes its halves: no gather of a later layer comes before them."""

    def layers(calls, x, table, *weights):
        table = calls(torch.ops.aten.cos.default, (table,), (4, 8))
        for w in weights:
            whole = calls(all_gather, (w, "dp", 2), (4, 4))
            x = calls(torch.ops.aten.mm.default, (x, whole), (4, 4))
            x = calls(
                torch.ops.aten.mul.Tensor, (x, calls(torch.ops.aten.slice.Tensor, (table, 1, 0, 4), (4, 4))), (4, 4)
            )
        return (x,)

    inputs = {"batch:x": (4, 4), "constant:t": (4, 8), **{f"param:{i}": (2, 4) for i in range(4)}}
    graph = written_by_hand(layers, inputs, {"dp": 2}).graph
    order = [n.target for unit in units(graph, lambda n: n.target is torch.ops.aten.mm.default) for n in unit]
    gathers = [i for i, target in enumerate(order) if target is all_gather]
    products = [i for i, target in enumerate(order) if target is torch.ops.aten.mm.default]
    assert all(product < gather for product, gather in zip(products, gathers[1:], strict=False))
