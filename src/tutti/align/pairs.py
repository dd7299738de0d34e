"""Rows with a preferred and a rejected completion of one prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from tutti.align.chat import is_conversation
from tutti.align.sequences import batch_of_pairs
from tutti.align.trainer import AlignTrainer


def with_prompt(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with `prompt`, `chosen` and `rejected`; without `prompt`, that is what the two begin with in common.

    Raises ValueError for a row without the two, and for one in which they are equal.
    """
    for name in ("chosen", "rejected"):
        if name not in row:
            raise ValueError(f"the row has {', '.join(row)}; it needs chosen and rejected")
    chosen, rejected = row["chosen"], row["rejected"]
    if chosen == rejected:
        raise ValueError("chosen and rejected are equal: the row says nothing")
    if "prompt" in row:
        return dict(row)
    common = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b),
                  min(len(chosen), len(rejected)))  # fmt: skip
    if isinstance(chosen, str) and common and chosen[common - 1] == " ":
        common -= 1  # the space belongs to the word behind it
    return {**row, "prompt": chosen[:common], "chosen": chosen[common:], "rejected": rejected[common:]}


class PairTrainer(AlignTrainer):
    """A trainer on rows of `with_prompt`."""

    def features(self, row: Mapping[str, Any]) -> dict[str, Any]:
        whole, encoder, pair = with_prompt(row), self.encoder_of(row), {}
        if not whole["prompt"]:
            raise ValueError("the row has no prompt, and chosen and rejected begin differently: give `prompt`")
        for key in ("chosen", "rejected"):
            completion = whole[key]
            if not completion and is_conversation(whole["prompt"]):
                raise ValueError(f"{key} has no message behind the prompt")
            pair[key] = self.cut_pair(encoder.pair(whole["prompt"], completion), key)
        return pair

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        return batch_of_pairs(rows, self.pad, self.args.pad_to_multiple_of, self.positions)
