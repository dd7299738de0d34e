"""Rejection sampling: the best of several completions of a prompt are kept, and learned.

`best_of_n` makes rows for `SFTTrainer` with a model that stays as it is. `BestOfNTrainer` samples from the model that
it trains, and its loss is the mean of -log p over the tokens of the best completion of each prompt (RAFT, Dong et al.
2023, arXiv:2304.06767). Among equal rewards, the first completion is the best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tutti.align import objectives
from tutti.align.arguments import longest_of
from tutti.align.chat import Encoder
from tutti.align.policy import PolicyConfig, PolicyTrainer, completions_of
from tutti.align.rewards.scoring import Rewards
from tutti.align.rollouts.rollout import Rollout, Sampler
from tutti.align.sequences import IGNORED, learned


def best_of_n(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Mapping[str, Any]],
    reward_funcs: Any,
    args: PolicyConfig,
    keep: int = 1,
    least: float | None = None,
    ended: bool = True,
) -> list[dict[str, Any]]:
    """The best completions of prompts, as rows with `prompt`, `completion` and `reward`, the best of a prompt first.

    rows: with `prompt`, and what the rewards read (`scoring.Rewards`). args: how completions are sampled and how many:
    num_generations, max_completion_length, temperature and others, reward_weights, seed and engine. keep: how many of a
    prompt. least: only such of at least this reward. ended: only such that the model has ended itself.
    """
    encoder, limit = Encoder(tokenizer), longest_of(args, model)
    prompts = [encoder.prompt(x["prompt"]) for x in rows]
    longest = max(map(len, prompts)) + args.max_completion_length
    if limit is not None and longest > limit:
        raise ValueError(f"a prompt and its completion may have {longest} tokens, and a sequence {limit}: raise "
                         "max_length, lower max_completion_length, or leave long prompts out")  # fmt: skip
    was = model.training
    sampler = Sampler(model, tokenizer, args.sampling(), longest, 64, **(args.engine or {}))
    sampler.update(model.state_dict())
    groups = sampler.generate(prompts, args.num_generations, args.seed)
    model.train(was)
    rewards, rollouts = Rewards(reward_funcs, args.reward_weights, tokenizer), [x for group in groups for x in group]
    completed = completions_of(rollouts, [row for row in rows for _ in range(args.num_generations)])
    totals = rewards.total(rewards(completed))
    best = []
    for at in range(0, len(totals), args.num_generations):
        group = [i for i in range(at, at + args.num_generations) if bool(totals[i].isfinite())]
        group = [i for i in group if (rollouts[i].ended or not ended) and (least is None or totals[i] >= least)]
        best += [{"prompt": completed.prompts[i], "completion": completed.completions[i], "reward": float(totals[i])}
                  for i in sorted(group, key=lambda i: -totals[i])[:keep]]  # fmt: skip
    return best


@dataclass
class BestOfNConfig(PolicyConfig):
    """Options of `BestOfNTrainer`. Rows of batches are the best completions."""

    learning_rate: float = field(default=2e-5, metadata={"help": "Highest learning rate."})
    mask_truncated_completions: bool = field(
        default=True, metadata={"help": "Whether completions that did not end have no loss."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_generations < 2:
            raise ValueError("num_generations must be at least 2: the best of one is all there is")


class BestOfNTrainer(PolicyTrainer):
    """Train a model on the best of what it writes. See `PolicyTrainer` for arguments.

    Logs have `rewards/best`, the mean reward of what is learned. With beta above 0 the loss has beta times the
    divergence from the reference besides.
    """

    args: BestOfNConfig

    arguments = BestOfNConfig
    weighted = False

    @property
    def completions_of_row(self) -> int:
        return self.size

    def advantages(self, rollouts: Sequence[Rollout], rewards: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The rewards, (rows)."""
        return {"rewards": rewards.float()}

    def select_rows(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Select the best completion of each prompt among those with a loss."""
        groups = torch.where((batch["labels"] != IGNORED).any(1), batch["rewards"], -torch.inf)
        groups = groups.nan_to_num(-torch.inf, torch.inf, -torch.inf).view(-1, self.size)
        best = groups.argmax(1) + self.size * torch.arange(len(groups))
        return {name: x[best] for name, x in batch.items()}

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False,
                     num_items_in_batch: Tensor | None = None) -> Any:  # fmt: skip
        """The mean over the learned tokens of all microbatches, and measures of rows."""
        mask = learned(inputs["labels"])
        logprobs, logits = self.token_logprobs(model, inputs)
        each, measures = -logprobs, {"rewards/best": inputs["rewards"]}
        measures["entropy"] = objectives.mean_of_rows(objectives.entropy(logits), mask).detach()
        if self.args.beta:
            kl = objectives.divergence(logprobs, inputs["ref_logprobs"])
            each, measures["kl"] = each + self.args.beta * kl, objectives.mean_of_rows(kl, mask).detach()
        return objectives.mean_of_tokens(each, mask, num_items_in_batch), measures
