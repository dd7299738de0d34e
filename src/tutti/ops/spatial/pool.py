"""Pooling: split over batch and channels, and over height and width by halos, as convolutions are."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any

import torch
from torch import Tensor

from tutti.ir.op_info import ARGUMENTS, LOCAL, SENDS
from tutti.ir.spec import Spec
from tutti.ir.step_graph import Call
from tutti.ops.registry import Cut, rules
from tutti.ops.spatial.convolution import AXES, Shape, Window, paddings, split_dims
from tutti.ops.spatial.halo import halo, halo_rows, pad, unhalo

aten = torch.ops.aten


def windows(
    kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], dims: int = 2
) -> list[Window]:
    """One window per pooled dim; no stride means that of the kernel."""
    spread = [list(v) * dims if len(v) == 1 else list(v) for v in (kernel, stride or kernel, padding, dilation)]
    return [Window(k, s, p, d, transposed=False) for k, s, p, d in zip(*spread, strict=True)]


def _lines(x: Shape, y: Shape, spatial: list[Window], whole: bool = False, local: bool = False):
    """Notation before and after pooling the last dims, with the sizes that shapes do not determine."""
    left, sizes = list("bc"[: len(x) - len(spatial)]), {}
    right = left.copy()
    for axis, size, out_size, window in zip(AXES, x[-len(spatial) :], y[-len(spatial) :], spatial, strict=False):
        before, after, factor_sizes = window.factors(axis, size, out_size, local)
        left.append(f"{axis}0!" if whole else before)
        right.append(f"{axis}1!" if whole else after)
        sizes |= {} if whole else factor_sizes
    return " ".join(left), " ".join(right), sizes


def _shape(x: Call) -> tuple[int, ...]:
    return x.meta["val"].shape


def _max(node: Call):
    left, right, sizes = _lines(
        _shape(node.args[0]), node.meta["val"][0].shape, _max_windows(node.args), _ceils(node.args), local=True
    )
    return f"{left} -> {right}, {right}", sizes


def _max_backward(node: Call):
    grad, x, *rest = node.args
    left, right, sizes = _lines(_shape(x), _shape(grad), _max_windows((x, *rest)), _ceils((x, *rest)), local=True)
    return f"{right}, {left}, {right} -> {left} | ~0", sizes


def _ceils(args: tuple) -> bool:
    """Whether windows may extend past the end (ceil_mode)."""
    return len(args) > 5 and args[5] is True


def _max_windows(args: tuple) -> list[Window]:
    """args of the forward operator: x, kernel, stride, padding, dilation, ..."""
    return windows(*_with_defaults(args[1:5], ([], [], [0], [1])))


def _with_defaults(args: tuple, defaults: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments, with defaults for the last ones."""
    return (*args, *defaults[len(args) :])


def _avg(dims: int):
    def notation(node: Call):
        left, right, sizes = _lines(_shape(node.args[0]), _shape(node), *_avg_windows(node.args, dims))
        return f"{left} -> {right} | ~0", sizes

    return notation


def _avg_backward(dims: int):
    def notation(node: Call):
        grad, x, *rest = node.args
        left, right, sizes = _lines(_shape(x), _shape(grad), *_avg_windows((x, *rest), dims))
        return f"{right}, {left} -> {left} | ~0", sizes

    return notation


def _avg_windows(args: tuple, dims: int) -> tuple[list[Window], bool]:
    """Windows, and whether the divisor depends on the position: then a part cannot compute it."""
    kernel, stride, padding, ceil, padded = _with_defaults(args[1:6], ([], [], [0], False, True))
    spatial = windows(kernel, stride, padding, [1], dims)
    return spatial, bool(ceil) or (not padded and any(w.padding for w in spatial))


def _adaptive(node: Call):
    left, right, sizes = _blocks(_shape(node.args[0]), _shape(node))
    return f"{left} -> {right} | ~0", sizes


