"""Elementwise operators take the memory of what dies with them, and leave alone what somebody still reads."""

import operator
from dataclasses import replace

import pytest
import torch
from torch import fx

import models
import tutti
from cases import slow
from tutti.analysis.passes import LEVELS
from tutti.ir.spec import Spec
from tutti.lower.collectives import all_reduce, wait
from tutti.lower.memory.reuse_operands import DIM, INTO, PLACE, write_over

aten = torch.ops.aten
SHAPE = (5, 7)


def graph_of(build):
    """A graph with two inputs of SHAPE; build(call, a, b) returns what it puts out."""
    graph = fx.Graph()

    def placeholder(name):
        node = graph.placeholder(name)
        node.meta["val"] = Spec(SHAPE, torch.float32)
        return node

    def call(target, *args, shape=SHAPE):
        node = graph.call_function(target, args)
        node.meta["val"] = Spec(shape, torch.float32)
        return node

    graph.output(build(call, placeholder("a"), placeholder("b")))
    write_over(graph)
    graph.lint()
    return graph


def written(graph):
    """The calls that write into what was there, and where."""
    return [(n.target, n.kwargs[PLACE[n.target]]) for n in graph.nodes if n.target in PLACE]


def test_a_chain_runs_in_one_memory():
    def build(call, a, b):
        return call(aten.tanh.default, call(aten.mul.Tensor, call(aten.add.Tensor, a, b), b))

    graph = graph_of(build)
    assert [target for target, _ in written(graph)] == [aten.mul.out, aten.tanh.out], "inputs are not written into"
    a, b = torch.randn(SHAPE), torch.randn(SHAPE)
    assert torch.equal(fx.GraphModule({}, graph)(a, b), torch.tanh((a + b) * b))


def test_the_second_operand_may_go():
    graph = graph_of(lambda call, a, b: call(aten.sub.Tensor, a, call(aten.neg.default, b)))
    ((target, place),) = written(graph)
    assert target is aten.sub.out and place.target is aten.neg.default


NOT_REUSED = {
    "read later": lambda call, a, b: (call(aten.tanh.default, x := call(aten.add.Tensor, a, b)), x),
    "looked at later": lambda call, a, b: (
        x := call(aten.add.Tensor, a, b),
        v := call(aten.t.default, x, shape=SHAPE[::-1]),
        call(aten.tanh.default, x),
        v,
    )[2:],
    "read twice in other ways": lambda call, a, b: call(
        aten.add.Tensor, x := call(aten.add.Tensor, a, b), call(aten.reshape.default, x, list(SHAPE))
    ),
    "in part": lambda call, a, b: call(
        aten.tanh.default,
        call(aten.slice.Tensor, call(aten.add.Tensor, a, b), 0, 0, 2, shape=(2, 7)),
        shape=(2, 7),
    ),
    "sent": lambda call, a, b: (
        x := call(aten.add.Tensor, a, b),
        y := call(all_reduce, x, "dp", "sum"),
        call(aten.tanh.default, x),
        y,
    )[2:],
    "made by who knows what": lambda call, a, b: call(aten.tanh.default, call(aten.contiguous.default, a)),
}


@pytest.mark.parametrize("why", NOT_REUSED)
def test_what_is_needed_is_kept(why):
    assert not written(graph_of(NOT_REUSED[why]))


def test_what_is_copied_is_made_where_it_goes():
    def build(call, a, b):
        new = call(aten.add.Tensor, a, b)
        return call(aten.copy_.default, a, new), call(aten.neg.default, new)

    graph = graph_of(build)
    (_, place) = written(graph)[0]
    assert len(written(graph)) == 1, "what lies in the input now is not written over"
    assert place.op == "placeholder" and aten.copy_.default not in [n.target for n in graph.nodes]
    a, b = torch.randn(SHAPE), torch.randn(SHAPE)
    expected = a + b
    new, negative = fx.GraphModule({}, graph)(a, b)
    assert torch.equal(a, expected) and torch.equal(negative, -expected) and new is a


def test_a_place_is_not_written_before_a_piece_of_its_split_is_read():
    def build(call, a, b):
        pieces = call(aten.split.Tensor, a, 2)
        piece = call(operator.getitem, pieces, 0, shape=(2, 7))
        new = call(aten.add.Tensor, a, b)
        return call(aten.neg.default, piece, shape=(2, 7)), call(aten.copy_.default, a, new)

    a, b = torch.randn(SHAPE), torch.randn(SHAPE)
    expected = -a[:2]
    assert torch.equal(fx.GraphModule({}, graph_of(build))(a, b)[0], expected)


def test_a_view_of_a_number_looks_at_nothing():
    """As the conjugate that autograd takes of a Python number."""

    def build(call, a, b):
        return call(aten.tanh.default, call(aten.mul.Tensor, a, call(aten._conj.default, 1j, shape=())))

    assert [target for target, _ in written(graph_of(build))] == [aten.tanh.out]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", DIM, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (8, 4, 33), (2, 3, 1000), (1, 40000)])
