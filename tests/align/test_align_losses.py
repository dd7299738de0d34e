"""The losses of alignment against definitions written here by hand in float64, and their gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tutti.align.algorithms.dpo import LOSSES, pair_loss
from tutti.align.algorithms.kto import kto_loss
from tutti.align.algorithms.orpo import odds_ratio_loss
from tutti.align.sequences import token_logprobs

BETA, E = 0.3, 0.1


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def by_hand(kind: str, chosen: float, rejected: float, logp: float, lengths: tuple[int, int], e: float) -> float:
    d, b, log = chosen - rejected, BETA, math.log
    d_mean = chosen / lengths[0] - rejected / lengths[1]
    if kind == "exo_pair":
        p, q = sigmoid(b * d), 1 - sigmoid(b * d)
        return p * log(p / (1 - e)) + q * log(q / e)
    return {
        "sigmoid": lambda: -(1 - e) * log(sigmoid(b * d)) - e * log(sigmoid(-b * d)),
        "robust": lambda: (-(1 - e) * log(sigmoid(b * d)) + e * log(sigmoid(-b * d))) / (1 - 2 * e),
        "hinge": lambda: max(0.0, 1 - b * d),
        "ipo": lambda: (d_mean - 0.5 / b) ** 2,
        "sigmoid_norm": lambda: -(1 - e) * log(sigmoid(b * d_mean)) - e * log(sigmoid(-b * d_mean)),
        "nca_pair": lambda: -log(sigmoid(b * chosen)) - 0.5 * (log(sigmoid(-b * chosen)) + log(sigmoid(-b * rejected))),
        "sppo_hard": lambda: (chosen - 0.5 / b) ** 2 + (rejected + 0.5 / b) ** 2,
        "apo_zero": lambda: 1 - sigmoid(b * chosen) + sigmoid(b * rejected),
        "apo_down": lambda: sigmoid(b * chosen) + 1 - sigmoid(b * d),
        "sft": lambda: -logp / lengths[0],
    }[kind]()


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_of_pairs(kind):
    draw = torch.Generator().manual_seed(0)
    ratios = torch.randn(6, 2, generator=draw, dtype=torch.float64).mul(2).requires_grad_()
    logprobs = -torch.rand(6, 2, generator=draw, dtype=torch.float64).mul(9).requires_grad_()
    lengths = torch.tensor([[3, 5], [1, 1], [7, 2], [4, 4], [2, 9], [6, 3]])

    def loss(ratios: Tensor, logprobs: Tensor) -> Tensor:
        return pair_loss(kind, ratios, logprobs, lengths, BETA, E)

    expected = [by_hand(kind, *x, float(y[0]), tuple(n), E)  # pyright: ignore
                for x, y, n in zip(ratios.tolist(), logprobs.tolist(), lengths.tolist(), strict=True)]  # fmt: skip
    torch.testing.assert_close(loss(ratios, logprobs), torch.tensor(expected, dtype=torch.float64))
    assert torch.autograd.gradcheck(loss, (ratios, logprobs))


def test_smoothing_of_zero_is_plain_preference():
    ratios = torch.randn(4, 2, dtype=torch.float64)
    nothing, lengths = torch.zeros(4, 2), torch.ones(4, 2)
    plain = pair_loss("sigmoid", ratios, nothing, lengths, BETA)
    torch.testing.assert_close(plain, -torch.log(torch.sigmoid(BETA * (ratios[:, 0] - ratios[:, 1]))))
    torch.testing.assert_close(plain, pair_loss("robust", ratios, nothing, lengths, BETA))


def test_odds_ratio():
    means = -torch.rand(5, 2, dtype=torch.float64).add(0.05).requires_grad_()
    p = means.detach().exp()
    odds = p / (1 - p)
    expected = -means[:, 0] - BETA * torch.log(torch.sigmoid(torch.log(odds[:, 0] / odds[:, 1])))
    torch.testing.assert_close(odds_ratio_loss(means, BETA), expected)
    assert torch.autograd.gradcheck(lambda x: odds_ratio_loss(x, BETA), (means,))
    certain = torch.zeros(1, 2, requires_grad=True)  # probabilities of 1: odds are infinite, and nothing else
    odds_ratio_loss(certain, BETA).sum().backward()
    assert certain.grad is not None and bool(certain.grad.isfinite().all())


def test_kahneman_tversky():
    ratios, good = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64), torch.tensor([True, False, False, True])
    kl = torch.tensor(0.25, dtype=torch.float64)
    expected = [1.5 * (1 - sigmoid(BETA * 0.25)), 1 - sigmoid(BETA * 1.25), 1 - sigmoid(BETA * -1.75),
                1.5 * (1 - sigmoid(BETA * -0.25))]  # fmt: skip
    torch.testing.assert_close(
        kto_loss(ratios, good, kl, BETA, (1.5, 1.0)), torch.tensor(expected, dtype=torch.float64)
    )


def test_log_probabilities_of_labels():
    logits, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    labels[0, 2] = labels[1, :3] = -100
    expected = torch.zeros(2, 4)
    for r in range(2):
        for t in range(1, 5):
            if labels[r, t] != -100:
                expected[r, t - 1] = torch.log_softmax(logits[r, t - 1], -1)[labels[r, t]]
    torch.testing.assert_close(token_logprobs(logits, labels), expected)
