"""Distillation: a compressed model learns to predict what the model that it was made of predicts.

The loss of a token is T^2 KL(p || q) of the distributions p of the teacher and q of the student at temperature T
(Hinton et al. 2015), and, with `hidden`, the squared distance of the last hidden states over the squared norm of the
teacher's. Quantized layers learn by rounding in each forward pass (`compress.methods.qat`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn

import tutti
from tutti.compress.methods import qat
from tutti.compress.modules import own_copy
from tutti.compress.recipe import Distill
from tutti.progress import Count

Batch = Mapping[str, Tensor]


def loss(both: Any, batch: Batch, temperature: float = 1.0, hidden: float = 0.0) -> Tensor:
    """The loss of a batch, a 0-d tensor. both: modules "student" and "teacher"."""
    options = {"use_cache": False, "output_hidden_states": hidden > 0}
    with torch.no_grad():
        target = both["teacher"](**batch, **options)
    output = both["student"](**batch, **options)
    log_p = torch.log_softmax(target.logits.float() / temperature, -1)
    log_q = torch.log_softmax(output.logits.float() / temperature, -1)
    lost = temperature**2 * (log_p.exp() * (log_p - log_q)).sum(-1)
    if hidden > 0:
        own, right = output.hidden_states[-1].float(), target.hidden_states[-1].float()
        lost = lost + hidden * (own - right).square().sum(-1) / right.square().sum(-1).clamp(min=1e-12)
    mask = batch.get("attention_mask")
    return lost.mean() if mask is None else (lost * mask).sum() / mask.sum()


def distill(
    student: nn.Module,
    teacher: nn.Module,
    batches: Sequence[Batch],
    step: Distill,
    weights: dict[str, Tensor] | None = None,
    progress: Count | None = None,
    pruned: Collection[str] = (),
) -> list[float]:
    """Train a student in place, with all its parameters and quantized layers. Returns the loss of each step.

    batches: dicts with input_ids (batch, sequence), taken in turns; where some have an attention_mask, others get one.
    weights: weights of quantized layers before they were rounded, by path; what they have become is put in their place.
    pruned: paths of layers whose zeros stay.

    Raises ValueError if the two have other vocabularies.
    """
    sizes = [x.get_input_embeddings().weight.shape[0] for x in (student, teacher)]  # pyright: ignore
    if sizes[0] != sizes[1]:
        raise ValueError(f"the student has {sizes[0]} tokens, the teacher {sizes[1]}: they must share a vocabulary")
    weights = {} if weights is None else weights
    if any("attention_mask" in x for x in batches):
        batches = [{"attention_mask": torch.ones_like(x["input_ids"]), **x} for x in batches]
    qat.trainable(student, weights, pruned)
    student.eval().requires_grad_(True)
    teacher = own_copy(teacher).eval()
    optimizer = torch.optim.AdamW(_groups(student, step), lr=step.lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: rate(i, step.steps))
    both = nn.ModuleDict({"student": student, "teacher": teacher})
    trained = tutti.parallelize(
        both, optimizer, dict(batches[0]), loss=lambda model, batch: loss(model, batch, step.temperature, step.hidden),
        clip_norm=1.0, seed=step.seed, fp32_master_weights=any(x.dtype != torch.float32 for x in student.parameters()),
    )  # fmt: skip
    losses = []
    for i, batch in enumerate(islice(cycle(batches), step.steps)):
        losses.append(trained(dict(batch)).item())
        schedule.step()
        if progress:
            progress(i, step.steps, f"distills, loss {losses[-1]:.4f}")
    student.requires_grad_(False)
    weights |= qat.finished(student)
    return losses


def rate(i: int, steps: int) -> float:
    """The share of the highest learning rate in step i: it rises over a twentieth, and falls as a cosine to 5 %."""
    return min((i + 1) / max(1, steps // 20), 0.05 + 0.475 * (1 + math.cos(math.pi * i / steps)))


def _groups(student: nn.Module, step: Distill) -> list[dict[str, Any]]:
    """Scales learn relatively, at ten times the rate of weights."""
    scales = [x for name, x in student.named_parameters() if name.endswith(".factors")]
    scale_ids = {id(x) for x in scales}
    groups = [{"params": [x for x in student.parameters() if id(x) not in scale_ids]}]
    return groups + ([{"params": scales, "lr": 10 * step.lr}] if scales else [])
