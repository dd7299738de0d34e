"""Unstructured and semi-structured pruning: weights become zero, a share of each output or 2 of each 4 inputs.

Which weights of W (n, k) go, for inputs x with G = sum x x^T:

    magnitude   those of least |W_ij|
    wanda       those of least |W_ij| sqrt(G_jj) (Sun et al. 2023, arXiv:2306.11695)
    sparsegpt   those of least W_ij^2 / [H^-1]_jj as columns are fixed one after the other and those to come make up
                (Frantar and Alistarh 2023, arXiv:2301.00774); H and its factor are those of `compress.methods.gptq`

Files keep the zeros: what is gained is speed on hardware that skips 2 of 4, and room for other steps.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tutti.compress import parallel
from tutti.compress.blocks import Batch, Walk, stack_of
from tutti.compress.experts import is_experts
from tutti.compress.methods.gptq import BLOCK, factor
from tutti.compress.modules import linear_layers, selected, shapes
from tutti.compress.recipe import Prune
from tutti.compress.statistics import Statistics
from tutti.progress import Count


def check(model: nn.Module, step: Prune) -> list[str]:
    """The paths of the layers that a step prunes. Raises ValueError if it does not fit a model."""
    sizes = shapes(model)
    paths = selected(list(sizes), step.layers, step.ignore)
    if not paths:
        raise ValueError("the recipe ignores all layers that it prunes")
    for path in paths:
        if step.pattern and sizes[path][1] % step.period:
            raise ValueError(f"{path} has {sizes[path][1]} inputs, which pattern {step.pattern!r} does not divide: "
                             "ignore it")  # fmt: skip
    fused = [name for name, x in model.named_modules() if is_experts(x)]
    if inside := [path for path in paths if any(path.startswith(f"{x}.") for x in fused)]:
        raise ValueError(f"experts such as {inside[0]} are not pruned: ignore '*.experts.*', or shrink their number")
    if step.calibrated and stack_of(model) is None:
        raise ValueError(f"{type(model).__name__} has no single list of blocks: use magnitude")
    return paths


@torch.no_grad()
def pruned(model: Any, step: Prune, batches: Sequence[Batch], progress: Count | None = None) -> tuple[Any, float]:
    """A pruned copy of a model, and the share of zeros in the layers that were pruned. The model is not changed."""
    paths = set(check(model, step))
    copied = copy.deepcopy(model).eval()
    walk = None

    def apply(layers: Mapping[str, nn.Linear], statistics: Mapping[str, Statistics]) -> None:
        def work(name: str) -> Tensor:
            return prune(layers[name].weight.data, step, statistics[name].gram if name in statistics else None)

        for name, weight in parallel.each(list(layers), work, lambda name: layers[name].in_features ** 2):
            layers[name].weight.data.copy_(weight)

    path, blocks = stack_of(copied) or ("", nn.ModuleList())
    if step.calibrated:
        walk = Walk(copied, blocks, batches)
        walk.begin()
    for i, block in enumerate(blocks):
        if progress:
            progress(i, len(blocks), f"prunes {path}.{i}")
        layers = {name: x for name, x in linear_layers(block).items() if f"{path}.{i}.{name}" in paths}
        apply(layers, walk.statistics(i, layers) if walk else {})
        if walk:
            walk.run(i, outputs=True)
    inside = {f"{path}.{i}.{name}" for i, block in enumerate(blocks) for name in linear_layers(block)}
    outside = {p: x for p, x in linear_layers(copied).items() if p in paths and p not in inside}
    apply(outside, walk.tail(outside) if walk and outside else {})
    weights = [x.weight for p, x in linear_layers(copied).items() if p in paths]
    return copied, sum(int((x == 0).sum()) for x in weights) / sum(x.numel() for x in weights)


def prune(weight: Tensor, step: Prune, gram: Tensor | None) -> Tensor:
    """The pruned weight (n, k), float32. gram: (k, k), which all methods but "magnitude" need.

    Raises ValueError for "2:4" and a k that 4 does not divide.
    """
    weight = weight.float()
    if step.pattern and weight.shape[1] % step.period:
        raise ValueError(f"pattern {step.pattern!r} along {weight.shape[1]} inputs: {step.period} must divide them")
    if step.method == "magnitude" or gram is None or not bool(gram.diagonal().any()):
        return weight.masked_fill(smallest(weight.abs(), step), 0.0)
    if step.method == "wanda":
        return weight.masked_fill(smallest(weight.abs() * gram.diagonal().sqrt(), step), 0.0)
    return _sparsegpt(weight, step, gram)


def smallest(scores: Tensor, step: Prune) -> Tensor:
    """Return a mask (n, k) of weights to remove: the smallest scores of each row, or of each period of a pattern."""
    n, k = scores.shape
    rows, count = (scores, round(step.sparsity * k)) if not step.pattern else (
        scores.reshape(-1, step.period), step.period - step.left)  # fmt: skip
    gone = torch.zeros_like(rows, dtype=torch.bool)
    gone.scatter_(1, rows.topk(count, dim=1, largest=False).indices, True)
    return gone.reshape(n, k)


def _sparsegpt(weight: Tensor, step: Prune, gram: Tensor, block: int = BLOCK) -> Tensor:
    work, k = weight.clone(), weight.shape[1]
    gram = gram.float().clone()
    diagonal = gram.diagonal()
    dead = diagonal == 0
    diagonal[dead] = 1
    work[:, dead] = 0
    upper = factor(gram, step.damping * float(diagonal[~dead].mean()))
    for begin in range(0, k, block):
        end = min(begin + block, k)
        errors = torch.zeros(len(work), end - begin)
        spread = upper.diagonal()[begin:end]
        gone = None if step.pattern else smallest(work[:, begin:end].square() / spread.square(), step)
        for j in range(begin, end):
            if step.pattern and (j - begin) % step.period == 0:
                ahead = slice(j, j + step.period)
                chosen = smallest(work[:, ahead].square() / upper.diagonal()[ahead].square(), step)
            away = gone[:, j - begin] if gone is not None else chosen[:, (j - begin) % step.period]
            error = torch.where(away, work[:, j], 0.0) / upper[j, j]
            work[:, j] = work[:, j].masked_fill(away, 0.0)
            if j + 1 < end:
                work[:, j + 1 : end] -= error.unsqueeze(1) * upper[j, j + 1 : end]
            errors[:, j - begin] = error
        work[:, end:] -= errors @ upper[begin:end, end:]
    return work
