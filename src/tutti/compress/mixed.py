"""Mixed precision: the scheme of each layer, chosen by measured sensitivity for a size of the whole.

The sensitivity of a layer to a scheme is what the model loses if that layer alone is rounded: the mean KL(p || q) of
its predictions over calibration data. Losses of layers are added, and the integer program

    min sum loss[l, s] x[l, s]   with   sum bytes[l, s] x[l, s] <= target,   sum_s x[l, s] = 1,   x binary

is solved by HiGHS (SciPy). Its optima for many targets are the Pareto curve.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import LinearConstraint, milp
from torch import Tensor

from tutti.compress.blocks import Batch, Walk, stack_of
from tutti.compress.compressor import check as check_quantized
from tutti.compress.modules import linear_layers, matches, shapes, sharing_copy
from tutti.compress.recipe import Mixed, Quantize, Recipe, Rotate, Step
from tutti.nn.quantized_linear import dtype_of
from tutti.nn.scheme import Scheme

POINTS = 24  # targets of the curve
TOKENS = 8192  # of calibration data, after which sensitivities hardly change


@dataclass(frozen=True)
class Sensitivity:
    """What each layer loses and takes under each scheme.

    losses: nats per token, bytes: by path, and then by scheme in the order of `schemes`.
    """

    schemes: tuple[Scheme, ...]
    losses: Mapping[str, tuple[float, ...]]
    bytes: Mapping[str, tuple[int, ...]]
    weights: Mapping[str, int]

    def choose(self, target: float) -> tuple[dict[str, Scheme], float, int]:
        """The schemes of least loss within a target of bytes, their loss and their bytes.

        Raises ValueError if even the smallest schemes exceed the target.
        """
        paths, width = list(self.losses), len(self.schemes)
        losses = np.array([self.losses[path] for path in paths])
        sizes = np.array([self.bytes[path] for path in paths], dtype=float)
        _check_target(int(sizes.min(1).sum()), target, sum(self.weights.values()))
        one_each = np.kron(np.eye(len(paths)), np.ones(width))
        solved = milp(
            losses.ravel() / max(losses.max(), 1e-30), integrality=np.ones(losses.size), bounds=(0, 1),
            constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(sizes.ravel() / target, -np.inf, 1)],
        )  # fmt: skip
        taken = solved.x.reshape(losses.shape).argmax(1)
        at = np.arange(len(paths))
        chosen = {path: self.schemes[i] for path, i in zip(paths, taken, strict=True)}
        return chosen, float(losses[at, taken].sum()), int(sizes[at, taken].sum())

    def curve(self, points: int = POINTS) -> list[tuple[float, float]]:
        """(bits per weight, loss) of the best choices for targets from the smallest to the largest size."""
        sizes = np.array(list(self.bytes.values()), dtype=float)
        found = [self.choose(x)[1:] for x in np.linspace(sizes.min(1).sum(), sizes.max(1).sum(), points) * (1 + 1e-9)]
        return [(8 * size / sum(self.weights.values()), loss) for loss, size in found]

    def picture(self, path: str | Path, chosen: float | None = None) -> None:
        """Draw the curve. chosen: bits per weight to mark."""
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
        axes.plot(*zip(*self.curve(), strict=True), marker=".", label="mixed")
        for i, scheme in enumerate(self.schemes):
            bits = 8 * sum(x[i] for x in self.bytes.values()) / sum(self.weights.values())
            axes.plot(bits, sum(x[i] for x in self.losses.values()), "o", label=f"{scheme} everywhere")
        if chosen is not None:
            axes.axvline(chosen, color="grey", linestyle=":")
        axes.set(xlabel="bits per weight", ylabel="sum of losses of layers, nats per token", yscale="log")
        axes.legend()
        figure.savefig(path)
        plt.close(figure)


def _check_target(least: int, target: float, weights: int) -> None:
    if least > target:
        raise ValueError(f"the smallest schemes take {least:,} bytes, more than the target of {target:,.0f}: "
                         f"{8 * least / weights:.2f} bits a weight")  # fmt: skip


def check(model: Any, step: Mixed, before: Sequence[Step] = ()) -> None:
    """Raise ValueError if a step does not fit a model. before: steps before it, which do not change shapes."""
    turns = [x for x in before if isinstance(x, Rotate)]
    for scheme in step.schemes:
        quantize = Quantize(scheme, step.method, ignore=step.ignore, embeddings=step.embeddings)
        check_quantized(model, Recipe((*turns, quantize)))
    found = stack_of(model)
    if found is None:
        raise ValueError(f"{type(model).__name__} has no single list of blocks, which the search needs")
    tied = tied_layers(model)
    inside = {path: x for path, x in shapes(model).items()
              if path not in tied and not any(matches(path, y) for y in step.ignore)}  # fmt: skip
    linear = linear_layers(model)
    if experts := [path for path in inside if path not in linear]:
        raise ValueError(f"{experts[0]} is of experts, whose schemes are not searched: ignore '*.experts.*'")
    dtype, weights = dtype_of(model), sum(n * k for n, k in inside.values())
    least = sum(min(x.bytes(shape, dtype) for x in step.schemes) for shape in inside.values())
    _check_target(least, step.bits * weights / 8, weights)


@torch.no_grad()
def sensitivity(
    model: Any,
    schemes: Sequence[Scheme],
    batches: Sequence[Batch],
    ignore: Callable[[str], bool] = lambda path: path == "lm_head",
    progress: Callable[[int, int, str], None] | None = None,
) -> Sensitivity:
    """Measure each linear layer under each scheme, but one that is tied to the embeddings. The model is not changed.

    batches: calibration data, of which the first 8192 tokens are used; only the blocks from that of the layer on are
        computed again.
    """
    found = stack_of(model)
    if found is None:
        raise ValueError(f"{type(model).__name__} has no single list of blocks, which the search needs")
    path, blocks = found
    sizes_of = [x["input_ids"].numel() for x in batches]
    batches = [x for i, x in enumerate(batches) if sum(sizes_of[:i]) < TOKENS]
    model = sharing_copy(model).eval()
    blocks = stack_of(model)[1]  # pyright: ignore[reportOptionalSubscript]
    walk = Walk(model, blocks, batches)
    walk.begin()
    begun = list(walk.hidden)
    expected = _predictions(walk, 0)
    losses: dict[str, tuple[float, ...]] = {}
    sizes: dict[str, tuple[int, ...]] = {}
    weights: dict[str, int] = {}
    walk.hidden = begun

    def measure(where: str, layer: torch.nn.Linear, first: int) -> None:
        """Measure a layer of block `first`, or behind all of them."""
        if ignore(where):
            return
        for scheme in schemes:
            scheme.check(where, layer.in_features)
        inputs, weight, lost = list(walk.hidden), layer.weight, []
        for scheme in schemes:
            layer.weight = torch.nn.Parameter(scheme.rounded(weight.data).to(weight.dtype), requires_grad=False)
            walk.hidden = list(inputs)
            lost.append(_divergence(expected, _predictions(walk, first)))
        layer.weight, walk.hidden = weight, inputs
        losses[where], weights[where] = tuple(lost), weight.numel()
        sizes[where] = tuple(x.bytes(weight.shape, weight.dtype) for x in schemes)

    for i, block in enumerate(blocks):
        if progress:
            progress(i, len(blocks), f"measures {path}.{i}")
        for name, layer in linear_layers(block).items():
            measure(f"{path}.{i}.{name}", layer, i)
        walk.run(i, outputs=True)
    tied = tied_layers(model)
    for where, layer in linear_layers(model).items():
        if not where.startswith(f"{path}.") and where not in tied:
            measure(where, layer, len(blocks))
    return Sensitivity(tuple(schemes), losses, sizes, weights)


def search(
    model: Any, step: Mixed, batches: Sequence[Batch], progress: Callable[[int, int, str], None] | None = None
) -> tuple[Quantize, Sensitivity]:
    """The step that quantizes each layer as is best for the bits per weight that are asked for, and what was measured.

    Raises ValueError if the smallest schemes take more.
    """
    table = sensitivity(model, step.schemes, batches, lambda path: any(matches(path, x) for x in step.ignore), progress)
    chosen, _, _ = table.choose(step.bits * sum(table.weights.values()) / 8)
    most = max(step.schemes, key=lambda x: list(chosen.values()).count(x))
    overrides = tuple((path, x) for path, x in chosen.items() if x != most)
    made = Quantize(most, step.method, ignore=step.ignore, overrides=overrides, embeddings=step.embeddings)
    return made, table


def tied_layers(model: Any) -> set[str]:
    """The paths of linear layers whose weight is an embedding's, which have its scheme."""
    embeddings = {id(x.weight) for x in model.modules() if isinstance(x, torch.nn.Embedding)}
    return {path for path, x in linear_layers(model).items() if id(x.weight) in embeddings}


def _predictions(walk: Walk, first: int) -> list[Tensor]:
    """Log probabilities (tokens, vocabulary) of each batch, from block `first` on."""
    for i in range(first, len(walk.blocks)):
        walk.run(i, outputs=True)
    return [torch.log_softmax(x.float(), -1) for x in walk.logits()]


def _divergence(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """The mean KL(p || q) of all tokens."""
    total = sum(float((p.exp() * (p - q)).sum()) for p, q in zip(expected, found, strict=True))
    return max(total, 0.0) / sum(len(p) for p in expected)
