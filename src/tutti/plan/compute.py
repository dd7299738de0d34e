"""What one call computes in, on one device and its local parts: by the search's options, and by the simulator's calls.

Matrix products go by their shapes, all else by the bytes that it moves (`tutti.hardware.operators`). What its operator
moves is told here: look-ups read as much of a table as they return, poolings what their windows cover, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from tutti.hardware.device import Device
from tutti.hardware.operators import PRODUCTS, Shape, family_of, is_attention, lies_transposed
from tutti.hardware.operators import seconds as operator_seconds
from tutti.ir.costs import FREE
from tutti.ir.loops import LOOPS, Body, Loop
from tutti.ir.op_info import FLOPS, SECONDS
from tutti.ops.registry import operands, specs

LOOKUPS = ("embedding", "index", "index_select", "gather", "nll_loss_forward")  # read as much of a table as they return
COPIES = ("clone", "reshape", "contiguous", "_to_copy", "copy")  # whose speed is that of how their operand lies
CONVOLUTIONS = ("convolution", "convolution_backward")
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

    @property
    def bytes(self) -> int:
        """Bytes of all operands and outputs."""
        return sum(self.read) + sum(self.made) + self.written


def seconds(device: Device, call: LocalCall) -> float:
    """Seconds of a call, without its overhead."""
    target, family = call.node.target, _family(call)
    if target in LOOPS:
        return _loop(device, call, LOOPS[target])
    if target in SECONDS:
        return SECONDS[target](device, call)
    if family == "table" and call.read:  # of zeros, to which the rows of the gradient are added
        rows = device.stream_seconds(3 * call.read[0], family, call.dtype)
        return device.stream_seconds(call.made[0], "add", call.dtype) + rows
    shapes = call.shapes() if target in PRODUCTS or is_attention(target) else ()
    work = call.flops * _filled(call) if device.name.startswith("cpu") else call.flops
    return operator_seconds(device, target, shapes, call.dtype, work, moved(call), call.transposed, family)


def moved(call: LocalCall) -> int:
    """Bytes that a call reads and writes."""
    if call.read and call.made:
        name = _name(call.node)
        if name in LOOKUPS:
            return sum(call.read[1:]) + 2 * sum(call.made)
        if family_of(call.node.target) == "pool" and not name.endswith("_backward"):  # what its windows cover
            return call.made[0] * prod(call.node.args[1])  # pyright: ignore
    return call.bytes


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
