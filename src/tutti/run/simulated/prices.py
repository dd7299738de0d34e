"""What the calls of a replayed Program cost on a cluster, in seconds.

A call goes by its own local shapes (`tutti.cluster.operators`), views are free. A kernel of several calls reads and
writes what crosses its border at the speed of memory; where the device's figures say that a family of operators takes
longer than moving its bytes does, the kernel takes that much longer.
"""

from __future__ import annotations

from math import prod

import torch
from torch import fx

import tutti.nn.random  # noqa: F401  (registers the operators)
from tutti.cluster import Cluster
from tutti.cluster.operators import PRODUCTS, family_of, lies_transposed, seconds
from tutti.graph.costs import FLOPS
from tutti.lower.program import Program
from tutti.plan.price import strides
from tutti.plan.reshard import sent_bytes
from tutti.run.simulated.replay import Event

# Passes over its numbers that a draw of random numbers makes (`tutti.nn.random`): by their count, and as measured on a
# CPU, where 17 to 36 of them take as long as writing four bytes each does, since the pieces stay in the cache.
DRAWS, PASSES, PASS = torch.ops.tutti.uniform.default, 22, 16  # bytes that a pass reads and writes in memory
LOOKUPS = ("embedding", "index", "index_select", "gather", "nll_loss_forward")  # read as much of a table as they return
COPIES = ("clone", "reshape", "contiguous", "_to_copy", "copy")  # whose speed is that of how their operand lies
LANES = 16  # channels that a CPU's kernels of convolutions work on at once (oneDNN's blocked layouts)


def flops(event: Event) -> int:
    """Of work on matrices."""
    return sum(FLOPS[node.target](node) for node in event.nodes if node.target in FLOPS)


def moved(event: Event) -> int:
    """Bytes that a call or a kernel reads and writes; of a pooling what its windows cover."""
    made = sum(s.bytes for s in event.outputs) if event.made else 0
    reads = event.reads
    if len(event.nodes) == 1 and reads:
        if _name(event.node) in LOOKUPS:
            return sum(o.bytes for o in reads[1:]) + 2 * made
        if family_of(event.node.target) == "pool" and not _name(event.node).endswith("_backward"):
            return event.outputs[0].bytes * prod(event.node.args[1])  # pyright: ignore
    return sum(o.bytes for o in reads) + made + event.writes


def _name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name.rpartition("::")[2] if schema else ""


def _filled(channels: int) -> float:
    return -(-channels // LANES) * LANES / channels


class Prices:
    """Prices on one cluster, for the ranks of one mesh."""

    def __init__(self, cluster: Cluster, program: Program):
        self.cluster, self.device, self.program = cluster, cluster.device, program
        self.strides = strides(program.mesh)

    def compute(self, event: Event) -> float:
        """Of a call or kernel that computes, launching it included."""
        if not event.computes:
            return 0.0
        dtype = event.outputs[0].dtype if event.outputs else event.reads[0].spec.dtype
        if len(event.nodes) == 1:
            shapes = [o.spec.shape for o in event.reads] if event.node.target in PRODUCTS else ()
            lies = lies_transposed(event.node)
            bytes_ = self.drawn(event) if event.node.target is DRAWS else moved(event)
            work, family = flops(event) * self.filled(event), self.family(event)
            if family == "table":  # of zeros, to which the rows of the gradient are added
                taken = self.device.stream_seconds(event.outputs[0].bytes, "add", dtype)
                taken += self.device.stream_seconds(3 * event.reads[0].bytes, family, dtype)
            else:
                taken = seconds(self.device, event.node.target, shapes, dtype, work, bytes_, lies, family)
        else:
            taken = self.device.stream_seconds(moved(event), "add", dtype) + sum(map(self.slower, event.nodes))
        return taken + self.device.overhead

    def family(self, event: Event) -> str:
        """By which a call moves its bytes: copies by how their operand lies, conversions of bools as comparisons."""
        first = event.reads[0] if event.reads else None
        if first and _name(event.node) in COPIES:
            if first.spec.dtype == torch.bool != event.outputs[0].dtype:
                return "compare"
            return "add" if first.in_rows else "transpose"
        return family_of(event.node.target)

    def filled(self, event: Event) -> float:
        """How much more work a CPU does for channels that do not fill its lanes: of what a convolution makes."""
        name = _name(event.node)
        if name not in ("convolution", "convolution_backward") or not self.device.name.startswith("cpu"):
            return 1.0
        backward = name == "convolution_backward"
        if event.node.args[9 if backward else 8] != 1:  # groups have kernels of their own
            return 1.0
        made, taken, *_ = event.reads[1 + backward].spec.shape
        return _filled(made) * (_filled(taken) if backward else 1.0)

    def drawn(self, event: Event) -> int:
        """Bytes whose moving takes as long as a draw of random numbers does."""
        return PASSES * (4 if self.device.name.startswith("cpu") else PASS) * event.outputs[0].numel

    def slower(self, node: fx.Node) -> float:
        """How much longer a call takes than moving its bytes does: arithmetic that fusing does not save."""
        family, spec = family_of(node.target), node.meta.get("val")
        if family in ("add", "index", "transpose") or spec is None or not self.device.streams:
            return 0.0
        spec = spec[0] if isinstance(spec, tuple) else spec
        count = 2 * spec.bytes
        streamed = self.device.stream_seconds
        return max(0.0, streamed(count, family, spec.dtype) - streamed(count, "add", spec.dtype))

    def communicate(self, event: Event) -> float:
        """Of a collective by itself, on links that nobody else uses."""
        kind, axis = event.collective, str(event.node.args[1])
        axes, mesh = axis.split(), self.program.mesh
        size = prod(mesh[a] for a in axes)
        if size == 1:
            return 0.0
        return self.cluster.time(kind, self.sent(event), self.strides[axes[-1]], size)

    def sent(self, event: Event) -> int:
        """Bytes that this rank sends; of a shift those that others send, where it has nobody to send to."""
        kind, mesh = event.collective, self.program.mesh
        local = event.reads[0].spec.bytes
        if kind == "shift":
            return local
        return sent_bytes(kind, local, mesh[str(event.node.args[1])])

    def copies(self, event: Event) -> float:
        """What the runtime copies around a collective: into one piece, or into the result that is reduced in place."""
        operand = event.reads[0]
        if event.collective != "all_reduce" and operand.contiguous:
            return 0.0
        return self.device.stream_seconds(2 * operand.spec.bytes, "add", operand.spec.dtype) + self.device.overhead

    def levels(self, event: Event) -> frozenset[int]:
        """The levels of the cluster whose links a collective uses, by their number, innermost 0."""
        axes = str(event.node.args[1]).split()
        size = prod(self.program.mesh[a] for a in axes)
        if size == 1:
            return frozenset()
        used = [stage.link for stage in self.cluster.stages(self.strides[axes[-1]], size)]
        return frozenset(i for i, (_, link) in enumerate(self.cluster.levels) if any(link is u for u in used))
