"""Seconds of one call on one device for its local parts, used by both the search and the simulator.

Matrix products are priced by their shapes, other operators by the bytes they move (`tutti.hardware.operators`). This
module determines these bytes: look-ups read as many bytes of a table as they return, pooling reads its windows, and so
on.
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
COPIES = ("clone", "reshape", "contiguous", "_to_copy", "copy")  # their speed depends on the operand's strides
CONVOLUTIONS = ("convolution", "convolution_backward")
LANES = 16  # channels that a CPU's convolution kernels process at once (oneDNN's blocked layouts)


@dataclass(slots=True)
class LocalCall:
    """A call on one rank's parts.

    node: the call, in the whole graph or in a Program.
    read, outputs: bytes of each operand and each output; written: bytes written in place.
    dtype: dtype of the first output; read_dtype: dtype of the first operand.
    flops: FLOPs of matrix operations.
    shapes: returns the shapes of the operands.
    in_rows: whether neighbours in the last dim of the first operand are neighbours in memory.
    transposed: whether the first matrix of a product is a transposed view.
    target: the operator that is called in place of that of the node; None for that of the node.
    """

    node: fx.Node
    read: Sequence[int]
    outputs: Sequence[int]
    dtype: torch.dtype
    read_dtype: torch.dtype | None
    flops: float
    shapes: Callable[[], Sequence[Shape]]
    in_rows: bool
    transposed: bool
    written: int = 0
    target: object = None

    @property
    def bytes(self) -> int:
        """Bytes of all operands and outputs."""
        return sum(self.read) + sum(self.outputs) + self.written


def seconds(device: Device, call: LocalCall) -> float:
    """Seconds of a call, without its overhead."""
    target, family = call.target or call.node.target, _family(call)
    if target in LOOPS:
        return _loop(device, call, LOOPS[target])
    if target in SECONDS:
        return SECONDS[target](device, call)
    if family == "table" and call.read:  # fills a table with zeros and adds the rows of the gradient
        rows = device.stream_seconds(3 * call.read[0], family, call.dtype)
        return device.stream_seconds(call.outputs[0], "add", call.dtype) + rows
    shapes = call.shapes() if target in PRODUCTS or is_attention(target) else ()
    work = call.flops * _filled(call) if device.name.startswith("cpu") else call.flops
    return operator_seconds(device, target, shapes, call.dtype, work, moved(call), call.transposed, family)


def moved(call: LocalCall) -> int:
    """Bytes that a call reads and writes."""
    if call.read and call.outputs:
        name = _name(call.node)
        if name in LOOKUPS:
            return sum(call.read[1:]) + 2 * sum(call.outputs)
        if family_of(call.node.target) == "pool" and not name.endswith("_backward"):  # reads its windows
            return call.outputs[0] * prod(call.node.args[1])  # pyright: ignore
    return call.bytes


def _loop(device: Device, call: LocalCall, loop: Loop) -> float:
    """Seconds of the sub-graphs' calls, times their runs. A part of the loop is scaled by its share of the bytes."""
    whole = sum(spec.bytes for spec in [*specs(call.node), *(x.meta["val"] for x in call.node.all_input_nodes)])
    part = (sum(call.read) + sum(call.outputs)) / max(1, whole)
    return sum(times * _body(device, body, min(1.0, part)) for body, times in loop.bodies)


def _body(device: Device, body: Body, part: float) -> float:
    """Seconds of one run of a sub-graph. part: the rank's share of it."""
    total = 0.0
    for node in body.step.calls:
        if node.target in FREE:
            continue
        reads = [x.meta["val"] for x in operands(node)]
        outputs = specs(node)
        call = LocalCall(
            node,
            [int(part * x.bytes) for x in reads],
            [int(part * x.bytes) for x in outputs if x.dtype],
            outputs[0].dtype or torch.float32,
            reads[0].dtype if reads else None,
            part * node.meta["flops"] if node.target in FLOPS else 0,
            lambda reads=reads: [x.shape for x in reads],
            True,
            lies_transposed(node),
        )
        total += device.overhead + (part if node.target in PRODUCTS else 1.0) * seconds(device, call)
    return total


def _family(call: LocalCall) -> str:
    """The family that determines the bandwidth: that of a comparison for bools, and of copies by operand strides."""
    if call.read and _name(call.node) in COPIES:
        if call.read_dtype == torch.bool != call.dtype:
            return "compare"
        return "add" if call.in_rows else "transpose"
    return family_of(call.node.target)


def _filled(call: LocalCall) -> float:
    """The factor of extra work on a CPU for channels that do not fill its lanes, for convolutions."""
    name = _name(call.node)
    if name not in CONVOLUTIONS:
        return 1.0
    backward = name == "convolution_backward"
    if call.node.args[9 if backward else 8] != 1:  # grouped convolutions have separate kernels
        return 1.0
    out_channels, in_channels, *_ = call.shapes()[1 + backward]
    return _lanes(out_channels) * (_lanes(in_channels) if backward else 1.0)


def _lanes(channels: int) -> float:
    return -(-channels // LANES) * LANES / channels


def _name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name.rpartition("::")[2] if schema else ""
