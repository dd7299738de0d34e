"""Pattern-exploiting training: classify with few labels by asking a masked language model (Schick and Schuetze 2021).

A pattern turns a row into a cloze text, `"{text} All in all it was {mask}."`. A verbalizer names the words that stand
for each label. A copy of the model for each pattern learns the few labelled rows as such clozes. Together the copies
label unlabelled rows, on which a classifier is trained ("Exploiting Cloze Questions for Few Shot Text
Classification and Natural Language Inference", EACL 2021).

A word of several tokens takes as many masks. Its score is the mean log-probability of its tokens, with all masks filled
at once.
"""

from __future__ import annotations

import copy
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel, TrainingArguments
from transformers.modeling_outputs import SequenceClassifierOutput

from tutti.train.tasks.language.text import stacked
from tutti.train.trainer.arguments import output_folder
from tutti.train.trainer.trainer import Trainer
from tutti.train.values import Outputs, Processor, ReadRow, Row

MASK = "mask"


@dataclass(frozen=True)
class Cloze:
    """How rows become cloze texts and words become labels.

    pattern: a format string with the columns of a row and one `{mask}`.
    verbalizer: label -> word, or words, any of which may stand for it. Labels are numbered in this order.
    length: longest text in tokens; the longest column is cut to fit.
    """

    pattern: str
    verbalizer: Mapping[str | int | bool, str | Sequence[str]]
    length: int = 128

    def __post_init__(self) -> None:
        fields = [name for _, name, _, _ in string.Formatter().parse(self.pattern) if name is not None]
        if fields.count(MASK) != 1:
            raise ValueError(f"the pattern {self.pattern!r} needs {{mask}} once")
        if len(fields) < 2:
            raise ValueError(f"the pattern {self.pattern!r} reads no column of a row, such as {{text}}")
        if len(self.verbalizer) < 2:
            raise ValueError(f"the verbalizer has {len(self.verbalizer)} label; it needs at least two")

    @property
    def columns(self) -> list[str]:
        """The columns that the pattern reads."""
        fields = string.Formatter().parse(self.pattern)
        return list(dict.fromkeys(name for _, name, _, _ in fields if name is not None and name != MASK))

    def words(self, tokenizer: Processor) -> Tensor:
        """The tokens of words, (labels, words, masks) int64, padded with -1.

        Raises ValueError for a word that the tokenizer does not know.
        """
        ids_of_labels: list[list[list[int]]] = []
        for words in self.verbalizer.values():
            words = [words] if isinstance(words, str) else words
            ids = [tokenizer(word, add_special_tokens=False)["input_ids"] for word in words]
            for word, tokens in zip(words, ids, strict=True):
                if not tokens or tokenizer.unk_token_id in tokens:
                    raise ValueError(f"the tokenizer does not know {word!r} of the verbalizer; choose another word")
            ids_of_labels.append(ids)
        most, masks = max(map(len, ids_of_labels)), max(len(tokens) for ids in ids_of_labels for tokens in ids)
        table = torch.full((len(ids_of_labels), most, masks), -1)
        for i, ids in enumerate(ids_of_labels):
            for j, tokens in enumerate(ids):
                table[i, j, : len(tokens)] = torch.tensor(tokens)
        return table

    def label(self, row: ReadRow, column: str) -> int:
        """The number of a row's label. Raises ValueError if the verbalizer lacks it."""
        labels, value = list(self.verbalizer), row[column]
        for i, label in enumerate(labels):
            if label == value or str(label) == str(value):
                return i
        raise ValueError(f"{column} is {value!r}, and the verbalizer has words for {', '.join(map(str, labels))}")

    def features(self, rows: Sequence[ReadRow], tokenizer: Processor,
                 label: str | None = "label") -> list[Row]:  # fmt: skip
        """`input_ids`, `mask_positions` and, with a `label` column, `labels` of each row.

        Raises ValueError if a column does not exist or a pattern leaves no room for the text.
        """
        masks = self.words(tokenizer).shape[2]
        rows_of_features = []
        for i, row in enumerate(rows):
            for name in [*self.columns, *([label] if label else [])]:
                if name not in row:
                    raise ValueError(f"row {i} has no column {name!r}; it has {', '.join(row)}")
            ids = self._ids(row, tokenizer, masks, i)
            at = [k for k, token in enumerate(ids) if token == tokenizer.mask_token_id][-masks:]
            feature: Row = {"input_ids": ids, "mask_positions": at}
            rows_of_features.append(feature | ({"labels": self.label(row, label)} if label else {}))
        return rows_of_features

    def _ids(self, row: ReadRow, tokenizer: Processor, masks: int, number: int) -> list[int]:
        values = {name: str(row[name]).replace(tokenizer.mask_token, "") for name in self.columns}
        filler = " ".join([tokenizer.mask_token] * masks)
        while True:
            ids = tokenizer(self.pattern.format(**values, mask=filler))["input_ids"]
            if len(ids) <= self.length:
                return ids
            longest = max(values, key=lambda name: len(values[name]))
            words = values[longest].split()
            if len(words) < 2:
                raise ValueError(f"row {number} does not fit into {self.length} tokens with {self.pattern!r}")
            values[longest] = " ".join(words[: int(len(words) * min(0.9, self.length / len(ids) + 0.1))])


