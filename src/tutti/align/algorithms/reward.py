"""Reward models: a number for a text, learned from which of two texts people prefer.

The Bradley-Terry model (1952) says that y+ is preferred to y- with probability s(r(y+) - r(y-)), s the logistic
function. The loss is -log s(r(y+) - r(y-) - m) with a margin m of the row, if it has one (Touvron et al. 2023,
arXiv:2307.09288), and c (r(y+) + r(y-))^2, which centers rewards (Eisenstein et al. 2023, arXiv:2312.09244).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from tutti.align.arguments import AlignArguments
from tutti.align.chat import Tokens, is_conversation
from tutti.align.sequences import batch_of_pairs, flat
from tutti.align.trainer import AlignTrainer


@dataclass
class RewardConfig(AlignArguments):
    """Options of `RewardTrainer`, with the names and defaults of TRL's."""

    learning_rate: float = field(default=1e-4, metadata={"help": "Highest learning rate."})
    center_rewards_coefficient: float | None = field(
        default=None, metadata={"help": "Weight of (r+ + r-)^2, which centers rewards."}
    )


class RewardTrainer(AlignTrainer):
    """Train a model with one output, such as `AutoModelForSequenceClassification` with num_labels=1.

        trainer = RewardTrainer(model, RewardConfig("out"), train_dataset=rows, processing_class=tokenizer)
        trainer.train()

    Rows have `chosen` and `rejected`, and maybe `prompt` and `margin`. Logs have `accuracy`, `margin`, `mean_reward`.
    """

    args: RewardConfig

    arguments = RewardConfig
    auto_class, config_options = "AutoModelForSequenceClassification", {"num_labels": 1}

    def __init__(self, model: nn.Module | str, args: Any = None, *positional: Any, **options: Any):
        super().__init__(model, args, *positional, **options)
        config = cast(PreTrainedModel, self.model).config
        outputs = getattr(config, "num_labels", None)
        if outputs != 1:
            raise ValueError(f"a reward model has one output, and the model has {outputs}: make it with num_labels=1")
        config.pad_token_id = self.pad  # which tells it where a sequence ends

    def features(self, row: Mapping[str, Any]) -> dict[str, Any]:
        pair: dict[str, Any] = {key: self.cut(self._whole(row, key)) for key in ("chosen", "rejected")}
        if pair["chosen"]["input_ids"] == pair["rejected"]["input_ids"]:
            raise ValueError("chosen and rejected are equal, or are once they are cut to max_length")
        return pair | {"margin": float(row.get("margin") or 0.0)}

    def _whole(self, row: Mapping[str, Any], key: str) -> Tokens:
        if key not in row:
            raise ValueError(f"the row has {', '.join(row)}; it needs chosen and rejected")
        encoder = self.encoder_of(row)
        if "prompt" in row:
            return encoder.pair(row["prompt"], row[key])
        return encoder.conversation(row[key]) if is_conversation(row[key]) else encoder.text(row[key])

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        margins = torch.tensor([x["margin"] for x in rows])
        return {**batch_of_pairs(rows, self.pad, self.args.pad_to_multiple_of, self.positions), "margin": margins}

    def losses(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        both = flat(batch)
        output: Any = model(input_ids=both["input_ids"], attention_mask=both["attention_mask"])
        rewards = output.logits.float().reshape(-1, 2)
        delta = rewards[:, 0] - rewards[:, 1]
        loss = -F.logsigmoid(delta - batch["margin"])
        if self.args.center_rewards_coefficient:
            loss = loss + self.args.center_rewards_coefficient * rewards.sum(1).square()
        measures = {"accuracy": (delta > 0).float(), "margin": delta.detach(), "mean_reward": rewards.detach().mean(1)}
        return loss.mean(), measures
