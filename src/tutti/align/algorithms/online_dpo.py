"""Online direct preference optimization (Guo et al. 2024, arXiv:2402.04792).

For each prompt the policy writes two completions. That with the higher reward is chosen, and the loss of the pair is
that of DPO (`dpo.pair_loss`) with the reference's log-probabilities of them. Pairs of equal rewards, and such with a
completion that has none, teach nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tutti.align import objectives
from tutti.align.algorithms.dpo import pair_loss
from tutti.align.algorithms.ppo import penalized
from tutti.align.policy import PolicyConfig, PolicyTrainer
from tutti.align.rollouts.rollout import Rollout
from tutti.align.sequences import flat, learned


@dataclass
class OnlineDPOConfig(PolicyConfig):
    """Options of `OnlineDPOTrainer`, with the names and defaults of TRL's. Rows of batches are pairs."""

    learning_rate: float = field(default=5e-7, metadata={"help": "Highest learning rate."})
    num_generations: int = field(default=2, metadata={"help": "Completions of each prompt: always 2."})
    temperature: float = field(default=0.9, metadata={"help": "Of sampling, and of all log-probabilities."})
    beta: float = field(default=0.1, metadata={"help": "How near the model stays to the reference."})
    loss_type: str = field(default="sigmoid", metadata={"help": "sigmoid or ipo."})
    missing_eos_penalty: float | None = field(
        default=None, metadata={"help": "Taken from the rewards of completions that did not end."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_type not in ("sigmoid", "ipo"):
            raise ValueError(f"loss_type {self.loss_type!r}; expected sigmoid or ipo")
        if self.num_generations != 2:
            raise ValueError(f"num_generations is {self.num_generations}; pairs have 2 completions")
        if not self.beta > 0:
            raise ValueError(f"beta is {self.beta}; it must be above 0")


class OnlineDPOTrainer(PolicyTrainer):
    """Train a model to prefer the better of two completions that it writes. See `PolicyTrainer` for arguments.

    Logs have `rewards/chosen`, `rewards/rejected`, `rewards/margins` and `rewards/accuracies` of the implicit rewards
    beta log p / p_ref, `kl`, and `pairs/tied`, the share of pairs that teach nothing.
    """

    args: OnlineDPOConfig

    equal_items = True
    arguments = OnlineDPOConfig
    weighted = False

    @property
    def completions_of_row(self) -> int:
        return 2

    def advantages(self, rollouts: Sequence[Rollout], rewards: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The rewards, (rows)."""
        return {"rewards": penalized(rewards, rollouts, self.args.missing_eos_penalty).float()}

    def select_rows(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Pairs (rows, 2, ...), the chosen first, and `weights` (rows): 1, or 0 for pairs without a preference."""
        pairs = {name: x.unflatten(0, (-1, 2)) for name, x in batch.items()}
        first, second = pairs.pop("rewards").unbind(1)
        order = torch.stack([first < second, ~(first < second)], 1).long()
        rows = torch.arange(len(order)).unsqueeze(1)
        counts = (first != second) & first.isfinite() & second.isfinite()
        counts &= (learned(batch["labels"]).sum(1) > 0).unflatten(0, (-1, 2)).all(1)
        return {name: x[rows, order] for name, x in pairs.items()} | {"weights": counts.float()}

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False,
                     num_items_in_batch: Tensor | None = None) -> Any:  # fmt: skip
        """The mean over the pairs of a microbatch, and measures of its pairs."""
        args, both = self.args, flat(inputs)
        tokens, _ = self.token_logprobs(model, both)
        lengths = learned(both["labels"]).sum(1).unflatten(0, (-1, 2))
        logprobs = tokens.sum(1).unflatten(0, (-1, 2))
        ratios = logprobs - inputs["ref_logprobs"].sum(2)
        weights = inputs["weights"]
        each = pair_loss(args.loss_type, ratios, logprobs, lengths, args.beta) * weights
        rewards = args.beta * ratios.detach()
        margins = rewards[:, 0] - rewards[:, 1]
        with torch.no_grad():
            kl = objectives.divergence(tokens, inputs["ref_logprobs"].flatten(0, 1))
            kl = objectives.mean_of_rows(kl, learned(both["labels"])).unflatten(0, (-1, 2)).mean(1)
        measures = {"rewards/chosen": rewards[:, 0], "rewards/rejected": rewards[:, 1], "rewards/margins": margins,
                    "rewards/accuracies": (margins > 0).float(), "pairs/tied": 1 - weights, "kl": kl}  # fmt: skip
        return each.mean(), measures
