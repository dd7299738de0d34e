"""Embedding bags: sums, means or maxima of rows. With a split table, each rank reduces its own rows.

Bags can be split if they are known to have equal sizes: if their offsets come from an `arange`, as for indices of shape
(bags, size). The offsets of a rank's part are then recomputed.

Rows of other ranks have weight zero, so that the fused kernel can be used. A non-finite first row of a part therefore
shows in bags that do not contain it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tutti.ir.op_info import CONTIGUOUS, LOCAL
from tutti.ir.spec import Spec
from tutti.ir.step_graph import Call
from tutti.ops.indexing.rows import read_rows, write_rows
from tutti.ops.registry import named, rules

aten = torch.ops.aten
SUM, MEAN, MAX = 0, 1, 2  # torch's codes of the mode
FORWARD = (aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
GRADIENT = aten._embedding_bag_backward.default
OF_WEIGHTS = aten._embedding_bag_per_sample_weights_backward.default


def _numel(x: Call) -> int:
    return x.meta["val"].numel


def _regular(indices: Call, offsets: Call) -> bool:
    """Whether all bags are known to have one size."""
    if offsets.target is aten.arange.start_step:
        start, end, step = (*offsets.args, 1)[:3]
    elif offsets.target in (aten.arange.default, aten.arange.start):
        start, end, step = (*(0, *offsets.args)[-2:], 1)
    else:
        return False
    return start == 0 and end == _numel(indices) == _numel(offsets) * step


def _names(arguments: dict, bags: int) -> tuple[str, str, str, str]:
    """Factor names of the bags, the entries, the offsets and the table's rows."""
    indices, offsets = arguments["indices"], arguments["offsets"]
    scaled = arguments.get("scale_grad_by_freq")  # by how often an index occurs: all entries are needed
    if _numel(offsets) != bags:  # there is a last offset
        return "b!", "n!", "o!", "v!"
    row = "v!" if scaled or arguments["mode"] == MAX else "v*"
    if _regular(indices, offsets) and not scaled:
        return "b@", "(b@ l!)", "b@", row
    return "b!", "n!", "b!", row


def _bookkeeping(arguments: dict, outputs: Iterable[Spec], bags: str, entries: str) -> str:
    """The outputs besides the result: the bag of each entry; for each bag its size, and the rows of its maxima or its
    size again. Some devices omit one of them; with a last offset, one is longer.
    """
    size, largest = ("j!", "k!") if arguments.get("include_last_offset") else (bags, bags)
    lines = [entries, size, f"{bags} z" if arguments["mode"] == MAX else largest]
    return ", = ".join("1" if spec.shape == (0,) else line for spec, line in zip(outputs, lines, strict=True))


def _bag(node: Call):
    arguments, (out, *rest) = named(node.target, node.args, node.kwargs), node.meta["val"]
    if arguments["sparse"]:
        return None
    bags, entries, offsets, row = _names(arguments, out.shape[0])
    weights = f", {entries}" if arguments["per_sample_weights"] is not None else ""
    line = f"{row} z, {entries}, {offsets}{weights} -> {bags} z, = {_bookkeeping(arguments, rest, bags, entries)}"
    return line, {"b": out.shape[0]}


def _bag_gradient(node: Call):
    arguments = named(node.target, node.args, node.kwargs)
    if arguments["sparse"]:
        return None
    saved = [arguments[name].meta["val"] for name in ("offset2bag", "bag_size", "maximum_indices")]
    count = arguments["grad"].meta["val"].shape[0]
    bags, entries, offsets, row = _names(arguments, count)
    more = _bookkeeping(arguments, saved, bags, entries).replace("=", "")
    weights, linear = (f", {entries}", "~0 ~6") if arguments["per_sample_weights"] is not None else ("", "~0")
    return f"{bags} z, {entries}, {offsets}, {more}{weights} -> {row} z | {linear}", {"b": count}


