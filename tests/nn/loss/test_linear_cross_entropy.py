"""Linear layer and cross-entropy in blocks, against the two of them in plain torch."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

import tutti
import zoo
from tutti.nn.loss import linear_cross_entropy as module
from tutti.nn.loss.linear_cross_entropy import linear_cross_entropy

ops = torch.ops.tutti
ROWS, HIDDEN, CLASSES = 12, 6, 40


@pytest.fixture(autouse=True, params=[5, CLASSES])
def blocks(monkeypatch, request):
    """Several, the last one smaller, or one; tiles of three rows of a block of classes, and of one row of all."""
    monkeypatch.setattr(module, "FEWEST", request.param)
    monkeypatch.setitem(module.BLOCK, "cpu", 0)
    monkeypatch.setitem(module.TILE, "cpu", 4 * 3 * request.param)


def drawn(dtype=torch.float64, biased=True):
    """hidden, weight, bias; labels, some of them ignored."""
    torch.manual_seed(0)
    shapes = [(ROWS, HIDDEN), (CLASSES, HIDDEN), *([(CLASSES,)] if biased else [])]
    tensors = [torch.randn(s, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]
    labels = torch.randint(0, CLASSES, (ROWS,))
    labels[::5] = -100
    return *tensors, *([] if biased else [None]), labels


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_float64(reduction, biased):
    hidden, weight, bias, labels = drawn(biased=biased)
    ours = linear_cross_entropy(hidden, weight, labels, bias, reduction=reduction)
    expected = F.cross_entropy(F.linear(hidden, weight, bias), labels, reduction=reduction)
    torch.testing.assert_close(ours, expected)
    grad = torch.randn_like(ours)
    learned = [x for x in (hidden, weight, bias) if x is not None]
    torch.testing.assert_close(*(torch.autograd.grad(y, learned, grad) for y in (ours, expected)))


def test_gradcheck():
    hidden, weight, bias, labels = drawn()
    assert torch.autograd.gradcheck(
        lambda *tensors: ops.linear_logsumexp(*tensors, labels.clamp(min=-1)), (hidden, weight, bias)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_logits_are_widened(dtype):
    """As transformers does it: logits in the model's dtype, all that follows in float32."""
    hidden, weight, bias, labels = drawn(dtype)
    ours = linear_cross_entropy(hidden, weight, labels, bias)
    expected = F.cross_entropy(F.linear(hidden, weight, bias).float(), labels)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
    for a, b in zip(*(torch.autograd.grad(y, (hidden, weight, bias)) for y in (ours, expected)), strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a, b, **({"rtol": 0.02, "atol": 1e-3} if dtype == torch.bfloat16 else {}))


def test_only_what_learns_has_a_gradient():
    hidden, weight, bias, labels = (x.detach() for x in drawn())
    lse, _ = ops.linear_logsumexp(hidden, weight, bias, labels)
    gradients = ops.linear_logsumexp_backward(lse, lse, hidden, weight, bias, labels, lse, [False, True, False])
    assert [x is None for x in gradients] == [True, False, True]


