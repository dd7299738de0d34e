"""Mixtures of few tokens against `tutti::experts`, and bits that do not depend on other tokens."""

import pytest
import torch
from torch import fx
from torch.library import opcheck

from tutti.ir.spec import Spec
from tutti.nn.experts import experts_rows

ops = torch.ops.tutti


def drawn(tokens, dtype, biases=False, activation="silu", first=0, local=6, total=6, k=2):
    torch.manual_seed(0)
    hidden, width = 40, 24
    x, up, down = torch.randn(tokens, hidden), torch.randn(local, 2 * width, hidden), torch.randn(local, hidden, width)
    index = torch.rand(tokens, total).argsort(1)[:, :k]
    bias_tensors = [torch.randn(local, 2 * width), torch.randn(local, hidden)] if biases else [None, None]
    tensors = [t if t is None else t.to(dtype) / 4 for t in (x * 4, up, down, *bias_tensors)]
    return (tensors[0], index, torch.rand(tokens, k), *tensors[1:], activation, first, total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [
    {}, {"biases": True}, {"activation": "gelu"}, {"first": 2, "local": 3}, {"tokens": 40}, {"k": 1}, {"tokens": 0},
], ids=str)  # fmt: skip
@pytest.mark.starts
def test_equals_the_mixture(options, dtype):
    args = drawn(**{"tokens": 5, "dtype": dtype, **options})
    y = ops.experts_rows(*args)
    wide = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    wanted = ops.experts(*wide, "", -1)
    assert y.dtype == dtype and y.shape == wanted.shape
    assert (y - wanted).norm() <= (2e-6 if dtype == torch.float32 else 8e-3) * wanted.norm()


def test_bits_do_not_depend_on_other_tokens():
    args = drawn(40, torch.bfloat16, biases=True)
    whole = ops.experts_rows(*args)
    for rows in (slice(0, 1), slice(7, 20)):
        assert torch.equal(ops.experts_rows(*(a[rows] for a in args[:3]), *args[3:]), whole[rows])


def test_registration():
    opcheck(ops.experts_rows.default, drawn(3, torch.float32))
    opcheck(ops.experts_rows.default, drawn(3, torch.float64))


def test_an_expert_that_does_not_exist():
    x, index, *rest = drawn(3, torch.float32)
    with pytest.raises(IndexError, match="there are 6 experts"):
        ops.experts_rows(x, index + 4, *rest)


@pytest.mark.parametrize("dtype, replaced", [(torch.float32, True), (torch.float64, False)])
def test_which_mixtures_of_a_graph_are_replaced(dtype, replaced):
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = Spec((3, 40), dtype)
    call = graph.call_function(ops.experts.default, (x, *drawn(3, dtype)[1:], "", -1))
    experts_rows.use(graph)
    assert (call.target is ops.experts_rows.default) == replaced
