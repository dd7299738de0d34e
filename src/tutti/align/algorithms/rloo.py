"""REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740).

A completion is one action. Its reward is that of the task less beta log p / p_ref of the whole completion, and its
advantage is relative to the other completions of the prompt (`advantages.leave_one_out`). The loss of a row is
-min(r A, clip(r) A), r the ratio of new to old probabilities of the whole completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tutti.align import objectives
from tutti.align.advantages import leave_one_out, normalized
from tutti.align.policy import PolicyConfig, PolicyTrainer
from tutti.align.rollouts.rollout import Rollout
from tutti.align.sequences import learned


@dataclass
class RLOOConfig(PolicyConfig):
    """Options of `RLOOTrainer`, with the names and defaults of TRL's."""

    num_generations: int = field(default=2, metadata={"help": "Completions of each prompt."})
    beta: float = field(default=0.05, metadata={"help": "Weight of the divergence from the reference in rewards."})
    normalize_advantages: bool = field(default=False, metadata={"help": "Divide advantages by their deviation."})
    reward_clip_range: tuple[float, float] | None = field(default=None, metadata={"help": "Limits of rewards."})

    importance_sampling_mode: str = field(
        default="sequence_truncate", metadata={"help": "sequence_truncate or sequence_mask: see `importance`."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.importance_sampling_mode.startswith("sequence"):
            raise ValueError(f"importance_sampling_mode {self.importance_sampling_mode!r}: a completion is one action, "
                             "so it has one weight: expected sequence_truncate or sequence_mask")  # fmt: skip
        if self.num_generations < 2:
            raise ValueError("num_generations must be at least 2: one completion is compared with the others")


class RLOOTrainer(PolicyTrainer):
    """Train a model by REINFORCE, with the other completions of a prompt as baseline. See `PolicyTrainer`."""

    args: RLOOConfig

    arguments = RLOOConfig
    scores_old = True

    def advantages(self, rollouts: Sequence[Rollout], rewards: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        args, mask = self.args, learned(batch["labels"])
        if args.reward_clip_range is not None:
            rewards = rewards.clamp(*args.reward_clip_range)
        if args.beta:
            rewards = rewards - args.beta * ((batch["old_logprobs"] - batch["ref_logprobs"]) * mask).sum(1)
        advantages = leave_one_out(rewards, self.size)
        advantages = normalized(advantages) if args.normalize_advantages else advantages
        return {"advantages": advantages.unsqueeze(1) * mask}

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False,
                     num_items_in_batch: Tensor | None = None) -> Any:  # fmt: skip
        """The mean over the rows of a microbatch, and measures of its rows."""
        args, mask = self.args, learned(inputs["labels"])
        logprobs, logits = self.token_logprobs(model, inputs)
        _, _, measures = self.clipped(inputs, logprobs, logits)
        change = ((logprobs - inputs["old_logprobs"]) * mask).sum(1)
        ratios = change.clamp(-objectives.LARGEST, objectives.LARGEST).exp()
        of_rows = torch.where(mask.sum(1) > 0, inputs["advantages"].sum(1) / mask.sum(1).clamp(min=1), 0)
        each = objectives.clipped_loss(ratios, of_rows, args.epsilon, args.high)
        measures["clip_ratio"] = objectives.clipped_share(ratios.detach(), of_rows, args.epsilon, args.high)
        return each.mean(), measures
