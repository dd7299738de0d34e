"""Normalizations over the last dims, which cannot be split."""

from __future__ import annotations

from math import prod
from string import ascii_lowercase

import torch
from torch import Tensor

from tutti.ir.op_info import ARGUMENTS, CONTIGUOUS, LOCAL, SENDS, UNEVEN
from tutti.ir.step_graph import Call
from tutti.ops.reductions.reduction import wide, wide_bytes
from tutti.ops.registry import Cut, operands, rules, specs

aten = torch.ops.aten


def _dims(node: Call, x: Call, normalized: int) -> tuple[str, str, str]:
    rank = len(x.meta["val"].shape)
    batch, rest = (
        list(ascii_lowercase[: rank - normalized]),
        [f"{c}!" for c in ascii_lowercase[rank - normalized : rank]],
    )
    return " ".join(batch + rest), " ".join(batch + ["1"] * normalized), " ".join(rest)


def _layer_norm(node: Call) -> str:
    x, statistics, weight = _dims(node, operands(node)[0], len(node.args[1]))
    weights = "".join(f", {weight}" for _ in operands(node)[1:])
    return f"{x}{weights} -> {x}, {statistics}, {statistics}"


def _layer_norm_backward(node: Call) -> str:
    x, statistics, weight = _dims(node, operands(node)[0], len(node.args[2]))
    weights = "".join(f", {weight}" for _ in operands(node)[4:])
    mask: list[bool] = node.args[7]
    outputs = [text if m else "1" for text, m in zip((x, weight, weight), mask, strict=True)]
    return f"{x}, {x}, {statistics}, {statistics}{weights} -> {', '.join(outputs)} | ~0"


rules(
    {
        aten.native_layer_norm.default: _layer_norm,
        aten.native_layer_norm_backward.default: _layer_norm_backward,
    }
)

CONTIGUOUS |= {
    aten.native_layer_norm_backward.default: (2, 3),  # mean and reciprocal deviation, on a CPU
    aten.native_group_norm.default: (0,),
    aten.native_group_norm_backward.default: (0, 1, 2, 3),
}


FUNCTIONAL = aten._native_batch_norm_legit_functional.default
OF_THE_BATCH = {aten._native_batch_norm_legit.no_stats}  # uses batch statistics, keeps no running ones


def _spatial(x: Call, mark: str) -> str:
    return " ".join(c + mark for c in "hwdt"[: len(x.meta["val"].shape) - 2])


def _batch_norm(node: Call) -> str:
    """In training, every part of the batch and of the image contributes to a channel's statistics."""
    x, *channels = operands(node)
    training = node.target in OF_THE_BATCH or (node.target is FUNCTIONAL and node.args[5])
    mark = "@" if training else ""
    line = f"n{mark} c {_spatial(x, mark)}"
    saved = "=c, =c" if training else "=1, =1"
    running = ", =c, =c" if len(specs(node)) == 5 else ""
    return f"{line}{', c' * len(channels)} -> {line}, {saved}{running}"


def _batch_norm_backward(node: Call) -> str:
    """(grad, x, weight, running mean and variance, saved mean and deviation, training, eps, mask)"""
    _, x, *channels = operands(node)
    mark = "@" if node.args[7] else ""
    line = f"n{mark} c {_spatial(x, mark)}"
    combined = "=c" if mark else "c"
    inputs = ", ".join([line, line, *("1" if not n.meta["val"].shape[0] else "c" for n in channels)])
    whole = len(specs(node)[0].shape) > 1  # a gradient that is not computed may still have a shape
    mask = [node.args[9][0] or whole, *node.args[9][1:]]
    outputs = [text if m else "1" for text, m in zip((line, combined, combined), mask, strict=True)]
    return f"{inputs} -> {', '.join(outputs)} | ~0"


def _group_norm(node: Call):
    x, *weights = operands(node)
    line = f"n (g c!) {_spatial(x, '@')}"
    return f"{line}{', (g c!)' * len(weights)} -> {line}, =n g, =n g", {"g": node.args[6]}


