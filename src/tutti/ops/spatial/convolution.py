"""Convolutions of any rank: split over batch, groups, channels on either side, and over height, width, ... by halos.

Per spatial dim an output position o reads the inputs `o s - p + d j` for j < k (stride s, padding p, dilation d, kernel
size k). Where the input has s times as many positions as the output, parts of both correspond, and a part needs p
positions before its own and d (k - 1) - p - (s - 1) behind. A transposed convolution is the adjoint of that.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tutti.ir.op_info import ARGUMENTS, FLOPS, LOCAL, SENDS, WORKSPACE
from tutti.ir.step_graph import Call
from tutti.ops.registry import Cut, operands, rules, shape_of
from tutti.ops.spatial.halo import halo, halo_rows, pad, unhalo

aten = torch.ops.aten
AXES = "hwd"
Shape = tuple[int, ...]


class Window(NamedTuple):
    """The parameters of a convolution along one spatial dim."""

    kernel: int
    stride: int
    padding: int
    dilation: int
    transposed: bool

    @property
    def reach(self) -> int:
        return self.dilation * (self.kernel - 1)

    @property
    def borders(self) -> tuple[int, int]:
        """Input positions that a part needs before and after its own. Negative if it does not need all of its own."""
        if self.transposed:
            return max(0, (self.reach - self.padding) // self.stride), 1 + (self.padding - 1) // self.stride
        return self.padding, self.reach - self.padding - (self.stride - 1)

    def factors(self, axis: str, size: int, out_size: int, local: bool = False) -> tuple[str, str, dict[str, int]]:
        """Notation of the dim before and after, with the sizes that shapes do not determine.

        local: whether a split needs a local computation even if parts do not overlap.
        """
        large, small = (out_size, size) if self.transposed else (size, out_size)
        if large != self.stride * small or (self.transposed and self.padding > self.reach):
            return f"{axis}0!", f"{axis}1!", {}
        mark = "*" if local or self.kernel > 1 or self.stride > 1 else ""
        if self.stride == 1:
            return axis + mark, axis + mark, {}
        many = f"({axis}{mark} {axis}s!)"
        sizes = {f"{axis}s": self.stride}
        return (axis + mark, many, sizes) if self.transposed else (many, axis + mark, sizes)


def windows(kernels: tuple[int, ...], args: tuple) -> list[Window]:
    """One window per spatial dim. args: (stride, padding, dilation, transposed), short lists standing for all dims."""
    stride, padding, dilation, transposed = args
    spread = [list(v) * len(kernels) if len(v) == 1 else list(v) for v in (stride, padding, dilation)]
    return [Window(k, s, p, d, transposed) for k, s, p, d in zip(kernels, *spread, strict=True)]


def _notation(x: tuple, w: tuple, y: tuple, args: tuple, groups: int):
    """Lines of input, weight, bias and output, and sizes."""
    axes = AXES[: len(w) - 2]
    dims = [
        window.factors(axis, size, out_size)
        for axis, size, out_size, window in zip(axes, x[2:], y[2:], windows(w[2:], args), strict=True)
    ]
    kernel = " ".join(f"{axis}k!" for axis in axes)
    into = "(g c) o" if args[3] else "(g o) c"
    sizes = {k: v for *_, factor_sizes in dims for k, v in factor_sizes.items()} | {"g": groups}
    left = " ".join(["n", "(g c)", *(before for before, *_ in dims)])
    right = " ".join(["n", "(g o)", *(after for _, after, _ in dims)])
    return left, f"{into} {kernel}", "(g o)", right, sizes | {"o": y[1] // groups, "c": x[1] // groups}


def _convolution(node: Call):
    shapes = [n.meta["val"].shape for n in operands(node)]
    x, w, b, y, sizes = _notation(shapes[0], shapes[1], node.meta["val"].shape, node.args[3:7], node.args[8])
    bias = "" if len(shapes) < 3 else f", +{b}"
    return f"{x}, {w}{bias} -> {y} | " + ("~0 ~1" if not bias else "~02 ~12"), sizes


def _backward(node: Call):
    grad, x, w = (n.meta["val"].shape for n in operands(node))
    left, weight, bias, right, sizes = _notation(x, w, grad, node.args[4:8], node.args[9])
    outputs = [line if m else "1" for line, m in zip((left, weight, bias), node.args[10], strict=True)]
    read = left.replace(" c)", " c:same)")  # the bias' gradient needs no input
    return f"{right}, {read}, {weight} -> {', '.join(outputs)} | ~0", sizes


rules({aten.convolution.default: _convolution, aten.convolution_backward.default: _backward})


def _groups(x: Shape, y: Shape, w: Shape, transposed: bool) -> int:
    """The number of local groups: the weight's second dim is the channels of one group."""
    return (y if transposed else x)[1] // w[1]


def _arguments(args: tuple, shapes: list[Shape]) -> tuple:
    x, w = (a.meta["val"].shape for a in args[:2])
    return (*args[:8], _groups(x, shapes[0], w, args[6]))


def _backward_arguments(args: tuple, shapes: list[Shape]) -> tuple:
    grad, x, w = (a.meta["val"].shape for a in args[:3])
    return (*args[:3], args[3] and [grad[1]], *args[4:9], _groups(x, grad, w, args[7]), args[10])


ARGUMENTS |= {aten.convolution.default: _arguments, aten.convolution_backward.default: _backward_arguments}


