"""What the calls of a replayed Program cost on a cluster, in seconds.

A call goes by its own local shapes (`tutti.plan.compute`), views are free. A kernel of several calls reads and
writes what crosses its border at the speed of memory; where the device's figures say that a family of operators takes
longer than moving its bytes does, the kernel takes that much longer.
"""

from __future__ import annotations

from math import prod

from torch import fx

from tutti.cluster import Cluster
from tutti.cluster.operators import family_of, lies_transposed
from tutti.graph.costs import FLOPS
from tutti.lower.program import Program
from tutti.plan import compute
from tutti.plan.compute import LocalCall
from tutti.plan.price import strides
from tutti.plan.reshard import sent_bytes
from tutti.run.simulated.replay import Event


def flops(event: Event) -> int:
    """Of work on matrices."""
    return sum(FLOPS[node.target](node) for node in event.nodes if node.target in FLOPS)


def moved(event: Event) -> int:
    """Bytes that a kernel of several calls reads and writes: what crosses its border."""
    return sum(o.bytes for o in event.reads) + sum(s.bytes for s in event.outputs) + event.writes


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
        if len(event.nodes) > 1:
            taken = self.device.stream_seconds(moved(event), "add", dtype) + sum(map(self.slower, event.nodes))
        else:
            first = event.reads[0] if event.reads else None
            taken = compute.seconds(
                self.device,
                LocalCall(
                    event.node,
                    [o.bytes for o in event.reads],
                    [s.bytes for s in event.outputs] if event.made else [],
                    dtype,
                    first.spec.dtype if first else None,
                    flops(event),
                    lambda: [o.spec.shape for o in event.reads],
                    first.in_rows if first else True,
                    lies_transposed(event.node),
                    event.writes,
                ),
            )
        return taken + self.device.overhead

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
        return self.cluster.time(kind, self.sent(event), min(self.strides[a] for a in axes), size)

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
        used = [stage.link for stage in self.cluster.stages(min(self.strides[a] for a in axes), size)]
        return frozenset(i for i, (_, link) in enumerate(self.cluster.levels) if any(link is u for u in used))
