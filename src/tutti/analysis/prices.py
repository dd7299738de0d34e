"""Prices of the calls of a replayed Program on a cluster, in seconds.

A call is priced by its local shapes (`tutti.plan.layouts.compute`); views are free. A kernel of several calls reads and
writes its inputs and outputs at memory speed. If calibration shows that a family of operators is slower than its memory
traffic, the kernel takes that much longer.
"""

from __future__ import annotations

from math import prod

from torch import fx

from tutti.analysis.replay import Event
from tutti.hardware import Cluster
from tutti.hardware.operators import family_of, lies_transposed
from tutti.ir.op_info import FLOPS
from tutti.lower.collectives import sent_by
from tutti.lower.program import Program
from tutti.plan.layouts import compute
from tutti.plan.layouts.compute import LocalCall
from tutti.plan.layouts.layout import extent
from tutti.plan.tier import DISK


def flops(event: Event) -> int:
    """FLOPs of matrix work."""
    return sum(FLOPS[node.target](node) for node in event.nodes if node.target in FLOPS)


def moved(event: Event) -> int:
    """Bytes that a call reads and writes. For a kernel of several calls, its inputs and outputs."""
    if len(event.nodes) == 1:
        return compute.moved(call_of(event))
    return sum(o.bytes for o in event.reads) + sum(s.bytes for s in event.outputs) + event.writes


def call_of(event: Event) -> LocalCall:
    """Convert a single call to the form in which it is priced."""
    first = event.reads[0] if event.reads else None
    return LocalCall(
        event.node,
        [o.bytes for o in event.reads],
        [s.bytes for s in event.outputs] if event.allocated else [],
        event.dtype,
        first.spec.dtype if first else None,
        flops(event),
        lambda: [o.spec.shape for o in event.reads],
        first.in_rows if first else True,
        lies_transposed(event.node),
        event.writes,
    )


class Prices:
    """Prices on one cluster, for the ranks of one mesh, in seconds unless stated otherwise."""

    def __init__(self, cluster: Cluster, program: Program):
        self.cluster, self.device, self.program = cluster, cluster.device, program

    def compute(self, event: Event) -> float:
        """Seconds of a computing call or kernel, launch overhead included."""
        if not event.computes:
            return 0.0
        if len(event.nodes) == 1:
            taken = compute.seconds(self.device, call_of(event))
        else:
            taken = self.device.stream_seconds(moved(event), "add", event.dtype) + sum(map(self.slower, event.nodes))
        filed = sum(o.spec.bytes for o in event.reads if o.storage.tier == DISK)
        return taken + self.device.overhead + filed / self.device.outside.link

    def beside(self, event: Event, travels: bool) -> tuple[float, int]:
        """Seconds and bytes of a transfer, or of what the host computes."""
        outside = self.device.outside
        if travels:
            count = event.reads[-1].spec.bytes
            return count / outside.link, count
        count = moved(event)
        return count / outside.bandwidth, count

    def slower(self, node: fx.Node) -> float:
        """Seconds that a call takes beyond its memory traffic: arithmetic that fusion does not save."""
        family, spec = family_of(node.target), node.meta.get("val")
        if family in ("add", "index", "transpose") or spec is None or not self.device.streams:
            return 0.0
        spec = spec[0] if isinstance(spec, tuple) else spec
        count = 2 * spec.bytes
        streamed = self.device.stream_seconds
        return max(0.0, streamed(count, family, spec.dtype) - streamed(count, "add", spec.dtype))

    def communicate(self, event: Event) -> float:
        """Seconds of a collective without contention."""
        stride, size = self.group(event)
        return self.cluster.time(event.collective, self.sent(event), stride, size) if size > 1 else 0.0

    def group(self, event: Event) -> tuple[int, int]:
        """Stride and size of a collective's groups, over one axis or several adjacent ones."""
        extents = [extent(axis, self.program.mesh) for axis in str(event.node.args[1]).split()]
        return min(stride for _, stride in extents), prod(size for size, _ in extents)

    def sent(self, event: Event) -> int:
        """Bytes that this rank sends. A rank without a ppermute target is charged like the ranks that have one."""
        return sent_by(event.node, self.program.mesh)

    def copies(self, event: Event) -> float:
        """Seconds of the runtime's copies around a collective: a contiguous operand, or a result to reduce in place."""
        operand = event.reads[0]
        if event.collective != "all_reduce" and operand.contiguous:
            return 0.0
        return self.device.stream_seconds(2 * operand.spec.bytes, "add", operand.spec.dtype) + self.device.overhead

    def levels(self, event: Event) -> frozenset[int]:
        """The levels of the cluster whose links a collective uses, innermost 0."""
        stride, size = self.group(event)
        if size == 1:
            return frozenset()
        used = [stage.link for stage in self.cluster.stages(stride, size)]
        return frozenset(i for i, (_, link) in enumerate(self.cluster.levels) if any(link is u for u in used))
