"""Attention between stripes of a sequence, against masks."""

import pytest
import torch
import torch.nn.functional as F

import tutti.nn.attention.striped_attention  # noqa: F401  (registers the operators)

ops = torch.ops.tutti


def drawn(tokens: int, dtype=torch.float64):
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(2, 3, tokens, 8, generator=generator).to(dtype) for _ in range(4)]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_equals_attention_under_a_mask(tokens, strict):
    q, k, v, grad = drawn(tokens)
    scores = torch.ones(tokens, tokens, dtype=torch.bool).tril(-1 if strict else 0)
    out, lse = ops.striped_attention(q, k, v, strict, None)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*leaves, attn_mask=scores)
    expected = torch.where(scores.any(1)[:, None], expected, 0.0)
    torch.testing.assert_close(out, expected.detach())
    assert torch.equal(lse == -torch.inf, (~scores.any(1)).expand_as(lse))
    gradients = ops.striped_attention_backward(grad, q, k, v, out, lse, strict, None)
    wanted = torch.autograd.grad(expected, leaves, grad)
    for ours, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(ours, torch.nan_to_num(theirs), atol=1e-9, rtol=1e-7)


def test_schemas_and_fakes():
    q, k, v, grad = drawn(4, torch.float32)
    checks = ("test_schema", "test_faketensor")
    for strict in (False, True):
        torch.library.opcheck(ops.striped_attention, (q, k, v, strict, 0.3), test_utils=checks)
        out, lse = ops.striped_attention(q, k, v, strict, 0.3)
        arguments = (grad, q, k, v, out, lse, strict, 0.3)
        torch.library.opcheck(ops.striped_attention_backward, arguments, test_utils=checks)
