"""Fused experts against a loop over tokens and choices in float64."""

import pytest
import torch
import torch.nn.functional as F

from tutti.nn.activation import ACTIVATIONS
from tutti.nn.experts import experts_grouped, experts_loop
from tutti.nn.experts.experts import experts
from tutti.nn.experts.gate import gate_of

ops = torch.ops.tutti
TOKENS, CHOICES, EXPERTS, HIDDEN, WIDTH = 7, 2, 5, 8, 16
FUNCTIONS = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
}  # fmt: skip


def drawn(halves: int = 2, total: int = EXPERTS, dtype=torch.float64, biased: bool = False):
    """x, index, weight, up, down and the two biases."""
    torch.manual_seed(0)
    index = torch.rand(TOKENS, total).topk(CHOICES).indices
    shapes = [(TOKENS, HIDDEN), (TOKENS, CHOICES), (EXPERTS, halves * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)]
    shapes += [(EXPERTS, halves * WIDTH), (EXPERTS, HIDDEN)] if biased else []
    x, *more = (torch.randn(s, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes)
    return (x, index, *more) if biased else (x, index, *more, None, None)


def clamped_swiglu(hidden, alpha=1.7, limit=0.5):
    gate, up = hidden[::2].clamp(max=limit), hidden[1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def by_hand(x, index, weight, up, down, up_bias=None, down_bias=None, activation="silu", first=0):
    """The docstring's formula."""
    rows = []
    for t in range(len(x)):
        y = torch.zeros_like(x[t])
        for j, e in enumerate((index[t] - first).tolist()):
            if 0 <= e < len(up):
                hidden = up[e] @ x[t] + (0 if up_bias is None else up_bias[e])
                gate, rest = hidden[:WIDTH], hidden[WIDTH:]
                if activation in FUNCTIONS:
                    a = FUNCTIONS[activation](gate) * (rest if len(rest) else 1)
                else:
                    a = clamped_swiglu(hidden)
                y = y + weight[t, j] * (down[e] @ a + (0 if down_bias is None else down_bias[e]))
        rows.append(y)
    return torch.stack(rows)


def learned(x, index, *rest):
    return [t for t in (x, *rest) if t is not None]


def mixed(x, index, weight, up, down, up_bias, down_bias, activation="silu"):
    return experts(x, index, weight, up, down, activation, up_bias, down_bias)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("activation", "halves"), [*((name, n) for name in ACTIVATIONS for n in (1, 2)), ("clamped_swiglu:1.7:0.5", 2)]
)
def test_values_and_gradients(halves, activation, biased):
    operands = drawn(halves, biased=biased)
    ours, expected = mixed(*operands, activation), by_hand(*operands, activation)
    torch.testing.assert_close(ours, expected)
    grad = torch.randn_like(ours)
    for a, b in zip(*(torch.autograd.grad(y, learned(*operands), grad) for y in (ours, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_gradcheck():
    x, index, *rest = drawn(biased=True)
    assert torch.autograd.gradcheck(lambda x, *rest: mixed(x, index, *rest), (x, *rest))


def test_experts_without_tokens_have_no_gradient():
    x, _, weight, *matrices = drawn(biased=True)
    index = torch.tensor([[1, 3]]).expand(TOKENS, CHOICES)
    mixed(x, index, weight, *matrices).sum().backward()
    for t in matrices:
        assert [bool(g.any()) for g in t.grad] == [False, True, False, True, False]


@pytest.mark.parametrize("first", [0, 2, 4])
def test_tokens_of_experts_that_are_elsewhere_add_nothing(first):
    operands = drawn(total=9, biased=True)
    y = ops.experts(*operands, "silu", first, 9, "", -1)
    expected = by_hand(*operands, first=first)
    torch.testing.assert_close(y, expected)
    grad = torch.randn_like(y)
    wanted = torch.autograd.grad(expected, learned(*operands), grad)
    for gradients in (
        torch.autograd.grad(y, learned(*operands), grad),
        torch.autograd.grad(ops.experts_training(*operands, "silu", first, 9, "", -1)[0], learned(*operands), grad),
    ):
        torch.testing.assert_close(gradients, wanted)


def test_rows_are_kept_for_the_experts_that_are_here():
    x, index, *rest = drawn(total=9)
    _, rows = ops.experts_training(x, index, *rest, "silu", 2, 9, "", -1)
    assert rows.shape == (int(((index >= 2) & (index < 7)).sum()), 2 * WIDTH)


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize(("halves", "biased"), [(1, False), (2, False), (2, True)])
def test_grouped_products_give_what_the_loop_gives(halves, biased, first):
    """They are for a GPU; PyTorch has them on a CPU too."""
    x, index, weight, *matrices = (t if t is None else t.detach() for t in drawn(halves, 9, torch.bfloat16, biased))
    activation = "clamped_swiglu:1.7:0.5" if biased else "silu"
    arguments = (x, index, weight.float(), *matrices, activation, first, 9, "", -1)
    y, rows = experts_loop.forward(*arguments, keep=True)
    theirs, more = experts_grouped.forward(*arguments, keep=True)
    close = {"rtol": 0.02, "atol": 0.02} if biased else {}  # the bias is added to a rounded product
    torch.testing.assert_close(theirs, y, **close)
    torch.testing.assert_close(more, rows, **close)
    assert len(more) == len(rows), "those of other experts are left out"
    gradients = experts_grouped.backward(torch.ones_like(x), *arguments, more)
    torch.testing.assert_close(
        gradients, experts_loop.backward(torch.ones_like(x), *arguments, rows), rtol=0.02, atol=0.02
    )


def test_grouped_products_without_a_local_token():
    x, index, weight, *matrices = (t.detach() for t in drawn(2, 9, torch.bfloat16, biased=True))
    arguments = (x, index * 0, weight.float(), *matrices, "silu", 4, 9, "", -1)
    y, rows = experts_grouped.forward(*arguments, keep=True)
    assert not y.any() and not len(rows)
    assert not any(g.any() for g in experts_grouped.backward(torch.ones_like(x), *arguments, rows))


def test_bfloat16_sums_in_float32_and_keeps_the_dtypes():
    x, index, weight, up, down, *_ = drawn(dtype=torch.bfloat16)
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
        y = mixed(*operands)
    x, index, weight, up, down, *_ = operands
    assert y.dtype == torch.float32
    assert torch.equal(y, experts(x.bfloat16(), index, weight, up.bfloat16(), down.bfloat16()).float())


@pytest.mark.parametrize("biased", [False, True])
def test_schemas_and_fakes_agree_with_the_kernels(biased):
    operands = drawn(biased=biased)
    for name in ("experts", "experts_training"):
        torch.library.opcheck(getattr(ops, name), (*operands, "silu", 0, EXPERTS, "", -1))
    plain = [t if t is None else t.detach() for t in operands]
    _, rows = ops.experts_training(*plain, "silu", 0, EXPERTS, "", -1)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.experts_backward, (plain[0], *plain, "silu", 0, EXPERTS, "", -1), test_utils=checks)
    torch.library.opcheck(
        ops.experts_backward_kept, (plain[0], *plain, "silu", 0, EXPERTS, "", -1, rows), test_utils=checks
    )


def test_errors_say_what_does_not_fit():
    x, index, weight, up, down, *_ = drawn()
    with pytest.raises(IndexError, match="index 5 is out of range; there are 5 experts"):
        experts(x, index * 0 + 5, weight, up, down)
    with pytest.raises(ValueError, match=r"up \(5, 31, 8\) and down \(5, 8, 16\) do not fit"):
        experts(x, index, weight, up[:, 1:], down)
    with pytest.raises(ValueError, match=r"tokens \(T, 8\) with index and weight \(T, k\), found \(7, 8\), \(6, 2\)"):
        experts(x, index[1:], weight, up, down)
    with pytest.raises(ValueError, match=r"both biases, \(5, 32\) and \(5, 8\), or neither; found None and \(5, 9\)"):
        experts(x, index, weight, up, down, down_bias=x.new_zeros(5, 9))
    with pytest.raises(ValueError, match=r"'clamped_swiglu:1.7:7' needs gate and up, but up \(5, 16, 8\) has no gate"):
        experts(x, index, weight, up[:, :16], down, "clamped_swiglu:1.7:7")
    with pytest.raises(ValueError, match="unknown activation 'swish'; expected one of silu, gelu"):
        gate_of("swish")