def _group_norm_backward(node: Call):
    """(grad, x, mean, deviation, weight, N, C, HW, groups, mask)"""
    _, x, _, _, *weights = operands(node)
    line = f"n (g c!) {_spatial(x, '@')}"
    channels = "(g c!)"
    outputs = [text if m else "1" for text, m in zip((line, channels, channels), node.args[9], strict=True)]
    return f"{line}, {line}, n g, n g{f', {channels}' * len(weights)} -> {', '.join(outputs)} | ~0", {"g": node.args[8]}


rules(
    {
        FUNCTIONAL: _batch_norm,
        aten._native_batch_norm_legit_no_training.default: _batch_norm,
        **dict.fromkeys(OF_THE_BATCH, _batch_norm),
        aten.native_batch_norm_backward.default: _batch_norm_backward,
        aten.native_group_norm.default: _group_norm,
        aten.native_group_norm_backward.default: _group_norm_backward,
    }
)


def _group_arguments(position: int, mask: bool):
    """N, C, HW and the number of groups of the local operands; statistics are (N, groups)."""

    def arguments(args: tuple, shapes: list) -> tuple:
        x = args[mask].meta["val"].shape
        groups = args[2].meta["val"].shape[1] if mask else shapes[1][1]
        return (*args[:position], x[0], x[1], prod(x[2:]), groups, *args[position + 4 :])

    return arguments


ARGUMENTS |= {
    aten.native_group_norm.default: _group_arguments(3, mask=False),
    aten.native_group_norm_backward.default: _group_arguments(5, mask=True),
}


def _per_channel(x: Tensor, value: Tensor) -> Tensor:
    """(C,) against (N, C, *)."""
    return value.view(-1, *[1] * (x.ndim - 2))


def _mean(here, x: Tensor, factors: str, dims: list[int]) -> Tensor:
    """The mean over dims of which other ranks have parts."""
    return _total(here, x.sum(dims), factors) / _count(here, x, factors, dims)


def _total(here, x: Tensor, factors: str) -> Tensor:
    """The sum of x over all ranks that have parts of these factors."""
    for factor in factors:
        x = here.all_reduce(x, factor, "sum")
    return x


def _count(here, x: Tensor, factors: str, dims: list[int]) -> int:
    """The number of elements in these dims on all ranks."""
    own = prod(x.shape[dim] for dim in dims)
    return own // prod(map(here.size, factors)) * prod(map(here.whole, factors))


def _local_batch_norm(here, x, weight, bias, running_mean, running_var, training, momentum, eps):
    dims, factors = [0, *range(2, x.ndim)], "nhwdt"[: x.ndim - 1]
    wider = wide(x)
    mean = _mean(here, wider, factors, dims)
    var = _mean(here, (wider - _per_channel(x, mean)).square(), factors, dims)
    deviation = (var + eps).rsqrt()
    y = (wider - _per_channel(x, mean)) * _per_channel(x, deviation)
    y = y if weight is None else y * _per_channel(x, weight)
    y = y if bias is None else y + _per_channel(x, bias)
    results = [y, mean, deviation]
    if running_mean is None:
        return *results, mean.new_empty(0), mean.new_empty(0)
    count = prod(here.whole_shape(0)) // here.whole_shape(0)[1]
    unbiased = var * (count / max(1, count - 1))
    return (
        *results,
        running_mean * (1 - momentum) + momentum * mean,
        running_var * (1 - momentum) + momentum * unbiased,
    )


def _local_batch_norm_backward(here, grad, x, weight, running_mean, running_var, mean, deviation, training, eps, mask):
    """With means over all elements of a channel: gx = w d (g - mean(g) - xhat mean(g xhat)), xhat = (x - m) d."""
    dims, factors = [0, *range(2, x.ndim)], "nhwdt"[: x.ndim - 1]
    wider, g = wide(x), wide(grad)
    normal = (wider - _per_channel(x, mean)) * _per_channel(x, deviation)
    both, count = torch.stack([g.sum(dims), (g * normal).sum(dims)]), _count(here, x, factors, dims)
    mean_g, mean_gx = (_total(here, both, factors) / count).unbind(0)
    scale = deviation if weight is None else deviation * weight
    gx = (g - _per_channel(x, mean_g) - normal * _per_channel(x, mean_gx)) * _per_channel(x, scale)
    return gx if mask[0] else None, mean_gx * count if mask[1] else None, mean_g * count if mask[2] else None


