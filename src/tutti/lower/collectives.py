"""The collectives of a Program as operators. Only their shapes are defined here; the runtimes implement them.

All act on a leading dim, so the exchanged data is contiguous. Ordinary reshapes and permutations around them choose
which dim is split or gathered.

| operator | input | output |
|---|---|---|
| all_reduce(x, axis, op) | x | x combined over the axis |
| all_gather(x, axis, k) | x | (k, *x): the x of each rank of the axis |
| reduce_scatter(x, axis, op) | (k, *y) | y: this rank's row of the reduction |
| all_to_all(x, axis) | (k, *y) | (k, *y): row i comes from rank i |
| ppermute(x, axes, how) | x | the x of the rank `by` places before, counted along the axes (outermost first) |
| exchange(x, axes, sends, receives, rows, expected) | (n, *y) | (rows, *y): rows of all ranks along the axes |

A collective is synchronous, unless `wait(x)` is its only reader: then it starts at its node and completes at the
`wait`. Several may be in flight. All ranks start the collectives of one axis in the same order.

`how` of ppermute is "<by> <edge>". A rank without a source receives the number `edge` ("1 0.0", "-1 -inf"), or, with
"1 wrap", the x from the other end.

An exchange is an all-to-all of as many rows as `sends` (int64, one number per rank of the axes) says: first those for
rank 0, and so on. `receives` are the numbers of rows that arrive, in the same order. Rows of x behind the last are not
sent; rows of the result behind the last are zero. More than fit are an error. `expected`: rows that leave a rank on
average, for predictions.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.node import has_side_effect

from tutti.plan.layouts.layout import Mesh, coordinates_of, rank_at
from tutti.plan.layouts.reshard import sent_bytes

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define("all_reduce(Tensor x, str axis, str op) -> Tensor")
_library.define("all_gather(Tensor x, str axis, int k) -> Tensor")
_library.define("reduce_scatter(Tensor x, str axis, str op) -> Tensor")
_library.define("all_to_all(Tensor x, str axis) -> Tensor")
_library.define("ppermute(Tensor x, str axes, str how) -> Tensor")
_library.define("exchange(Tensor x, str axes, Tensor sends, Tensor receives, int rows, int expected) -> Tensor")

torch.library.register_fake("tutti::all_reduce", lambda x, axis, op: torch.empty_like(x))
torch.library.register_fake("tutti::all_gather", lambda x, axis, k: x.new_empty((k, *x.shape)))
torch.library.register_fake("tutti::reduce_scatter", lambda x, axis, op: x.new_empty(x.shape[1:]))
torch.library.register_fake("tutti::all_to_all", lambda x, axis: torch.empty_like(x))
torch.library.register_fake("tutti::ppermute", lambda x, axes, how: x.new_empty(x.shape))
torch.library.register_fake(
    "tutti::exchange", lambda x, axes, sends, receives, rows, expected: x.new_empty((rows, *x.shape[1:]))
)

all_reduce = torch.ops.tutti.all_reduce.default
all_gather = torch.ops.tutti.all_gather.default
reduce_scatter = torch.ops.tutti.reduce_scatter.default
all_to_all = torch.ops.tutti.all_to_all.default
ppermute = torch.ops.tutti.ppermute.default
exchange = torch.ops.tutti.exchange.default

COLLECTIVES = {all_reduce: "all_reduce", all_gather: "all_gather", reduce_scatter: "reduce_scatter",
               all_to_all: "all_to_all", ppermute: "ppermute", exchange: "exchange"}  # fmt: skip

for _collective in COLLECTIVES:  # other ranks need this rank's part even if it does not use the result
    has_side_effect(_collective)


def wait(x: torch.Tensor) -> torch.Tensor:
    """The result of an asynchronous collective, after it has completed."""
    return x


def is_begun(node: fx.Node) -> bool:
    """Return whether a collective is asynchronous: only `wait` nodes read it."""
    return bool(node.users) and all(user.target is wait for user in node.users)


def peer(rank: int, axes: str, by: int, wrap: bool, mesh: Mesh) -> int | None:
    """The rank `by` places after this one along the axes, or None past the end."""
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


def sent_by(node: fx.Node, mesh: Mesh) -> int:
    """Bytes that a rank sends in a collective: the expected ones of an exchange, those to the target of a ppermute."""
    kind, operand = COLLECTIVES[node.target], node.args[0].meta["val"]  # pyright: ignore
    if kind == "exchange":
        return node.args[5] * operand.bytes // max(1, operand.shape[0])  # pyright: ignore
    return operand.bytes if kind == "ppermute" else sent_bytes(kind, operand.bytes, mesh[str(node.args[1])])


def bounds_of(counts: torch.Tensor, rows: int) -> list[int]:
    """Return the row counts of an exchange. Raises RuntimeError if a buffer of `rows` rows is too small for them."""
    sizes = counts.tolist()
    if sum(sizes) > rows:
        raise RuntimeError(f"an exchange of {sum(sizes)} rows does not fit into a buffer of {rows}")
    return sizes


def parse_ppermute(how: str) -> tuple[int, float | None]:
    """(by, edge) of a ppermute; edge is None if it wraps."""
    by, edge = how.split()
    return int(by), None if edge == "wrap" else float(edge)
