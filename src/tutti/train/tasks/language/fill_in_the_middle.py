"""Fill in the middle (Bavarian et al. 2022): a causal model that completes between a prefix and a suffix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tutti.train.tasks.draw import first_of, generator
from tutti.train.tasks.language.text import stacked, with_mask
from tutti.train.tasks.scores import next_token_scores
from tutti.train.tasks.task import Task, check_length, length_of, padded
from tutti.train.values import Outputs, Processor, Row

TOKENS = (
    ("<|fim_prefix|>", "<fim_prefix>", "<fim-prefix>"),
    ("<|fim_middle|>", "<fim_middle>", "<fim-middle>"),
    ("<|fim_suffix|>", "<fim_suffix>", "<fim-suffix>"),
)


@dataclass(frozen=True)
class FillInTheMiddle(Task):
    """Causal language modelling of texts whose middle was moved to the end.

    A text is cut at two characters, uniform among all pairs of places. Then it reads

        PSM: <prefix> text before  <suffix> text after  <middle> text between <end>
        SPM: <prefix> <suffix> text after  <middle> text before  text between <end>

    (SPM as the paper's variant 2). All tokens have labels. Texts that are not cut are trained on as they are.

    text: column of texts.
    length: longest sequence; by default the tokenizer's `model_max_length`. What is too long loses the end of the
        text after, then the beginning of the text before, then the end of the middle.
    rate: fraction of texts that are cut.
    spm: fraction of these in SPM form.
    buckets: lengths to which batches are padded; None: the longest of the batch.
    """

    text: str = "text"
    length: int | None = None
    rate: float = 0.5
    spm: float = 0.5
    buckets: Sequence[int] | None = None

    name = "fill-in-the-middle"
    model_class = "AutoModelForCausalLM"

    def __post_init__(self) -> None:
        for key, value in (("rate", self.rate), ("spm", self.spm)):
            if not 0 <= value <= 1:
                raise ValueError(f"{key} is {value}; it must be a fraction")

    def columns(self):
        return (self.text,)

    texts = columns

    def feature(self, row, processor):
        return {"text": row[self.text]}

    def batch(self, features, processor):
        rows = [self.rearranged(f, processor) for f in features]
        labels = stacked(rows, -100, getattr(processor, "padding_side", "right"))
        return padded({**with_mask(rows, processor), "labels": labels}, processor, self.buckets)

    def rearranged(self, feature: Row, processor: Processor) -> list[int]:
        """Token ids of a text, cut or not."""
        text = feature["text"]
        draw = generator(self.seed, feature, text)
        limit = length_of(self.length, processor)
        is_cut, is_spm = draw.random(2) < (self.rate, self.spm)
        places = np.sort(draw.integers(0, len(text) + 1, 2))
        if not is_cut:
            return [*_ids(processor, text)[: limit - 1], processor.eos_token_id]
        prefix, middle, suffix = markers(processor)
        a, b = places.tolist()
        before, between, after = (_ids(processor, part) for part in (text[:a], text[a:b], text[b:]))
        over = max(0, len(before) + len(between) + len(after) + 4 - limit)
        cut = min(over, len(after))
        after, over = after[: len(after) - cut], over - cut
        cut = min(over, len(before))
        before, over = before[cut:], over - cut
        between = between[: len(between) - over]
        if is_spm:
            return [prefix, suffix, *after, middle, *before, *between, processor.eos_token_id]
        return [prefix, *before, suffix, *after, middle, *between, processor.eos_token_id]

    def metrics(self, prediction: Outputs) -> dict[str, float]:
        """`accuracy` of the next token; `perplexity` if the predictions are logits."""
        return next_token_scores(prediction, shift=1)

    def check(self, model, processor, dataset) -> None:
        super().check(model, processor, dataset)
        check_length(self.length, model, processor)
        markers(processor)
        if processor.eos_token_id is None:
            raise ValueError("the tokenizer has no end-of-text token; set tokenizer.eos_token")


def markers(tokenizer: Processor) -> tuple[int, int, int]:
    """Ids of the prefix, middle and suffix tokens. Raises ValueError if the tokenizer lacks one."""
    vocabulary = tokenizer.get_vocab()
    tokens = [first_of(names, vocabulary) for names in TOKENS]
    if None in tokens:
        missing = TOKENS[tokens.index(None)][0]
        raise ValueError(
            f"the tokenizer has no {missing}; tokenizer.add_tokens({[n[0] for n in TOKENS]}, special_tokens=True) "
            "adds the three; then resize the model's embedding"
        )
    return tuple(tokens)  # pyright: ignore[reportReturnType]


def _ids(tokenizer: Processor, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []
