"""Group relative policy optimization (Shao et al. 2024, arXiv:2402.03300), and its relatives.

For each prompt the policy writes a group of completions. The advantage A of a completion is its reward relative to its
group (`advantages.group_advantages`). With the ratio r of new to old probabilities of a token, the loss of the token is

    l = -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) + beta KL(policy || reference)

| loss_type | the loss of a step | source |
|---|---|---|
| grpo | the mean over rows of means over tokens | GRPO |
| bnpo | the sum over the tokens of a microbatch over their number | TRL |
| dapo | the sum over all tokens over their number | DAPO, Yu et al. 2025, arXiv:2503.14476 |
| dr_grpo | the sum over all tokens over rows x max_completion_length | Dr. GRPO, Liu et al. 2025, arXiv:2503.20783 |
| cispo | as dapo, with l = -min(r, 1 + epsilon_high) A log p, the factor a constant | MiniMax-M1, arXiv:2506.13585 |

`importance_sampling_level="sequence"` takes one ratio for a whole completion (GSPO, arXiv:2507.18071). An
`epsilon_high` above epsilon is DAPO's "clip higher".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from tutti.align import objectives
from tutti.align.advantages import group_advantages
from tutti.align.policy import PolicyConfig, PolicyTrainer
from tutti.align.rollouts.rollout import Rollout
from tutti.align.sequences import learned

LOSSES = "grpo", "bnpo", "dapo", "dr_grpo", "cispo"


@dataclass
class GRPOConfig(PolicyConfig):
    """Options of `GRPOTrainer`, with the names and defaults of TRL's."""

    loss_type: str = field(default="dapo", metadata={"help": "grpo, bnpo, dapo, dr_grpo or cispo."})
    importance_sampling_level: str = field(default="token", metadata={"help": "token, or sequence (GSPO)."})
    scale_rewards: str = field(default="group", metadata={"help": "group, batch or none: what rewards are divided by."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_type not in LOSSES:
            raise ValueError(f"loss_type {self.loss_type!r}; expected one of {', '.join(LOSSES)}")
        if self.importance_sampling_level not in ("token", "sequence"):
            raise ValueError(
                f"importance_sampling_level {self.importance_sampling_level!r}; expected token or sequence"
            )
        if self.scale_rewards not in ("group", "batch", "none"):
            raise ValueError(f"scale_rewards {self.scale_rewards!r}; expected group, batch or none")
        if self.num_generations < 2:
            raise ValueError("num_generations must be at least 2: rewards are relative to a group")


class GRPOTrainer(PolicyTrainer):
    """Train a model to write what rewards like, relative to what else it writes.

        trainer = GRPOTrainer(model, reward, GRPOConfig("out"), train_dataset=prompts, processing_class=tokenizer)
        trainer.train()

    See `PolicyTrainer` for arguments. Logs have `reward`, `reward_std`, `frac_reward_zero_std` (groups of equal
    rewards, which teach nothing), `kl`, `entropy`, `clip_ratio` and the lengths of completions.
    """

    args: GRPOConfig

    arguments = GRPOConfig

    def advantages(self, rollouts: Sequence[Rollout], rewards: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        of_rows = group_advantages(rewards, self.size, self.args.scale_rewards)
        return {"advantages": of_rows.unsqueeze(1) * learned(batch["labels"])}

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False,
                     num_items_in_batch: Tensor | None = None) -> Any:  # fmt: skip
        """The loss of a microbatch, and measures of its rows."""
        args, mask = self.args, learned(inputs["labels"])
        logprobs, logits = self.token_logprobs(model, inputs)
        each, ratios, measures = self.clipped(inputs, logprobs, logits, args.importance_sampling_level)
        if args.loss_type == "cispo":
            each = -ratios.detach().clamp(max=1 + args.high) * inputs["advantages"] * logprobs
        if args.beta:
            each = each + args.beta * objectives.divergence(logprobs, inputs["ref_logprobs"])
        return reduced(each, mask, args.loss_type, num_items_in_batch, args.max_completion_length), measures


def reduced(each: Tensor, mask: Tensor, kind: str, items: Tensor | None, longest: int) -> Tensor:
    """The loss of a microbatch from those of its tokens (rows, t), as the table above says. items: the learned tokens
    of the step over the number of microbatches; None: those of this batch."""
    if kind == "grpo":
        return objectives.mean_of_rows(each, mask).mean()
    if kind == "dr_grpo":
        return (each * mask).sum() / (len(each) * longest)
    return objectives.mean_of_tokens(each, mask, None if kind == "bnpo" else items)
