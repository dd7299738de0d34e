"""Process reward models: whether each step of a solution is right (Lightman et al. 2023, arXiv:2305.20050).

A model with two outputs a token reads a problem and the steps of its solution, each followed by a separator. The loss
is the cross-entropy of its outputs at the last token of each step with the label of the step, 0 or 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tutti.align.arguments import AlignArguments
from tutti.align.sequences import IGNORED, batch_of
from tutti.align.trainer import AlignTrainer


@dataclass
class PRMConfig(AlignArguments):
    """Options of `PRMTrainer`, with the names and defaults of TRL's."""

    learning_rate: float = field(default=1e-5, metadata={"help": "Highest learning rate."})
    step_separator: str = field(default="\n", metadata={"help": "Text behind each step."})
    train_on_last_step_only: bool = field(default=False, metadata={"help": "Whether only the last step has a loss."})


class PRMTrainer(AlignTrainer):
    """Train a model of `AutoModelForTokenClassification` with num_labels=2.

    Rows have `prompt`, `completions` (the steps, texts) and `labels` (whether each is right). Logs have `accuracy`.
    """

    args: PRMConfig

    arguments = PRMConfig
    equal_items = False
    auto_class = "AutoModelForTokenClassification"

    def features(self, row: Mapping[str, Any]) -> dict[str, Any]:
        steps, labels = row["completions"], row["labels"]
        if len(steps) != len(labels) or not steps:
            raise ValueError(f"the row has {len(steps)} steps and {len(labels)} labels: give one for each step")
        separator = self.tokenizer(self.args.step_separator, add_special_tokens=False)["input_ids"]
        ids, targets = self.encoder.prompt(row["prompt"]), []
        targets = [IGNORED] * len(ids)
        for i, (step, label) in enumerate(zip(steps, labels, strict=True)):
            own = [*self.tokenizer(step, add_special_tokens=False)["input_ids"], *separator]
            if not own:
                raise ValueError(f"step {i} is empty")
            labeled = not self.args.train_on_last_step_only or i == len(steps) - 1
            ids, targets = ids + own, targets + [IGNORED] * (len(own) - 1) + [int(label) if labeled else IGNORED]
        part = self.remainder(len(ids))
        ids, targets = ids[part], targets[part]
        if all(x == IGNORED for x in targets):
            raise ValueError(f"no step ends within {self.longest} tokens: raise max_length, or leave the row out")
        return {"input_ids": ids, "labels": targets}

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        return batch_of(rows, self.pad, self.args.pad_to_multiple_of, self.positions)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False,
                     num_items_in_batch: Tensor | None = None) -> Any:  # fmt: skip
        """The mean over labelled steps of all microbatches, and the accuracy of each row."""
        output: Any = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        labels, logits = inputs["labels"], output.logits.float()
        lost = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED)
        mask = labels != IGNORED
        loss = lost / (mask.sum() if num_items_in_batch is None else num_items_in_batch)
        self.names = ("accuracy",)
        right = ((logits.argmax(-1) == labels) & mask).sum(1) / mask.sum(1).clamp(min=1)
        return (loss, {"accuracy": right}) if model.training or return_outputs else loss
