"""What one call computes in, on one device and its local parts: by the search's options, and by the simulator's calls.

Matrix products go by their shapes, all else by the bytes that it moves (`tutti.hardware.operators`). What its operator
moves is told here: look-ups read as much of a table as they return, poolings what their windows cover, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, prod

import torch
from torch import fx

import tutti.nn.experts
import tutti.nn.linear_cross_entropy
import tutti.nn.random  # noqa: F401  (registers the operators)
from tutti.hardware.device import Device
from tutti.hardware.operators import PRODUCTS, Shape, family_of, known, lies_transposed
from tutti.hardware.operators import seconds as operator_seconds
from tutti.ir.costs import FLOPS, FREE
from tutti.ir.loops import LOOPS, Body, Loop
from tutti.ops.registry import operands, specs

# Passes over its numbers that a draw of random numbers makes (`tutti.nn.random`): by their count, and as measured on a
# CPU, where 17 to 36 of them take as long as writing four bytes each does, since the pieces stay in the cache.
DRAWS, PASSES, PASS = torch.ops.tutti.uniform.default, 22, 16  # bytes that a pass reads and writes in memory
LOOKUPS = ("embedding", "index", "index_select", "gather", "nll_loss_forward")  # read as much of a table as they return
COPIES = ("clone", "reshape", "contiguous", "_to_copy", "copy")  # whose speed is that of how their operand lies
CONVOLUTIONS = ("convolution", "convolution_backward")
_ops = torch.ops.tutti
EXPERTS: dict[object, bool] = {  # whether it is a backward pass
    _ops.experts.default: False,
    _ops.experts_training.default: False,
    _ops.experts_backward.default: True,
    _ops.experts_backward_kept.default: True,
}
LINEAR_LOSSES: dict[object, bool] = {  # whether it makes gradients
    _ops.linear_logsumexp.default: False,
    _ops.linear_logsumexp_backward.default: True,
    _ops.linear_logsumexp_with_gradients.default: True,
}
LANES = 16  # channels that a CPU's kernels of convolutions work on at once (oneDNN's blocked layouts)


@dataclass(slots=True)
class LocalCall:
    """A call on one rank's parts.

    node: the call, of the whole graph or of a Program: its operator and arguments. read, made: bytes by operand and
    output; written: in place. dtype: of its first output; read_dtype: of its first operand. flops: of work on matrices.
    shapes: of its operands, asked for where they matter. in_rows: whether neighbours in the last dim of its first
    operand are neighbours in memory. transposed: whether the first matrix of a product is a transposed view.
    """

    node: fx.Node
    read: Sequence[int]
    made: Sequence[int]
    dtype: torch.dtype
    read_dtype: torch.dtype | None
    flops: float
    shapes: Callable[[], Sequence[Shape]]
    in_rows: bool
    transposed: bool
    written: int = 0


def seconds(device: Device, call: LocalCall) -> float:
    """Seconds of a call, without its overhead."""
    target, family = call.node.target, _family(call)
    if target in LOOPS:
        return _loop(device, call, LOOPS[target])
    if target in EXPERTS:
        return _experts(device, call, EXPERTS[target])
    if target in LINEAR_LOSSES:
        return _linear_loss(device, call, LINEAR_LOSSES[target])
    if family == "table" and call.read:  # of zeros, to which the rows of the gradient are added
        rows = device.stream_seconds(3 * call.read[0], family, call.dtype)
        return device.stream_seconds(call.made[0], "add", call.dtype) + rows
    shapes = call.shapes() if target in PRODUCTS else ()
    work = call.flops * _filled(call) if device.name.startswith("cpu") else call.flops
    bytes_ = _drawn(device, call) if target is DRAWS else moved(call)
    return operator_seconds(device, target, shapes, call.dtype, work, bytes_, call.transposed, family)


def moved(call: LocalCall) -> int:
    """Bytes that a call reads and writes."""
    if call.read and call.made:
        name = _name(call.node)
        if name in LOOKUPS:
            return sum(call.read[1:]) + 2 * sum(call.made)
        if family_of(call.node.target) == "pool" and not name.endswith("_backward"):  # what its windows cover
            return call.made[0] * prod(call.node.args[1])  # pyright: ignore
    return sum(call.read) + sum(call.made) + call.written


def _loop(device: Device, call: LocalCall, loop: Loop) -> float:
    """The calls of the sub-graphs, each as often as it runs; of a part of the loop as much less as it has bytes."""
    whole = sum(spec.bytes for spec in [*specs(call.node), *(x.meta["val"] for x in call.node.all_input_nodes)])
    part = (sum(call.read) + sum(call.made)) / max(1, whole)
    return sum(times * _body(device, body, min(1.0, part)) for body, times in loop.bodies)


def _body(device: Device, body: Body, part: float) -> float:
    """Seconds of one run of a sub-graph, of which a rank has a part."""
    taken = 0.0
    for node in body.step.calls:
        if node.target in FREE:
            continue
        reads = [x.meta["val"] for x in operands(node)]
        made = specs(node)
        call = LocalCall(
            node,
            [int(part * x.bytes) for x in reads],
            [int(part * x.bytes) for x in made if x.dtype],
            made[0].dtype or torch.float32,
            reads[0].dtype if reads else None,
            part * node.meta["flops"] if node.target in FLOPS else 0,
            lambda reads=reads: [x.shape for x in reads],
            True,
            lies_transposed(node),
        )
        taken += device.overhead + (part if node.target in PRODUCTS else 1.0) * seconds(device, call)
    return taken


def _experts(device: Device, call: LocalCall, backward: bool) -> float:
    """A product for each expert, of its share of the choices; of more where `flops` says that this rank is busier.
    Between them the choices' rows are gathered, activated and added."""
    _, (tokens, k), _, (experts, made, hidden), (_, _, width) = call.shapes()[backward : 5 + backward]
    rows = ceil(tokens * k / call.node.args[7 + backward])  # pyright: ignore
    products = [(rows, hidden, made), (rows, width, hidden)]
    if backward:
        products = [(rows, hidden, width), (hidden, rows, width), (made, rows, hidden), (rows, made, hidden)]
    busier = call.flops / max(1, sum(2 * experts * prod(sizes) for sizes in products))
    bytes_ = moved(call) + (1 + backward) * 2 * rows * experts * (hidden + made) * call.dtype.itemsize
    taken = sum(device.matmul_seconds(experts, *sizes, known(device, call.dtype)) for sizes in products)
    return max(1.0, busier) * taken + device.stream_seconds(bytes_, "add", call.dtype)


