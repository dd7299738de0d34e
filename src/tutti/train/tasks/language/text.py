"""What the tasks on text share: token ids of texts, and tensors of sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from tutti.train.values import Processor

CHUNK = 256  # texts that are tokenized together


def token_ids(tokenizer: Processor, texts: Iterator[str], end: bool) -> Iterator[list[int]]:
    """Token ids of each text without special tokens; if `end`, between the tokens that begin and end a text.

    A text begins with the tokenizer's begin token if the tokenizer itself puts it there, as that of Llama does.
    """
    if end and tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end-of-text token; set tokenizer.eos_token")
    head = tokenizer("")["input_ids"][:1] if end else []
    head = head if head == [tokenizer.bos_token_id] else []
    tail = [tokenizer.eos_token_id] if end else []
    chunk: list[str] = []

    def encoded() -> Iterator[list[int]]:
        rows = tokenizer(chunk, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        return ([*head, *row, *tail] for row in rows)

    for text in texts:
        chunk.append(text)
        if len(chunk) == CHUNK:
            yield from encoded()
            chunk.clear()
    if chunk:
        yield from encoded()


def stacked(rows: Sequence[Sequence[int]], fill: int, side: str = "right") -> Tensor:
    """(rows, longest) int64, padded with `fill`."""
    longest = max(map(len, rows))
    filled = np.full((len(rows), longest), fill, np.int64)
    for r, row in enumerate(rows):
        filled[r, slice(longest - len(row), None) if side == "left" else slice(len(row))] = row
    return torch.from_numpy(filled)


def with_mask(rows: Sequence[Sequence[int]], tokenizer: Processor) -> dict[str, Tensor]:
    """input_ids and attention_mask of some sequences."""
    from tutti.train.tasks.task import pad_id

    side = getattr(tokenizer, "padding_side", "right")
    return {
        "input_ids": stacked(rows, pad_id(tokenizer), side),
        "attention_mask": stacked([[1] * len(row) for row in rows], 0, side),
    }
