"""Odds-ratio preference optimization (Hong et al. 2024, arXiv:2403.07691): fine-tuning that prefers, in one step.

With p(y | x) the geometric mean of the probabilities of the tokens of y, and odds(y) = p / (1 - p),

    loss = -log p(y+) - b log s(log odds(y+) - log odds(y-))

where s is the logistic function. There is no reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tutti.align.arguments import AlignArguments
from tutti.align.pairs import PairTrainer
from tutti.align.sequences import IGNORED, flat, model_logprobs


@dataclass
class ORPOConfig(AlignArguments):
    """Options of `ORPOTrainer`, with the names and defaults of TRL's."""

    learning_rate: float = field(default=1e-6, metadata={"help": "Highest learning rate."})
    beta: float = field(default=0.1, metadata={"help": "Weight of the odds ratio."})


def odds_ratio_loss(means: Tensor, beta: float) -> Tensor:
    """The loss of each pair. means: the mean log-probabilities of the chosen and the rejected sequence, (rows, 2)."""
    odds = means - torch.log(-torch.expm1(means.clamp(max=-1e-6)))
    return -means[:, 0] - beta * F.logsigmoid(odds[:, 0] - odds[:, 1])


class ORPOTrainer(PairTrainer):
    """Fine-tune a model on the chosen completions, away from the rejected ones. Rows: as for `DPOTrainer`."""

    args: ORPOConfig

    arguments = ORPOConfig

    def losses(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        lengths = (batch["labels"][..., 1:] != IGNORED).sum(2).clamp(min=1)
        means = model_logprobs(model, flat(batch)).sum(1).unflatten(0, (-1, 2)) / lengths
        rewards = self.args.beta * means.detach()
        margins = rewards[:, 0] - rewards[:, 1]
        measures = {"rewards/chosen": rewards[:, 0], "rewards/rejected": rewards[:, 1], "rewards/margins": margins,
                    "rewards/accuracies": (margins > 0).float(), "nll_loss": -means[:, 0].detach()}  # fmt: skip
        return odds_ratio_loss(means, self.args.beta).mean(), measures
