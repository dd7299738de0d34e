"""In-place operators become pure ones, and keep their origin."""

import torch
from torch import fx

from tutti import compat
from tutti.tracing.functional import functionalize
from tutti.tracing.trace import trace


def traced(function, *shapes):
    with compat.fake_mode():
        fakes = [torch.empty(shape) for shape in shapes]
        graph = trace(function, *fakes)
        for node in graph.graph.nodes:
            node.meta |= {"phase": "forward", "path": "a.b"}
        return graph, functionalize(graph, fakes)


def in_place(x, y):
    z = x.clone()
    z[0].add_(y)
    z.mul_(2)
    return z


def test_the_result_is_the_same_without_mutation():
    before, after = traced(in_place, (3, 4), (4,))
    assert any(node.target._schema.is_mutable for node in before.graph.nodes if node.op == "call_function")
    assert not any(node.target._schema.is_mutable for node in after.graph.nodes if node.op == "call_function")
    x, y = torch.randn(3, 4), torch.randn(4)
    assert torch.equal(fx.GraphModule({}, after.graph)(x, y), in_place(x, y))


def test_new_nodes_carry_the_origin_of_the_old():
    _, after = traced(in_place, (3, 4), (4,))
    assert {node.meta["path"] for node in after.graph.nodes if node.op == "call_function"} == {"a.b"}


def test_a_pure_graph_is_not_traced_again():
    before, after = traced(lambda x: x.sin() + 1, (3,))
    assert after is before
