"""Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv:2402.01306): from completions that are good or bad.

With r = log p(y | x) - log p_ref(y | x), and z an estimate of KL(p || p_ref) that has no gradient,

    loss = w+ (1 - s(b (r - z)))   if y is good,      w- (1 - s(b (z - r)))   if it is bad

where s is the logistic function. z is max(0, the mean of r over the prompts of a batch with completions of other
prompts); here that is the completion of the next row of the dataset that has another prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tutti.align.arguments import AlignArguments
from tutti.align.chat import Tokens
from tutti.align.reference import Referenced
from tutti.align.sequences import batch_of_pairs, cut
from tutti.align.trainer import AlignTrainer
from tutti.data.rows import Mapped, Rows, bad_row


@dataclass
class KTOConfig(AlignArguments):
    """Options of `KTOTrainer`, with the names and defaults of TRL's."""

    learning_rate: float = field(default=1e-6, metadata={"help": "Highest learning rate."})
    beta: float = field(default=0.1, metadata={"help": "How near the model stays to the reference."})
    desirable_weight: float = field(default=1.0, metadata={"help": "w+, of good completions."})
    undesirable_weight: float = field(default=1.0, metadata={"help": "w-, of bad ones."})


def kto_loss(ratios: Tensor, good: Tensor, kl: Tensor, beta: float, weights: tuple[float, float]) -> Tensor:
    """The loss of each row. ratios: r (rows). good: bool (rows). kl: z, 0-d. weights: w+ and w-."""
    desirable = weights[0] * (1 - torch.sigmoid(beta * (ratios - kl)))
    undesirable = weights[1] * (1 - torch.sigmoid(beta * (kl - ratios)))
    return torch.where(good, desirable, undesirable)


class WithOther(Rows):
    """Rows, each also with the completion of the next one that has another prompt, for the prompt of this one.

    features: rows of `KTOTrainer.features`, whose sequences have been cut by `trainer.cut_pair`.
    """

    def __init__(self, features: Mapped, trainer: AlignTrainer):
        self.features, self.trainer = features, trainer

    def __len__(self) -> int:
        return len(self.features)

    def row(self, i: int) -> dict[str, Any]:
        row, partner = self.features[i], self.features[self.other(i)]
        try:
            whole = self.trainer.cut_pair(joined(row["prompt"], row["completion"]), "the completion")
        except ValueError as error:
            raise bad_row(self.name(i), error) from error
        mismatched = joined(row["prompt"], partner["completion"])
        return {"chosen": whole, "label": row["label"],
                "rejected": cut(*mismatched, self.trainer.longest, self.trainer.args.keep)}  # fmt: skip

    def other(self, i: int) -> int:
        """The next row with another prompt. Raises ValueError if there is none."""
        source, count = self.features.rows, len(self)
        prompt = source[i]["prompt"]
        for j in (*range(i + 1, count), *range(i)):
            if source[j]["prompt"] != prompt:
                return j
        raise ValueError("all rows of the dataset have one prompt: the estimate of KL needs a completion of another")

    def name(self, i: int) -> str:
        return self.features.name(i)


def joined(prompt: Sequence[int], completion: Sequence[int]) -> Tokens:
    """The tokens of a prompt and a completion, of which the completion is learned."""
    return Tokens([*prompt, *completion], [False] * len(prompt) + [True] * len(completion))


class KTOTrainer(Referenced, AlignTrainer):
    """Train a model on rows of `prompt`, `completion` and `label` (whether the completion is good).

    ref_model: as for `DPOTrainer`. Logs have the implicit rewards b r of good and bad completions, and `kl`.
    """

    args: KTOConfig

    arguments = KTOConfig

    def __init__(self, model: nn.Module | str, ref_model: nn.Module | None = None, args: Any = None, **options: Any):
        self.ref_model = ref_model
        super().__init__(model, args, **options)

    def rows(self, dataset: Any, args: Any) -> Any:
        features = super().rows(dataset, args)
        if isinstance(features, dict):
            return features
        if len(features) < 2:
            raise ValueError("the dataset has one row: the estimate of KL needs the completion of another")
        return WithOther(features, self)

    def features(self, row: Mapping[str, Any]) -> dict[str, Any]:
        for name in ("prompt", "completion", "label"):
            if name not in row:
                raise ValueError(f"the row has {', '.join(row)}; it needs prompt, completion and label")
        tokens = self.encoder_of(row).pair(row["prompt"], row["completion"])
        begin = tokens.learned.count(False)
        if begin == len(tokens.ids):
            raise ValueError("the completion is empty")
        return {"prompt": tokens.ids[:begin], "completion": tokens.ids[begin:], "label": bool(row["label"])}

    def reference_batch(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        return batch_of_pairs(rows, self.pad, self.args.pad_to_multiple_of, self.positions)

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        return {**self.reference_batch(rows), "good": torch.tensor([x["label"] for x in rows]),
                "reference": torch.stack([x["reference"] for x in rows])}  # fmt: skip

    def losses(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        args, good = self.args, batch["good"]
        ratios = self.pair_logprobs(model, batch) - batch["reference"]
        kl = ratios[:, 1].detach().mean().clamp(min=0)
        weights = args.desirable_weight, args.undesirable_weight
        loss, rewards = kto_loss(ratios[:, 0], good, kl, args.beta, weights), args.beta * ratios[:, 0].detach()
        nothing = torch.full_like(rewards, float("nan"))
        measures = {"rewards/chosen": torch.where(good, rewards, nothing),
                    "rewards/rejected": torch.where(good, nothing, rewards), "kl": kl.expand_as(rewards)}  # fmt: skip
        return loss.mean(), measures
