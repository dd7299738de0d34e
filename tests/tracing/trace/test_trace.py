"""What is traced is what torch's own `make_fx` traces, and computes what the function does."""

import operator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from tutti import compat
from tutti.ir.spec import Spec
from tutti.tracing.rewrite.remove_redundant import simplify
from tutti.tracing.trace.trace import is_tracing, recorded, sign, trace


def gradients(x, y):
    w = x.detach().requires_grad_()
    loss = F.cross_entropy(F.layer_norm(w @ y, (5,)), torch.tensor([1, 0, 4, 2])) + torch.linalg.vector_norm(w.tanh())
    return torch.autograd.grad(loss, w)


def parts(x, y):
    a, *_, b = (x @ y).split(2, dim=1)
    value, index = x.sort(dim=1)
    return [a.mean() + b.sum(), value[:, index[0]]]


def in_place(x, y):
    z = torch.zeros(4, 3)
    z[1:].add_(x[1:]).mul_(2)
    torch._foreach_add_([z], [x])
    return (torch.cumsum(z, 0, out=torch.empty(4, 3)),)


def mapped(x, y):
    return (torch.vmap(lambda row: (row @ y).softmax(-1))(x),)


def number(x, y):
    """What a model makes out of a Python number has a value, also where it computes with that."""
    return (x * torch.tensor(1.5).exp().item(),)


def kept_number(x, y):
    """A tensor that is no argument has a value."""
    return (x * CONSTANT.item(),)


def resized(x, y):
    return (torch.empty(0).resize_(4, 3).copy_(x) * torch.zeros(4, 3).fill_(2),)


def composed(x, y):
    with torch.inference_mode():
        return (F.linear(x, y.t()),)


FUNCTIONS = [gradients, parts, in_place, mapped, number, kept_number, resized, composed]
CONSTANT = torch.tensor(3.0)
X, Y = torch.randn(4, 3), torch.randn(3, 5)


def numbered(graph: fx.Graph) -> list[tuple]:
    """The nodes that compute, by the numbers of their operands, and what they make."""
    for node in graph.nodes:
        node.meta |= {"phase": "", "path": ""}
    simplify(graph)
    number = {node: i for i, node in enumerate(graph.nodes)}
    operands = [fx.map_arg((node.args, node.kwargs), lambda x: number[x]) for node in graph.nodes]
    targets = [node.target if node.op == "call_function" else node.op for node in graph.nodes]
    specs = [node.meta.get("val") for node in graph.nodes]
    return list(zip(targets, map(repr, operands), specs, strict=True))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_graph_is_that_of_make_fx(function):
    with compat.fake_mode():
        fakes = torch.empty(4, 3), torch.empty(3, 5)
        ours, theirs = trace(function, *fakes), make_fx(function)(*fakes)
    for node in theirs.graph.nodes:
        node.meta = {"val": Spec.of(node.meta.get("val"))}
        if node.op == "call_function" and node.target is not operator.getitem:
            node.target = recorded(node.target)
    assert numbered(ours.graph) == numbered(theirs.graph)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_it_computes_what_the_function_does(function):
    with compat.fake_mode():
        traced = trace(function, torch.empty(4, 3), torch.empty(3, 5))
    module = fx.GraphModule(traced.constants, traced.graph)
    for output, expected in zip(module(X, Y), function(X, Y), strict=True):
        assert torch.equal(output, expected)


def test_nodes_are_signed():
    def function(x):
        assert is_tracing()
        sign(path="a")
        y = x.sin()
        sign(phase="forward")
        return y.cos().max(0)

    with compat.fake_mode():
        nodes = list(trace(function, torch.empty(3)).graph.nodes)
    assert [node.meta.get("path") for node in nodes] == [None, "a", "a", "a", "a", "a", None]
    assert [node.meta.get("phase") for node in nodes] == [None, None, *["forward"] * 4, None] and not is_tracing()


def test_what_asks_for_values_is_told():
    with compat.fake_mode(), pytest.raises(compat.ValuesNeeded):
        trace(lambda x: x * x.sum().item(), torch.empty(3))
    assert not is_tracing()


def test_a_tensor_that_is_no_argument_is_a_constant():
    outside = torch.arange(3.0)
    with compat.fake_mode():
        traced = trace(lambda x: x + outside * outside, torch.empty(3))
    assert len(traced.constants) == 1 and fx.GraphModule(traced.constants, traced.graph)(outside).tolist() == [0, 2, 6]


def test_higher_order_operators_are_refused():
    def function(x):
        return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x + 1, (x,))

    with compat.fake_mode(), pytest.raises(ValueError, match="calls cond, a higher-order operator"):
        trace(function, torch.empty(3))


def test_autocast_keeps_nothing_of_a_trace():
    weight = torch.nn.Parameter(torch.randn(3, 3))
    with torch.autocast("cpu", torch.bfloat16):
        with compat.fake_mode():
            trace(lambda x: x @ weight, torch.empty(2, 3))
        assert torch.is_autocast_cache_enabled()
        assert type(torch.ones(2, 3) @ weight) is torch.Tensor


def test_signing_needs_a_trace_and_other_threads_are_not_traced():
    with pytest.raises(AssertionError, match="called outside of trace"):
        sign(path="a")

    def function(x):
        with ThreadPoolExecutor(1) as pool:
            assert is_tracing() and not pool.submit(is_tracing).result()
        return x + 1

    with compat.fake_mode():
        trace(function, torch.empty(3))
    seen = []
    make_fx(lambda x: seen.append(is_tracing()) or x + 1)(torch.empty(3))
    assert seen == [True]
