"""Indexing: a dim that is read from can be split. Each rank reads its own rows, and the others are zero."""

from __future__ import annotations

from string import ascii_lowercase

import torch

from tutti.ir.op_info import LOCAL, UNEVEN
from tutti.ir.step_graph import Call
from tutti.ops.indexing.rows import from_end, only, read_rows
from tutti.ops.registry import operands, rules
from tutti.ops.view import aligned, letters

aten = torch.ops.aten


def along(shapes: list[tuple[int, ...]], dim: int, names: tuple[str, ...]) -> list[list[str]]:
    """Dims of operands that correspond, except `dim` with the given names, such as x and the index of a `gather`.

    If an operand is shorter than another, only its first rows take part, and that dim cannot be split.
    """
    lines = [[] for _ in shapes]
    for d, sizes in enumerate(zip(*shapes, strict=True)):
        for i, n in enumerate(sizes):
            same = len(set(sizes)) == 1
            lines[i].append(names[i] if d == dim else "1" if n == 1 else ascii_lowercase[d] if same else f"x{d}_{i}!")
    return lines


def _gather(node: Call) -> str | None:
    shapes = [n.meta["val"].shape for n in operands(node)]
    if not shapes[0]:
        return None
    x, index = along(shapes, node.args[1] % len(shapes[0]), ("v*", "k"))
    return f"{' '.join(x)}, {' '.join(index)} -> {' '.join(index)} | ~0"


def _index_select(node: Call) -> str | None:
    x = letters(node)
    if not x:
        return None
    dim = node.args[1] % len(x)
    index = "n" if node.args[2].meta["val"].shape else "1"
    out = [*x[:dim], index, *x[dim + 1 :]]
    x[dim] = "v*"
    return f"{' '.join(x)}, {index.replace('1', '')} -> {' '.join(out)} | ~0"


def _take(node: Call) -> str:
    """Positions in the flattened tensor, which cannot be split."""
    x = " ".join(f"v{i}!" for i in range(len(node.args[0].meta["val"].shape)))
    index = " ".join(letters(node, 1))
    return f"{x}, {index} -> {index} | ~0"


def indexed(x: Call, indices: list, mark: str = "") -> tuple[list[str], list[str], list[str]] | None:
    """Return the names of the dims of x, of each index tensor, and of x[indices].

    mark: mark of the dims that the index tensors have together. Returns None for masks, for which the rule of integers
    does not hold.
    """
    tensors = [i for i in indices if i is not None]
    if any(i.meta["val"].dtype in (torch.bool, torch.uint8) for i in tensors):
        return None
    shape = torch.broadcast_shapes(*(i.meta["val"].shape for i in tensors))
    common = ["1" if n == 1 else f"i{d}{mark}" for d, n in enumerate(shape)]
    names, places = [], []
    for d, n in enumerate(x.meta["val"].shape):
        if d < len(indices) and indices[d] is not None:
            names.append(f"v{d}*")
            places.append(d)
        else:
            names.append("1" if n == 1 else ascii_lowercase[d])
    first = places[0] if places[-1] - places[0] == len(places) - 1 else 0
    remaining = [name for d, name in enumerate(names) if d not in places]
    return names, [aligned(i, common) for i in tensors], remaining[:first] + common + remaining[first:]


def _index(node: Call) -> str | None:
    dims = indexed(*node.args[:2])
    if dims is None:
        return None
    x, indices, out = dims
    return f"{' '.join(x)}, {', '.join(indices)} -> {' '.join(out)} | ~0"


rules(
    {
        aten.gather.default: _gather,
        aten.index_select.default: _index_select,
        aten.take.default: _take,
        aten.index.Tensor: _index,
    }
)


def _gather_own(here, x, dim, index, **kwargs):
    rows, own = read_rows(here, "v", index)
    return only(aten.gather(x, dim, rows), own)


def _select_own(here, x, dim, index):
    rows, own = read_rows(here, "v", index)
    return only(aten.index_select(x, dim, rows), own.view(-1, *[1] * (x.ndim - 1 - dim % x.ndim)))


def _index_own(here, x, indices):
    places = [d for d, index in enumerate(indices) if index is not None]
    rows, own = list(indices), None
    for d in places:
        if here.axes(f"v{d}"):
            rows[d], mine = read_rows(here, f"v{d}", from_end(here, f"v{d}", indices[d]))
            own = mine if own is None else own & mine
    assert own is not None
    together = places[-1] - places[0] == len(places) - 1
    behind = x.ndim - 1 - places[-1] if together else x.ndim - len(places)  # dims of the result after the indices'
    return only(aten.index(x, rows), own.view(*own.shape, *[1] * behind))


LOCAL |= {
    aten.gather.default: _gather_own,
    aten.index_select.default: _select_own,
    aten.index.Tensor: _index_own,
}

UNEVEN |= dict.fromkeys((aten.gather.default, aten.index_select.default, aten.index.Tensor), True)