@pytest.mark.parametrize("wanted", [[True, True, True], [False, True, False], [True, False, False]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_with_gradients_is_both_in_one(dtype, wanted, monkeypatch):
    """In blocks of 5, 5 and 2 rows."""
    monkeypatch.setattr(module, "FEWEST", 5)
    hidden, weight, bias, labels = (x.detach() for x in drawn(dtype))
    lse, picked = ops.linear_logsumexp(hidden, weight, bias, labels)
    gradients = torch.randn_like(lse), torch.randn_like(lse)
    expected = ops.linear_logsumexp_backward(*gradients, hidden, weight, bias, labels, lse, wanted)
    fused = ops.linear_logsumexp_with_gradients(*gradients, hidden, weight, bias, labels, wanted)
    near = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(fused, (lse, picked, *expected), **near)


compiles = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")


@compiles
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_give_the_same(dtype, biased):
    hidden, weight, bias, labels = drawn(dtype, biased)
    operands = *(None if x is None else x.detach() for x in (hidden, weight, bias)), labels
    slopes = torch.randn(1).expand(ROWS), torch.randn(ROWS, 2)[:, 0]  # of any strides
    near = {"rtol": 0.01, "atol": 0.01} if dtype == torch.bfloat16 else {}
    wanted = [True, True, biased]
    plain, compiled = (
        (
            *(forward := ops.linear_logsumexp(*operands, compiled=how)),
            *ops.linear_logsumexp_backward(*slopes, *operands, forward[0], wanted, compiled=how),
            *ops.linear_logsumexp_with_gradients(*slopes, *operands, wanted, compiled=how),
        )
        for how in (False, True)
    )
    torch.testing.assert_close(compiled[:2], plain[:2], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(compiled, plain, **near)


@compiles
def test_kernels_sum_many_classes_exactly(monkeypatch):
    """In one block, a sum in float32 would lose of what each adds."""
    monkeypatch.setattr(module, "FEWEST", 1 << 20)
    torch.manual_seed(0)
    hidden, weight, labels = torch.ones(2, 1), torch.randn(100_003, 1) / 100, torch.tensor([5, 100_002])
    lse, picked = ops.linear_logsumexp(hidden, weight, None, labels, compiled=True)
    torch.testing.assert_close(lse.double(), weight.double().logsumexp(0).expand(2), rtol=1e-7, atol=0)
    assert torch.equal(picked, weight[labels, 0])


@compiles
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_kernels_tell_of_what_is_not_finite(value):
    hidden, weight, _, labels = drawn(torch.float32, biased=False)
    operands = hidden.detach().clone(), weight.detach(), None, labels
    operands[0][3] = value
    slopes = torch.ones(ROWS), torch.ones(ROWS)
    plain, compiled = (
        ops.linear_logsumexp_with_gradients(*slopes, *operands, [True, True, False], compiled=how)
        for how in (False, True)
    )
    torch.testing.assert_close(compiled[0], plain[0], equal_nan=True)
    assert torch.equal(compiled[2].isfinite(), plain[2].isfinite())


@compiles
def test_kernels_take_what_lies_otherwise():
    hidden, weight, _, labels = drawn(torch.bfloat16, biased=False)
    operands = hidden.detach(), weight.detach(), None, labels
    lse = ops.linear_logsumexp(*operands)[0]
    slopes = torch.randn(2, ROWS)
    wanted = [True, True, False]
    expected = ops.linear_logsumexp_backward(*slopes, *operands, lse, wanted)
    apart = torch.stack([lse, lse + 1], 1)[:, 0]
    gradients = ops.linear_logsumexp_backward(*slopes.bfloat16(), *operands, apart, wanted, compiled=True)
    torch.testing.assert_close(gradients[:2], expected[:2], rtol=0.03, atol=0.03)
    for compiled in (False, True):
        with pytest.raises(ValueError, match=r"labels are torch\.int32"):
            ops.linear_logsumexp(*operands[:3], labels.int(), compiled=compiled)


@compiles
@pytest.mark.starts
def test_a_compiled_step_uses_them():
    model, batch = zoo.llama(1), zoo.tokens(4)
    for level, used in (("O0", False), ("O1", True)):
        step = tutti.parallelize(
            model, torch.optim.SGD(model.parameters(), lr=0.1), batch, cluster="cpu:1", level=level
        )
        step(batch)
        (loss,) = step.program.graph.find_nodes(op="call_function", target=ops.linear_logsumexp_with_gradients.default)
        assert loss.kwargs.get("compiled", False) is used


def test_nothing_of_rows_times_classes_is_kept():
    hidden, weight, bias, labels = drawn()
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        linear_cross_entropy(hidden, weight, labels, bias)
    assert max(sizes) == CLASSES * HIDDEN < ROWS * CLASSES


def test_registration():
    hidden, weight, bias, labels = drawn()
    opcheck(ops.linear_logsumexp.default, (hidden, weight, bias, labels))
    hidden, weight, bias = (x.detach() for x in (hidden, weight, bias))
    lse = ops.linear_logsumexp(hidden, weight, bias, labels)[0]
    wanted = [True, True, False]
    opcheck(ops.linear_logsumexp_backward.default, (lse, lse, hidden, weight, bias, labels, lse, wanted))
    opcheck(ops.linear_logsumexp_with_gradients.default, (lse, lse, hidden, weight, bias, labels, wanted))


def test_errors():
    hidden, weight, bias, labels = drawn()
    with pytest.raises(IndexError, match="a label is out of range: classes are 0 to 39"):
        linear_cross_entropy(hidden, weight, labels.clamp(min=0) + CLASSES - labels.max(), bias)
    with pytest.raises(ValueError, match=r"labels must be integers, not torch\.float32"):
        linear_cross_entropy(hidden, weight, labels.float())
    with pytest.raises(ValueError, match="unknown reduction 'max'"):
        linear_cross_entropy(hidden, weight, labels, reduction="max")
    with pytest.raises(ValueError, match=r"labels \(...\), not \(12, 6\), \(40, 6\) and \(6,\)"):
        linear_cross_entropy(hidden, weight, labels[::2])


def test_labels_that_are_no_class():
    hidden, weight = torch.randn(4, 8), torch.randn(5, 8)
    with pytest.raises(IndexError):
        linear_cross_entropy(hidden, weight, torch.tensor([0, -1, 2, 3]))
    narrow = torch.tensor([0, 1, 2, 3], dtype=torch.uint8)
    expected = F.cross_entropy(hidden @ weight.t(), narrow)
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, narrow), expected)


def test_under_autocast():
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    labels = torch.tensor([0, 1, 2, 3])
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_cross_entropy(hidden, weight, labels)
        theirs = F.cross_entropy(F.linear(hidden, weight).float(), labels)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(*(torch.autograd.grad(loss, (hidden, weight)) for loss in (ours, theirs)), strict=True):
        assert a.dtype == b.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_a_loss_in_float32_whose_backward_pass_is_within_autocast():
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    labels = torch.tensor([0, 1, 2, 3])
    ours = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), (hidden, weight))
    loss = linear_cross_entropy(hidden, weight, labels)
    with torch.autocast("cpu", torch.bfloat16):
        within = torch.autograd.grad(loss, (hidden, weight))
    torch.testing.assert_close(within, ours, rtol=0, atol=0)
