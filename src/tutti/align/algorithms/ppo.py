"""Proximal policy optimization of a language model (Schulman et al. 2017, arXiv:1707.06347; Ziegler et al. 2019,
arXiv:1909.08593; Ouyang et al. 2022, arXiv:2203.02155).

Tokens are actions. With the reference p_ref and a value v of what has been written so far, the reward of a token is

    r_t = -kl_coef (log p_t - log p_ref,t), and the reward of the task more at the last token

Advantages A and returns R are those of GAE (`advantages.generalized_advantages`), A normalized. The loss is

    mean of -min(ratio A, clip(ratio) A)  +  vf_coef mean of max((v - R)^2, (clip(v, v_old +- c) - R)^2) / 2

The value is one linear layer on the last hidden states of the policy. With `kl_target` the coefficient follows the
divergence: after each round it is multiplied by 1 + clip(KL / target - 1, -0.2, 0.2) rows / kl_horizon.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tutti.align import objectives
from tutti.align.advantages import generalized_advantages, normalized
from tutti.align.algorithms.reinforce import token_rewards
from tutti.align.policy import PolicyConfig, PolicyTrainer
from tutti.align.rollouts.rollout import Rollout
from tutti.align.sequences import learned, token_logprobs

NAMES = {"beta": "kl_coef", "num_iterations": "num_ppo_epochs", "epsilon": "cliprange"}
"""Options of other trainers that generate, and what they are called here."""


@dataclass
class PPOConfig(PolicyConfig):
    """Options of `PPOTrainer`, with the names and defaults of TRL's.

    Raises ValueError for `beta`, `num_iterations` and `epsilon`, which have other names here.
    """

    learning_rate: float = field(default=3e-6, metadata={"help": "Highest learning rate."})
    num_generations: int = field(default=1, metadata={"help": "Completions of each prompt."})
    num_ppo_epochs: int = field(default=4, metadata={"help": "How often the completions of a round are trained on."})
    kl_coef: float = field(default=0.05, metadata={"help": "Weight of the divergence from the reference in rewards."})
    kl_target: float | None = field(
        default=None,
        metadata={"help": "Nats a completion that kl_coef is to lead to; None: it is fixed."},
    )
    kl_horizon: int = field(default=10_000, metadata={"help": "Completions over which kl_coef adapts."})
    cliprange: float = field(default=0.2, metadata={"help": "How far ratios may be from 1."})
    cliprange_value: float = field(default=0.2, metadata={"help": "How far values may be from their old ones."})
    vf_coef: float = field(default=0.1, metadata={"help": "Weight of the loss of values."})
    gamma: float = field(default=1.0, metadata={"help": "Discount of later rewards."})
    lam: float = field(default=0.95, metadata={"help": "Lambda of GAE."})
    whiten_rewards: bool = field(default=False, metadata={"help": "Give rewards a variance of 1."})
    missing_eos_penalty: float | None = field(
        default=None, metadata={"help": "Taken from the rewards of completions that did not end."}
    )

    beta: float = field(default=None, metadata={"help": "Is kl_coef."})  # pyright: ignore[reportAssignmentType]
    num_iterations: int = field(default=None, metadata={"help": "Is num_ppo_epochs."})  # pyright: ignore
    epsilon: float = field(default=None, metadata={"help": "Is cliprange."})  # pyright: ignore

    def __post_init__(self) -> None:
        for name, own in NAMES.items():
            value = getattr(self, name)
            if value is not None and value != getattr(self, own):
                raise ValueError(f"{name}={value}: PPO calls it {own}: give {own}={value}")
            setattr(self, name, getattr(self, own))
        super().__post_init__()
        if not 0 <= self.gamma <= 1 or not 0 <= self.lam <= 1:
            raise ValueError(f"gamma is {self.gamma} and lam {self.lam}; expected 0 to 1")
        if self.kl_target is not None and (self.kl_target <= 0 or self.kl_coef <= 0):
            raise ValueError("kl_target needs to be above 0, and kl_coef, where it begins, too")


class PPOTrainer(PolicyTrainer):
    """Train a model and a value of what it writes. See `PolicyTrainer` for arguments.

    Logs have besides `objective/kl` (nats a completion), `objective/kl_coef`, `value/loss` and `value/explained`.
    """

    args: PPOConfig

    arguments = PPOConfig
    scores_old, apart = True, "value_head."

    def __init__(self, model: nn.Module | str, *args: Any, **options: Any):
        super().__init__(model, *args, **options)
        config = cast(PreTrainedModel, self.model).config.get_text_config()
        first = next(self.model.parameters())
        head = nn.Linear(config.hidden_size, 1, dtype=first.dtype, device=first.device)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        self.model.value_head = head
        self.kl_coef = float(self.args.kl_coef)

    def outputs(self, model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities and values of tokens (rows, t - 1), and logits."""
        output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], output_hidden_states=True)
        logits = output.logits / self.args.temperature
        values = model.value_head(output.hidden_states[-1][:, :-1]).squeeze(2).float()
        return token_logprobs(logits, batch["labels"]), values, logits

    def score(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values = self.computed("values", self.policy, lambda batch: self.outputs(self.policy, batch)[1], batch)
        return super().score(batch) | {"old_values": values * learned(batch["labels"])}

    def example_batch(self, rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
        batch = super().example_batch(rollouts)
        return batch | {"old_values": torch.zeros_like(batch["old_logprobs"])}

    def advantages(self, rollouts: Sequence[Rollout], rewards: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        args, mask = self.args, learned(batch["labels"])
        rewards = penalized(rewards, rollouts, args.missing_eos_penalty)
        tokens, values = token_rewards(rewards, mask), batch.get("old_values", torch.zeros_like(mask))
        kl = torch.zeros_like(mask)
        if args.beta:
            kl = (batch["old_logprobs"] - batch["ref_logprobs"]) * mask
        tokens = tokens - self.kl_coef * kl
        if args.whiten_rewards:
            tokens = normalized(tokens, mask, center=False)
        advantages, returns = generalized_advantages(tokens, values, mask, args.gamma, args.lam)
        self.divergence = float(kl.sum(1).mean())
        return {"advantages": normalized(advantages, mask) * mask, "returns": returns}

    def round(self, rows: Sequence[Mapping[str, Any]], seed: int) -> list[dict[str, Tensor]]:
        batches = super().round(rows, seed)
        args = self.args
        self.measured[-1] |= {
            "objective/kl": torch.tensor(self.divergence),
            "objective/kl_coef": torch.tensor(self.kl_coef),
        }
        if args.kl_target is not None:
            error = min(max(self.divergence / args.kl_target - 1, -0.2), 0.2)
            self.kl_coef *= 1 + error * self.round_rows / args.kl_horizon
        return batches

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False,
                     num_items_in_batch: Tensor | None = None) -> Any:  # fmt: skip
        """The loss of policy and values over the learned tokens of all microbatches, and measures of rows."""
        args, mask = self.args, learned(inputs["labels"])
        logprobs, values, logits = self.outputs(model, inputs)
        each, _, measures = self.clipped(inputs, logprobs, logits)
        lost = value_loss(values, inputs["old_values"], inputs["returns"], args.cliprange_value)
        measures["value/loss"] = objectives.mean_of_rows(lost.detach(), mask)
        return objectives.mean_of_tokens(each + args.vf_coef * lost, mask, num_items_in_batch), measures

    def round_state(self) -> dict[str, Any]:
        return {"kl_coef": self.kl_coef}

    def load_round_state(self, state: Mapping[str, Any]) -> None:
        self.kl_coef = state["kl_coef"]


def penalized(rewards: Tensor, rollouts: Sequence[Rollout], penalty: float | None) -> Tensor:
    """Rewards (rows), less a penalty for completions that did not end."""
    return rewards if penalty is None else rewards - penalty * torch.tensor([float(not x.ended) for x in rollouts])


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> Tensor:
    """max((v - R)^2, (clip(v, v_old +- clip) - R)^2) / 2 of each token."""
    near = old + (values - old).clamp(-clip, clip)
    return torch.maximum((values - returns).square(), (near - returns).square()) / 2