def _adaptive_backward(node: Call):
    left, right, sizes = _blocks(_shape(node.args[1]), _shape(node.args[0]))
    return f"{right}, {left} -> {left} | ~0", sizes


def _adaptive_max(node: Call):
    left, right, sizes = _blocks(_shape(node.args[0]), node.meta["val"][0].shape, local=True)
    return f"{left} -> {right}, {right}", sizes


def _adaptive_max_backward(node: Call):
    grad, x, _ = node.args
    left, right, sizes = _blocks(_shape(x), _shape(grad), local=True)
    return f"{right}, {left}, {right} -> {left} | ~0", sizes


def _blocks(x: tuple, y: tuple, local: bool = False) -> tuple[str, str, dict[str, int]]:
    """If outputs divide the input evenly, each output reads a separate block."""
    even = all(n % m == 0 for n, m in zip(x[-2:], y[-2:], strict=True))
    return _lines(x, y, _block_windows(x, y), whole=not even, local=local)


def _block_windows(x: Shape, y: Shape) -> list[Window]:
    return [Window(n // m, n // m, 0, 1, transposed=False) for n, m in zip(x[-2:], y[-2:], strict=True)]


AVG = {aten.avg_pool2d.default: 2, aten.avg_pool3d.default: 3}  # how many dims are pooled
AVG_BACKWARD = {aten.avg_pool2d_backward.default: 2, aten.avg_pool3d_backward.default: 3}

rules(
    {
        aten.max_pool2d_with_indices.default: _max,
        aten.max_pool2d_with_indices_backward.default: _max_backward,
        **{op: _avg(dims) for op, dims in AVG.items()},
        **{op: _avg_backward(dims) for op, dims in AVG_BACKWARD.items()},
        aten._adaptive_avg_pool2d.default: _adaptive,
        aten._adaptive_avg_pool2d_backward.default: _adaptive_backward,
        aten.adaptive_max_pool2d.default: _adaptive_max,
        aten.adaptive_max_pool2d_backward.default: _adaptive_max_backward,
    }
)

ARGUMENTS[aten._adaptive_avg_pool2d.default] = lambda args, shapes: (args[0], list(shapes[0][-2:]))


def _plane(here, x: Tensor, split: list):
    """(columns, own columns, own first row and column), of the full plane and of this rank's part with its halo.

    x: this rank's part, without halo.
    """
    rows, columns = x.shape[-2:]
    first, size = [0, 0], [rows, columns]
    parts = [1, 1]
    for axis, dim, w in split:
        i = dim - (x.ndim - 2)
        parts[i] = here.parts(axis)
        first[i] = here.part(axis) * size[i] - w.borders[0]
        size[i] += sum(w.borders)
    return columns * parts[1], size[1], first


def _local_max(here, x, *rest):
    spatial = _max_windows((x, *rest))
    split = split_dims(here, x, spatial)
    wide, own, first = _plane(here, x, split)
    for axis, dim, w in split:
        x = halo(here, x, axis, dim, *w.borders, edge=-inf)
    kernel, stride, dilation = ([getattr(w, name) for w in spatial] for name in ("kernel", "stride", "dilation"))
    y, at = aten.max_pool2d_with_indices(x, kernel, stride, paddings(here, spatial), dilation)
    return y, (at // own + first[0]) * wide + at % own + first[1]


def _local_max_backward(here, grad, x, *rest):
    *options, indices = rest
    spatial = _max_windows((x, *options))
    split = split_dims(here, x, spatial)
    wide, own, first = _plane(here, x, split)
    at = (indices // wide - first[0]) * own + indices % wide - first[1]
    for _, dim, w in split:
        x = _room(x, dim, w)
    kernel, stride, dilation = ([getattr(w, name) for w in spatial] for name in ("kernel", "stride", "dilation"))
    gx = aten.max_pool2d_with_indices_backward(grad, x, kernel, stride, paddings(here, spatial), dilation, False, at)
    for axis, dim, w in reversed(split):
        gx = unhalo(here, gx, axis, dim, *w.borders)
    return gx


def _room(x: Tensor, dim: int, w: Window) -> Tensor:
    """A tensor of the shape that `halo` returns, with arbitrary values."""
    before, after = w.borders
    x = pad(x, dim, before, after)
    return x.narrow(dim, 0, x.shape[dim] + min(0, before) + min(0, after))


def _local_adaptive_max(here, x, size):
    out = list(here.output_shape(0)[-2:])
    wide, own, first = _plane(here, x, split_dims(here, x, _block_windows(x.shape, tuple(out))))
    y, at = aten.adaptive_max_pool2d(x, out)
    return y, (at // own + first[0]) * wide + at % own + first[1]


def _local_adaptive_max_backward(here, grad, x, indices):
    wide, own, first = _plane(here, x, split_dims(here, x, _block_windows(x.shape, grad.shape)))
    at = (indices // wide - first[0]) * own + indices % wide - first[1]
    return aten.adaptive_max_pool2d_backward(grad, x, at)


def _local_avg(pool, dims: int):
    def local(here, x, *rest):
        spatial, _ = _avg_windows((x, *rest), dims)
        for axis, dim, w in split_dims(here, x, spatial):
            x = halo(here, x, axis, dim, *w.borders)
        return pool(x, *_avg_options(here, spatial, rest))

    return local


def _local_avg_backward(gradient, dims: int):
    def local(here, grad, x, *rest):
        spatial, _ = _avg_windows((x, *rest), dims)
        split = split_dims(here, x, spatial)
        for _, dim, w in split:
            x = _room(x, dim, w)
        gx = gradient(grad, x, *_avg_options(here, spatial, rest))
        for axis, dim, w in reversed(split):
            gx = unhalo(here, gx, axis, dim, *w.borders)
        return gx

    return local


def _avg_options(here, spatial: list[Window], rest: tuple) -> tuple:
    divisor = rest[5] if len(rest) > 5 else None
    return (
        [w.kernel for w in spatial],
        [w.stride for w in spatial],
        paddings(here, spatial),
        False,
        True,
        divisor,
    )


LOCAL |= {
    aten.max_pool2d_with_indices.default: _local_max,
    aten.max_pool2d_with_indices_backward.default: _local_max_backward,
    **{op: _local_avg(op, dims) for op, dims in AVG.items()},
    **{op: _local_avg_backward(op, dims) for op, dims in AVG_BACKWARD.items()},
    aten.adaptive_max_pool2d.default: _local_adaptive_max,
    aten.adaptive_max_pool2d_backward.default: _local_adaptive_max_backward,
    aten._adaptive_avg_pool2d.default: lambda here, x, size: aten._adaptive_avg_pool2d(x, here.output_shape(0)[-2:]),
    aten._adaptive_avg_pool2d_backward.default: lambda here, grad, x: aten._adaptive_avg_pool2d_backward(grad, x),
}


def _sends(spatial: list[Window], cut: Cut, x: Spec) -> Iterator[tuple[str, int]]:
    i = AXES.index(cut.factor)
    yield "ppermute", halo_rows(*spatial[i].borders) * (x.bytes // x.shape[len(x.shape) - len(spatial) + i])


def _avg_sends(dims: int):
    return lambda cut: _sends(_avg_windows(cut.node.args, dims)[0], cut, cut.inputs[0])


def _avg_backward_sends(dims: int):
    return lambda cut: _sends(_avg_windows(cut.node.args[1:], dims)[0], cut, cut.inputs[1])


SENDS |= {
    aten.max_pool2d_with_indices.default: lambda cut: _sends(_max_windows(cut.node.args), cut, cut.inputs[0]),
    aten.max_pool2d_with_indices_backward.default: lambda cut: _sends(
        _max_windows(cut.node.args[1:]), cut, cut.inputs[1]
    ),
    **{op: _avg_sends(dims) for op, dims in AVG.items()},
    **{op: _avg_backward_sends(dims) for op, dims in AVG_BACKWARD.items()},
}
