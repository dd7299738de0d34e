"""AdaSum: its formula, and training with the gradients of parts of a batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from optim_cases import MLP, assert_equal, batches
from tutti.train.boost import Boost
from tutti.train.boost.adasum import AdaSum, adasum, divided, in_parts, pair
from tutti.train.boost.algorithm import default_loss


def definition(a, b):
    return (1 - (a @ b) / (2 * a @ a)) * a + (1 - (a @ b) / (2 * b @ b)) * b


def test_a_pair_is_the_formula():
    a, b = torch.randn(2, 9, dtype=torch.float64)
    torch.testing.assert_close(pair(a, b), definition(a, b))
    torch.testing.assert_close(pair(a.reshape(3, 3), b.reshape(3, 3)), definition(a, b).reshape(3, 3))


def test_orthogonal_gradients_are_added_and_equal_ones_averaged():
    a, b = torch.tensor([3.0, 0, 0, 0]), torch.tensor([0, 0, 2.0, 1])
    torch.testing.assert_close(pair(a, b), a + b)
    torch.testing.assert_close(pair(a, a), a)
    torch.testing.assert_close(pair(a, torch.zeros(4)), a)


def test_four_gradients_are_combined_in_pairs():
    a, b, c, d = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(adasum([a, b, c, d]), definition(definition(a, b), definition(c, d)))


def test_it_is_homogeneous():
    gradients = list(torch.randn(4, 6, dtype=torch.float64))
    torch.testing.assert_close(adasum([g * 8 for g in gradients]), adasum(gradients) * 8)


def test_what_cannot_be_divided_is_averaged():
    gradients = list(torch.randn(4, 3))
    torch.testing.assert_close(adasum(gradients), torch.stack(gradients).mean(0))


def by_hand(make, parts, count):
    """Plain PyTorch: gradients of each part by themselves."""
    model = MLP()
    optimizer = make(model)
    for batch in batches()[:count]:
        each = []
        for part in divided(batch, parts):
            model.zero_grad()
            model(**part).backward()
            each.append({name: p.grad for name, p in model.named_parameters()})
        for name, p in model.named_parameters():
            p.grad = adasum([gradients[name] for gradients in each])
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("plan", "parts"), [("dp", 2), ("zero3", 4), ("tp2", 2)])
def test_training(plan, parts):
    make = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2)  # noqa: E731
    model, boost = MLP(), Boost.parse({"adasum": {"parts": parts}})
    step = boost.make_step(model, make(model), batches()[0], cluster="cpu:2", plan=plan, level="O0")
    losses = [step(batch) for batch in batches()[:6]]
    assert_equal(step.state_dict(), by_hand(make, parts, 6))
    torch.testing.assert_close(losses[0], MLP()(**batches()[0]).detach())
    trained = MLP()
    trained.load_state_dict(step.state_dict())
    torch.testing.assert_close(step.evaluate(batches()[0]), trained(**batches()[0]).detach())


def test_batch_norm_sees_one_part_at_a_time():
    model, x = nn.BatchNorm1d(2, affine=True), torch.randn(4, 2)
    whole = in_parts(lambda m, batch: m(batch[0]).square().sum(), 2)
    first, second = (nn.functional.batch_norm(part, None, None, training=True) for part in x.split(2))
    torch.testing.assert_close(whole(model, (x,)), (first.square().sum() + second.square().sum()) / 2)
    assert model.num_batches_tracked == 2


def test_metrics_of_parts():
    def loss(model, batch):
        out = model(batch[0])
        return out.mean(), {"mean": out.mean().detach(), "rows": out.detach()}

    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    value, metrics = in_parts(loss, 2)(model, (x,))
    torch.testing.assert_close(metrics["rows"], model(x).detach())
    torch.testing.assert_close(metrics["mean"], value.detach())


def test_errors():
    with pytest.raises(ValueError, match="parts is 3; adasum needs a power of two"):
        AdaSum(3)
    with pytest.raises(ValueError, match="adasum divides a batch into 4 equal parts, but it has 6 rows"):
        in_parts(default_loss, 4)(nn.Linear(2, 2), (torch.ones(6, 2),))
