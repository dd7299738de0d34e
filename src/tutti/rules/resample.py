"""Up-sampling, pixel shuffle and reflected borders."""

from __future__ import annotations

from string import ascii_lowercase

import torch
from torch import Tensor

from tutti.graph.step_graph import Call
from tutti.rules.convolution import AXES, Shape
from tutti.rules.halo import halo, pad, unhalo
from tutti.rules.registry import ARGUMENTS, LOCAL, SENDS, Cut, rules

aten = torch.ops.aten


def _shape(x: Call) -> Shape:
    return x.meta["val"].shape


def _blown_up(x: Shape, y: Shape, scales: tuple, mark: str = "") -> tuple[str, str, dict[str, int]]:
    """Each position of the last dims becomes a block of its own where the sizes divide, and no other scale is given."""
    left, right, sizes = ["n", "c"], ["n", "c"], {}
    for i, (axis, size, made) in enumerate(zip(AXES, x[2:], y[2:], strict=False)):
        scale = (scales[i : i + 1] or (None,))[0]
        even = made % size == 0 and scale in (None, made / size)
        inner = "!" if mark or scale is not None else ""  # a part of a block has another scale than the whole
        left.append(f"{axis}{mark}" if even else f"{axis}0!")
        right.append(f"({axis}{mark} {axis}s{inner})" if even else f"{axis}1!")
        sizes |= {f"{axis}s": made // size} if even else {}
    return " ".join(left), " ".join(right), sizes


def _nearest(node: Call):
    left, right, sizes = _blown_up(_shape(node.args[0]), _shape(node), node.args[2:])
    return f"{left} -> {right} | ~0", sizes


def _nearest_backward(node: Call):
    left, right, sizes = _blown_up(_shape(node), _shape(node.args[0]), node.args[3:])
    return f"{right} -> {left} | ~0", sizes


def _bilinear(node: Call):
    left, right, sizes = _blown_up(_shape(node.args[0]), _shape(node), node.args[3:], _mark(node.args[2]))
    return f"{left} -> {right} | ~0", sizes


def _bilinear_backward(node: Call):
    left, right, sizes = _blown_up(_shape(node), _shape(node.args[0]), node.args[4:], _mark(node.args[3]))
    return f"{right} -> {left} | ~0", sizes


def _mark(align_corners: bool) -> str:
    """Aligned corners make the distance of samples depend on the size of the whole."""
    return "!" if align_corners else "*"


def _pixel_shuffle(node: Call):
    r = node.args[1]
    return "n (c r! s!) h w -> n c (h r!) (w s!) | ~0", {"r": r, "s": r}


def _pixel_unshuffle(node: Call):
    r = node.args[1]
    return "n c (h r!) (w s!) -> n (c r! s!) h w | ~0", {"r": r, "s": r}


def _framed(x: Call, pads: list[int]) -> tuple[str, str]:
    """Dims that get a border stay whole."""
    before = list(ascii_lowercase[: len(_shape(x))])
    after = before.copy()
    for i in range(len(pads) // 2):
        if pads[2 * i] or pads[2 * i + 1]:
            at = len(before) - 1 - i
            before[at], after[at] = f"y{i}!", f"z{i}!"
    return " ".join(before), " ".join(after)


def _border(node: Call) -> str:
    before, after = _framed(node.args[0], node.args[1])
    return f"{before} -> {after} | ~0"


def _border_backward(node: Call) -> str:
    before, after = _framed(node.args[1], node.args[2])
    return f"{after}, {before} -> {before} | ~0"


NEAREST = [aten.upsample_nearest1d, aten.upsample_nearest2d, aten._upsample_nearest_exact2d]
NEAREST_BACKWARD = [
    aten.upsample_nearest1d_backward,
    aten.upsample_nearest2d_backward,
    aten._upsample_nearest_exact2d_backward,
]

rules(
    {
        **{op.default: _nearest for op in NEAREST},
        **{op.default: _nearest_backward for op in NEAREST_BACKWARD},
        aten.upsample_bilinear2d.default: _bilinear,
        aten.upsample_bilinear2d_backward.default: _bilinear_backward,
        aten.pixel_shuffle.default: _pixel_shuffle,
        aten.pixel_unshuffle.default: _pixel_unshuffle,
        aten.reflection_pad1d.default: _border,
        aten.reflection_pad2d.default: _border,
        aten.replication_pad2d.default: _border,
        aten.reflection_pad1d_backward.default: _border_backward,
        aten.reflection_pad2d_backward.default: _border_backward,
        aten.replication_pad2d_backward.default: _border_backward,
    }
)


def _sizes(args: tuple, shapes: list[Shape]) -> tuple:
    return args[0], list(shapes[0][2:]), *args[2:]


def _backward_sizes(args: tuple, shapes: list[Shape]) -> tuple:
    return args[0], list(_shape(args[0])[2:]), list(shapes[0]), *args[3:]


ARGUMENTS |= {op.default: _sizes for op in NEAREST} | {op.default: _backward_sizes for op in NEAREST_BACKWARD}
ARGUMENTS[aten.upsample_bilinear2d_backward.default] = _backward_sizes


def _local_bilinear(here, x: Tensor, size: list[int], align_corners: bool, *scales):
    """With a border of one position on either side; at the ends of the whole it repeats the last one."""
    out, cut = list(here.output_shape(0)[2:]), []
    for i, axis in enumerate(AXES[:2]):
        if here.axes(axis):
            scale = out[i] // x.shape[i + 2]
            x = _ends(here, halo(here, x, axis, i + 2, 1, 1), x, axis, i + 2)
            cut.append((i + 2, scale, out[i]))
            out[i] += 2 * scale
    y = aten.upsample_bilinear2d(x, out, align_corners, *scales)
    for dim, scale, length in cut:
        y = y.narrow(dim, scale, length)
    return y


def _ends(here, x: Tensor, own: Tensor, axis: str, dim: int) -> Tensor:
    """Beyond the first and the last part the halo is zero: their own border is added there."""
    if here.part(axis) == 0:
        x = x + pad(own.narrow(dim, 0, 1), dim, 0, x.shape[dim] - 1)
    if here.part(axis) == here.parts(axis) - 1:
        x = x + pad(own.narrow(dim, own.shape[dim] - 1, 1), dim, x.shape[dim] - 1, 0)
    return x


def _local_bilinear_backward(here, grad: Tensor, size: list[int], shape: list[int], align_corners: bool, *scales):
    own, split = list(here.output_shape(0)), []
    out = list(grad.shape[2:])
    for i, axis in enumerate(AXES[:2]):
        if here.axes(axis):
            scale = grad.shape[i + 2] // own[i + 2]
            grad = pad(grad, i + 2, scale, scale)
            own[i + 2] += 2
            out[i] += 2 * scale
            split.append((axis, i + 2))
    gx = aten.upsample_bilinear2d_backward(grad, out, own, align_corners, *scales)
    for axis, dim in reversed(split):
        n = gx.shape[dim]
        ends = torch.zeros_like(gx.narrow(dim, 1, n - 2))
        if here.part(axis) == 0:
            ends = ends + pad(gx.narrow(dim, 0, 1), dim, 0, n - 3)
        if here.part(axis) == here.parts(axis) - 1:
            ends = ends + pad(gx.narrow(dim, n - 1, 1), dim, n - 3, 0)
        gx = unhalo(here, gx, axis, dim, 1, 1) + ends
    return gx


LOCAL |= {
    aten.upsample_bilinear2d.default: _local_bilinear,
    aten.upsample_bilinear2d_backward.default: _local_bilinear_backward,
}


def _two_rows(cut: Cut, small) -> list[tuple[str, int]]:
    return [("shift", 2 * small.bytes // small.shape[2 + AXES.index(cut.factor)])]


SENDS |= {
    aten.upsample_bilinear2d.default: lambda cut: _two_rows(cut, cut.inputs[0]),
    aten.upsample_bilinear2d_backward.default: lambda cut: _two_rows(cut, cut.outputs[0]),
}
