"""What is made of a number needs no operand."""

import pytest
import torch
from torch import fx

from tutti import compat
from tutti.tracing.rewrite.like_operators import make_without_operands
from tutti.tracing.rewrite.remove_redundant import simplify
from tutti.tracing.trace.trace import trace

aten = torch.ops.aten
CPU = torch.device("cpu")


def targets_and_module(function, x):
    """The operators of a function of x, rewritten, and its value."""
    with compat.fake_mode():
        graph = trace(function, torch.empty_like(x, device="cpu")).graph
    make_without_operands(graph, CPU)
    for node in graph.nodes:
        node.meta |= {"phase": "forward", "path": ""}
    simplify(graph)
    return [node.target for node in graph.nodes if node.op == "call_function"], fx.GraphModule({}, graph)(x)


X = torch.arange(6).view(2, 3)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.zeros_like(x.sin()),
        lambda x: torch.ones_like(x, dtype=torch.bool),
        lambda x: torch.full_like(x, 7),
        lambda x: x.sin().new_zeros(4),
        lambda x: x.new_ones(4, 5),
        lambda x: x.new_full((3,), 2),
        lambda x: aten.fill.Scalar(x.sin(), 0.5),
    ],
)
def test_a_full_tensor_of_the_same_shape_dtype_and_number(function):
    operators, value = targets_and_module(function, X)
    assert operators == [aten.full.default]
    assert value.dtype == function(X).dtype and torch.equal(value, function(X))


def test_what_is_undefined_is_only_allocated():
    operators, value = targets_and_module(lambda x: torch.empty_like(x.sin()), X)
    assert operators == [aten.empty.memory_format] and value.shape == X.shape and value.dtype == torch.float32


def test_one_number_stays_where_it_is():
    operators, _ = targets_and_module(lambda x: torch.ones_like(x.sum()), X)
    assert operators == [aten.sum.default, aten.ones_like.default]
