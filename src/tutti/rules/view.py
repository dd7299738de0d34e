"""Operators that only move elements: reshapes, permutations, slices, concatenations."""

from __future__ import annotations

from math import gcd
from string import ascii_lowercase
from typing import Any

import torch

from tutti.graph.step_graph import Call
from tutti.rules.registry import ARGUMENTS, operands, rules, specs

aten = torch.ops.aten
Shape = tuple[int, ...]


def factorize(source: Shape, target: Shape) -> tuple[list[str], list[str], dict[str, int]]:
    """Common factors of the dims of two shapes of as many elements: (6, 4) and (2, 12) share `a=2 b=3 c=4`.

    Where the two do not refine one another (6, 4 and 4, 6) the rest of the group must stay whole.
    """
    names = iter(ascii_lowercase)
    left: list[list[str]] = [[] for _ in source]
    right: list[list[str]] = [[] for _ in target]
    sizes: dict[str, int] = {}
    ins = [(i, n) for i, n in enumerate(source) if n != 1]
    outs = [(i, n) for i, n in enumerate(target) if n != 1]
    while ins and outs:
        (i, a), (j, b) = ins[0], outs[0]
        common = gcd(a, b)
        if common == 1:  # no common major factor: keep this group of dims whole, up to where both products meet
            while a != b:
                if a < b:
                    ins, a = _whole(ins, left, names, sizes), a * ins[1][1]
                else:
                    outs, b = _whole(outs, right, names, sizes), b * outs[1][1]
            ins, outs = _whole(ins, left, names, sizes), _whole(outs, right, names, sizes)
            continue
        name = next(names)
        left[i].append(name)
        right[j].append(name)
        sizes[name] = common
        ins = [(i, a // common), *ins[1:]] if a > common else ins[1:]
        outs = [(j, b // common), *outs[1:]] if b > common else outs[1:]
    return [_dim(f) for f in left], [_dim(f) for f in right], sizes


def _whole(dims, factors, names, sizes):
    """Give the rest of the first dim a factor of its own that must not be split; return the other dims."""
    name = next(names)
    factors[dims[0][0]].append(name + "!")
    sizes[name] = dims[0][1]
    return dims[1:]


def _dim(factors: list[str]) -> str:
    return "1" if not factors else factors[0] if len(factors) == 1 else f"({' '.join(factors)})"


def _reshape(node: Call):
    left, right, sizes = factorize(node.args[0].meta["val"].shape, node.meta["val"].shape)
    return f"{' '.join(left)} -> {' '.join(right)} | ~0", sizes


def letters(node: Call, operand: int = 0) -> list[str]:
    """A letter for each dim of an operand; 1 for dims of size one."""
    return [
        "1" if n == 1 else c for c, n in zip(ascii_lowercase, operands(node)[operand].meta["val"].shape, strict=False)
    ]


def _line(left: list[str], right: list[str]) -> str:
    return f"{' '.join(left)} -> {' '.join(right)} | ~0"


def _permute(order):
    def notation(node: Call) -> str:
        dims = letters(node)
        return _line(dims, [dims[i] for i in order(node, len(dims))])

    return notation


def _swapped(node: Call, rank: int) -> list[int]:
    order = list(range(rank))
    i, j = node.args[1] % rank, node.args[2] % rank
    order[i], order[j] = j, i
    return order


def _unsqueeze(node: Call) -> str:
    dims = letters(node)
    at = node.args[1] % (len(dims) + 1)
    return _line(dims, [*dims[:at], "1", *dims[at:]])


def _squeeze(node: Call) -> str:
    dims = letters(node)
    shape = operands(node)[0].meta["val"].shape
    named = node.args[1] if len(node.args) > 1 else range(len(dims))
    named = {d % len(dims) for d in ([named] if isinstance(named, int) else named)}
    return _line(dims, [c for i, c in enumerate(dims) if not (i in named and shape[i] == 1)])


def _expand(node: Call) -> str:
    """A dim that is broadcast is a factor of the output alone."""
    source, target = node.args[0].meta["val"].shape, node.meta["val"].shape
    right = list(ascii_lowercase[: len(target)])
    left = [
        c if n == m else "1"
        for c, n, m in zip(right[len(target) - len(source) :], source, target[len(target) - len(source) :], strict=True)
    ]
    return _line(left, right)


def _slice(node: Call) -> str:
    dims = letters(node)
    at = (node.args[1] if len(node.args) > 1 else 0) % len(dims)
    sliced, cut = dims.copy(), dims.copy()
    sliced[at], cut[at] = "y!", "z!"
    return _line(sliced, cut)


def _select(node: Call) -> str:
    dims = letters(node)
    at = node.args[1] % len(dims)
    return _line([*dims[:at], "z!", *dims[at + 1 :]], dims[:at] + dims[at + 1 :])


def _slice_backward(node: Call) -> str:
    dims = ["1" if n == 1 else c for c, n in zip(ascii_lowercase, node.meta["val"].shape, strict=False)]
    at = node.args[2] % len(dims)
    sliced, cut = dims.copy(), dims.copy()
    sliced[at], cut[at] = "y!", "z!"
    return _line(cut, sliced)


def _select_backward(node: Call) -> str:
    dims = ["1" if n == 1 else c for c, n in zip(ascii_lowercase, node.meta["val"].shape, strict=False)]
    at = node.args[2] % len(dims)
    return _line(dims[:at] + dims[at + 1 :], [*dims[:at], "z!", *dims[at + 1 :]])


def _along(node: Call) -> str:
    """Operators that walk along one dim, or turn it round: that dim stays whole."""
    dims = letters(node)
    named = node.args[1]
    for at in [named] if isinstance(named, int) else named:
        dims[at % len(dims)] = f"z{at % len(dims)}!"
    return _line(dims, dims)


def _split(node: Call):
    """Equal parts are a major factor of the dim, so that the part can be split: that is what a fused qkv needs."""
    dims, parts = letters(node), [s.shape for s in specs(node)]
    at = (node.args[2] if len(node.args) > 2 else 0) % len(dims)
    return _parts(dims, at, [p[at] for p in parts], joined_left=True)


def _cat(node: Call):
    dims, parts = letters(node), [n.meta["val"].shape for n in operands(node)]
    at = (node.args[1] if len(node.args) > 1 else 0) % len(dims)
    return _parts(dims, at, [p[at] for p in parts], joined_left=False)


def _parts(dims: list[str], at: int, sizes: list[int], joined_left: bool):
    """The rule of a dim that is joined from parts (cat) or taken apart (split)."""
    equal = len(set(sizes)) == 1
    joined = "(y! z)" if equal else "y!"
    names = ["z"] * len(sizes) if equal else [f"z{i}!" for i in range(len(sizes))]
    whole = " ".join([*dims[:at], joined, *dims[at + 1 :]])
    parts = ", ".join(" ".join([*dims[:at], name, *dims[at + 1 :]]) for name in names)
    if joined_left:
        return f"{whole} -> {parts} | ~0", {"z": sizes[0]} if equal else {}
    return f"{parts} -> {whole} | ~*", {"z": sizes[0]} if equal else {}


def _pad(node: Call) -> str:
    dims = letters(node)
    pads: list[int] = node.args[1]
    before, after = dims.copy(), dims.copy()
    for i in range(len(pads) // 2):
        if pads[2 * i] or pads[2 * i + 1]:
            at = len(dims) - 1 - i
            before[at], after[at] = f"y{i}!", f"z{i}!"
    return f"{' '.join(before)} -> {' '.join(after)}"


rules(
    {
        aten.reshape.default: _reshape,
        aten.t.default: _permute(lambda node, rank: [1, 0] if rank == 2 else list(range(rank))),
        aten.transpose.int: _permute(_swapped),
        aten.permute.default: _permute(lambda node, rank: [i % rank for i in node.args[1]]),
        aten.unsqueeze.default: _unsqueeze,
        aten.squeeze.default: _squeeze,
        aten.squeeze.dim: _squeeze,
        aten.squeeze.dims: _squeeze,
        aten.expand.default: _expand,
        aten.slice.Tensor: _slice,
        aten.slice_backward.default: _slice_backward,
        aten.select.int: _select,
        aten.select_backward.default: _select_backward,
        aten.split.Tensor: _split,
        aten.split_with_sizes.default: _split,
        aten.cat.default: _cat,
        aten.cumsum.default: _along,
        aten.flip.default: _along,
        aten.constant_pad_nd.default: _pad,
    }
)


def output_shape(position: int):
    """The argument at this position is the output's shape."""

    def arguments(args: tuple, shapes: list[Shape]) -> tuple:
        return (*args[:position], list(shapes[0]), *args[position + 1 :])

    return arguments


def _split_arguments(args: Any, shapes: list[Shape]) -> tuple:
    sizes = [shape[args[2] if len(args) > 2 else 0] for shape in shapes]
    return (args[0], sizes if isinstance(args[1], (list, tuple)) else sizes[0], *args[2:])


ARGUMENTS |= {
    aten.reshape.default: output_shape(1),
    aten.expand.default: output_shape(1),
    aten.slice_backward.default: output_shape(1),
    aten.select_backward.default: output_shape(1),
    aten.split.Tensor: _split_arguments,
    aten.split_with_sizes.default: _split_arguments,
}
