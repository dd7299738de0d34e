"""Writing by index: a dim that is written to can be split. Each rank writes its own rows."""

from __future__ import annotations

import torch

from tutti.ir.op_info import ARGUMENTS, LOCAL
from tutti.ir.step_graph import Call
from tutti.ops.indexing.index import along, indexed
from tutti.ops.indexing.rows import from_end, with_spare, without_spare, write_rows
from tutti.ops.registry import operands, rules
from tutti.ops.view import aligned, letters

aten = torch.ops.aten


def _along_dim(adds: bool):
    """scatter(x, dim, index, source). If entries are added, the index can be split too, for a partial sum."""

    def notation(node: Call) -> str | None:
        shapes = [n.meta["val"].shape for n in operands(node)[:3]]
        if not shapes[0] or len(shapes[-1]) != len(shapes[0]):
            return None
        dim = node.args[1] % len(shapes[0])
        total = adds and not (len(node.args) > 4 and (node.args[4] != "sum" or not _includes_self(node)))
        equal = shapes[1][dim] == shapes[-1][dim]  # else only the first entries of the source take part
        entry = "k" if total and equal else "k!"
        source = entry if equal else "s!"
        x, index, *rest = along(shapes, dim, ("v*", entry, source))
        line = ", ".join(" ".join(dims) for dims in (x, index, *rest))
        replaces = node.target in (aten.scatter.src, aten.scatter.value) or node.kwargs.get("reduce") == "add"
        linear = (
            " | ~0"
            if node.kwargs.get("reduce") == "multiply"
            else (" | ~02" if rest else " | ~0" if node.args[3] == 0 else "")
            if replaces or total
            else ""
        )
        return f"{'+' if total else ''}{line} -> {' '.join(x)}{linear}"

    return notation


def _includes_self(node: Call) -> bool:
    return node.kwargs.get("include_self", True)


def _index_add(mark: str, added: str = ""):
    """index_add(x, dim, index, source)"""

    def notation(node: Call) -> str | None:
        x = letters(node)
        if not x or not node.args[2].meta["val"].shape:
            return None
        dim = node.args[1] % len(x)
        source = [*x[:dim], f"n{mark}", *x[dim + 1 :]]
        x[dim] = "v*"
        linear = "" if node.target is aten.index_reduce.default else " | ~02"
        return f"{added}{' '.join(x)}, n{mark}, {' '.join(source)} -> {' '.join(x)}{linear}"

    return notation


def _index_fill(node: Call) -> str | None:
    x = letters(node)
    if not x:
        return None
    index = "n!" if node.args[2].meta["val"].shape else ""
    x[node.args[1] % len(x)] = "v*"
    value = operands(node)[2:]  # a number, or a 0-d tensor
    linear = " | ~02" if value else " | ~0" if node.args[3] == 0 else ""
    return f"{' '.join(x)}, {index}{', ' if value else ''} -> {' '.join(x)}{linear}"


def _put(node: Call) -> str:
    """Positions in the flattened tensor, which cannot be split."""
    x = " ".join(f"v{i}!" for i in range(len(node.args[0].meta["val"].shape)))
    adds = len(node.args) > 3 and node.args[3]
    entries = " ".join(letters(node, 1)) if adds else " ".join(f"k{i}!" for i in range(len(letters(node, 1))))
    return f"{'+' if adds else ''}{x}, {entries}, {entries} -> {x} | ~02"


def _index_put(node: Call) -> str | None:
    x, indices, values = node.args[:3]
    adds = len(node.args) > 3 and node.args[3]
    dims_of_index = indexed(x, indices, "" if adds else "!")
    if dims_of_index is None:
        return _mask_put(node)
    dims, index, out = dims_of_index
    last = len(operands(node)) - 1
    linear = f" | ~0{last}" if last < 10 else ""
    line = f"{' '.join(dims)}, {', '.join(index)}, {aligned(values, out)} -> {' '.join(dims)}"
    return f"{'+' if adds else ''}{line}{linear}"


