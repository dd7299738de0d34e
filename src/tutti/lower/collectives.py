"""The collectives of a Program, as operators: only their shapes are defined here, the runtimes carry them out.

All work on a leading dim, so that what is exchanged is contiguous; what goes where is said by ordinary reshapes and
permutations around them.

| operator | input | output |
|---|---|---|
| all_reduce(x, axis, op) | x | x combined over the axis |
| all_gather(x, axis, k) | x | (k, *x): what each rank of the axis holds |
| reduce_scatter(x, axis, op) | (k, *y) | y: this rank's row of the combination |
| all_to_all(x, axis) | (k, *y) | (k, *y): row i comes from rank i |
| shift(x, axes, how) | x | x of the rank `by` places before, counted along the axes (outermost first) |

A collective is carried out where it stands; where only `wait(x)` reads it, it is begun there, and over where that
stands. Several may be under way. All ranks begin those of one axis in the same order.

`how` is "<by> <edge>": what a rank receives that has nobody there is a number ("1 0.0", "-1 -inf") or, with "1 wrap",
comes from the other end.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.node import has_side_effect

from tutti.plan.layout import Mesh, coordinates_of, rank_at

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define("all_reduce(Tensor x, str axis, str op) -> Tensor")
_library.define("all_gather(Tensor x, str axis, int k) -> Tensor")
_library.define("reduce_scatter(Tensor x, str axis, str op) -> Tensor")
_library.define("all_to_all(Tensor x, str axis) -> Tensor")
_library.define("shift(Tensor x, str axes, str how) -> Tensor")

torch.library.register_fake("tutti::all_reduce", lambda x, axis, op: torch.empty_like(x))
torch.library.register_fake("tutti::all_gather", lambda x, axis, k: x.new_empty((k, *x.shape)))
torch.library.register_fake("tutti::reduce_scatter", lambda x, axis, op: x.new_empty(x.shape[1:]))
torch.library.register_fake("tutti::all_to_all", lambda x, axis: torch.empty_like(x))
torch.library.register_fake("tutti::shift", lambda x, axes, how: x.new_empty(x.shape))

all_reduce = torch.ops.tutti.all_reduce.default
all_gather = torch.ops.tutti.all_gather.default
reduce_scatter = torch.ops.tutti.reduce_scatter.default
all_to_all = torch.ops.tutti.all_to_all.default
shift = torch.ops.tutti.shift.default

COLLECTIVES = {all_reduce: "all_reduce", all_gather: "all_gather", reduce_scatter: "reduce_scatter",
               all_to_all: "all_to_all", shift: "shift"}  # fmt: skip

for _collective in COLLECTIVES:  # a rank may have no use for the result, and the others still need its part
    has_side_effect(_collective)


def wait(x: torch.Tensor) -> torch.Tensor:
    """What a collective that is under way brings, once it is over."""
    return x


def is_begun(node: fx.Node) -> bool:
    """Whether a collective is only begun where it stands."""
    return bool(node.users) and all(user.target is wait for user in node.users)


def peer(rank: int, axes: str, by: int, wrap: bool, mesh: Mesh) -> int | None:
    """The rank `by` places after this one along the axes; None beyond the end."""
    where = coordinates_of(rank, mesh)
    place, size = 0, 1
    for axis in axes.split():
        place, size = place * mesh[axis] + where[axis], size * mesh[axis]
    place += by
    if not wrap and not 0 <= place < size:
        return None
    for axis in reversed(axes.split()):
        place, where[axis] = divmod(place, mesh[axis])
    return rank_at(where, mesh)


def parse_shift(how: str) -> tuple[int, float | None]:
    """(by, edge) of a shift; the edge None where it wraps."""
    by, edge = how.split()
    return int(by), None if edge == "wrap" else float(edge)
