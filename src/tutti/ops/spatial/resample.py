"""Upsampling, sampling at given positions, pixel shuffle and reflected borders."""

from __future__ import annotations

from collections.abc import Callable
from string import ascii_lowercase

import torch
from torch import Tensor

from tutti.ir.op_info import ARGUMENTS, LOCAL, SENDS
from tutti.ir.spec import Spec
from tutti.ir.step_graph import Call
from tutti.ops.registry import Cut, rules
from tutti.ops.spatial.convolution import AXES, Shape
from tutti.ops.spatial.halo import halo, pad, unhalo

aten = torch.ops.aten


def _shape(x: Call) -> Shape:
    return x.meta["val"].shape


def _blown_up(x: Shape, y: Shape, scales: tuple, mark: str = "") -> tuple[str, str, dict[str, int]]:
    """Each position of the last dims becomes a separate block, if the sizes divide and no other scale is given."""
    left, right, sizes = ["n", "c"], ["n", "c"], {}
    for i, (axis, size, out_size) in enumerate(zip(AXES, x[2:], y[2:], strict=False)):
        scale = (scales[i : i + 1] or (None,))[0]
        even = out_size % size == 0 and scale in (None, out_size / size)
        inner = "!" if mark or scale is not None else ""  # a part of a block has another scale than the whole
        left.append(f"{axis}{mark}" if even else f"{axis}0!")
        right.append(f"({axis}{mark} {axis}s{inner})" if even else f"{axis}1!")
        sizes |= {f"{axis}s": out_size // size} if even else {}
    return " ".join(left), " ".join(right), sizes


def _nearest(node: Call):
    left, right, sizes = _blown_up(_shape(node.args[0]), _shape(node), node.args[2:])
    return f"{left} -> {right} | ~0", sizes


def _nearest_backward(node: Call):
    left, right, sizes = _blown_up(_shape(node), _shape(node.args[0]), node.args[3:])
    return f"{right} -> {left} | ~0", sizes


def _smooth(node: Call):
    left, right, sizes = _blown_up(_shape(node.args[0]), _shape(node), node.args[3:], _mark(node.args[2]))
    return f"{left} -> {right} | ~0", sizes


def _smooth_backward(node: Call):
    left, right, sizes = _blown_up(_shape(node), _shape(node.args[0]), node.args[4:], _mark(node.args[3]))
    return f"{right} -> {left} | ~0", sizes


def _mark(align_corners: bool) -> str:
    """With align_corners, the distance of samples depends on the full size."""
    return "!" if align_corners else "*"


def _pixel_shuffle(node: Call):
    r = node.args[1]
    return "n (c r! s!) h w -> n c (h r!) (w s!) | ~0", {"r": r, "s": r}


def _pixel_unshuffle(node: Call):
    r = node.args[1]
    return "n c (h r!) (w s!) -> n (c r! s!) h w | ~0", {"r": r, "s": r}


def _framed(x: Call, pads: list[int]) -> tuple[str, str]:
    """Padded dims cannot be split."""
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


def _sampled_gradient(image: str, positions: str) -> Callable[[Call], str]:
    """(grad, image, grid, mode, padding, align, mask): of the image by all positions, of the grid by all channels."""

    def notation(node: Call) -> str:
        of_image = f"n c {image}" if node.args[6][0] else "1"
        return f"n c {positions}, n c {image}, n {positions} y! -> {of_image}, n {positions} y! | ~0"

    return notation


NEAREST = [aten.upsample_nearest1d, aten.upsample_nearest2d, aten._upsample_nearest_exact2d]
NEAREST_BACKWARD = [
    aten.upsample_nearest1d_backward,
    aten.upsample_nearest2d_backward,
    aten._upsample_nearest_exact2d_backward,
]
# How many rows around its own a part reads; windows of kernels that reach over the end read its last row again.
SMOOTH = {aten.upsample_bilinear2d: 1, aten.upsample_bicubic2d: 2}
SMOOTH_BACKWARD = {aten.upsample_bilinear2d_backward: 1, aten.upsample_bicubic2d_backward: 2}

rules(
    {
        **{op.default: _nearest for op in NEAREST},
        **{op.default: _nearest_backward for op in NEAREST_BACKWARD},
        **{op.default: _smooth for op in SMOOTH},
        **{op.default: _smooth_backward for op in SMOOTH_BACKWARD},
        aten.grid_sampler_2d.default: "n c h! w!, n p q y! -> n c p q | ~0",
        aten.grid_sampler_3d.default: "n c d! h! w!, n p q r y! -> n c p q r | ~0",
        aten.grid_sampler_2d_backward.default: _sampled_gradient("h! w!", "p q"),
        aten.grid_sampler_3d_backward.default: _sampled_gradient("d! h! w!", "p q r"),
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
ARGUMENTS |= {op.default: _backward_sizes for op in SMOOTH_BACKWARD}


def _beyond(here, axis: str, rows: int, border: int) -> tuple[int, int]:
    """The number of a part's border rows that are past the first and last row of the full tensor."""
    before = here.part(axis) * rows
    behind = (here.parts(axis) - 1 - here.part(axis)) * rows
    return max(0, border - before), max(0, border - behind)


def _with_ends(x: Tensor, dim: int, front: int, back: int) -> Tensor:
    """Rows past the ends repeat the end rows."""
    n = x.shape[dim] - front - back
    rows = [x.narrow(dim, front, 1)] * front + [x.narrow(dim, front, n)] + [x.narrow(dim, front + n - 1, 1)] * back
    return torch.cat(rows, dim) if len(rows) > 1 else x


def _ends_added(x: Tensor, dim: int, front: int, back: int) -> Tensor:
    """The adjoint of `_with_ends`, with zeros beyond the ends."""
    n = x.shape[dim] - front - back
    own = x.narrow(dim, front, n)
    if front:
        own = own + pad(x.narrow(dim, 0, front).sum(dim, keepdim=True), dim, 0, n - 1)
    if back:
        own = own + pad(x.narrow(dim, front + n, back).sum(dim, keepdim=True), dim, n - 1, 0)
    return pad(own, dim, front, back)


def _local_smooth(upsample, border: int):
    def local(here, x: Tensor, size: list[int], align_corners: bool, *scales) -> Tensor:
        out, cut = list(here.output_shape(0)[2:]), []
        for i, axis in enumerate(AXES[:2]):
            if here.axes(axis):
                rows = x.shape[i + 2]
                scale = out[i] // rows
                x = halo(here, x, axis, i + 2, border, border)
                x = _with_ends(x, i + 2, *_beyond(here, axis, rows, border))
                cut.append((i + 2, border * scale, out[i]))
                out[i] += 2 * border * scale
        y = upsample(x, out, align_corners, *scales)
        for dim, start, length in cut:
            y = y.narrow(dim, start, length)
        return y

    return local


def _local_smooth_backward(gradient, border: int):
    def local(here, grad: Tensor, size: list[int], shape: list[int], align_corners: bool, *scales) -> Tensor:
        own, split = list(here.output_shape(0)), []
        out = list(grad.shape[2:])
        for i, axis in enumerate(AXES[:2]):
            if here.axes(axis):
                rows = own[i + 2]
                scale = grad.shape[i + 2] // rows
                grad = pad(grad, i + 2, border * scale, border * scale)
                own[i + 2] += 2 * border
                out[i] += 2 * border * scale
                split.append((axis, i + 2, rows))
        gx = gradient(grad, out, own, align_corners, *scales)
        for axis, dim, rows in reversed(split):
            gx = _ends_added(gx, dim, *_beyond(here, axis, rows, border))
            gx = unhalo(here, gx, axis, dim, border, border)
        return gx

    return local


LOCAL |= {op.default: _local_smooth(op.default, border) for op, border in SMOOTH.items()}
LOCAL |= {op.default: _local_smooth_backward(op.default, border) for op, border in SMOOTH_BACKWARD.items()}


def _border_rows(border: int, small: Callable[[Cut], Spec]) -> Callable[[Cut], list[tuple[str, int]]]:
    """For the small image: `border` rows are sent in each direction."""

    def sends(cut: Cut) -> list[tuple[str, int]]:
        x = small(cut)
        return [("ppermute", 2 * border * x.bytes // x.shape[2 + AXES.index(cut.factor)])]

    return sends


SENDS |= {op.default: _border_rows(border, lambda cut: cut.inputs[0]) for op, border in SMOOTH.items()}
SENDS |= {op.default: _border_rows(border, lambda cut: cut.outputs[0]) for op, border in SMOOTH_BACKWARD.items()}
