"""Simplification removes nodes and changes no number."""

import pytest
import torch
from torch import fx

import tutti
from tutti import compat
from tutti.tracing.rewrite.like_operators import make_without_operands
from tutti.tracing.rewrite.remove_redundant import simplify
from tutti.tracing.trace.trace import trace

aten = torch.ops.aten


def simplified(function, *inputs, phase="forward"):
    """The operators that are left. Their results are those of the function."""
    with compat.fake_mode():
        graph = trace(function, *(torch.empty_like(x, device="cpu") for x in inputs)).graph
    for i, node in enumerate(graph.nodes):
        node.meta |= {"phase": phase, "path": "model.layers.0.a" if i % 2 else "model.layers.0.b"}
    make_without_operands(graph, torch.device("cpu"))
    simplify(graph)
    module = fx.GraphModule({}, graph)
    for expected, actual in zip(function(*inputs), module(*inputs), strict=True):
        assert torch.equal(expected, actual)
    return [node for node in graph.nodes if node.op == "call_function"]


def test_identities_vanish():
    x = torch.randn(4, 6)
    left = simplified(lambda x: (x.detach().clone().view(4, 6).expand(4, 6).to(torch.float32)[0:4] + 1,), x)
    assert [node.target for node in left] == [aten.add.Tensor]


def test_every_kind_of_view_becomes_a_reshape():
    left = simplified(lambda x: (x.view(2, 12) * 2, x.reshape(24) * 3), torch.randn(4, 6))
    assert [node.target for node in left if node.target != aten.mul.Tensor] == [aten.reshape.default] * 2


def test_an_empty_part_of_a_concatenation_is_dropped():
    left = simplified(lambda x: (torch.cat([torch.empty(0), x]) + 1,), torch.randn(4))
    assert [node.target for node in left] == [aten.add.Tensor]


def test_a_slice_without_elements_and_its_gradient_vanish():
    """As rotary embeddings of a part of each head (Phi, GPT-NeoX, StableLM) where the part is all of it."""

    def rotated(x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = torch.cat((x[..., :4].sin(), x[..., 4:]), dim=-1)
            return y, torch.autograd.grad(y, x, torch.ones_like(y))[0]

    left = simplified(rotated, torch.randn(3, 4), phase="backward")
    assert all(0 not in node.meta["val"].shape for node in left)
    assert not {aten.cat.default, aten.slice.Tensor, aten.slice_backward.default} & {node.target for node in left}


@pytest.mark.parametrize(
    "x", [torch.randn(4), torch.randn(2, 3).bfloat16(), torch.randn(0, 3)], ids=("1-d", "2-d", "empty")
)
def test_an_empty_part_decides_the_dtype_of_a_concatenation(x):
    left = simplified(lambda x: (torch.cat((x, x[:0].double(), torch.empty(0)), 0) * 2,), x)
    assert (aten.cat.default in [node.target for node in left]) == (not x.numel())


def test_zeros_are_added_in_the_forward_pass():
    """The sum of -0.0 and 0.0 is 0.0."""
    negative = torch.full((3,), -0.0)
    simplified(lambda x: (torch.copysign(torch.ones_like(x), x + torch.zeros_like(x)),), negative)


def test_equal_subexpressions_are_computed_once_and_belong_to_what_holds_both():
    left = simplified(lambda x: (x.sin() + 1, x.cos(), x.sin() * 2), torch.randn(4))
    (sine,) = (node for node in left if node.target == aten.sin.default)
    assert sine.meta["path"] == "model.layers.0"


def test_a_conversion_stays():
    left = simplified(lambda x: (x.to(torch.float64),), torch.randn(4))
    assert [node.target for node in left] == [aten._to_copy.default]


def test_what_returns_nothing_is_dropped():
    """`torch.linalg.solve` asks whether the matrix is singular by an operator without outputs."""

    def solved(x):
        return (torch.linalg.solve(x @ x.T + torch.eye(4), x),)

    left = simplified(solved, torch.randn(4, 6))
    assert aten._linalg_solve_ex.default in [node.target for node in left]
    assert aten._linalg_check_errors.default not in [node.target for node in left]


def test_slices_that_fill_an_empty_tensor_are_a_concatenation():
    def filled(x, y):
        z = torch.slice_scatter(x.new_empty(4, 5), aten.copy(x.new_empty(4, 3), x), 1, 0, 3)
        return (torch.slice_scatter(z, y, 1, 3) * 2,)

    left = simplified(filled, torch.randn(4, 3), torch.randn(4, 2))
    assert [node.target for node in left] == [aten.cat.default, aten.mul.Tensor]


def test_slices_that_overlap_are_assigned_one_by_one():
    def overlapping(x, y):
        return (torch.slice_scatter(torch.slice_scatter(x.new_empty(4, 5), x, 1, 0, 3), y, 1, 2),)

    def again(x, y):
        z = torch.slice_scatter(x.new_empty(4, 6), x, 1, 3, 6)
        for piece, stop in ((y, 3), (torch.cat([x, y], 1), 6), (x, 3)):
            z = torch.slice_scatter(z, piece, 1, 0, stop)
        return (z,)

    simplified(again, torch.randn(4, 3), torch.randn(4, 3))
    left = simplified(overlapping, torch.randn(4, 3), torch.randn(4, 3))
    assert [node.target for node in left].count(aten.slice_scatter.default) == 2


def test_slices_of_what_an_assignment_wrote_or_left():
    def partial(x, y):
        z = torch.slice_scatter(x * 2, y, 1, 0, 3)
        return z[:, 3:], z[:, :3] + 1, z[:, 2:4]

    left = simplified(partial, torch.randn(4, 5), torch.randn(4, 3))
    assert [node.target for node in left].count(aten.slice_scatter.default) == 1, "for the slice over both"
    (whole,) = (node for node in left if node.target is aten.slice_scatter.default)
    assert len(whole.users) == 1


def test_a_piece_of_a_concatenation_is_the_part_only_in_its_dtype():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).bfloat16()

        def forward(self, x):
            one, two = torch.cat([self.a(x), self.b(x.bfloat16())], -1).split([4, 4], -1)
            return one.square().mean() + (two * 1.001).square().mean()

    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, 4)
    step = tutti.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), (x,), loss=lambda m, b: m(*b),
                             cluster="cpu:1", plan="single", level="O0")  # fmt: skip
    loss = Model.forward(model, x).item()
    assert step((x,)).item() == loss
