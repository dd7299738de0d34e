"""Operators that only move elements: reshapes, permutations, slices, concatenations."""

from __future__ import annotations

from math import gcd, prod
from string import ascii_lowercase
from typing import Any

import torch

from tutti.ir.op_info import ARGUMENTS, CONTIGUOUS, LOCAL, UNEVEN
from tutti.ir.step_graph import Call
from tutti.ops.registry import named, operands, rules, specs

aten = torch.ops.aten
Shape = tuple[int, ...]
SPLITS = (
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unsafe_split.Tensor,  # what `chunk` of a GRU's gates becomes
    aten.unsafe_split_with_sizes.default,
)


def factorize(source: Shape, target: Shape) -> tuple[list[str], list[str], dict[str, int]]:
    """Common factors of the dims of two shapes with equally many elements: (6, 4) and (2, 12) share `a=2 b=3 c=4`.

    If neither refines the other (6, 4 and 4, 6), the remaining factors of the group cannot be split.
    """
    names = iter(ascii_lowercase)
    left: list[list[str]] = [[] for _ in source]
    right: list[list[str]] = [[] for _ in target]
    sizes: dict[str, int] = {}
    ins = [(i, n) for i, n in enumerate(source) if n != 1]
    outs = [(i, n) for i, n in enumerate(target) if n != 1]
    while ins and outs and prod(source):
        (i, a), (j, b) = ins[0], outs[0]
        common = gcd(a, b)
        if common == 1:  # no common major factor: do not split these dims, up to where both products are equal
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
    while ins or outs:  # of tensors without elements
        dims, factors = (ins, left) if ins else (outs, right)
        dims[:] = _whole(dims, factors, names, sizes)
    return [_dim(f) for f in left], [_dim(f) for f in right], sizes


def _whole(dims, factors, names, sizes):
    """Make the rest of the first dim a separate factor that cannot be split; return the other dims."""
    name = next(names)
    factors[dims[0][0]].append(name + "!")
    sizes[name] = dims[0][1]
    return dims[1:]


def _dim(factors: list[str]) -> str:
    return "1" if not factors else factors[0] if len(factors) == 1 else f"({' '.join(factors)})"


def _reshape(node: Call):
    left, right, sizes = factorize(node.args[0].meta["val"].shape, node.meta["val"].shape)
    return f"{' '.join(left)} -> {' '.join(right)} | ~0", sizes


def names(shape: Shape) -> list[str]:
    """A letter for each dim; 1 for dims of size one."""
    return ["1" if n == 1 else c for c, n in zip(ascii_lowercase, shape, strict=False)]


def letters(node: Call, operand: int = 0) -> list[str]:
    """The names of an operand's dims."""
    return names(operands(node)[operand].meta["val"].shape)


def aligned(node: Call, whole: list[str]) -> str:
    """The names of a tensor's dims when it is broadcast to dims with these names: 1 for a dim of size one."""
    shape = node.meta["val"].shape
    return " ".join("1" if n == 1 else name for n, name in zip(shape, whole[len(whole) - len(shape) :], strict=True))


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
    """A broadcast dim is a factor of the output only."""
    source, target = node.args[0].meta["val"].shape, node.meta["val"].shape
    right = list(ascii_lowercase[: len(target)])
    left = [
        c if n == m else "1"
        for c, n, m in zip(right[len(target) - len(source) :], source, target[len(target) - len(source) :], strict=True)
    ]
    return _line(left, right)


def _repeat(node: Call) -> str:
    """The number of repetitions of a dim is a factor of the output only."""
    dims = letters(node)
    times: list[int] = node.args[1]
    right = [f"r{i}" for i in range(len(times) - len(dims))]
    for i, (name, n) in enumerate(zip(dims, times[len(right) :], strict=True)):
        right.append(name if n == 1 else f"q{i}" if name == "1" else f"(q{i} {name})")
    return _line(dims, right)


def _flip(node: Call) -> str:
    dims = letters(node)
    for at in node.args[1]:
        dims[at % len(dims)] = f"z{at % len(dims)}!"
    return _line(dims, dims)


def _rot90(node: Call) -> str:
    dims = letters(node)
    arguments = named(node.target, node.args, node.kwargs)
    i, j = arguments["dims"]
    dims[i % len(dims)], dims[j % len(dims)] = "y!", "z!"
    turned = dims.copy()
    if arguments["k"] % 2:
        turned[i % len(dims)], turned[j % len(dims)] = "z!", "y!"
    return _line(dims, turned)


def _split(node: Call):
    """Equal parts are a major factor of the dim, so that the parts can be split, as a fused qkv needs."""
    dims, parts = letters(node), [s.shape for s in specs(node)]
    at = (node.args[2] if len(node.args) > 2 else 0) % len(dims)
    return _parts(dims, at, [p[at] for p in parts], joined_left=True)


def _cat(node: Call):
    dims, parts = letters(node), [n.meta["val"].shape for n in operands(node)]
    at = (node.args[1] if len(node.args) > 1 else 0) % len(dims)
    return _parts(dims, at, [p[at] for p in parts], joined_left=False)


def _parts(dims: list[str], at: int, sizes: list[int], joined_left: bool):
    """The rule of a dim that is concatenated from parts (cat) or divided into parts (split)."""
    equal = len(set(sizes)) == 1
    joined = "(y! z)" if equal else "y!"
    each = ["z"] * len(sizes) if equal else [f"z{i}!" for i in range(len(sizes))]
    whole = " ".join([*dims[:at], joined, *dims[at + 1 :]])
    parts = ", ".join(" ".join([*dims[:at], name, *dims[at + 1 :]]) for name in each)
    if joined_left:
        return f"{whole} -> {parts} | ~0", {"z": sizes[0]} if equal else {}
    return f"{parts} -> {whole} | ~*", {"z": sizes[0]} if equal else {}


