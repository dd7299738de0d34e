"""Where a pattern lies in a graph, and where it does not."""

import pytest
import torch
from torch import nn

import tutti
from tutti.tracing.rewrite.match import SubgraphMatcher

aten = torch.ops.aten


class Function(nn.Module):
    """A function of a parameter of shape (4, 6)."""

    def __init__(self, function):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(4, 6)), function

    def forward(self, x):
        return self.function(self.weight, x).sum()


def captured(function, *shape) -> tutti.StepGraph:
    return tutti.capture(Function(function), (torch.ones(*shape or (4, 6)),), gradients=False, patterns=())


def match_count(pattern, function, anchor, exact=True) -> int:
    """How often one function is found in another."""
    small, large = captured(pattern), captured(function)
    calls = [n for n in small.calls if n.target is not aten.sum.default]
    (first,) = (n for n in calls if n.target is anchor)
    return sum(
        sum(1 for _ in SubgraphMatcher(calls, exact).matches(first, at))
        for at in large.graph.find_nodes(op="call_function", target=anchor)
    )


def pattern(w, x):
    return (w + x.exp()) * 2.0


@pytest.mark.parametrize(
    ("function", "times"),
    {
        "itself": (lambda w, x: (w + x.exp()) * 2.0, 1),
        "swapped operands of a sum": (lambda w, x: (x.exp() + w) * 2.0, 1),
        "twice": (lambda w, x: (w + x.exp()) * 2.0 + (x + w.exp()) * 2.0, 2),
        "between others": (lambda w, x: ((w.tanh() + x.sin().exp()) * 2.0).cos(), 1),
        "another number": (lambda w, x: (w + x.exp()) * 3.0, 0),
        "a number of another type": (lambda w, x: (w + x.exp()) * 2, 0),
        "another operator": (lambda w, x: (w - x.exp()) * 2.0, 0),
        "another shape": (lambda w, x: (w[:2] + x[:2].exp()) * 2.0, 0),
        "another dtype": (lambda w, x: (w.double() + x.double().exp()) * 2.0, 0),
        "a tensor for the number": (lambda w, x: (w + x.exp()) * x, 0),
    }.values(),
)
def test_exactly(function, times):
    assert match_count(pattern, function, aten.exp.default) == times


def test_whatever_the_shapes_and_numbers():
    assert match_count(pattern, lambda w, x: (w[:2] + x[:2].exp()) * 3.0, aten.exp.default, exact=False) == 1
    assert match_count(pattern, lambda w, x: (w - x.exp()) * 2.0, aten.exp.default, exact=False) == 0


def test_different_nodes_stand_for_different_nodes():
    """The two sines of a pattern may not be the same one."""
    two = lambda w, x: w.sin() * x.sin().exp()  # noqa: E731
    assert match_count(two, lambda w, x: w.sin() * x.sin().exp(), aten.exp.default) == 1
    assert match_count(two, lambda w, x: x.sin() * x.sin().exp(), aten.exp.default) == 0
