"""Reshard: the cheapest path from one layout to another.

A step changes the placement along one axis:

| step | from | to | bytes that a rank sends (k ranks, n local bytes before the step) |
|---|---|---|---|
| all_gather | split | replicate | (k-1) n |
| all_reduce | partial | replicate | 2 (k-1)/k n |
| reduce_scatter | partial | split | (k-1)/k n |
| all_to_all | split | another split | (k-1)/k n |
| slice | replicate | split | 0 |
| mask | replicate | partial sum | 0 |

A path is a shortest path (Dijkstra) over layouts, which also determines the order of the axes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from math import prod

from tutti.plan.layouts.layout import Layout, Mesh, Partial, R, Split


@dataclass(frozen=True)
class ReshardStep:
    """One collective (or local slice) along one axis."""

    kind: str
    axis: str
    source: Layout
    target: Layout

    @property
    def communicates(self) -> bool:
        return self.kind not in ("slice", "mask")

    def sent(self, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> int:
        """Bytes that each rank sends."""
        n, k = prod(self.source.local_shape(shape, mesh)) * itemsize, mesh[self.axis]
        return sent_bytes(self.kind, n, k)


def sent_bytes(kind: str, local: int, k: int) -> int:
    """Bytes that each of k ranks sends, if each has `local` bytes before the collective."""
    return {
        "all_gather": (k - 1) * local,
        "all_reduce": 2 * (k - 1) * local // k,
        "reduce_scatter": (k - 1) * local // k,
        "all_to_all": (k - 1) * local // k,
        "ppermute": local,
        "slice": 0,
        "mask": 0,
    }[kind]


Price = Callable[[ReshardStep, int], float]  # cost of a step that sends this number of bytes


def reshard(
    source: Layout,
    target: Layout,
    shape: tuple[int, ...],
    mesh: Mesh,
    itemsize: int = 4,
    price: Price | None = None,
) -> list[ReshardStep]:
    """The cheapest steps from `source` to `target` for a tensor of this global shape.

    By default the path with the fewest bytes sent wins, then the one with the fewest steps, then the one that sends
    least over outer axes. Raises ValueError if a layout does not fit the shape.
    """
    if source == target:
        return []
    for layout in (source, target):
        layout.local_shape(shape, mesh)
    if price is None:
        return list(_fewest_bytes(source, target, shape, tuple(mesh.items()), itemsize))
    return _search(source, target, shape, mesh, itemsize, price)


@lru_cache(maxsize=100_000)
def _fewest_bytes(source, target, shape, mesh, itemsize) -> tuple[ReshardStep, ...]:
    tie = 1e-3  # a step costs less than one byte
    outer = {axis: 1 + 1e-9 * (len(mesh) - i) for i, (axis, _) in enumerate(mesh)}  # outer links are slower
    return tuple(_search(source, target, shape, dict(mesh), itemsize, lambda step, sent: sent * outer[step.axis] + tie))


def _search(source, target, shape, mesh, itemsize, price: Price) -> list[ReshardStep]:
    order = count()
    queue: list[tuple[float, int, Layout, tuple[ReshardStep, ...]]] = [(0.0, next(order), source, ())]
    done = set()
    while queue:
        cost, _, layout, path = heapq.heappop(queue)
        if layout == target:
            return list(path)
        if layout in done:
            continue
        done.add(layout)
        for step in _steps(layout, source, target, shape, mesh):
            if step.target not in done:
                total = cost + price(step, step.sent(shape, itemsize, mesh))
                heapq.heappush(queue, (total, next(order), step.target, (*path, step)))
    raise ValueError(f"no path from layout {source} to {target} for shape {shape} on a mesh {dict(mesh)}")


def _steps(layout: Layout, source: Layout, target: Layout, shape: tuple[int, ...], mesh: Mesh) -> Iterator[ReshardStep]:
    for axis in mesh:
        here = layout[axis]
        wanted = [p for p in dict.fromkeys((target[axis], source[axis])) if p != here]
        splits = [p for p in wanted if isinstance(p, Split)]
        if isinstance(here, Split):
            moves = [("all_gather", R), *(("all_to_all", p) for p in splits)]
        elif isinstance(here, Partial):
            yield ReshardStep("all_reduce", axis, layout, layout.replace(axis, R))
            if len(layout.partials) > 1:  # a reduce-scatter first leaves less to reduce over the other axes
                splits += _anywhere(layout, axis, shape, mesh)
            moves = [("reduce_scatter", p) for p in splits]
        else:
            moves = [("slice", p) for p in splits] + [("mask", p) for p in wanted if p == Partial("sum")]
        for kind, placement in moves:
            step = ReshardStep(kind, axis, layout, layout.replace(axis, placement))
            if possible(step, shape, mesh):
                yield step


def _anywhere(layout: Layout, axis: str, shape: tuple[int, ...], mesh: Mesh) -> list[Split]:
    """A split of the first dim that divides, nested in the existing splits of that dim."""
    for dim in range(len(shape)):
        inside = max((s.outer * mesh[a] for a, s in layout.splits.items() if s.dim == dim), default=1)
        if layout.replace(axis, Split(dim, inside)).fits(shape, mesh):
            return [Split(dim, inside)]
    return []


def possible(step: ReshardStep, shape: tuple[int, ...], mesh: Mesh) -> bool:
    """Whether the step's target fits and its split falls between the digits of its source."""
    if not step.target.fits(shape, mesh):
        return False
    old, new = step.source[step.axis], step.target[step.axis]
    if isinstance(old, Split) and isinstance(new, Split) and old.dim == new.dim and (old.unit or new.unit):
        return False  # gathered, then sliced
    try:
        if isinstance(new, Split):
            step.target.cut(step.axis, step.source, shape[new.dim], mesh)
        if isinstance(old, Split):
            step.source.cut(step.axis, step.target, shape[old.dim], mesh)
    except ValueError:
        return False
    return True
