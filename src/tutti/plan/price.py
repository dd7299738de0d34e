"""What operators and collectives cost on a cluster, in seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from tutti.cluster import Cluster
from tutti.plan.choice import Choice, Choices, input_placement, output_placement
from tutti.plan.layout import Mesh, Placement, Split
from tutti.plan.problem import Operator
from tutti.plan.reshard import sent_bytes
from tutti.rules import ROWS

BUCKET = 64 << 20  # bytes that collectives of the update are merged into: enough to forget latency


def strides(mesh: Mesh) -> dict[str, int]:
    """The distance of neighbouring ranks along each axis."""
    sizes = list(mesh.values())
    return {axis: prod(sizes[i + 1 :]) for i, axis in enumerate(mesh)}


class Pricer:
    """Prices on one cluster and mesh. Computation is a roofline: the slower of arithmetic and memory traffic."""

    def __init__(self, cluster: Cluster, mesh: Mesh):
        self.cluster, self.mesh, self.strides = cluster, mesh, strides(mesh)

    def compute(self, o: Operator, choices: Choices) -> float:
        """One run of the local part of an operator, with what its own computation communicates."""
        if o.is_input or not o.bytes:
            return 0.0
        parts = prod(self.mesh[axis] for axis, c in choices.items() if c.factor)
        moved = sum(
            prod(o.input_shape(i)) * self.itemsize(o) // self.parts(input_placement, o, i, choices)
            for i in range(len(o.rule.inputs))
        ) + sum(self.made_bytes(o, i, choices) for i, s in enumerate(o.outputs) if s.dtype)
        seconds = max(o.flops / parts / self.rate(o), moved / self.cluster.device.bandwidth)
        return seconds + self.cluster.device.overhead + self.rows(o, choices)

    def rows(self, o: Operator, choices: Choices) -> float:
        """The reductions inside a split softmax or loss: one number for every row."""
        count = ROWS.get(o.target, 0)
        split = [(axis, c.factor) for axis, c in choices.items() if c.factor in o.rule.local]
        if not count or not split:
            return 0.0
        axis, factor = split[0]
        rows = (
            o.outputs[0].numel
            // o.rule.sizes[factor]
            // prod(self.mesh[a] for a, c in choices.items() if c.factor and c.factor != factor)
        )
        return count * self.collective("all_reduce", axis, rows * 4)

    def made_bytes(self, o: Operator, output: int, choices: Choices) -> int:
        """Bytes of one output on one rank."""
        return o.outputs[output].bytes // self.parts(output_placement, o, output, choices)

    def parts(self, placement: Callable[..., Placement], o: Operator, i: int, choices: Choices) -> int:
        """Over how many ranks an operand (`input_placement`) or output (`output_placement`) is split."""
        return prod(self.mesh[a] for a, c in choices.items() if isinstance(placement(o.rule, c, i), Split))

    def rate(self, o: Operator) -> float:
        """FLOP/s of this operator's dtype; of float32 where the device has no figure for it."""
        try:
            return self.cluster.device.rate(o.outputs[0].dtype)
        except ValueError:
            return self.cluster.device.rate("float32")

    def itemsize(self, o: Operator) -> int:
        return next((s.dtype.itemsize for s in o.outputs if s.dtype), 4)

    def collective(self, kind: str, axis: str, local: int, messages: int = 1) -> float:
        """Collectives in which each rank begins with `local` bytes in all, with the copies around them."""
        k = self.mesh[axis]
        if kind in ("", "slice", "mask"):
            return 0.0
        sent = sent_bytes(kind, local, k)
        copies = 2 * local * (k if kind == "all_gather" else 1) / self.cluster.device.bandwidth
        start = self.cluster.time(kind, 0, self.strides[axis], k)
        return (messages - 1) * start + self.cluster.time(kind, sent, self.strides[axis], k) + copies


def with_choice(choices: Mapping[str, Choice], axis: str, choice: Choice | None) -> dict[str, Choice]:
    """The choices with one axis added, or left as they are where it computes the whole."""
    return {**choices, axis: choice} if choice else dict(choices)
