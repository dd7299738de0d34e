"""REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): PPO's loss without a value model.

The reward of a token is -beta (log p - log p_ref), and that of the task at the last one. The advantage of a token is
the discounted sum of rewards from it on, normalized over all tokens of the round. With `num_generations` above 1,
rewards are first taken relative to the mean of the prompt (REINFORCE++-baseline).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tutti.align import objectives
from tutti.align.advantages import group_advantages, normalized, returns_to_go
from tutti.align.policy import PolicyConfig, PolicyTrainer
from tutti.align.rollouts.rollout import Rollout
from tutti.align.sequences import learned


@dataclass
class ReinforceConfig(PolicyConfig):
    """Options of `ReinforceTrainer`."""

    num_generations: int = field(default=1, metadata={"help": "Completions of each prompt."})
    beta: float = field(default=0.01, metadata={"help": "Weight of the divergence from the reference in rewards."})
    gamma: float = field(default=1.0, metadata={"help": "Discount of later rewards."})


class ReinforceTrainer(PolicyTrainer):
    """Train a model by REINFORCE with normalized advantages and clipped ratios. See `PolicyTrainer`."""

    args: ReinforceConfig

    arguments = ReinforceConfig
    scores_old = True

    def advantages(self, rollouts: Sequence[Rollout], rewards: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        args, mask = self.args, learned(batch["labels"])
        if self.size > 1:
            rewards = group_advantages(rewards, self.size, "none")
        tokens = token_rewards(rewards, mask)
        if args.beta:
            tokens = tokens - args.beta * (batch["old_logprobs"] - batch["ref_logprobs"]) * mask
        return {"advantages": normalized(returns_to_go(tokens, args.gamma) * mask, mask)}

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False,
                     num_items_in_batch: Tensor | None = None) -> Any:  # fmt: skip
        """The mean over the learned tokens of all microbatches, and measures of rows."""
        mask = learned(inputs["labels"])
        each, _, measures = self.clipped(inputs, *self.token_logprobs(model, inputs))
        return objectives.mean_of_tokens(each, mask, num_items_in_batch), measures


def token_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """Rewards (rows) at the last learned token of each row, (rows, t); rows without one, or without a reward, get 0."""
    last = mask * (mask.flip(1).cumsum(1).flip(1) == 1)
    return torch.where(rewards.isfinite(), rewards, 0).unsqueeze(1) * last
