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
    made = fx.Graph()
    x = made.placeholder("x")
    made.output(build(made.call_function, x))
    for node in made.nodes:
        node.meta = {"val": Spec((4,), torch.float32), "phase": "forward", "label": node.name, "path": ""}
    return made


def targets(made: fx.Graph) -> list:
    return [n.target for n in made.nodes if n.op == "call_function"]


def several(call, x):
    """Two under way at once; something that needs neither, and what nobody reads."""
    a = call(all_reduce, (x, "dp", "sum"))
    b = call(all_gather, (x, "dp", 2))
    call(all_reduce, (x, "dp", "max"))
    c = call(aten.neg.default, (x,))
    return call(aten.add.Tensor, (call(aten.mul.Tensor, (c, b)), a)), c


def test_where_they_stand():
    made = graph(several)
    insert_waits(made, [])
    order = [all_reduce, all_gather, all_reduce, aten.neg.default, wait, aten.mul.Tensor, wait, aten.add.Tensor, wait]
    assert targets(made) == order
    assert all(is_begun(n) for n in made.nodes if n.target in (all_reduce, all_gather))


def test_the_same_numbers_and_what_is_asked_for():
    plain, made = graph(several), graph(several)
    insert_waits(made, [])
    inputs = [(torch.arange(4.0),), (torch.ones(4),)]
    expected, found = (run_virtual([generate(g)] * 2, inputs, MESH) for g in (plain, made))
    assert all(
        torch.equal(a, b) for row, other in zip(expected, found, strict=True) for a, b in zip(row, other, strict=True)
    )
    program = generate(made)(torch.ones(4))
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

    made = graph(build)
    insert_waits(made, [[n] if n.target is all_reduce else [] for n in made.nodes] + [list(made.nodes)[2:4]])
    assert targets(made) == [all_reduce, wait, aten.neg.default, aten.add.Tensor]


def test_before_what_is_sent_is_overwritten():
    made = fx.Graph()
    p, g, m, v, step, lr = (made.placeholder(name) for name in ("p", "g", "m", "v", "step", "lr"))
    gathered = made.call_function(all_gather, (made.call_function(aten.reshape.default, (p, [4])), "dp", 2))
    update = made.call_function(torch.ops.tutti.adam_.default, ([p], [g], [m], [v], step, lr))
    made.output((gathered,))
    for node in made.nodes:
        node.meta = {"val": Spec((4,), torch.float32), "phase": "update", "label": node.name, "path": ""}
    found = units(made, lambda node: False)
    insert_waits(made, found)
    order = [n.target for n in made.nodes if n.op == "call_function"]
    assert order.index(wait) == order.index(torch.ops.tutti.adam_.default) - 1 and update in made.nodes


@pytest.mark.parametrize("kind", ["all_gather", "all_reduce"])
def test_ranks_that_disagree_are_told(kind):
    def one(x):
        yield Request(kind, "dp", "sum", x)

    def other(x):
        yield Wait(x)

    with pytest.raises(AssertionError, match="some ranks start a collective while others wait"):
        run_virtual([one, other], [(torch.ones(1),)] * 2, MESH)
