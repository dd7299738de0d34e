"""Generated code computes the graph, drops what is dead, and hands out its collectives."""

import weakref

import pytest
import torch
from torch import fx

from tutti.lower.collectives import all_gather, all_reduce
from tutti.run.code import Request, generate

aten = torch.ops.aten


def finished(program):
    with pytest.raises(StopIteration) as stop:
        program.send(None)
    return stop.value.value


def test_values_of_every_kind_are_written():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    z = graph.call_function(aten.cat.default, ([x, y], 1))
    z = graph.call_function(aten.add.Tensor, (z, 0.5), {"alpha": 2})
    z = graph.call_function(aten._to_copy.default, (z,), {"dtype": torch.float64})
    z = graph.call_function(aten.sum.dim_IntList, (z, [1], True))
    graph.output((z, x))
    a, b = torch.randn(2, 3), torch.randn(2, 1)
    ours = finished(generate(graph)(a, b))
    assert torch.equal(ours[0], (torch.cat([a, b], 1) + 1).double().sum(1, keepdim=True)) and ours[1] is a


def test_collectives_are_asked_for():
    graph = fx.Graph()
    x = graph.placeholder("x")
    total = graph.call_function(all_reduce, (x, "tp", "max"))
    graph.output((graph.call_function(all_gather, (total, "dp", 2)),))
    program, x = generate(graph)(torch.ones(3)), torch.ones(3)
    first = program.send(None)
    assert isinstance(first, Request) and first[:3] == ("all_reduce", "tp", "max") and torch.equal(first.tensor, x)
    second = program.send(x * 2)
    assert second[:3] == ("all_gather", "dp", "") and torch.equal(second.tensor, x * 2)
    with pytest.raises(StopIteration) as stop:
        program.send(torch.stack([x, x]))
    assert stop.value.value[0].shape == (2, 3)


def test_values_die_after_their_last_use():
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(aten.mul.Tensor, (x, 2))
    b = graph.call_function(all_reduce, (a, "dp", "sum"))
    c = graph.call_function(aten.add.Tensor, (b, 1))
    unread = graph.call_function(aten.neg.default, (c,))
    d = graph.call_function(all_reduce, (c, "dp", "sum"))
    graph.output((d,))
    program = generate(graph)(torch.ones(3))
    request = program.send(None)
    died = weakref.ref(request.tensor)
    del request
    program.send(torch.ones(3))
    assert died() is None and unread is not None
