"""Masked language modelling (Devlin et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from tutti.train.tasks.draw import generator
from tutti.train.tasks.language.text import stacked, with_mask
from tutti.train.tasks.scores import next_token_scores
from tutti.train.tasks.task import Task, check_length, length_of, padded
from tutti.train.values import Outputs, Processor, Row, Rows


@dataclass(frozen=True)
class MaskedLM(Task):
    """Predict tokens that were chosen at random, from those on both sides.

    Of a sequence's tokens that are not special, a fraction is chosen, at least one. Of these, 80 % become the mask
    token, 10 % a random token and 10 % stay. Only chosen tokens have labels.

    text: column of texts.
    length: longest sequence, with special tokens; by default the tokenizer's `model_max_length`.
    probability: fraction of tokens that are chosen.
    mask, random: fractions of the chosen that become the mask token and a random token.
    whole_word: choose whole words, in random order, as long as their tokens are within the fraction (at least one
        word). It needs a fast tokenizer.
    buckets: lengths to which batches are padded; None: the longest of the batch.
    """

    text: str = "text"
    length: int | None = None
    probability: float = 0.15
    mask: float = 0.8
    random: float = 0.1
    whole_word: bool = False
    buckets: Sequence[int] | None = None

    name = "masked-lm"
    model_class = "AutoModelForMaskedLM"

    def __post_init__(self) -> None:
        if not 0 < self.probability < 1:
            raise ValueError(f"probability is {self.probability}; it must be between 0 and 1")
        if min(self.mask, self.random) < 0 or self.mask + self.random > 1:
            raise ValueError(f"mask {self.mask} and random {self.random} must be fractions with a sum of at most 1")

    def columns(self):
        return (self.text,)

    texts = columns

    def feature(self, row, processor):
        encoded = processor(
            row[self.text],
            truncation=True,
            max_length=length_of(self.length, processor),
            return_special_tokens_mask=True,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        selected = {"input_ids": encoded["input_ids"], "special_tokens_mask": encoded["special_tokens_mask"]}
        if self.whole_word:
            if not processor.is_fast:
                raise ValueError("whole_word needs a fast tokenizer, which knows the words of its tokens")
            selected["word_ids"] = [-1 if word is None else word for word in encoded.word_ids()]
        return selected

    def batch(self, features, processor):
        masked = [self.masked(f, processor) for f in features]
        rows = [ids.tolist() for ids, _ in masked]
        side = getattr(processor, "padding_side", "right")
        labels = stacked([labels.tolist() for _, labels in masked], -100, side)
        return padded({**with_mask(rows, processor), "labels": labels}, processor, self.buckets)

    def masked(self, feature: Row, processor: Processor) -> tuple[np.ndarray, np.ndarray]:
        """(input_ids, labels) of a feature, (length,) int64 each."""
        if processor.mask_token_id is None:
            raise ValueError("the tokenizer has no mask token; set tokenizer.mask_token")
        ids = np.array(feature["input_ids"], np.int64)
        draw = generator(self.seed, feature, ids)
        special = feature.get("special_tokens_mask")
        if special is None:
            special = np.isin(ids, processor.all_special_ids)
        candidates = np.flatnonzero(~np.asarray(special, bool))
        labels = np.full(len(ids), -100, np.int64)
        if not len(candidates):
            return ids, labels
        wanted = max(1, round(self.probability * len(candidates)))
        words = np.asarray(feature["word_ids"])[candidates] if self.whole_word else None
        chosen = draw.permutation(candidates)[:wanted] if words is None else _words(draw, candidates, words, wanted)
        labels[chosen] = ids[chosen]
        kinds = draw.random(len(chosen))
        others = draw.integers(0, len(processor), len(chosen))
        ids[chosen[kinds < self.mask]] = processor.mask_token_id
        replaced = (kinds >= self.mask) & (kinds < self.mask + self.random)
        ids[chosen[replaced]] = others[replaced]
        return ids, labels

    def metrics(self, prediction: Outputs) -> dict[str, float]:
        """`accuracy` at chosen tokens; `perplexity` if the predictions are logits."""
        return next_token_scores(prediction, shift=0)

    def check(self, model: nn.Module, processor: Processor, dataset: Rows) -> None:
        super().check(model, processor, dataset)
        check_length(self.length, model, processor)
        if processor.mask_token_id is None:
            raise ValueError("the tokenizer has no mask token; set tokenizer.mask_token")


def _words(draw: np.random.Generator, candidates: np.ndarray, words: np.ndarray, wanted: int) -> np.ndarray:
    """Tokens of whole words, up to `wanted` tokens; of one word if none is so short."""
    chosen: list[np.ndarray] = []
    count = 0
    for word in draw.permutation(np.unique(words)):
        tokens = candidates[words == word]
        if not chosen or count + len(tokens) <= wanted:
            chosen.append(tokens)
            count += len(tokens)
        if count >= wanted:
            break
    return np.concatenate(chosen)
