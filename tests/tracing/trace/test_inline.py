"""A function is written into a graph at its insertion point."""

import torch
from torch import fx

from tutti.ir.spec import Spec
from tutti.tracing.trace.inline import inline, template


def test_the_function_runs_inside_the_graph():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    x.meta["val"], y.meta["val"] = Spec((2, 3), torch.float32), Spec((3,), torch.float32)
    product, total = inline(
        graph, lambda parts, scale: (parts[0] * parts[1] * scale, parts[0].sum()), ([x, y],), {"scale": 2}
    )
    assert product.meta["val"] == Spec((2, 3), torch.float32) and total.meta["val"] == Spec((), torch.float32)
    graph.output((product, total))
    a, b = torch.randn(2, 3), torch.randn(3)
    ours = fx.GraphModule({}, graph)(a, b)
    assert torch.equal(ours[0], a * b * 2) and torch.equal(ours[1], a.sum())


def test_a_trace_holds_for_operands_that_lie_otherwise_in_memory():
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    x.meta["val"], w.meta["val"] = Spec((2, 3, 4), torch.float32), Spec((4, 5), torch.float32)
    traced = template(lambda x, w: (x @ w, x.contiguous().view(-1) + 1), (x, w), {})
    ours = fx.GraphModule({}, traced)
    x, w = torch.randn(3, 2, 4).transpose(0, 1), torch.randn(5, 4).T
    torch.testing.assert_close(ours(x, w), (x @ w, x.flatten() + 1))
