"""In-place operators become pure ones, and keep their origin."""

import pytest
import torch
from torch import fx

from tutti import compat
from tutti.tracing.rewrite.functional import functionalize
from tutti.tracing.trace.trace import trace


def traced(function, *shapes):
    with compat.fake_mode():
        fakes = [torch.empty(shape) for shape in shapes]
        graph = trace(function, *fakes)
        for node in graph.graph.nodes:
            node.meta |= {"phase": "forward", "path": "a.b"}
        assert function is pure or any(map(mutates, graph.graph.nodes))
        return graph, functionalize(graph, fakes)


def mutates(node):
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def pure(x):
    return x.sin() + 1


def in_place(x, y):
    z = x.clone()
    z[0].add_(y)
    z.mul_(2)
    return z


def through_a_transpose(x, y):
    z = x.clone()
    z.t().add_(1)
    return z * y


def read_by_an_older_view(x, y):
    z = x.clone()
    row = z[0]
    z.mul_(2)
    return row + y


def parts(x, y):
    z = x.new_zeros((3, 8))
    z[:, 2:6].copy_(x)
    z[:, :2] = 1.5
    z.scatter_(1, torch.zeros(3, 2, dtype=torch.int64), 2.0)
    return z, z[1] + 1, z.masked_fill_(z > 1, 0.5)


def promoted(x, y):
    z = x.to(torch.bfloat16)
    z.add_(y)
    return z


def one_of_several_outputs(x, y):
    weights, index = x.topk(2)
    weights /= weights.sum(-1, keepdim=True)
    return weights, index


@pytest.mark.parametrize(
    "function", [in_place, parts, one_of_several_outputs, through_a_transpose, read_by_an_older_view, promoted]
)
def test_the_result_is_the_same_without_mutation(function):
    _, after = traced(function, (3, 4), (4,))
    assert not any(map(mutates, after.graph.nodes))
    x, y = torch.randn(3, 4), torch.randn(4)
    outputs, expected = fx.GraphModule(after.constants, after.graph)(x, y), function(x, y)
    for a, b in zip(outputs, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("function", "again"),
    [(in_place, False), (parts, False), (one_of_several_outputs, False), (through_a_transpose, True)],
)
def test_only_what_is_not_plain_is_traced_again(function, again):
    before, after = traced(function, (3, 4), (4,))
    assert (after is not before) == again


def test_new_nodes_carry_the_origin_of_the_old():
    _, after = traced(in_place, (3, 4), (4,))
    assert {node.meta["path"] for node in after.graph.nodes if node.op == "call_function"} == {"a.b"}


def test_a_pure_graph_is_not_traced_again():
    before, after = traced(pure, (3,))
    assert after is before