def _mask_put(node: Call) -> str | None:
    """x[mask] = one value, which is pointwise."""
    indices, values = node.args[1:3]
    tensors = [i for i in indices if i is not None]
    if len(tensors) > 1 or tensors[0].meta["val"].dtype != torch.bool or values.meta["val"].numel != 1:
        return None
    dims, first = letters(node), indices.index(tensors[0])
    mask = dims[first : first + len(tensors[0].meta["val"].shape)]
    line = " ".join(dims)
    return f"{line}, {' '.join(mask)}, {' '.join('1' for _ in values.meta['val'].shape)} -> {line} | ~02"


def _masked_scatter(node: Call) -> str:
    """(x, mask, source). The position of a source entry depends on all of the mask. The last dim can be split if the
    mask selects full rows, such as the tokens of images."""
    x, mask, source = (n.meta["val"].shape for n in operands(node))
    left, right = _rows_taken(x, mask, source)
    return f"{left}, {_whole(mask, 'm')}, {right} -> {left}"


def _masked_scatter_backward(node: Call) -> str:
    """(grad, mask): the gradient of the source."""
    grad, mask = (n.meta["val"].shape for n in operands(node))
    left, right = _rows_taken(grad, mask, node.meta["val"].shape)
    return f"{left}, {_whole(mask, 'm')} -> {right} | ~0"


def _rows_taken(x: tuple[int, ...], mask: tuple[int, ...], source: tuple[int, ...]) -> tuple[str, str]:
    """The dims of a tensor and of the source in a masked scatter."""
    rows = len(x) > 0 and len(mask) > 0 and len(source) > 1 and mask[-1] == 1 and x[-1] == source[-1] > 1
    if not rows:
        return _whole(x, "x"), _whole(source, "s")
    return f"{_whole(x[:-1], 'x')} h".strip(), f"{_whole(source[:-1], 's')} h"


def _whole(shape: tuple[int, ...], letter: str) -> str:
    return " ".join("1" if n == 1 else f"{letter}{d}!" for d, n in enumerate(shape))


rules(
    {
        aten.scatter.src: _along_dim(adds=False),
        aten.scatter.value: _along_dim(adds=False),
        aten.scatter_add.default: _along_dim(adds=True),
        aten.scatter_reduce.two: _along_dim(adds=True),
        aten.scatter.reduce: _along_dim(adds=False),
        aten.scatter.value_reduce: _along_dim(adds=False),
        aten.index_reduce.default: _index_add("!"),
        aten.index_add.default: _index_add("", "+"),
        aten.index_copy.default: _index_add("!"),
        aten.index_fill.int_Scalar: _index_fill,
        aten.index_fill.int_Tensor: _index_fill,
        aten.index_put.default: _index_put,
        aten.put.default: _put,
        aten.masked_scatter.default: _masked_scatter,
        aten.masked_scatter_backward.default: _masked_scatter_backward,
    }
)


ARGUMENTS[aten.masked_scatter_backward.default] = lambda args, shapes: (*args[:2], list(shapes[0]))

FROM_END = (aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)  # they accept negative indices


def _own_rows(target):
    """An operator (x, dim, index, ...) that writes rows of x."""

    def local(here, x, dim, index, *rest, **kwargs):
        if target in FROM_END:
            index = from_end(here, "v", index)
        rows, _ = write_rows(here, "v", index)
        return without_spare(target(with_spare(x, dim), dim, rows, *rest, **kwargs), dim)

    return local


def _put_own(here, x, indices, values, accumulate=False):
    split = [d for d, index in enumerate(indices) if index is not None and here.axes(f"v{d}")]
    rows = list(indices)
    for d in split:
        rows[d], _ = write_rows(here, f"v{d}", from_end(here, f"v{d}", indices[d]))
    return without_spare(aten.index_put(with_spare(x, *split), rows, values, accumulate), *split)


LOCAL |= {
    target: _own_rows(target)
    for target in (aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter_reduce.two,
                   aten.scatter.reduce, aten.scatter.value_reduce, aten.index_reduce.default,
                   aten.index_add.default, aten.index_copy.default, aten.index_fill.int_Scalar,
                   aten.index_fill.int_Tensor)
} | {aten.index_put.default: _put_own}  # fmt: skip
