"""Fused experts against a loop over tokens and choices in float64."""

import pytest
import torch
import torch.nn.functional as F

from tutti.nn import experts_grouped, experts_loop
from tutti.nn.activation import ACTIVATIONS, activation_of
from tutti.nn.experts import experts

ops = torch.ops.tutti
TOKENS, CHOICES, EXPERTS, HIDDEN, WIDTH = 7, 2, 5, 8, 16
FUNCTIONS = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
}  # fmt: skip


def drawn(halves: int = 2, total: int = EXPERTS, dtype=torch.float64):
    """x, index, weight, up and down."""
    torch.manual_seed(0)
    index = torch.rand(TOKENS, total).topk(CHOICES).indices
    shapes = (TOKENS, HIDDEN), (TOKENS, CHOICES), (EXPERTS, halves * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
    x, weight, up, down = (torch.randn(s, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes)
    return x, index, weight, up, down


def by_hand(x, index, weight, up, down, activation="silu", first=0):
    """The docstring's formula."""
    rows = []
    for t in range(len(x)):
        y = torch.zeros_like(x[t])
        for j, e in enumerate((index[t] - first).tolist()):
            if 0 <= e < len(up):
                made = up[e] @ x[t]
                gate, rest = made[:WIDTH], made[WIDTH:]
                a = FUNCTIONS[activation](gate) * (rest if len(rest) else 1)
                y = y + weight[t, j] * (down[e] @ a)
        rows.append(y)
    return torch.stack(rows)


def learned(x, index, weight, up, down):
    return x, weight, up, down


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_and_gradients(halves, activation):
    operands = drawn(halves)
    ours, expected = experts(*operands, activation), by_hand(*operands, activation)
    torch.testing.assert_close(ours, expected)
    grad = torch.randn_like(ours)
    for a, b in zip(*(torch.autograd.grad(y, learned(*operands), grad) for y in (ours, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_gradcheck():
    x, index, weight, up, down = drawn()
    assert torch.autograd.gradcheck(lambda x, w, u, d: experts(x, index, w, u, d), (x, weight, up, down))


def test_experts_without_tokens_have_no_gradient():
    x, _, weight, up, down = drawn()
    index = torch.tensor([[1, 3]]).expand(TOKENS, CHOICES)
    experts(x, index, weight, up, down).sum().backward()
    assert [bool(g.any()) for g in up.grad] == [bool(g.any()) for g in down.grad] == [False, True, False, True, False]


@pytest.mark.parametrize("first", [0, 2, 4])
def test_tokens_of_experts_that_are_elsewhere_add_nothing(first):
    operands = drawn(total=9)
    y = ops.experts(*operands, "silu", first, 9)
    expected = by_hand(*operands, first=first)
    torch.testing.assert_close(y, expected)
    grad = torch.randn_like(y)
    wanted = torch.autograd.grad(expected, learned(*operands), grad)
    for found in (
        torch.autograd.grad(y, learned(*operands), grad),
        torch.autograd.grad(ops.experts_training(*operands, "silu", first, 9)[0], learned(*operands), grad),
    ):
        torch.testing.assert_close(found, wanted)


def test_rows_are_kept_for_the_experts_that_are_here():
    x, index, *rest = drawn(total=9)
    _, rows = ops.experts_training(x, index, *rest, "silu", 2, 9)
    assert rows.shape == (int(((index >= 2) & (index < 7)).sum()), 2 * WIDTH)


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("halves", [1, 2])
def test_grouped_products_give_what_the_loop_gives(halves, first):
    """They are for a GPU; PyTorch has them on a CPU too."""
    x, index, weight, up, down = (t.detach() for t in drawn(halves, 9, torch.bfloat16))
    arguments = (x, index, weight.float(), up, down, "silu", first, 9)
    y, rows = experts_loop.forward(*arguments, keep=True)
    theirs, more = experts_grouped.forward(*arguments, keep=True)
    torch.testing.assert_close(theirs, y)
    torch.testing.assert_close(more, rows)
    assert len(more) == len(rows), "those of other experts are left out"
    found = experts_grouped.backward(torch.ones_like(x), *arguments, more)
    torch.testing.assert_close(found, experts_loop.backward(torch.ones_like(x), *arguments, rows), rtol=0.02, atol=0.02)


def test_grouped_products_without_a_local_token():
    x, index, weight, up, down = (t.detach() for t in drawn(2, 9, torch.bfloat16))
    arguments = (x, index * 0, weight.float(), up, down, "silu", 4, 9)
    y, rows = experts_grouped.forward(*arguments, keep=True)
    assert not y.any() and not len(rows)
    assert not any(g.any() for g in experts_grouped.backward(torch.ones_like(x), *arguments, rows))


def test_bfloat16_sums_in_float32_and_keeps_the_dtypes():
    x, index, weight, up, down = drawn(dtype=torch.bfloat16)
    weight = weight.detach().float().requires_grad_()
    y = experts(x, index, weight, up, down)
    expected = by_hand(*(t.double() if t.is_floating_point() else t for t in (x, index, weight, up, down)))
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), expected, rtol=0.03, atol=0.03 * expected.abs().max().item())
    y.sum().backward()
    assert [t.grad.dtype for t in (x, weight, up, down)] == [t.dtype for t in (x, weight, up, down)]


def test_autocast():
    operands = drawn(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = experts(*operands)
    x, index, weight, up, down = operands
    assert y.dtype == torch.float32
    assert torch.equal(y, experts(x.bfloat16(), index, weight, up.bfloat16(), down.bfloat16()).float())


def test_schemas_and_fakes_agree_with_the_kernels():
    operands = drawn()
    for name in ("experts", "experts_training"):
        torch.library.opcheck(getattr(ops, name), (*operands, "silu", 0, EXPERTS))
    plain = [t.detach() for t in operands]
    _, rows = ops.experts_training(*plain, "silu", 0, EXPERTS)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.experts_backward, (plain[0], *plain, "silu", 0, EXPERTS), test_utils=checks)
    torch.library.opcheck(ops.experts_backward_kept, (plain[0], *plain, "silu", 0, EXPERTS, rows), test_utils=checks)


def test_errors_say_what_does_not_fit():
    x, index, weight, up, down = drawn()
    with pytest.raises(IndexError, match="index 5 is out of range; there are 5 experts"):
        experts(x, index * 0 + 5, weight, up, down)
    with pytest.raises(ValueError, match=r"up \(5, 31, 8\) and down \(5, 8, 16\) do not fit"):
        experts(x, index, weight, up[:, 1:], down)
    with pytest.raises(ValueError, match=r"tokens \(T, 8\) with index and weight \(T, k\), found \(7, 8\), \(6, 2\)"):
        experts(x, index[1:], weight, up, down)
    with pytest.raises(ValueError, match="unknown activation 'swish'; expected one of silu, gelu"):
        activation_of("swish")
