"""Supervised fine-tuning: a model learns to write what is in the data.

The loss is the mean of -log p(x_t | x_<t) over the tokens that are learned: all of a text, the completion of a prompt,
or what the assistant writes in a conversation. With `loss_type="dft"` each token is weighted with its own probability,
-p log p with p a constant in the gradient (dynamic fine-tuning, Wu et al. 2025, arXiv:2508.05629).

Rows have `text`; or `prompt` and `completion`, both texts or both messages; or `messages`; or `input_ids` with or
without `labels`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tutti.align.arguments import AlignArguments
from tutti.align.chat import is_conversation
from tutti.align.sequences import IGNORED, batch_of, token_logprobs
from tutti.align.trainer import AlignTrainer
from tutti.data.packs import Packs, packed_batch
from tutti.launch.progress import progress
from tutti.train.tasks.language.causal_lm import check_packing
from tutti.train.trainer.loss import unpacked


@dataclass
class SFTConfig(AlignArguments):
    """Options of `SFTTrainer`, with the names and defaults of TRL's."""

    learning_rate: float = field(default=2e-5, metadata={"help": "Highest learning rate."})
    dataset_text_field: str = field(default="text", metadata={"help": "Column of texts."})
    packing: bool = field(
        default=False, metadata={"help": "Put several sequences into a row, which do not see one another."}
    )
    completion_only_loss: bool | None = field(
        default=None,
        metadata={
            "help": "Whether prompts have no loss, where rows have `prompt` and `completion`. None: they do not."
        },
    )
    assistant_only_loss: bool = field(
        default=False, metadata={"help": "Whether only what the assistant writes in `messages` has a loss."}
    )
    loss_type: str = field(default="nll", metadata={"help": "nll, or dft (dynamic fine-tuning)."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_type not in ("nll", "dft"):
            raise ValueError(f"loss_type is {self.loss_type!r}; it must be nll or dft")
        if self.packing and self.max_length is None:
            raise ValueError("packing=True needs max_length, the length of a row")


class SFTTrainer(AlignTrainer):
    """Fine-tune a causal language model on texts, completions or conversations.

        trainer = SFTTrainer(model, SFTConfig("out"), train_dataset=rows, processing_class=tokenizer)
        trainer.train()

    Arguments are those of `tutti.Trainer`, and `peft_config`. Evaluations report `mean_token_accuracy`.
    """

    args: SFTConfig

    equal_items = False
    arguments = SFTConfig

    def rows(self, dataset: Any, args: Any) -> Any:
        features = super().rows(dataset, args)
        if not args.packing or isinstance(dataset, dict):
            return features
        with progress("tokenizing, to pack sequences") as tell:
            rows = []
            for i in range(len(features)):
                rows.append(features[i])
                tell.count(i + 1, len(features))
        return Packs(rows, self.row_length(args))

    def row_length(self, args: Any) -> int:
        """Tokens of a packed row."""
        assert self.longest is not None
        return self.longest

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        if self.args.packing:
            check_packing(self.model, self.row_length(self.args), "mask")

    def features(self, row: Mapping[str, Any]) -> dict[str, Any]:
        args = self.args
        if "input_ids" in row:
            labels = row.get("labels", row["input_ids"])
            return {"input_ids": list(row["input_ids"]), "labels": list(labels)}
        if "messages" in row:
            tokens = self.encoder_of(row).conversation(row["messages"], args.assistant_only_loss)
        elif args.assistant_only_loss:
            raise ValueError("assistant_only_loss=True needs rows with `messages`")
        elif "completion" in row:
            tokens = self.encoder_of(row).pair(row["prompt"], row["completion"])
            if args.completion_only_loss is False:
                tokens = tokens._replace(learned=[True] * len(tokens.ids))
        elif (text := row.get(args.dataset_text_field)) is not None:
            tokens = self.encoder.conversation(text) if is_conversation(text) else self.encoder.text(text)
        else:
            raise ValueError(f"the row has {', '.join(row)}; it needs {args.dataset_text_field}, "
                             "prompt and completion, messages, or input_ids")  # fmt: skip
        feature = self.cut(tokens)
        if all(x == IGNORED for x in feature["labels"][1:]):
            raise ValueError(f"nothing is left to learn of a row of {len(tokens.ids)} tokens, cut to {self.longest}: "
                             "raise max_length, or leave the row out")  # fmt: skip
        return feature

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        if "sequences" in rows[0]:
            return packed_batch([dict(x) for x in rows], self.row_length(self.args), pad_id=self.pad)
        return batch_of(rows, self.pad, self.args.pad_to_multiple_of, self.positions)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False,
                     num_items_in_batch: Tensor | None = None) -> Any:  # fmt: skip
        """The mean over learned tokens of all microbatches; in evaluation also the accuracy of each row."""
        if model.training and self.args.loss_type == "nll":
            return super(AlignTrainer, self).compute_loss(model, inputs, False, num_items_in_batch)
        labels = inputs["labels"]
        with unpacked(inputs):
            logits = model(**{key: x for key, x in inputs.items() if key != "labels"}).logits
        logprobs, mask = token_logprobs(logits, labels), labels[:, 1:] != IGNORED
        weights = logprobs.detach().exp() if self.args.loss_type == "dft" else torch.ones_like(logprobs)
        count = mask.sum() if num_items_in_batch is None else num_items_in_batch
        loss = -(weights * logprobs).sum() / count
        if model.training or not return_outputs:
            return loss
        right = ((logits[:, :-1].argmax(-1) == labels[:, 1:]) & mask).sum(1) / mask.sum(1).clamp(min=1)
        self.names = ("mean_token_accuracy",)
        return loss, {"mean_token_accuracy": right}
