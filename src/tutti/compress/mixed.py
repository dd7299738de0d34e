"""Mixed precision: the scheme of each layer, chosen by measured sensitivity for a size of the whole.

The sensitivity of a layer to a scheme is what the model loses if that layer alone is rounded: the mean KL(p || q) of
its predictions over calibration data. Losses of layers are added, and the integer program

    min sum loss[l, s] x[l, s]   with   sum cost[l, s] x[l, s] <= target,   sum_s x[l, s] = 1,   x binary

is solved by HiGHS (SciPy). Costs are bytes of a file, or seconds of a decoded token by the planner's model of a device.
Its optima for many targets are the Pareto curve. A layer may also become a product of two of lower rank, which are
rounded. Sparsity is no choice: 2:4 saves neither bytes nor time in the formats and operators that are here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import Tensor

import tutti
from tutti.compress import parallel
from tutti.compress.blocks import Batch, Walk, stack_of
from tutti.compress.compressor import check as check_quantized
from tutti.compress.methods.low_rank import factor, rank_of
from tutti.compress.modules import linear_layers, matches, shapes, sharing_copy
from tutti.compress.recipe import LowRank, Mixed, Quantize, Recipe, Rotate, Step
from tutti.compress.statistics import Statistics
from tutti.nn.quantized.quantized_linear import KERNELS, QuantizedLinear, dtype_of
from tutti.nn.quantized.scheme import Scheme
from tutti.progress import Count

POINTS = 24  # targets of the curve
LARGER = "quantize embeddings (e4, e8) and the output layer (head), or give a larger target"
TOKENS = 8192  # of calibration data, after which sensitivities hardly change


@dataclass(frozen=True)
class Factored:
    """Two layers of lower rank in the place of one, each quantized. share: fraction of the numbers that stay."""

    scheme: Scheme
    share: float

    def __str__(self) -> str:
        return f"rank {self.share:g} {self.scheme}"


Choice = Scheme | Factored


@dataclass(frozen=True)
class Sensitivity:
    """What each layer loses and takes under each scheme.

    losses, bytes: losses in nats per token, and bytes, by path, and then by scheme in the order of `schemes`. Where a
    loss is infinite, a layer cannot have this scheme. seconds: seconds of a decoded token, in the same order, where
    that was asked for.
    """

    schemes: tuple[Choice, ...]
    losses: Mapping[str, tuple[float, ...]]
    bytes: Mapping[str, tuple[int, ...]]
    weights: Mapping[str, int]
    seconds: Mapping[str, tuple[float, ...]] | None = None

    def choose(self, target: float, by: str = "bytes") -> tuple[dict[str, Choice], float, int]:
        """The schemes of least loss within a target, their loss and their bytes. by: "bytes" or "seconds".

        Raises ValueError if even the smallest schemes exceed the target.
        """
        paths, width = list(self.losses), len(self.schemes)
        losses = np.array([self.losses[path] for path in paths])
        sizes = np.array([self.bytes[path] for path in paths], dtype=float)
        costs = sizes if by == "bytes" else np.array([(self.seconds or {})[path] for path in paths])
        able = np.isfinite(losses)
        least = float(np.where(able, costs, np.inf).min(1).sum())
        if by == "bytes":
            _check_target(int(least), target, sum(self.weights.values()))
        else:
            _check_seconds(least, target)
        one_each = np.kron(np.eye(len(paths)), np.ones(width))
        bounds = Bounds(0, able.ravel().astype(float))  # pyright: ignore[reportArgumentType]
        finite = np.where(able, losses, 0)
        solved = milp(
            finite.ravel() / max(finite.max(), 1e-30), integrality=np.ones(losses.size), bounds=bounds,
            constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(costs.ravel() / target, -np.inf, 1)],
        )  # fmt: skip
        taken = solved.x.reshape(losses.shape).argmax(1)
        at = np.arange(len(paths))
        chosen = {path: self.schemes[i] for path, i in zip(paths, taken, strict=True)}
        return chosen, float(losses[at, taken].sum()), int(sizes[at, taken].sum())

    def curve(self, points: int = POINTS) -> list[tuple[float, float]]:
        """(bits per weight, loss) of the best choices for targets from the smallest to the largest size."""
        sizes = np.array(list(self.bytes.values()), dtype=float)
        optima = [self.choose(x)[1:] for x in np.linspace(sizes.min(1).sum(), sizes.max(1).sum(), points) * (1 + 1e-9)]
        return [(8 * size / sum(self.weights.values()), loss) for loss, size in optima]

    def picture(self, path: str | Path, chosen: float | None = None) -> None:
        """Draw the curve. chosen: bits per weight to mark."""
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
        axes.plot(*zip(*self.curve(), strict=True), marker=".", label="mixed")
        for i, scheme in enumerate(self.schemes):
            if not all(np.isfinite(x[i]) for x in self.losses.values()):
                continue
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
        raise ValueError(f"the smallest schemes take {least:,} bytes, more than the target of {target:,.0f} for the "
                         f"layers that are searched: {8 * least / weights:.2f} bits a weight")  # fmt: skip


def _check_seconds(least: float, target: float) -> None:
    if least > target:
        raise ValueError(f"the fastest schemes take {1e3 * least:.3g} ms for a token by the model of the device, more "
                         f"than the {1e3 * target:.3g} ms that are left for them")  # fmt: skip


def choices_of(step: Mixed) -> tuple[Choice, ...]:
    """What layers can become."""
    return (*step.schemes, *(Factored(x, share) for share in step.shares for x in step.schemes))


def rank(choice: Factored, multiple: int, n: int, k: int) -> int | None:
    """The rank of a layer (n, k), or None if it would not be smaller, or groups do not divide it."""
    r = rank_of(LowRank(choice.share, multiple), n, k)
    return None if r is None or r % (choice.scheme.group or 1) else r


def parts_of(choice: Choice, multiple: int, n: int, k: int) -> list[tuple[Scheme, tuple[int, int]]]:
    """The quantized weights that a layer (n, k) becomes; none if it cannot."""
    if isinstance(choice, Scheme):
        return [(choice, (n, k))]
    r = rank(choice, multiple, n, k)
    return [] if r is None else [(choice.scheme, (r, k)), (choice.scheme, (n, r))]


def seconds_of(scheme: Scheme | None, n: int, k: int, dtype: torch.dtype, cluster: str) -> float:
    """Return the seconds that a layer takes for one token on a device of a cluster, for its products or for reading it,
    whichever is more. scheme: scheme of the weight (n, k); None: it is not quantized.

    Schemes without an operator of their own are widened for each token.
    """
    device = tutti.Cluster.parse(cluster).device
    count = n * k * dtype.itemsize
    if scheme is not None:
        layer = QuantizedLinear(k, n, scheme, dtype=dtype, device="meta")
        count = sum(x.nbytes for x in layer.parameters()) + (2 * count if layer.layout not in KERNELS else 0)
    computed = device.dtype_with_peak(dtype)
    return max(2 * n * k / device.rate(computed), device.stream_seconds(count, "add", computed))


def check(model: Any, step: Mixed, before: Sequence[Step] = ()) -> None:
    """Raise ValueError if a step does not fit a model. before: steps before it, which do not change shapes."""
    turns = [x for x in before if isinstance(x, Rotate)]
    for scheme in step.schemes:
        quantize = Quantize(scheme, step.method, ignore=step.ignore, embeddings=step.embeddings)
        check_quantized(model, Recipe((*turns, quantize)))
    stack = stack_of(model)
    if stack is None:
        raise ValueError(f"{type(model).__name__} has no single list of blocks, which the search needs")
    tied = tied_layers(model)
    inside = {path: x for path, x in shapes(model).items()
              if path not in tied and not any(matches(path, y) for y in step.ignore)}  # fmt: skip
    linear = linear_layers(model)
    if experts := [path for path in inside if path not in linear]:
        raise ValueError(f"{experts[0]} is of experts, whose schemes are not searched: ignore '*.experts.*'")
    dtype, weights = dtype_of(model), sum(n * k for n, k in inside.values())
    parts = [[y for x in choices_of(step) if (y := parts_of(x, step.multiple, *shape))] for shape in inside.values()]
    if step.latency:
        tutti.Cluster.parse(step.cluster)
        least = sum(min(sum(seconds_of(x, *of, dtype, step.cluster) for x, of in y) for y in each) for each in parts)
        _check_seconds(least, target_seconds(model, step, inside))
    else:
        least = sum(min(sum(x.bytes(of, dtype) for x, of in y) for y in each) for each in parts)
        _check_target(least, target_bytes(model, step, inside), weights)


def target_bytes(model: Any, step: Mixed, searched: Iterable[str]) -> float:
    """The bytes that the searched layers may take. Raises ValueError if the rest is larger than the target."""
    paths, linear = set(searched), linear_layers(model)
    counts = sum(linear[path].weight.numel() for path in paths)
    if not step.size:
        return step.bits * counts / 8
    rest = sum(x.nbytes for x in model.parameters()) - sum(linear[path].weight.nbytes for path in paths)
    if step.embeddings is not None:
        table = model.get_input_embeddings().weight
        rest += step.embeddings.bytes(table.shape, table.dtype) - table.nbytes
    if rest >= step.size:
        raise ValueError(f"what is not searched takes {rest:,} bytes of the {step.size:,.0f} of the target: {LARGER}")
    return step.size - rest


def target_seconds(model: Any, step: Mixed, searched: Iterable[str]) -> float:
    """The seconds that the searched layers may take. Raises ValueError if the rest takes longer than the target."""
    if (rest := rest_seconds(model, step, searched)) >= step.latency:
        raise ValueError(f"what is not searched takes {1e3 * rest:.3g} ms of the {1e3 * step.latency:.3g} ms of the "
                         f"target: {LARGER}")  # fmt: skip
    return step.latency - rest


def rest_seconds(model: Any, step: Mixed, searched: Iterable[str]) -> float:
    """Seconds of the linear layers that are not searched."""
    paths, dtype = set(searched), dtype_of(model)
    tied = tied_layers(model)
    return sum(seconds_of(step.embeddings if path in tied else None, x.out_features, x.in_features, dtype, step.cluster)
               for path, x in linear_layers(model).items() if path not in paths)  # fmt: skip


@torch.no_grad()
def sensitivity(
    model: Any,
    schemes: Sequence[Choice],
    batches: Sequence[Batch],
    ignore: Callable[[str], bool] = lambda path: path == "lm_head",
    progress: Count | None = None,
    multiple: int = 64,
    cluster: str = "",
) -> Sensitivity:
    """Measure each linear layer under each scheme, but one that is tied to the embeddings. The model is not changed.

    batches: calibration data, of which the first 8192 tokens are used; only the blocks from that of the layer on are
        computed again. multiple: number that ranks are multiples of. cluster: cluster on a device of which seconds are
        estimated, too; "": none.
    """
    stack = stack_of(model)
    if stack is None:
        raise ValueError(f"{type(model).__name__} has no single list of blocks, which the search needs")
    path, blocks = stack
    sizes_of = [x["input_ids"].numel() for x in batches]
    batches = [x for i, x in enumerate(batches) if sum(sizes_of[:i]) < TOKENS / parallel.processes()]
    model = sharing_copy(model).eval()
    blocks = stack_of(model)[1]  # pyright: ignore[reportOptionalSubscript]
    walk = Walk(model, blocks, batches)
    walk.begin()
    begun = list(walk.hidden)
    expected = _predictions(walk, 0)
    losses: dict[str, tuple[float, ...]] = {}
    sizes: dict[str, tuple[int, ...]] = {}
    weights: dict[str, int] = {}
    seconds: dict[str, tuple[float, ...]] = {}
    walk.hidden = begun

    factored = any(isinstance(x, Factored) for x in schemes)

    def measure(where: str, layer: torch.nn.Linear, first: int, statistics: Statistics | None) -> None:
        """Measure a layer of block `first`, or behind all of them."""
        for scheme in schemes:
            if isinstance(scheme, Scheme):
                scheme.check(where, layer.in_features)
        inputs, weight, lost = list(walk.hidden), layer.weight, []
        parts = [parts_of(x, multiple, *weight.shape) for x in schemes]
        for scheme, own in zip(schemes, parts, strict=True):
            if not own:
                lost.append(float("inf"))
                continue
            if isinstance(scheme, Scheme) or statistics is None:
                rounded = own[0][0].rounded(weight.data)
            else:
                a, b, _ = factor(weight.data, own[0][1][0], statistics.gram)
                rounded = scheme.scheme.rounded(b.to(weight.dtype)) @ scheme.scheme.rounded(a.to(weight.dtype))
            layer.weight = torch.nn.Parameter(rounded.to(weight.dtype), requires_grad=False)
            walk.hidden = list(inputs)
            lost.append(_divergence(expected, _predictions(walk, first)))
        layer.weight, walk.hidden = weight, inputs
        losses[where], weights[where] = tuple(lost), weight.numel()
        sizes[where] = tuple(sum(x.bytes(of, weight.dtype) for x, of in own) for own in parts)
        if cluster:
            seconds[where] = tuple(sum(seconds_of(x, *of, weight.dtype, cluster) for x, of in own) for own in parts)

    for i, block in enumerate(blocks):
        if progress:
            progress(i, len(blocks), f"measures {path}.{i}")
        layers = {name: x for name, x in linear_layers(block).items() if not ignore(f"{path}.{i}.{name}")}
        statistics = walk.statistics(i, layers) if factored else {}
        for name, layer in layers.items():
            measure(f"{path}.{i}.{name}", layer, i, statistics.get(name))
        walk.run(i, outputs=True)
    tied = tied_layers(model)
    outside = {where: x for where, x in linear_layers(model).items()
               if not where.startswith(f"{path}.") and where not in tied and not ignore(where)}  # fmt: skip
    statistics = walk.tail(outside) if factored and outside else {}
    for where, layer in outside.items():
        measure(where, layer, len(blocks), statistics.get(where))
    return Sensitivity(tuple(schemes), losses, sizes, weights, seconds or None)


def search(
    model: Any, step: Mixed, batches: Sequence[Batch], progress: Count | None = None
) -> tuple[list[LowRank], Quantize, Sensitivity]:
    """The steps that lower the ranks of layers, that which quantizes each as is best for the target, and what was
    measured.

    Raises ValueError if the smallest schemes take more.
    """
    cluster = step.cluster if step.latency else ""
    table = sensitivity(model, choices_of(step), batches, lambda path: any(matches(path, x) for x in step.ignore),
                        progress, step.multiple, cluster)  # fmt: skip
    if step.latency:
        chosen, _, _ = table.choose(target_seconds(model, step, table.losses), "seconds")
    else:
        chosen, _, _ = table.choose(target_bytes(model, step, table.losses))
    most = max(step.schemes, key=lambda x: list(chosen.values()).count(x))
    overrides: list[tuple[str, Scheme | None]] = []
    for path, x in chosen.items():
        paths = [path] if isinstance(x, Scheme) else [f"{path}.a", f"{path}.b"]
        overrides += [(own, y) for own in paths if (y := x if isinstance(x, Scheme) else x.scheme) != most]
    ranks = [
        LowRank(share, step.multiple, layers=layers, ignore=())
        for share in step.shares
        if (layers := tuple(path for path, x in chosen.items() if isinstance(x, Factored) and x.share == share))
    ]
    quantize = Quantize(most, step.method, ignore=step.ignore, overrides=tuple(overrides), embeddings=step.embeddings)
    return ranks, quantize, table


def tied_layers(model: Any) -> set[str]:
    """The paths of linear layers whose weight is an embedding's, which have its scheme."""
    embeddings = {id(x.weight) for x in model.modules() if isinstance(x, torch.nn.Embedding)}
    return {path for path, x in linear_layers(model).items() if id(x.weight) in embeddings}


def _predictions(walk: Walk, first: int) -> list[Tensor]:
    """Log probabilities (tokens, vocabulary) of each batch, from block `first` on."""
    for i in range(first, len(walk.blocks)):
        walk.run(i, outputs=True)
    return [torch.log_softmax(x.float(), -1) for x in walk.logits()]


def _divergence(expected: Sequence[Tensor], predicted: Sequence[Tensor]) -> float:
    """The mean KL(p || q) of all tokens, over the data of all processes."""
    own = sum(float((p.exp() * (p - q)).sum()) for p, q in zip(expected, predicted, strict=True))
    return max(parallel.added(own), 0.0) / parallel.added(sum(len(p) for p in expected))
