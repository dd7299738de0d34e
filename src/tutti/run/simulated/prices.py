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
LOOKUPS = ("embedding", "index", "index_select", "gather")  # read as much of a table as they return


def flops(event: Event) -> int:
    """Of work on matrices."""
    return sum(FLOPS[node.target](node) for node in event.nodes if node.target in FLOPS)


def moved(event: Event) -> int:
    """Bytes that a call or a kernel reads and writes."""
    made = sum(s.bytes for s in event.outputs) if event.made else 0
    reads = event.reads
    if len(event.nodes) == 1 and _name(event.node) in LOOKUPS and reads:
        return sum(o.bytes for o in reads[1:]) + 2 * made
    return sum(o.bytes for o in reads) + made + event.writes


def _name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name.rpartition("::")[2] if schema else ""


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
            taken = seconds(self.device, event.node.target, shapes, dtype, flops(event), bytes_, lies)
        else:
            taken = self.device.stream_seconds(moved(event), "add", dtype) + sum(map(self.slower, event.nodes))
        return taken + self.device.overhead

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
