"""Generated code computes the graph, drops what is dead, and hands out its collectives."""

import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from tutti.exec.kernels.codegen import Request, generate
from tutti.lower.collectives import all_gather, all_reduce

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


PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.complex_numbers(),
    st.text(max_size=5), st.sampled_from(["floor", "it's \"\\n", "{x}", "sum"]),
    st.sampled_from([math.inf, -math.inf, math.nan, -0.0, 1e-45, complex(0, math.inf), complex(math.nan, -0.0)]),
    st.sampled_from([torch.bool, torch.float32, torch.complex64, torch.strided, torch.contiguous_format,
                     torch.channels_last, torch.device("cpu"), torch.device("meta"), torch.Size([2, 3]), torch.Size()]),
)  # fmt: skip
VALUES = st.recursive(PLAIN, lambda x: st.lists(x, max_size=3) | st.lists(x, max_size=3).map(tuple), max_leaves=6)


def same(a, b) -> bool:
    """Equal in value and kind, NaN and signs of zeros included; what is a torch.Size may be a tuple."""
    if isinstance(b, (list, tuple)):
        kind = list if isinstance(b, list) else tuple
        return isinstance(a, kind) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a is b or repr(a) == repr(b))


@given(st.lists(VALUES, max_size=4), st.dictionaries(st.sampled_from(["alpha", "dtype", "self", "from", "x"]), VALUES))
@settings(max_examples=200)
def test_an_argument_of_any_kind_arrives_as_it_is(args, kwargs):
    graph, received = fx.Graph(), []

    def target(*positional, **named):
        received.append((positional, named))

    graph.call_function(target, tuple(args), kwargs)
    graph.output(())
    finished(generate(graph)())
    ((positional, named),) = received
    assert same(positional, tuple(args)) and named.keys() == kwargs.keys()
    assert all(same(named[key], kwargs[key]) for key in kwargs)


@pytest.mark.parametrize("value", [True, False, 1, 0.0, torch.tensor(True)], ids=str)
def test_a_mask_is_filled_with_any_number(value):
    graph = fx.Graph()
    x, mask = graph.placeholder("x"), graph.placeholder("mask")
    target = aten.masked_fill.Tensor if isinstance(value, torch.Tensor) else aten.masked_fill.Scalar
    graph.output((graph.call_function(target, (x, mask, value)),))
    a, b = torch.tensor([True, False, True]), torch.tensor([True, True, False])
    assert torch.equal(finished(generate(graph)(a, b))[0], a.masked_fill(b, value))


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
