"""Low rank: a weight becomes a product of two smaller ones that computes nearly what it did on the calibration data.

For W (n, k) and G = sum x x^T of the inputs, with G = S S^T, the product of rank r that is nearest in ||X (W - B A)^T||
is the truncated singular value decomposition of W S (SVD-LLM, Wang et al. 2024, arXiv:2403.07378). With the
eigenvectors U of W G W^T, which are the left singular vectors of W S, it is B = U_r and A = U_r^T W, and the squared
error is the sum of the other eigenvalues: neither S nor its inverse is computed.

r (n + k) numbers take the place of n k. Ranks are multiples of a number, so that groups of scales divide them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tutti.compress.blocks import Batch, Walk, stack_of
from tutti.compress.compressor import LayerReport
from tutti.compress.experts import is_experts
from tutti.compress.modules import linear_layers, selected, shapes, sharing_copy
from tutti.compress.recipe import LowRank
from tutti.compress.statistics import Statistics
from tutti.nn.linear.low_rank_linear import LowRankLinear
from tutti.progress import Count

DAMPING = 1e-4  # of the mean diagonal: inputs that the data does not have count a little


def rank_of(step: LowRank, n: int, k: int) -> int | None:
    """The rank that a layer gets, or None if no rank of the step makes it smaller.

    It is the multiple that is nearest to the share that stays, at least one and at most what saves numbers.
    """
    most = (n * k - 1) // (n + k) // step.multiple
    wanted = round(step.share * n * k / (n + k) / step.multiple)
    return step.multiple * min(max(wanted, 1), most) if most else None


def check(model: nn.Module, step: LowRank) -> dict[str, int]:
    """The ranks of the layers that a step changes, by path. Raises ValueError if it does not fit a model."""
    layers = shapes(model)
    paths = selected(list(layers), step.layers, step.ignore)
    fused = [name for name, x in model.named_modules() if is_experts(x)]
    if inside := [path for path in paths if any(path.startswith(f"{x}.") for x in fused)]:
        raise ValueError(f"experts such as {inside[0]} do not get a lower rank: ignore '*.experts.*'")
    embeddings = {id(x.weight) for x in model.modules() if isinstance(x, nn.Embedding)}
    for path in paths:
        if id(model.get_submodule(path).weight) in embeddings:
            raise ValueError(f"{path} is tied to the embeddings, which have a weight of full rank: ignore it")
    ranks = {path: rank for path in paths if (rank := rank_of(step, *layers[path])) is not None}
    if not ranks:
        raise ValueError(f"no layer becomes smaller with a rank that is a multiple of {step.multiple}: give a smaller "
                         "multiple, such as 8")  # fmt: skip
    if stack_of(model) is None:
        raise ValueError(f"{type(model).__name__} has no single list of blocks, which low rank needs")
    return ranks


def planned(model: nn.Module, step: LowRank) -> Any:
    """A copy with the layers that a model will have, on the meta device. It shares all other tensors."""
    copied = sharing_copy(model)
    prepare(copied, check(model, step), "meta")
    return copied


def prepare(model: Any, ranks: Mapping[str, int], device: Any = None) -> None:
    """Put layers of lower rank, whose memory is not touched, in the place of a model's layers."""
    for path, rank in ranks.items():
        model.set_submodule(path, LowRankLinear.like(model.get_submodule(path), rank, device))


@torch.no_grad()
def factored(
    model: Any, step: LowRank, batches: Sequence[Batch], progress: Count | None = None
) -> tuple[Any, list[LayerReport]]:
    """A copy of a model with layers of lower rank, and what became of each. The model is not changed."""
    ranks = check(model, step)
    copied = copy.deepcopy(model).eval()
    path, blocks = stack_of(copied) or ("", nn.ModuleList())
    walk, reports = Walk(copied, blocks, batches), []
    walk.begin()

    def apply(layers: Mapping[str, nn.Linear], statistics: Mapping[str, Statistics]) -> None:
        for own, layer in layers.items():
            weight, rank, inputs = layer.weight.data, ranks[own], statistics[own]
            a, b, error = factor(weight, rank, inputs.gram)
            new = LowRankLinear.like(layer, rank)
            new.a.weight.copy_(a)
            new.b.weight.copy_(b)
            copied.set_submodule(own, new)
            after = new.a.weight.nbytes + new.b.weight.nbytes
            reports.append(LayerReport(own, f"rank {rank}", weight.nbytes, after, error, inputs.count))

    for i, block in enumerate(blocks):
        if progress:
            progress(i, len(blocks), f"factors {path}.{i}")
        layers = {f"{path}.{i}.{name}": x for name, x in linear_layers(block).items() if f"{path}.{i}.{name}" in ranks}
        apply(layers, walk.statistics(i, layers))
        walk.run(i, outputs=True)
    outside = {own: x for own, x in linear_layers(copied).items() if own in ranks}
    apply(outside, walk.tail(outside) if outside else {})
    return copied, reports


def factor(weight: Tensor, rank: int, gram: Tensor) -> tuple[Tensor, Tensor, float]:
    """A (rank, k) and B (n, rank), float32, and the error ||X (W - B A)^T|| / ||X W^T||.

    gram: sum of x x^T (k, k). Without data, all inputs count alike.
    """
    weight, moments = weight.double(), gram.double().clone()
    moments.diagonal().add_(DAMPING * moments.diagonal().mean() or 1.0)
    values, vectors = torch.linalg.eigh(weight @ moments @ weight.T)  # ascending
    basis = vectors[:, -rank:].flip(1)
    values = values.clamp(min=0)
    error = float((values[:-rank].sum() / values.sum().clamp(min=1e-30)).sqrt())
    return (basis.T @ weight).float(), basis.float(), error