def _stack(node: Call) -> str:
    dims = letters(node)
    at = (node.args[1] if len(node.args) > 1 else 0) % (len(dims) + 1)
    n = len(operands(node))
    return (
        f"{', '.join([' '.join(dims)] * n)} -> {' '.join([*dims[:at], 'y!', *dims[at:]])} | {'~*' if n > 1 else '~0'}"
    )


def _unbind(node: Call) -> str:
    dims = letters(node)
    at = (node.args[1] if len(node.args) > 1 else 0) % len(dims)
    parts = ", ".join([" ".join(dims[:at] + dims[at + 1 :])] * len(specs(node)))
    return f"{' '.join([*dims[:at], 'y!', *dims[at + 1 :]])} -> {parts} | ~0"


def _pads(args: Any, rank: int) -> dict[int, tuple[int, int]]:
    """Dim -> (rows before, rows after) of padded dims. Negative numbers crop."""
    pads: list[int] = args[1]
    return {rank - 1 - i: (pads[2 * i], pads[2 * i + 1]) for i in range(len(pads) // 2) if any(pads[2 * i : 2 * i + 2])}


def _pad(node: Call) -> str:
    """An output can be split along a padded dim. An input can if the padding is zero: the output is a partial sum."""
    before = letters(node)
    after, zero = before.copy(), len(node.args) < 3 or node.args[2] == 0
    for at in _pads(node.args, len(before)):
        before[at], after[at] = f"y{at}{'*' if zero else '!'}", f"z{at}*"
    return f"{' '.join(before)} -> {' '.join(after)}{' | ~0' if zero else ''}"


def _diagonal_of(node: Call, dims: list[str]) -> tuple[list[str], list[str]]:
    """Names of a tensor's dims, derived from `dims`, and of its diagonal's dims."""
    arguments = named(node.target, node.args, node.kwargs)
    i, j = arguments["dim1"] % len(dims), arguments["dim2"] % len(dims)
    rest = [name for at, name in enumerate(dims) if at not in (i, j)]
    dims = dims.copy()
    dims[i], dims[j] = "y!", "z!"
    return dims, [*rest, "w!"]


def _diagonal(node: Call) -> str:
    return _line(*_diagonal_of(node, letters(node)))


def _into_diagonal(node: Call) -> str:
    dims, diagonal = _diagonal_of(node, names(node.meta["val"].shape))
    return _line(diagonal, dims)


def _diagonal_scatter(node: Call) -> str:
    dims, diagonal = _diagonal_of(node, letters(node))
    return f"{' '.join(dims)}, {' '.join(diagonal)} -> {' '.join(dims)} | ~01"


def _channel_shuffle(node: Call):
    batch, _, *rest = letters(node)
    lines = (" ".join([batch, channels, *rest]) for channels in ("(g@ s)", "(s g@)"))
    return f"{' -> '.join(lines)} | ~0", {"g": node.args[1]}


def _view_as_real(node: Call) -> str:
    dims = letters(node)
    return _line(dims, [*dims, "y!"])


def _view_as_complex(node: Call) -> str:
    dims = letters(node)[:-1]
    return _line([*dims, "y!"], dims)


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
        **dict.fromkeys(SPLITS, _split),
        aten.cat.default: _cat,
        aten.stack.default: _stack,
        aten.unbind.int: _unbind,
        aten.repeat.default: _repeat,
        aten.flip.default: _flip,
        aten.rot90.default: _rot90,
        aten.constant_pad_nd.default: _pad,
        aten.diagonal.default: _diagonal,
        aten.diagonal_backward.default: _into_diagonal,
        aten.diagonal_scatter.default: _diagonal_scatter,
        aten.diag_embed.default: _into_diagonal,
        aten.channel_shuffle.default: _channel_shuffle,
        aten.view_as_real.default: _view_as_real,
        aten.view_as_complex.default: _view_as_complex,
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


def _repeat_arguments(args: Any, shapes: list[Shape]) -> tuple:
    shape = args[0].meta["val"].shape
    shape = (1,) * (len(shapes[0]) - len(shape)) + shape
    return (args[0], [n // m if m else 1 for n, m in zip(shapes[0], shape, strict=True)])


ARGUMENTS |= {
    aten.reshape.default: output_shape(1),
    aten.repeat.default: _repeat_arguments,
    aten.diagonal_backward.default: output_shape(1),
    aten.expand.default: output_shape(1),
    **dict.fromkeys(SPLITS, _split_arguments),
}

CONTIGUOUS[aten.view_as_complex.default] = (0,)  # real and imaginary parts must be adjacent
CONTIGUOUS[aten.as_strided.default] = (0,)  # the strides of `tracing.rewrite.strided`


def _pad_own(here, x, pads, value=0):
    """The rank's rows of x, at their positions among the rank's rows of the result."""
    for at, (before, _) in _pads((x, pads), x.ndim).items():
        rows, out = (f"{c}{at}" for c in "yz")
        first, begin, size = here.offset(rows), here.offset(out) - before, here.size(out)
        low, high = max(first, begin), min(first + here.size(rows), begin + size)
        own = x.narrow(at, low - first if high > low else 0, max(0, high - low))
        front = low - begin if high > low else 0
        edges = [0, 0] * (x.ndim - at)
        edges[-2:] = front, size - front - own.shape[at]
        x = aten.constant_pad_nd(own, edges, value)
    return x


LOCAL |= {
    aten.constant_pad_nd.default: _pad_own,
    aten.channel_shuffle.default: lambda here, x, groups: aten.channel_shuffle(x, here.size("g")),
}

UNEVEN |= dict.fromkeys((aten.constant_pad_nd.default,), True)