class ClozeModel(nn.Module):
    """A masked language model as a classifier: logits are the scores of labels, (rows, labels).

    words: tokens of labels, (labels, words, masks) int64, padded with -1.
    """

    accepts_loss_kwargs = False
    words: Tensor

    def __init__(self, model: PreTrainedModel, words: Tensor):
        super().__init__()
        self.model = model
        self.register_buffer("words", words, persistent=False)

    def forward(self, input_ids: Tensor, mask_positions: Tensor, attention_mask: Tensor | None = None,
                labels: Tensor | None = None) -> SequenceClassifierOutput:  # fmt: skip
        """labels: (rows,) int64. mask_positions: (rows, masks) int64."""
        logits: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        at = mask_positions[:, :, None].expand(-1, -1, logits.shape[-1])
        log_probs = logits.gather(1, at).log_softmax(-1)  # (rows, masks, vocabulary)
        count, several, masks = self.words.shape
        tokens = self.words.clamp(min=0).permute(2, 0, 1).reshape(masks, -1)  # (masks, labels x words)
        word_log_probs = log_probs.gather(2, tokens[None].expand(log_probs.shape[0], -1, -1)).view(
            -1, masks, count, several
        )
        used = (self.words >= 0).permute(2, 0, 1)[None].to(word_log_probs.dtype)  # (1, masks, labels, words)
        scores = (word_log_probs * used).sum(1) / used.sum(1).clamp(min=1)
        present = used[:, 0]  # (1, labels, words)
        scores = (scores * present).sum(-1) / present.sum(-1)
        loss = None if labels is None else nn.functional.cross_entropy(scores, labels)
        return SequenceClassifierOutput(loss=loss, logits=scores)


@dataclass(frozen=True)
class PetResult:
    """Result of `pet`. models: one for each pattern. weights: weight of each in the ensemble. classifier: model that
    was trained on what they say."""

    clozes: Sequence[Cloze]
    models: Sequence[ClozeModel]
    weights: Sequence[float]
    classifier: PreTrainedModel


