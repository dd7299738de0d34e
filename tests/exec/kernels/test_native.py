"""Runs of calls in C++ give what the calls give, one after another."""

import operator

import pytest
import torch
from torch import fx

import tutti.nn.attention.paged_write
import tutti.nn.linear.linear_int8
import tutti.nn.rows  # noqa: F401  (registers the operators)
from tutti.exec.kernels import native
from tutti.exec.kernels.codegen import generate
from tutti.ir.spec import Spec
from tutti.lower.memory.inplace import written

aten, ops = torch.ops.aten, torch.ops.tutti


class Builder:
    """A graph whose nodes have the specs of what they give for some inputs."""

    def __init__(self, *inputs: torch.Tensor):
        self.graph, self.values = fx.Graph(), {}
        self.inputs = [self._note(self.graph.placeholder(f"in_{i}"), x) for i, x in enumerate(inputs)]

    def _note(self, node, value):
        self.values[node], node.meta = value, {"val": Spec.of(value), "label": str(node)}
        return node

    def call(self, target, *args, **kwargs):
        operands = fx.map_arg((args, kwargs), lambda n: self.values[n])
        return self._note(self.graph.call_function(target, args, kwargs), target(*operands[0], **operands[1]))


def executed(graph, *inputs):
    """The outputs of a generated program without collectives."""
    with pytest.raises(StopIteration) as stop:
        next(generate(graph)(*inputs))
    return stop.value.value


@pytest.mark.starts
def test_as_one_by_one():
    torch.manual_seed(0)
    x, weight, scales = torch.randn(2, 3, 64), torch.randint(-9, 9, (8, 64)).to(torch.int8), torch.rand(8)
    builder = Builder(x, weight, scales)
    x_, w_, s_ = builder.inputs
    flat = builder.call(aten.reshape.default, x_, [6, 64])
    norm = builder.call(ops.norm_rows.default, flat, None, None, 1e-6, 0, False, False)
    linear = builder.call(ops.linear_int8.default, norm, w_, s_, rounded=False)
    first = builder.call(operator.getitem, builder.call(aten.max.dim, linear, 1), 0)
    joined = builder.call(aten.cat.default, [first, first])
    cast = builder.call(aten._to_copy.default, joined, dtype=torch.bfloat16, memory_format=torch.preserve_format)
    added = builder.call(aten.add.Tensor, linear, 1.5)  # a number in the place of a tensor stays in Python
    builder.graph.output((cast, added, x_))
    wanted = [builder.values[n] for n in (cast, added, x_)]
    native.use(builder.graph)
    runs = [n.target for n in builder.graph.nodes if isinstance(n.target, native.Native)]
    assert [len(run.calls) for run in runs] == [6] and runs[0].run is None
    for _ in range(2):
        outputs = executed(builder.graph, x, weight, scales)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(outputs, wanted, strict=True))


@pytest.mark.starts
def test_writes_in_place_and_names_the_call_that_fails():
    cache, rows_, slots = torch.zeros(4, 1, 2), torch.ones(2, 1, 2), torch.tensor([3, -1])
    builder = Builder(cache, rows_, slots)
    c_, r_, s_ = builder.inputs
    doubled = builder.call(aten.add.Tensor, r_, r_)
    call = builder.graph.call_function(ops.paged_write_.default, (c_, doubled, s_))
    call.meta = {"label": "layer 1"}
    builder.values[call] = None
    new = builder.call(written, call, c_)
    sums = builder.call(aten.sum.dim_IntList, new, [0])
    builder.graph.output((new, sums))
    native.use(builder.graph)
    updated, total = executed(builder.graph, cache, rows_, slots)
    assert updated.data_ptr() == cache.data_ptr() and cache[3].tolist() == [[2.0, 2.0]]
    assert total.tolist() == [[2.0, 2.0]]
    with pytest.raises(IndexError, match=r"slot 9 of a cache with 4 slots(.|\n)*layer 1"):
        executed(builder.graph, cache, rows_, torch.tensor([9, 0]))