def _weights_gradient(node: Call):
    arguments = named(node.target, node.args, node.kwargs)
    count = arguments["grad"].meta["val"].shape[0]
    bags, entries, offsets, row = _names(arguments, count)
    bag_of = "1" if arguments["offset2bag"].meta["val"].shape == (0,) else entries
    return f"{bags} z, {row} z, {entries}, {offsets}, {bag_of} -> {entries} | ~0 ~1", {"b": count}


rules(dict.fromkeys(FORWARD, _bag) | {GRADIENT: _bag_gradient, OF_WEIGHTS: _weights_gradient})


def _entries(here, indices: Tensor, offsets: Tensor, bags: int) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's indices, the offsets of its bags among them, and the bag of each index, from this rank's first."""
    dtype = torch.promote_types(indices.dtype, offsets.dtype)
    places = torch.arange(len(indices), dtype=dtype, device=indices.device)
    begin = places[:: len(indices) // len(offsets)].contiguous() if here.axes("b") else offsets.to(dtype)
    return indices.to(dtype), begin, torch.bucketize(places, begin[1:bags].contiguous(), right=True).to(dtype)


def _bag_sums(
    here, weight, indices, offsets, scale=False, mode=SUM, sparse=False, weights=None, last=False, padding=-1
):
    n, bags = len(indices), len(offsets) - last
    indices, begin, bag = _entries(here, indices, offsets, bags)
    counted = torch.ones_like(indices) if padding < 0 else (indices != padding).to(indices.dtype)
    size = torch.zeros(bags, dtype=indices.dtype, device=indices.device).index_add(0, bag, counted)
    if here.axes("v"):
        rows, own = read_rows(here, "v", indices)
        own = (own & counted.bool()).to(weight.dtype)
        own = own if weights is None else own * weights
        out = aten._embedding_bag(weight, rows, begin, False, SUM, False, own, last)[0]
        out = out / size.clamp(min=1).unsqueeze(1) if mode == MEAN else out
        largest = size
    else:
        out, _, _, largest = aten._embedding_bag(weight, indices, begin, scale, mode, sparse, weights, last, padding)
    size = torch.zeros_like(size) if mode == SUM else size  # as torch has it
    if here.whole_shape(1) == (0,):
        bag = bag.new_empty(0)
    elif here.axes("b"):
        bag = (offsets // (n // bags))[bag]  # its global bag
    return out, bag, size, largest if mode == MAX else size.clone()


def _bag_rows(here, grad, indices, offsets, bag, size, largest, rows, scale, mode, sparse, weights, padding=-1):
    indices, begin, bag = _entries(here, indices, offsets, len(grad))
    if not here.axes("v"):
        return GRADIENT(grad, indices, begin, bag, size, largest, rows, scale, mode, False, weights, padding)
    spare = here.size("v")
    own, _ = write_rows(here, "v", indices)
    own = torch.where(indices == padding, spare, own) if padding >= 0 else own
    grad = GRADIENT(grad, own, begin, bag, size, largest, spare + 1, scale, mode, False, weights, -1)
    return grad.narrow(0, 0, spare)


def _bag_weights(here, grad, weight, indices, offsets, bag, mode, padding=-1):
    indices, begin, bag = _entries(here, indices, offsets, len(grad))
    if not here.axes("v"):
        return OF_WEIGHTS(grad, weight, indices, begin, bag, mode, padding)
    rows, own = read_rows(here, "v", indices)
    own = own & (indices != padding) if padding >= 0 else own
    return torch.where(own, OF_WEIGHTS(grad, weight, rows, begin, bag, mode, -1), 0)


LOCAL |= dict.fromkeys(FORWARD, _bag_sums) | {GRADIENT: _bag_rows, OF_WEIGHTS: _bag_weights}
# With other weights torch chooses another kernel with other outputs. Kernels overlook the strides of indices.
CONTIGUOUS |= dict.fromkeys(FORWARD, (0, 1, 2)) | {GRADIENT: (1, 2)}
