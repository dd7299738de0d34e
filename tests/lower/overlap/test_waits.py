"""Collectives are waited for in front of what reads them first, and of what overwrites what they send."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from tutti.exec.kernels.codegen import Request, Wait, generate
from tutti.exec.runtimes.virtual import run_virtual
from tutti.ir.spec import Spec
from tutti.lower.collectives import all_gather, all_reduce, is_begun, wait
from tutti.lower.overlap.compute_units import units
from tutti.lower.overlap.waits import insert_waits

aten = torch.ops.aten
MESH = {"dp": 2}


def graph(build) -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(build(graph.call_function, x))
    for node in graph.nodes:
        node.meta = {"val": Spec((4,), torch.float32), "phase": "forward", "label": node.name, "path": ""}
    return graph


def targets(graph: fx.Graph) -> list:
    return [n.target for n in graph.nodes if n.op == "call_function"]


def several(call, x):
    """Two under way at once; something that needs neither, and what nobody reads."""
    a = call(all_reduce, (x, "dp", "sum"))
    b = call(all_gather, (x, "dp", 2))
    call(all_reduce, (x, "dp", "max"))
    c = call(aten.neg.default, (x,))
    return call(aten.add.Tensor, (call(aten.mul.Tensor, (c, b)), a)), c


def test_where_they_stand():
    waiting = graph(several)
    insert_waits(waiting, [])
    order = [all_reduce, all_gather, all_reduce, aten.neg.default, wait, aten.mul.Tensor, wait, aten.add.Tensor, wait]
    assert targets(waiting) == order
    assert all(is_begun(n) for n in waiting.nodes if n.target in (all_reduce, all_gather))


def test_the_same_numbers_and_what_is_asked_for():
    plain, waiting = graph(several), graph(several)
    insert_waits(waiting, [])
    inputs = [(torch.arange(4.0),), (torch.ones(4),)]
    expected, overlapped = (run_virtual([generate(g)] * 2, inputs, MESH) for g in (plain, waiting))
    assert all(
        torch.equal(a, b)
        for row, other in zip(expected, overlapped, strict=True)
        for a, b in zip(row, other, strict=True)
    )
    program = generate(waiting)(torch.ones(4))
    asked = [program.send(None)]
    for answer in ("first", "second", "third"):
        asked.append(program.send(answer))
    assert [type(r) for r in asked] == [Request, Request, Request, Wait]
    assert not any(r.waits for r in asked[:3]) and asked[3].begun == "second"


def test_in_front_of_a_whole_unit():
    def build(call, x):
        total = call(all_reduce, (x, "dp", "sum"))
        a = call(aten.neg.default, (x,))
        return call(aten.add.Tensor, (a, total))

    waiting = graph(build)
    insert_waits(waiting, [[n] if n.target is all_reduce else [] for n in waiting.nodes] + [list(waiting.nodes)[2:4]])
    assert targets(waiting) == [all_reduce, wait, aten.neg.default, aten.add.Tensor]


def test_before_what_is_sent_is_overwritten():
    graph = fx.Graph()
    p, g, m, v, step, lr = (graph.placeholder(name) for name in ("p", "g", "m", "v", "step", "lr"))
    gathered = graph.call_function(all_gather, (graph.call_function(aten.reshape.default, (p, [4])), "dp", 2))
    update = graph.call_function(torch.ops.tutti.adam_.default, ([p], [g], [m], [v], step, lr))
    graph.output((gathered,))
    for node in graph.nodes:
        node.meta = {"val": Spec((4,), torch.float32), "phase": "update", "label": node.name, "path": ""}
    all_units = units(graph, lambda node: False)
    insert_waits(graph, all_units)
    order = [n.target for n in graph.nodes if n.op == "call_function"]
    assert order.index(wait) == order.index(torch.ops.tutti.adam_.default) - 1 and update in graph.nodes


@pytest.mark.parametrize("kind", ["all_gather", "all_reduce"])
def test_ranks_that_disagree_are_told(kind):
    def one(x):
        yield Request(kind, "dp", "sum", x)

    def other(x):
        yield Wait(x)

    with pytest.raises(AssertionError, match="some ranks start a collective while others wait"):
        run_virtual([one, other], [(torch.ones(1),)] * 2, MESH)
