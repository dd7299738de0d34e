"""Generalized knowledge distillation (Agarwal et al. 2023, arXiv:2306.13649).

A student learns the distributions p of a teacher, in a share `lmbda` of the rounds on completions that the student
writes, in the others on those of the data. The loss of a token with the student's distribution q is the generalized
Jensen-Shannon divergence

    beta KL(p || m) + (1 - beta) KL(q || m),      m = beta p + (1 - beta) q

and, as what it tends to over beta and 1 - beta, KL(p || q) for beta 0 and KL(q || p) for beta 1. `temperature` is that
of sampling; the divergence is that of the models' own distributions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tutti.align import objectives
from tutti.align.arguments import without_dropout
from tutti.align.policy import PolicyConfig, PolicyTrainer
from tutti.align.rollouts.rollout import Rollout, Sampler
from tutti.align.sequences import batch_of, learned
from tutti.launch.progress import progress


@dataclass
class GKDConfig(PolicyConfig):
    """Options of `GKDTrainer`, with the names and defaults of TRL's."""

    learning_rate: float = field(default=2e-5, metadata={"help": "Highest learning rate."})
    num_generations: int = field(default=1, metadata={"help": "Completions of each prompt: always 1."})
    max_completion_length: int = field(default=128, metadata={"help": "Longest completion in tokens."})
    temperature: float = field(default=0.9, metadata={"help": "Of sampling."})
    lmbda: float = field(default=0.5, metadata={"help": "Share of rounds on completions of the student."})
    beta: float = field(default=0.5, metadata={"help": "0: KL(teacher || student), 1: KL(student || teacher)."})

    def __post_init__(self) -> None:
        if self.target_kl is not None:
            raise ValueError("target_kl is of a divergence from a reference, and a student has none: leave it out, and "
                             "give max_steps or num_train_epochs")  # fmt: skip
        super().__post_init__()
        if not 0 <= self.lmbda <= 1 or not 0 <= self.beta <= 1:
            raise ValueError(f"lmbda is {self.lmbda} and beta {self.beta}; expected 0 to 1")
        if self.staleness:
            raise ValueError("staleness: completions of a student are learned as soon as they are written")
        if self.num_generations != 1:
            raise ValueError(f"num_generations is {self.num_generations}; a student writes one for each prompt")


class GKDTrainer(PolicyTrainer):
    """Distill a teacher into a student.

        trainer = GKDTrainer(student, teacher, args=GKDConfig("out"), train_dataset=rows, processing_class=tokenizer)
        trainer.train()

    teacher_model: a causal language model with the vocabulary of the student. Rows have `prompt` and, with lmbda below
    1, `completion`. Checkpoints have the teacher too; `save_model` leaves it out. Logs have `on_policy`, the share of
    rounds on completions of the student.
    """

    args: GKDConfig

    arguments = GKDConfig
    rewarded, weighted, apart = False, False, "teacher."

    def __init__(self, model: nn.Module | str, teacher_model: Any, args: Any = None, **options: Any):
        super().__init__(model, None, args, **options)
        teacher = self._loaded(teacher_model)
        if teacher is self.model:
            raise ValueError("the teacher is the model that is trained")
        sizes = [x.get_input_embeddings().weight.shape[0] for x in (self.model, teacher)]  # pyright: ignore
        if sizes[0] != sizes[1]:
            raise ValueError(f"the student has {sizes[0]} tokens, the teacher {sizes[1]}: they must share a vocabulary")
        without_dropout(teacher)
        self.model.teacher = teacher.eval().requires_grad_(False)

    def _reference(self, model: Any) -> nn.Module | None:
        return None  # beta is that of the divergence from the teacher

    def features(self, row: Mapping[str, Any]) -> dict[str, Any]:
        if self.args.lmbda < 1 and "completion" not in row:
            raise ValueError(f"the row has {', '.join(row)}; it needs completion, or set lmbda=1")
        return super().features(row)

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The batch of completions of the data."""
        if missing := [x for x in rows if "completion" not in x]:
            raise ValueError(f"the row has {', '.join(missing[0])}; evaluation needs completion")
        pairs = [self.encoder_of(x).pair(x["prompt"], x["completion"]) for x in rows]
        return batch_of([self.cut(x) for x in pairs], self.pad, self.args.pad_to_multiple_of, self.positions)

    def make_sampler(self, prompt: int) -> Sampler:
        teacher = self.model.teacher
        del self.model.teacher  # the engine needs no memory for it
        try:
            return super().make_sampler(prompt)
        finally:
            self.model.teacher = teacher

    def round(self, rows: Sequence[Mapping[str, Any]], seed: int) -> list[dict[str, Tensor]]:
        """The batches of a round: completions of the student, or of the data."""
        begin = time.perf_counter()
        own = bool(torch.rand((), generator=torch.Generator().manual_seed(seed)) < self.args.lmbda)
        measures = {"on_policy": torch.tensor(float(own))}
        if own:
            with progress(f"writing {len(rows)} completions"):
                rollouts = self.generate(rows, seed)
            batch = self.batch_of_rollouts(rollouts, torch.zeros(len(rows)))
            measures["time/generation"] = torch.tensor(time.perf_counter() - begin)
        else:
            batch = self.collate(rows)
        self.measured.append(measures)
        return self.parts(batch, seed)

    def example_batch(self, rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
        return self.batch_of_rollouts(rollouts, torch.zeros(len(rollouts)))

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False,
                     num_items_in_batch: Tensor | None = None) -> Any:  # fmt: skip
        """The mean over the learned tokens of all microbatches."""
        tokens = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            target = model.teacher(**tokens).logits[:, :-1]
        each, mask = jensen_shannon(model(**tokens).logits[:, :-1], target, self.args.beta), learned(inputs["labels"])
        self.names = ("divergence",)
        loss = objectives.mean_of_tokens(each, mask, num_items_in_batch)
        return (loss, {"divergence": (each.detach() * mask).sum(1)}) if model.training or return_outputs else loss


def jensen_shannon(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """The generalized Jensen-Shannon divergence of logits (..., vocabulary), as the formula above has it: (...)."""
    wide = torch.promote_types(student.dtype, torch.float32)
    log_q, log_p = torch.log_softmax(student.to(wide), -1), torch.log_softmax(teacher.to(wide), -1)
    if beta == 0:
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    if beta == 1:
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return (beta * log_p.exp() * (log_p - log_m) + (1 - beta) * log_q.exp() * (log_q - log_m)).sum(-1)
