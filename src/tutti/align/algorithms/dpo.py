"""Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290), and its relatives.

With y+ preferred to y- for a prompt x, and the log-ratios r(y) = log p(y | x) - log p_ref(y | x), d = r(y+) - r(y-):

| loss_type | loss | source |
|---|---|---|
| sigmoid | -(1 - e) log s(b d) - e log s(-b d) | DPO; with e = label_smoothing > 0 cDPO (Mitchell 2023) |
| robust | (-(1 - e) log s(b d) + e log s(-b d)) / (1 - 2 e) | Chowdhury et al. 2024, arXiv:2403.00409 |
| hinge | max(0, 1 - b d) | SLiC, Zhao et al. 2023, arXiv:2305.10425 |
| ipo | (d' - 1 / (2 b))^2, d' with means over tokens | Azar et al. 2023, arXiv:2310.12036 |
| sigmoid_norm | -log s(b d') | DPO normalized by lengths, Lambert et al. 2024, arXiv:2411.15124 |
| nca_pair | -log s(b r+) - (log s(-b r+) + log s(-b r-)) / 2 | Chen et al. 2024, arXiv:2402.05369 |
| exo_pair | KL((s(b d), s(-b d)) \\|\\| (1 - e, e)) | Ji et al. 2024, arXiv:2402.00856, equation 16 |
| sppo_hard | (r+ - 1 / (2 b))^2 + (r- + 1 / (2 b))^2 | Wu et al. 2024, arXiv:2405.00675 |
| apo_zero | 1 - s(b r+) + s(b r-) | D'Oosterlinck et al. 2024, arXiv:2408.06266, equation 7 |
| apo_down | s(b r+) + 1 - s(b d) | the same, equation 8 |
| sft | -log p(y+), the mean over tokens | the term of RPO and of others |

s is the logistic function. Several losses are added with `loss_weights`. `reference_free=True` sets log p_ref to 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tutti.align.arguments import AlignArguments
from tutti.align.pairs import PairTrainer
from tutti.align.reference import Referenced, WithReference
from tutti.align.sequences import IGNORED

LOSSES = ("sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "nca_pair", "exo_pair", "sppo_hard", "apo_zero",
          "apo_down", "sft")  # fmt: skip


def pair_loss(
    kind: str, ratios: Tensor, logprobs: Tensor, lengths: Tensor, beta: float, smoothing: float = 0.0
) -> Tensor:
    """The loss of each pair (rows), as the table above defines it.

    ratios: r of the chosen and the rejected sequence, (rows, 2). logprobs: log p of them, and lengths: their learned
    tokens. smoothing: e. Raises ValueError for an unknown kind.
    """
    chosen, rejected = ratios.unbind(1)
    delta, log_sigmoid = chosen - rejected, F.logsigmoid
    if kind in ("ipo", "sigmoid_norm"):
        means = ratios / lengths.clamp(min=1)
        delta = means[:, 0] - means[:, 1]
    if kind in ("sigmoid", "sigmoid_norm"):
        return -(1 - smoothing) * log_sigmoid(beta * delta) - smoothing * log_sigmoid(-beta * delta)
    if kind == "robust":
        as_labeled, flipped = log_sigmoid(beta * delta), log_sigmoid(-beta * delta)
        return (-(1 - smoothing) * as_labeled + smoothing * flipped) / (1 - 2 * smoothing)
    if kind == "hinge":
        return torch.relu(1 - beta * delta)
    if kind == "ipo":
        return (delta - 1 / (2 * beta)).square()
    if kind == "nca_pair":
        less = log_sigmoid(-beta * chosen) + log_sigmoid(-beta * rejected)
        return -log_sigmoid(beta * chosen) - less / 2
    if kind == "exo_pair":
        share = torch.sigmoid(beta * delta)
        return (share * (log_sigmoid(beta * delta) - math.log(1 - smoothing))
                + (1 - share) * (log_sigmoid(-beta * delta) - math.log(smoothing)))  # fmt: skip
    if kind == "sppo_hard":
        return (chosen - 1 / (2 * beta)).square() + (rejected + 1 / (2 * beta)).square()
    if kind == "apo_zero":
        return 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)
    if kind == "apo_down":
        return torch.sigmoid(beta * chosen) + 1 - torch.sigmoid(beta * delta)
    if kind == "sft":
        return -logprobs[:, 0] / lengths[:, 0].clamp(min=1)
    raise ValueError(f"loss_type {kind!r}; expected one of {', '.join(LOSSES)}")


@dataclass
class DPOConfig(AlignArguments):
    """Options of `DPOTrainer`, with the names and defaults of TRL's."""

    learning_rate: float = field(default=1e-6, metadata={"help": "Highest learning rate."})
    beta: float = field(default=0.1, metadata={"help": "How near the model stays to the reference."})
    loss_type: Any = field(default="sigmoid", metadata={"help": "One of the losses, or a list of them."})
    loss_weights: list[float] | None = field(default=None, metadata={"help": "A weight for each loss; None: 1."})
    label_smoothing: float = field(default=0.0, metadata={"help": "Share of pairs whose label is taken to be wrong."})
    reference_free: bool = field(default=False, metadata={"help": "Use no reference."})
    precompute_ref_log_probs: bool = field(
        default=True, metadata={"help": "Always true: the reference is computed once, before training."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds = self.kinds
        for kind in kinds:
            if kind not in LOSSES:
                raise ValueError(f"loss_type {kind!r}; expected one of {', '.join(LOSSES)}")
        if self.loss_weights is not None and len(self.loss_weights) != len(kinds):
            raise ValueError(f"{len(self.loss_weights)} loss_weights for {len(kinds)} losses")
        if not self.beta > 0:
            raise ValueError(f"beta is {self.beta}; it must be above 0")
        limit = 1.0 if set(kinds) & {"sigmoid", "sigmoid_norm"} else 0.5
        if not 0 <= self.label_smoothing < limit:
            raise ValueError(f"label_smoothing is {self.label_smoothing}; it must be from 0 to below {limit}")
        if "exo_pair" in kinds and self.label_smoothing == 0:
            self.label_smoothing = 1e-3  # as its paper has it: at 0 the loss is infinite
        if not self.precompute_ref_log_probs:
            raise ValueError("precompute_ref_log_probs=False: the reference is always computed once, before training")

    @property
    def kinds(self) -> list[str]:
        """The losses."""
        return [self.loss_type] if isinstance(self.loss_type, str) else list(self.loss_type)


class DPOTrainer(Referenced, PairTrainer):
    """Train a model to prefer the chosen completions of `chosen` and `rejected`.

        trainer = DPOTrainer(model, args=DPOConfig("out"), train_dataset=rows, processing_class=tokenizer)
        trainer.train()

    ref_model: the reference; None: the model before training, or without its adapters. It is computed once, so it needs
    no memory while the model trains. Logs have the implicit rewards b r: `rewards/chosen`, `rewards/rejected`,
    `rewards/margins`, `rewards/accuracies`, and `logps/chosen`, `logps/rejected`.
    """

    args: DPOConfig

    arguments = DPOConfig

    def __init__(self, model: nn.Module | str, ref_model: nn.Module | None = None, args: Any = None, **options: Any):
        if ref_model is not None and ref_model is model:
            raise ValueError("ref_model is the model that is trained: leave it out")
        self.ref_model = ref_model
        super().__init__(model, args, **options)

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        batch = super().collate(rows)
        return {**batch, "reference": torch.stack([x["reference"] for x in rows])}

    def reference_batch(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        return super().collate(rows)

    def referenced(self, rows: Any, name: str, resumes: bool) -> Any:
        if rows is None or not self.args.reference_free or isinstance(rows, dict):
            return super().referenced(rows, name, resumes)
        return rows if isinstance(rows, WithReference) else WithReference(rows, torch.zeros(len(rows), 2))

    def losses(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        args = self.args
        logprobs = self.pair_logprobs(model, batch)
        ratios, lengths = logprobs - batch["reference"], (batch["labels"][..., 1:] != IGNORED).sum(2)
        weights = args.loss_weights or [1.0] * len(args.kinds)
        each = [w * pair_loss(kind, ratios, logprobs, lengths, args.beta, args.label_smoothing)
                for kind, w in zip(args.kinds, weights, strict=True)]  # fmt: skip
        rewards = args.beta * ratios.detach()
        margins = rewards[:, 0] - rewards[:, 1]
        measures = {"rewards/chosen": rewards[:, 0], "rewards/rejected": rewards[:, 1], "rewards/margins": margins,
                    "rewards/accuracies": (margins > 0).float(), "logps/chosen": logprobs[:, 0].detach(),
                    "logps/rejected": logprobs[:, 1].detach()}  # fmt: skip
        return torch.stack(each).sum(0).mean(), measures