def _groups(x: Tensor, groups: int) -> Tensor:
    """(N, C, *) as (N, groups, channels of a group, *)."""
    return x.reshape(x.shape[0], groups, -1, *x.shape[2:])


def _local_group_norm(here, x, weight, bias, n, c, size, groups, eps):
    groups = here.output_shape(1)[1]
    parted, factors = _groups(wide(x), groups), "hwdt"[: x.ndim - 2]
    dims, statistics = list(range(2, parted.ndim)), (slice(None), slice(None), *[None] * (parted.ndim - 2))
    mean = _mean(here, parted, factors, dims)
    parted = parted - mean[statistics]
    deviation = (_mean(here, parted.square(), factors, dims) + eps).rsqrt()
    y = (parted * deviation[statistics]).reshape(x.shape)
    y = y if weight is None else y * _per_channel(x, weight)
    y = y if bias is None else y + _per_channel(x, bias)
    return y, mean, deviation


def _local_group_norm_backward(here, grad, x, mean, deviation, weight, n, c, size, total, mask):
    """As for a batch norm, with means over a group, of the gradient times the weight."""
    groups, factors = mean.shape[1], "hwdt"[: x.ndim - 2]
    g, parted = wide(grad), _groups(wide(x), groups)
    statistics = (slice(None), slice(None), *[None] * (parted.ndim - 2))
    normal = (parted - mean[statistics]) * deviation[statistics]
    weighted = _groups(g if weight is None else g * _per_channel(x, weight), groups)
    gx, dims = None, list(range(2, parted.ndim))
    if mask[0]:
        both = torch.stack([weighted.sum(dims), (weighted * normal).sum(dims)])
        mean_g, mean_gx = (_total(here, both, factors) / _count(here, weighted, factors, dims)).unbind(0)
        gx = (weighted - mean_g[statistics] - normal * mean_gx[statistics]) * deviation[statistics]
        gx = gx.reshape(x.shape)
    over = [0, *range(2, x.ndim)]
    gw = (g * normal.reshape(x.shape)).sum(over) if mask[1] else None
    gb = g.sum(over) if mask[2] else None
    return gx, gw, gb


def _local_batch_norm_alone(here, x, weight, bias, training, momentum, eps):
    return _local_batch_norm(here, x, weight, bias, None, None, training, momentum, eps)[:3]


LOCAL |= {
    FUNCTIONAL: _local_batch_norm,
    **dict.fromkeys(OF_THE_BATCH, _local_batch_norm_alone),
    aten.native_batch_norm_backward.default: _local_batch_norm_backward,
    aten.native_group_norm.default: _local_group_norm,
    aten.native_group_norm_backward.default: _local_group_norm_backward,
}


def _mean_and_variance(cut: Cut) -> list[tuple[str, int]]:
    return [("all_reduce", wide_bytes(cut.outputs[1]))] * 2


SENDS |= {
    **dict.fromkeys((FUNCTIONAL, *OF_THE_BATCH), _mean_and_variance),
    aten.native_batch_norm_backward.default: lambda cut: [("all_reduce", 2 * wide_bytes(cut.inputs[-1]))],
    aten.native_group_norm.default: _mean_and_variance,
    aten.native_group_norm_backward.default: lambda cut: (
        [("all_reduce", 2 * wide_bytes(cut.inputs[2]))] if cut.node.args[9][0] else []
    ),
}

UNEVEN |= dict.fromkeys((FUNCTIONAL, *OF_THE_BATCH, aten.native_batch_norm_backward.default), True)