def test_softmaxes_in_place_give_the_same_bits(target, shape, dtype):
    operands = [torch.randn(shape, dtype=dtype) for _ in range(2 if DIM[target] == 2 else 1)]
    rest = (len(shape) - 1, dtype if DIM[target] == 2 else False)
    if DIM[target] == 2:
        operands[1] = torch.log_softmax(operands[1], -1) if "log" in str(target) else torch.softmax(operands[1], -1)
    expected = target(*operands, *rest)
    into, name = INTO[target]
    into(*operands, *rest, **{name: operands[0]})
    assert torch.equal(operands[0], expected)


@pytest.mark.parametrize(
    "operand_of",
    [
        lambda call, a: call(aten.t.default, call(aten.mm.default, a, a)),
        lambda call, a: call(aten.add.Tensor, call(aten.t.default, call(aten.mm.default, a, a)), 1.0),
        lambda call, a: call(aten.mm.default, a, a),
    ],
    ids=["turned", "made of what is turned", "contiguous"],
)
def test_softmaxes_write_where_memory_is_contiguous(operand_of):
    graph = fx.Graph()
    a = graph.placeholder("a")
    a.meta["val"] = Spec((6, 6), torch.float32)

    def call(target, *args):
        node = graph.call_function(target, args)
        node.meta["val"] = Spec((6, 6), torch.float32)
        return node

    graph.output(call(aten._log_softmax.default, operand_of(call, a), 1, False))
    x = torch.randn(6, 6)
    expected = fx.GraphModule({}, graph)(x)
    write_over(graph)
    assert torch.equal(fx.GraphModule({}, graph)(x), expected)


def test_softmaxes_over_other_dims_are_left_alone():
    def build(call, a, b):
        return call(aten._softmax.default, call(aten.add.Tensor, a, b), 0, False)

    assert not written(graph_of(build))


@pytest.mark.parametrize("name", ["llama", slow("resnet"), slow("mixtral")])
def test_steps_give_the_same_bits(name, monkeypatch):
    """With and without this pass."""

    def losses():
        model, batch, loss = models.case(name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = tutti.parallelize(model, optimizer, batch, loss=loss, cluster="cpu:2", plan="zero1", level="O0")
        written = [step(batch).item() for _ in range(3)], step.state_dict()
        return written, sum(n.target in PLACE for n in step.program.graph.nodes)

    (ours, state), count = losses()
    monkeypatch.setitem(LEVELS, "O0", replace(LEVELS["O0"], after=()))
    (theirs, expected), none = losses()
    assert count > 10 and none == 0 and ours == theirs
    assert all(torch.equal(state[name], expected[name]) for name in expected)


class Looked(torch.nn.Module):
    """A value is read through a view after an operator that could take its memory."""

    def __init__(self, view):
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.view = torch.nn.Parameter(torch.randn(6, 6) * 0.3), view

    def forward(self, x):
        y = x @ self.weight
        v = self.view(y)
        z = torch.tanh(y)
        return (z * 0.5).sum() + (v * v * v).sum()


@pytest.mark.parametrize("view", [
    lambda y: y.squeeze(), lambda y: y.diagonal(dim1=0, dim2=2), lambda y: y.unfold(2, 2, 2), lambda y: y.reshape(-1),
    lambda y: torch.view_as_complex(y.reshape(8, 3, 2)).real, lambda y: y.contiguous().mT,
    lambda y: torch.nn.functional.group_norm(y, 1), lambda y: torch.softmax(y.chunk(2, -1)[1], -1),
    lambda y: torch.nn.functional.scaled_dot_product_attention(y[None], y[None], y[None]),
], ids=["squeeze", "diagonal", "unfold", "reshape", "complex", "contiguous", "norm", "chunk", "attention"])  # fmt: skip
def test_whoever_looks_at_a_memory_keeps_it(view):
    model, x = Looked(view), torch.randn(8, 1, 6)
    expected = model(x)
    (gradient,) = torch.autograd.grad(expected, [model.weight])
    weight = model.weight.detach() - 0.1 * gradient
    step = tutti.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), (x,), plan="single", level="O0",
                             cluster="cpu:1")  # fmt: skip
    loss = step((x,))
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(step.state_dict()["weight"], weight)


def test_a_piece_of_a_split_is_no_place_for_a_softmax():
    class Halves(torch.nn.Linear):
        def forward(self, x):
            a, b = super().forward(x).chunk(2, -1)
            return torch.tanh(a).sum() + (torch.softmax(b, -1) ** 2).sum()

    torch.manual_seed(0)
    model, x = Halves(6, 8), torch.randn(16, 6)
    step = tutti.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), (x,), plan="single", level="O0",
                             cluster="cpu:1")  # fmt: skip
    loss = model(x).detach()
    torch.testing.assert_close(step((x,)), loss)


def test_what_is_being_sent_is_not_written_into():
    """A place is made into only behind the end of whatever may still read it."""
    graph = fx.Graph()
    place, other = graph.placeholder("place"), graph.placeholder("other")
    sent = graph.call_function(all_reduce, (place, "dp", "sum"))
    difference = graph.call_function(aten.sub.Tensor, (other, other))
    over = graph.call_function(wait, (sent,))
    copy = graph.call_function(aten.copy_.default, (place, difference))
    graph.output((over, copy))
    for node in (place, other, sent, difference, over, copy):
        node.meta["val"] = Spec(SHAPE, torch.float32)
    write_over(graph)
    assert not written(graph)
