"""What the calls of a replayed Program cost on a cluster, in seconds.

A call goes by its own local shapes (`tutti.plan.compute`), views are free. A kernel of several calls reads and
writes what crosses its border at the speed of memory; where the device's figures say that a family of operators takes
longer than moving its bytes does, the kernel takes that much longer.
"""

from __future__ import annotations

from math import prod

from torch import fx

from tutti.analysis.replay import Event
from tutti.hardware import Cluster
from tutti.hardware.operators import family_of, lies_transposed
from tutti.ir.costs import FLOPS
from tutti.lower.program import Program
from tutti.plan import compute
from tutti.plan.compute import LocalCall
from tutti.plan.price import strides
from tutti.plan.reshard import sent_bytes
from tutti.plan.tier import DISK


def flops(event: Event) -> int:
    """Of work on matrices."""
    return sum(FLOPS[node.target](node) for node in event.nodes if node.target in FLOPS)


def moved(event: Event) -> int:
    """Bytes that a call reads and writes; of a kernel of several calls what crosses its border."""
    if len(event.nodes) == 1:
        return compute.moved(call_of(event))
    return sum(o.bytes for o in event.reads) + sum(s.bytes for s in event.outputs) + event.writes


def call_of(event: Event) -> LocalCall:
    """A single call, as it is priced."""
    first = event.reads[0] if event.reads else None
    return LocalCall(
        event.node,
        [o.bytes for o in event.reads],
        [s.bytes for s in event.outputs] if event.made else [],
        event.dtype,
        first.spec.dtype if first else None,
        flops(event),
        lambda: [o.spec.shape for o in event.reads],
        first.in_rows if first else True,
        lies_transposed(event.node),
        event.writes,
    )


class Prices:
    """Prices on one cluster, for the ranks of one mesh."""

    def __init__(self, cluster: Cluster, program: Program):
        self.cluster, self.device, self.program = cluster, cluster.device, program
        self.strides = strides(program.mesh)

    def compute(self, event: Event) -> float:
        """Of a call or kernel that computes, launching it included."""
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
        stride, size = self.group(event)
        return self.cluster.time(event.collective, self.sent(event), stride, size) if size > 1 else 0.0

    def group(self, event: Event) -> tuple[int, int]:
        """Stride and size of the groups of a collective, over one axis or several neighbouring ones."""
        axes = str(event.node.args[1]).split()
        return min(self.strides[a] for a in axes), prod(self.program.mesh[a] for a in axes)

    def sent(self, event: Event) -> int:
        """Bytes that this rank sends. A rank without a ppermute target is charged like the ranks that have one."""
        kind, mesh = event.collective, self.program.mesh
        local = event.reads[0].spec.bytes
        if kind == "ppermute":
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
        stride, size = self.group(event)
        if size == 1:
            return frozenset()
        used = [stage.link for stage in self.cluster.stages(stride, size)]
        return frozenset(i for i, (_, link) in enumerate(self.cluster.levels) if any(link is u for u in used))