def pet(
    model: PreTrainedModel,
    tokenizer: Processor,
    rows: Sequence[ReadRow],
    unlabelled: Sequence[ReadRow],
    clozes: Sequence[Cloze],
    args: TrainingArguments,
    *,
    distill: TrainingArguments | None = None,
    label: str = "label",
    text: str = "text",
    temperature: float = 2.0,
) -> PetResult:
    """Train a classifier from a few labelled rows and many without labels.

    model: a masked language model of transformers, which stays as it is.
    clozes: the patterns; all have the same labels in the same order.
    args, distill: `TrainingArguments` of the training of each pattern, and of the classifier (by default the same).
    label, text: columns of the label, and of the text that the classifier reads.
    temperature: softens the labels that the ensemble gives (Hinton et al. 2015).

    Models of the ensemble are weighted with their accuracy on the labelled rows before training. Raises ValueError if
    there are no rows, or if patterns differ in their labels.
    """
    if not rows or not unlabelled:
        raise ValueError("pet needs labelled rows and unlabelled rows")
    if len({tuple(map(str, cloze.verbalizer)) for cloze in clozes}) != 1:
        raise ValueError("the clozes have different labels")
    if tokenizer.mask_token is None:
        raise ValueError("the tokenizer has no mask token: pet asks a masked language model")
    models, weights, predictions = [], [], []
    for i, cloze in enumerate(clozes):
        one = ClozeModel(copy.deepcopy(model), cloze.words(tokenizer))
        labelled = cloze.features(rows, tokenizer, label)
        trainer = Trainer(one, _in(args, f"pattern-{i}"), ClozeCollator(tokenizer), labelled)
        before = trainer.predict(labelled)
        weights.append(float((np.argmax(before.predictions, -1) == before.label_ids).mean()))
        trainer.train()
        predictions.append(trainer.predict(cloze.features(unlabelled, tokenizer, None)).predictions)
        models.append(one)
    total = sum(weights) or 1.0
    weights = [w / total for w in weights] if sum(weights) else [1 / len(weights)] * len(weights)
    scores = sum(w * torch.from_numpy(x) for w, x in zip(weights, predictions, strict=True))
    soft = (scores / temperature).softmax(-1)  # pyright: ignore
    classifier = classifier_of(model, soft.shape[1])
    soft_rows = [
        {"input_ids": ids, "labels": target.tolist()}
        for ids, target in zip(_encoded(unlabelled, tokenizer, text, clozes[0].length), soft, strict=True)
    ]
    trainer = Trainer(classifier, _in(distill or args, "classifier"), SoftCollator(tokenizer), soft_rows,
                      compute_loss_func=soft_cross_entropy)  # fmt: skip
    trainer.train()
    return PetResult(clozes, models, weights, classifier)


def soft_cross_entropy(outputs: Outputs, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    """Mean cross-entropy with probabilities of labels, (rows, labels)."""
    return nn.functional.cross_entropy(outputs.logits, labels)


def classifier_of(model: PreTrainedModel, labels: int) -> PreTrainedModel:
    """A sequence classifier with the body of another model and a new head."""
    config = copy.deepcopy(model.config)
    config.num_labels = labels
    classifier = AutoModelForSequenceClassification.from_config(config)
    getattr(classifier, classifier.base_model_prefix).load_state_dict(
        getattr(model, model.base_model_prefix).state_dict(), strict=False
    )
    return classifier


def _encoded(rows: Sequence[ReadRow], tokenizer: Processor, text: str, length: int) -> list[list[int]]:
    return tokenizer([str(row[text]) for row in rows], truncation=True, max_length=length)["input_ids"]


def _in(args: TrainingArguments, folder: str) -> TrainingArguments:
    """The same options with a subfolder of their own."""
    changed = copy.copy(args)
    changed.output_dir = str(Path(output_folder(args), folder))
    return changed


@dataclass(frozen=True)
class ClozeCollator:
    """Pad features of `Cloze.features` to the longest."""

    tokenizer: Processor

    def __call__(self, features: list[Row]) -> dict[str, Tensor]:
        batch = padded(features, self.tokenizer)
        batch["mask_positions"] = torch.tensor([x["mask_positions"] for x in features])
        if "labels" in features[0]:
            batch["labels"] = torch.tensor([x["labels"] for x in features])
        return batch


@dataclass(frozen=True)
class SoftCollator:
    """Pad features with labels of any shape to the longest."""

    tokenizer: Processor

    def __call__(self, features: list[Row]) -> dict[str, Tensor]:
        return padded(features, self.tokenizer) | {"labels": torch.tensor([x["labels"] for x in features])}


def padded(features: list[Row], tokenizer: Processor) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask`, padded on the right to the longest, (rows, tokens) int64."""
    rows = [x["input_ids"] for x in features]
    return {"input_ids": stacked(rows, tokenizer.pad_token_id),
            "attention_mask": stacked([[1] * len(row) for row in rows], 0)}  # fmt: skip
