"""Averaged weights and centralized gradients, in plain steps and in captured ones."""

from __future__ import annotations

import pytest
import torch

import tutti
from optim_cases import MLP, assert_equal, batches, captured
from tutti.tracing.optimizers.marks import centralized

STEPS = 8
MAKERS = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    "Lion": lambda m: tutti.optim.Lion(m.parameters(), lr=1e-3),
}


def by_hand(make, decay, centralize=False):
    """Parameters and averages of plain training, by the definitions."""
    model = MLP()
    optimizer = make(model)
    averages = {name: p.detach().clone() for name, p in model.named_parameters()}
    for batch in batches()[:STEPS]:
        optimizer.zero_grad()
        model(**batch).backward()
        for p in model.parameters():
            if centralize and p.ndim > 1:
                p.grad -= p.grad.flatten(1).mean(1).reshape(-1, *[1] * (p.ndim - 1))
        optimizer.step()
        for name, p in model.named_parameters():
            averages[name] = decay * averages[name] + (1 - decay) * p.detach()
    return {name: p.detach() for name, p in model.named_parameters()}, averages


@pytest.mark.parametrize(("name", "plan"), [("SGD", "zero3"), ("AdamW", "tp2"), ("Lion", "dp")])
def test_averages(name, plan):
    step, state = captured(lambda m: tutti.optim.with_ema(MAKERS[name](m), 0.9), plan, batches()[:STEPS])
    params, averages = by_hand(MAKERS[name], 0.9)
    assert_equal(state, params)
    assert_equal(tutti.optim.ema_state_dict(step), averages)
    if plan == "zero3":
        assert step.store.parts[0]["ema:inner.weight"].numel() * 2 == averages["inner.weight"].numel()


def test_averaged_swaps_parameters():
    step, state = captured(lambda m: tutti.optim.with_ema(MAKERS["SGD"](m), 0.9), "dp", batches()[:STEPS])
    _, averages = by_hand(MAKERS["SGD"], 0.9)
    model = MLP()
    model.load_state_dict(averages)
    with tutti.optim.averaged(step):
        torch.testing.assert_close(step.evaluate(batches()[0]), model(**batches()[0]).detach())
    assert all(torch.equal(x, state[name]) for name, x in step.state_dict().items())
    with pytest.raises(RuntimeError, match="trained while it had the averages"), tutti.optim.averaged(step):
        step(batches()[0])


@pytest.mark.parametrize("name", MAKERS)
def test_plain_steps_do_the_same(name):
    model = MLP()
    optimizer = tutti.optim.centralize_gradients(tutti.optim.with_ema(MAKERS[name](model), 0.9))
    for batch in batches()[:4]:
        optimizer.zero_grad()
        model(**batch).backward()
        optimizer.step()
    step = tutti.parallelize(model, optimizer, batches()[0], cluster="cpu:1", plan="single", level="O0")
    for batch in batches()[4:STEPS]:
        step(batch)
    params, averages = by_hand(MAKERS[name], 0.9, centralize=True)
    assert_equal(step.state_dict(), params)
    assert_equal(tutti.optim.ema_state_dict(step), averages)


def test_plain_steps_with_a_closure():
    model = MLP()
    optimizer = tutti.optim.with_ema(torch.optim.SGD(model.parameters(), lr=0.1), 0.5)
    start = model.inner.weight.detach().clone()

    def closure():
        optimizer.zero_grad()
        loss = model(**batches()[0])
        loss.backward()
        return loss

    optimizer.step(closure)
    wanted = 0.5 * start + 0.5 * model.inner.weight.detach()
    torch.testing.assert_close(optimizer.state[model.inner.weight]["ema"], wanted)


def test_an_average_that_begins_later():
    """The optimizer has stepped before: its moments go on, and the average starts with the present parameters."""
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(**batches()[0]).backward()
    optimizer.step()
    tutti.optim.with_ema(optimizer, 0.5)
    start = model.inner.weight.detach().clone()
    step = tutti.parallelize(model, optimizer, batches()[0], cluster="cpu:1", plan="single", level="O0")
    assert step.steps == 1 and torch.equal(step.store.whole("ema:inner.weight"), start)
    assert torch.equal(step.store.whole("exp_avg:inner.weight"), optimizer.state[model.inner.weight]["exp_avg"])


def test_a_skipped_step_keeps_the_average():
    step, _ = captured(lambda m: tutti.optim.with_ema(MAKERS["AdamW"](m), 0.9), "zero3", batches()[:2],
                       max_nonfinite_steps=1)  # fmt: skip
    before = step.store.whole("ema:inner.weight")
    step({**batches()[2], "x": batches()[2]["x"] * torch.nan})
    assert step.skipped == 1 and torch.equal(step.store.whole("ema:inner.weight"), before)


def test_averages_of_low_precision_are_float32():
    model = MLP().bfloat16()
    optimizer = tutti.optim.with_ema(torch.optim.SGD(model.parameters(), lr=0.1), 0.9)
    batch = {key: x.bfloat16() for key, x in batches()[0].items()}
    step = tutti.parallelize(model, optimizer, batch, cluster="cpu:1", plan="single", level="O0",
                             fp32_master_weights=True)  # fmt: skip
    start = step.store.whole("master:inner.weight")
    step(batch)
    wanted = 0.9 * start + 0.1 * step.store.whole("master:inner.weight")
    torch.testing.assert_close(step.store.whole("ema:inner.weight"), wanted, rtol=1e-6, atol=1e-7)
    assert tutti.optim.ema_state_dict(step)["inner.weight"].dtype is torch.bfloat16


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 2, 2)])
def test_centralized_gradients_have_no_mean_over_the_fan_in(shape):
    grad = torch.randn(shape)
    centered = centralized(grad)
    torch.testing.assert_close(centered.flatten(1).mean(1), torch.zeros(4), rtol=0, atol=1e-6)
    torch.testing.assert_close((grad - centered).flatten(1).var(1), torch.zeros(4), rtol=0, atol=1e-6)
    assert torch.equal(centralized(grad[0, 0].reshape(-1)), grad[0, 0].reshape(-1))


def test_centralized_training_under_a_plan():
    _, state = captured(lambda m: tutti.optim.centralize_gradients(MAKERS["SGD"](m)), "tp2", batches()[:STEPS])
    assert_equal(state, by_hand(MAKERS["SGD"], 0.9, centralize=True)[0])


def test_errors():
    model = MLP()
    with pytest.raises(ValueError, match=r"ema_decay is 1.0; it must be at least 0 and less than 1"):
        tutti.optim.with_ema(torch.optim.SGD(model.parameters()), 1.0)
    with pytest.raises(ValueError, match="LBFGS is not supported"):
        tutti.optim.centralize_gradients(torch.optim.LBFGS(model.parameters()))
    step, _ = captured(MAKERS["SGD"], data=batches()[:1])
    with pytest.raises(ValueError, match="the step keeps no averages: wrap its optimizer in"):
        tutti.optim.ema_state_dict(step)
