"""The router's choices, losses and bias, against their formulas."""

import pytest
import torch

from tutti.nn.experts.router import Router

HIDDEN, EXPERTS, TOKENS = 8, 6, 64


def routed(**options):
    torch.manual_seed(0)
    router = Router(HIDDEN, EXPERTS, 2, **options)
    x = torch.randn(4, TOKENS // 4, HIDDEN)
    return router, x, (x @ router.weight.float().T).flatten(0, 1), router(x)


def test_the_largest_scores_are_chosen_and_normalized():
    _, _, logits, routing = routed()
    scores, index = logits.softmax(-1).topk(2)
    assert torch.equal(routing.index.flatten(0, 1), index)
    torch.testing.assert_close(routing.weight.flatten(0, 1), scores / scores.sum(1, keepdim=True))
    *_, routing = routed(normalize=False)
    torch.testing.assert_close(routing.weight.flatten(0, 1), scores)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_losses(scores):
    _, _, logits, routing = routed(scores=scores)
    p = logits.softmax(1) if scores == "softmax" else logits.sigmoid() / logits.sigmoid().sum(1, keepdim=True)
    f = torch.stack([(routing.index == e).sum() for e in range(EXPERTS)])
    assert torch.equal(routing.load, f.float())
    torch.testing.assert_close(routing.balance, EXPERTS * (f / (2 * TOKENS) * p.mean(0)).sum())
    torch.testing.assert_close(routing.z, logits.exp().sum(1).log().square().mean())


def skewed(**options):
    """A router that favours expert 0, and 1024 tokens."""
    router, *_ = routed(**options)
    with torch.no_grad():
        router.weight.normal_(std=0.5)
        router.weight[0] += 0.5
        if router.bias is not None:
            router.bias.zero_()
    return router, torch.randn(8, 128, HIDDEN) + 0.5


def test_a_skewed_router_costs_more_and_its_gradient_evens_it():
    router, x = skewed()
    before = router(x)
    for _ in range(100):
        (grad,) = torch.autograd.grad(router(x).balance, router.weight)
        with torch.no_grad():
            router.weight -= 0.5 * grad
    after = router(x)
    assert before.balance > 1.5 > 1.1 > after.balance
    assert before.load.max() > 2 * before.load.mean() and after.load.max() < 1.2 * after.load.mean()


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_the_bias_balances_without_a_loss(scores):
    router, x = skewed(scores=scores, bias_update=0.002)
    first = router(x)
    assert torch.equal(router.bias, 0.002 * (first.load.mean() - first.load).sign())
    for _ in range(500):
        last = router(x)
    assert first.load.max() > 2 * first.load.mean() and last.load.max() < 1.3 * last.load.mean()
    logits = x @ router.weight.T
    chosen = (logits.softmax(-1) if scores == "softmax" else logits.sigmoid()).gather(-1, last.index)
    torch.testing.assert_close(last.weight, chosen / chosen.sum(-1, keepdim=True))  # the bias weighs nothing


def test_the_bias_stays_in_evaluation():
    router, x, _, _ = routed(bias_update=0.01)
    before = router.eval().bias.clone()
    router(x)
    assert torch.equal(router.bias, before)


def test_it_computes_in_float32():
    router, x, *_ = routed(dtype=torch.bfloat16)
    logits = x.bfloat16().float() @ router.weight.float().T
    with torch.autocast("cpu", torch.bfloat16):
        routing = router(x.bfloat16())
    assert torch.equal(routing.index, logits.topk(2).indices) and routing.weight.dtype == torch.float32


def test_errors():
    with pytest.raises(ValueError, match="unknown scores 'tanh'; expected one of softmax, sigmoid"):
        Router(8, 4, 2, scores="tanh")
    with pytest.raises(ValueError, match="top_k=5 of 4 experts: it must be 1 to 4"):
        Router(8, 4, 5)