def split_dims(here, x: Tensor, spatial: list[Window]) -> list[tuple[str, int, Window]]:
    """Which of the last dims of x are split: (factor, dim, window)."""
    first = x.ndim - len(spatial)
    return [(axis, first + i, w) for i, (axis, w) in enumerate(zip(AXES, spatial, strict=False)) if here.axes(axis)]


def paddings(here, spatial: list[Window]) -> list[int]:
    """Split dims are padded by their halos."""
    return [0 if here.axes(axis) else w.padding for axis, w in zip(AXES, spatial, strict=False)]


def _local(here, x, w, bias, stride, padding, dilation, transposed, output_padding, groups):
    spatial = windows(w.shape[2:], (stride, padding, dilation, transposed))
    split = split_dims(here, x, spatial)
    own = {dim: x.shape[dim] for _, dim, _ in split}
    for axis, dim, window in split:
        x = halo(here, x, axis, dim, *window.borders)
    spread = _spread(w, output_padding, split)
    groups = _groups(x.shape, tuple(here.output_shape(0)), w.shape, transposed)
    y = aten.convolution(x, w, bias, stride, paddings(here, spatial), dilation, transposed, spread, groups)
    if transposed:
        for _, dim, window in split:
            y = y.narrow(dim, _first(window), own[dim] * window.stride)
    return y


def _local_backward(here, grad, x, w, bias, stride, padding, dilation, transposed, output_padding, groups, mask):
    spatial = windows(w.shape[2:], (stride, padding, dilation, transposed))
    split = split_dims(here, x, spatial)
    for axis, dim, window in split:
        if transposed:  # zeros where the forward pass cut
            length = (x.shape[dim] + sum(window.borders) - 1) * window.stride + window.reach + 1
            grad = pad(grad, dim, _first(window), max(0, length - _first(window) - grad.shape[dim]))
        x = halo(here, x, axis, dim, *window.borders)
    groups = _groups(x.shape, grad.shape, w.shape, transposed)
    spread = _spread(w, output_padding, split)
    bias = bias and [grad.shape[1]]
    gx, gw, gb = aten.convolution_backward(
        grad, x, w, bias, stride, paddings(here, spatial), dilation, transposed, spread, groups, mask
    )
    for axis, dim, window in reversed(split) if mask[0] else ():
        gx = unhalo(here, gx, axis, dim, *window.borders)
    return gx, gw, gb


def _first(window: Window) -> int:
    """The offset of a part's own positions in the transposed convolution of the part and its halo."""
    return window.padding + window.borders[0] * window.stride


def _spread(w: Tensor, output_padding: list[int], split: list) -> list[int]:
    """Output padding. In split dims, only what a kernel shorter than its stride leaves out."""
    spread = list(output_padding) * (w.ndim - 2) if len(output_padding) == 1 else list(output_padding)
    for _, dim, window in split:
        covered = (window.padding - 1) // window.stride * window.stride + window.reach + 1
        spread[dim - 2] = max(0, window.padding - covered) if window.transposed else 0
    return spread


LOCAL |= {aten.convolution.default: _local, aten.convolution_backward.default: _local_backward}


def _sends(cut: Cut, gradient: bool) -> Iterator[tuple[str, int]]:
    """The input's halo. In the backward pass, also its gradient's, in the other direction."""
    x, w = cut.inputs[gradient : gradient + 2]
    args = cut.node.args[3 + gradient : 7 + gradient]
    dim = 2 + AXES.index(cut.factor)
    rows = halo_rows(*windows(w.shape[2:], args)[dim - 2].borders)
    times = 2 if gradient and cut.node.args[10][0] else 1
    yield "ppermute", times * rows * (x.bytes // x.shape[dim])


SENDS |= {
    aten.convolution.default: lambda cut: _sends(cut, gradient=False),
    aten.convolution_backward.default: lambda cut: _sends(cut, gradient=True),
}


def _flops(node: Call) -> int:
    """A multiply-add for each output element (input element if transposed) and element of its window."""
    x, w = node.args[:2]
    anchor = shape_of(x) if node.args[6] else node.meta["val"].shape
    return 2 * prod(anchor) * prod(shape_of(w)[1:])


def _backward_flops(node: Call) -> int:
    """The FLOPs of the forward pass for each of the gradients of input and weight."""
    grad, x, w = node.args[:3]
    anchor = shape_of(x) if node.args[7] else shape_of(grad)
    return 2 * prod(anchor) * prod(shape_of(w)[1:]) * sum(node.args[10][:2])


BLOCK = 16  # channels of a block in oneDNN's layouts


def _workspace(event: Any) -> int:
    """Copies of image and gradient with blocked channels. None for channels_last images, images that need no gradient,
    and 1 x 1 kernels."""
    gradient, image, kernel = (operand.spec for operand in event.reads[:3])
    wanted: Any = event.node.args[10]
    if not event.reads[1].contiguous or not wanted[0] or set(kernel.shape[2:]) == {1}:
        return 0
    return sum(
        x.shape[0] * -(-x.shape[1] // BLOCK) * BLOCK * prod(x.shape[2:]) * x.dtype.itemsize for x in (gradient, image)
    )


FLOPS |= {aten.convolution.default: _flops, aten.convolution_backward.default: _backward_flops}
WORKSPACE[aten.convolution_backward.default] = _workspace
