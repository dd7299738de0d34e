"""Operators that create tensors from numbers, random ones included."""

from __future__ import annotations

from math import prod
from string import ascii_lowercase
from typing import Any

import torch

import tutti.nn.random  # noqa: F401  (registers tutti::uniform)
from tutti.ir.op_info import ARGUMENTS, LOCAL, SECONDS, UNEVEN
from tutti.ir.step_graph import Call
from tutti.ops.registry import operands, rules, specs
from tutti.ops.view import output_shape

aten, ops = torch.ops.aten, torch.ops.tutti


def _anew(mark: str = "", unread: str = "!"):
    """Return the notation of a new tensor. mark: mark of its dims. unread: mark of the dims of an operand that only
    provides the dtype.

    Zeros are also a partial sum of zeros, so any part of the operand will do.
    """

    def notation(node: Call) -> str:
        left = ", ".join(
            " ".join(["1" if n == 1 else f"{c}{i}{unread}" for c, n in zip(ascii_lowercase, s, strict=False)])
            for i, s in enumerate(o.meta["val"].shape for o in operands(node))
        )
        right = " ".join(f"{c}{mark}" for c in ascii_lowercase[: len(specs(node)[0].shape)])
        return f"{left} -> {right}"

    return notation


def _triangle(node: Call) -> str:
    *batch, row, column = ascii_lowercase[: len(specs(node)[0].shape)]
    line = " ".join([*batch, f"{row}*", f"{column}*"])
    return f"{line} -> {line} | ~0"


def _strided(node: Call) -> str:
    """Memory in any order of the dims, without gaps."""
    shape, strides, inside = specs(node)[0].shape, node.args[2], 1
    dense = True
    for stride, n in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1):
        dense, inside = dense and stride == inside, inside * n
    return _anew("" if dense else "!", unread="")(node)


rules(
    {
        aten.full.default: _anew(),
        aten.zeros.default: _anew(),
        aten.ones.default: _anew(),
        aten.empty.memory_format: _anew(),
        aten.new_zeros.default: _anew(unread=""),
        aten.new_ones.default: _anew(),
        aten.new_full.default: _anew(),
        aten.new_empty.default: _anew(unread=""),
        aten.new_empty_strided.default: _strided,
        aten.scalar_tensor.default: "->",
        aten.linspace.default: "-> a!",
        aten.eye.default: "-> a! b!",
        aten.eye.m: "-> a! b!",
        aten.tril_indices.default: "-> a! b!",
        aten.triu_indices.default: "-> a! b!",
        aten.arange.default: "-> a!",
        aten.arange.start: "-> a!",
        aten.arange.start_step: "-> a!",
        aten.tril.default: _triangle,
        aten.triu.default: _triangle,
        ops.uniform.default: _anew("@"),
    }
)


def _strided_arguments(args: tuple, shapes) -> tuple:
    """Strides of the local part, its dims in the same order in memory."""
    strides, inside = [1] * len(shapes[0]), 1
    for _, dim in sorted((stride, dim) for dim, stride in enumerate(args[2])):
        strides[dim], inside = inside, inside * shapes[0][dim]
    return (args[0], list(shapes[0]), strides, *args[3:])


ARGUMENTS |= {
    aten.full.default: output_shape(0),
    aten.zeros.default: output_shape(0),
    aten.ones.default: output_shape(0),
    aten.empty.memory_format: output_shape(0),
    aten.new_zeros.default: output_shape(1),
    aten.new_ones.default: output_shape(1),
    aten.new_full.default: output_shape(1),
    aten.new_empty.default: output_shape(1),
    aten.new_empty_strided.default: _strided_arguments,
}


def _uniform(here, seed, step, salt, shape, sizes, strides, offset, **kwargs):
    """The numbers of the full tensor at this rank's positions."""
    part = here.output_indices(0)
    at = part if sizes is None else _of_part(part, sizes, strides, offset)
    if at is None:
        whole = ops.uniform(seed, step, salt, shape, sizes, strides, offset, **kwargs)
        return torch.as_strided(whole, *part).reshape(here.output_shape(0))
    return ops.uniform(seed, step, salt, here.output_shape(0), *at, **kwargs)


def _of_part(part: tuple, sizes: list[int], strides: list[int], offset: int) -> tuple | None:
    """Positions of a part of a part, with these sizes and strides: the common digits, and the offset of the first
    element. None if the digits are not all common."""
    inner_sizes, inner_strides, first = part
    digits: list[tuple[int, int]] = []
    for n, inner in zip(inner_sizes, inner_strides, strict=True):
        weight, covered = prod(sizes), 1
        for size, stride in zip(sizes, strides, strict=True):
            whole, weight = weight, weight // size
            low, high = max(inner, weight), min(inner * n, whole)
            if low < high:
                if high % low or low % weight or low % inner or whole % high:
                    return None
                digits.append((high // low, stride * (low // weight)))
                covered *= high // low
        if covered != n:
            return None
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        first, digit = divmod(first, size)
        offset += digit * stride
    return [size for size, _ in digits], [stride for _, stride in digits], offset


def _part_of_triangle(cut_off):
    """The diagonal moves in a part that starts further right or further down."""

    def local(here, x, diagonal=0):
        row, column = ascii_lowercase[x.ndim - 2 : x.ndim]
        return cut_off(x, diagonal + here.offset(row) - here.offset(column))

    return local


LOCAL |= {
    ops.uniform.default: _uniform,
    aten.tril.default: _part_of_triangle(aten.tril.default),
    aten.triu.default: _part_of_triangle(aten.triu.default),
}


# passes over its numbers that a draw makes (`nn.random`): by their count, and as measured on a CPU, where 17 to 36 of
# them take as long as writing four bytes each, since the pieces stay in the cache
PASSES, PASS = 22, 16  # bytes that a pass reads and writes in memory


def _draw_seconds(device: Any, call: Any) -> float:
    each = call.dtype.itemsize if device.name.startswith("cpu") else PASS
    return device.stream_seconds(PASSES * each * (call.outputs[0] // call.dtype.itemsize), "add", call.dtype)


SECONDS[ops.uniform.default] = _draw_seconds

UNEVEN |= dict.fromkeys((aten.tril.default, aten.triu.default), True)