def _linear_loss(device: Device, call: LocalCall, backward: bool) -> float:
    """The product that makes the logits, one more for each gradient; and reading and writing the logits once."""
    (rows, hidden), (classes, _) = call.shapes()[2 * backward : 2 * backward + 2]
    dtype = known(device, call.node.args[2 * backward].meta["val"].dtype)  # pyright: ignore
    products = [(rows, hidden, classes)]
    if backward:
        more = [(rows, classes, hidden), (classes, rows, hidden)]
        products += [sizes for sizes, want in zip(more, call.node.args[-1], strict=False) if want]  # pyright: ignore
    taken = sum(device.matmul_seconds(1, *sizes, dtype) for sizes in products)
    return taken + device.stream_seconds(2 * 4 * rows * classes, "exp", torch.float32)


def _drawn(device: Device, call: LocalCall) -> int:
    """Bytes whose moving takes as long as a draw of random numbers does."""
    each = call.dtype.itemsize if device.name.startswith("cpu") else PASS
    return PASSES * each * (call.made[0] // call.dtype.itemsize)


def _family(call: LocalCall) -> str:
    """By which a call moves its bytes: copies by how their operand lies, conversions of bools as comparisons."""
    if call.read and _name(call.node) in COPIES:
        if call.read_dtype == torch.bool != call.dtype:
            return "compare"
        return "add" if call.in_rows else "transpose"
    return family_of(call.node.target)


def _filled(call: LocalCall) -> float:
    """How much more work a CPU does for channels that do not fill its lanes: of what a convolution makes."""
    name = _name(call.node)
    if name not in CONVOLUTIONS:
        return 1.0
    backward = name == "convolution_backward"
    if call.node.args[9 if backward else 8] != 1:  # groups have kernels of their own
        return 1.0
    made, taken, *_ = call.shapes()[1 + backward]
    return _lanes(made) * (_lanes(taken) if backward else 1.0)


def _lanes(channels: int) -> float:
    return -(-channels // LANES) * LANES / channels


def _name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name.rpartition("::")[2] if schema else ""
