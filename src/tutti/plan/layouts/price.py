"""Prices of operators and collectives on a cluster, in seconds."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from tutti.hardware import Cluster
from tutti.ir.op_info import SENDS, WORK
from tutti.ir.spec import Spec
from tutti.ops import Cut, operands
from tutti.plan.layouts import compute
from tutti.plan.layouts.choice import Choice, Choices, input_placement, layouts, output_placement, waste
from tutti.plan.layouts.compute import LocalCall
from tutti.plan.layouts.layout import Layout, Mesh, Placement, Split, axis_part, extent, inside_node
from tutti.plan.layouts.problem import Operator
from tutti.plan.layouts.reshard import sent_bytes

BUCKET = 64 << 20  # bytes of a bucket of collectives in the update, enough to make latency negligible

# The minimum bytes of gradients that one call updates (`lower.memory.inplace`). A fused kernel moves 14 times as much
# (bfloat16, with master weights) or 7 times. That takes a GPU at least 50 microseconds, ten times the launch overhead.
# At O2 a call ends a compiled function.
PIECE = 32 << 20


class Pricer:
    """Prices on one cluster and mesh. Matrix products are priced by their shapes, other operators by their bytes.

    whole: whether a step is one Program, in which a loss is computed together with its gradients if its vocabulary is
        not split.
    hides: whether exchanges of tokens are hidden behind the computation of another microbatch.
    """

    def __init__(self, cluster: Cluster, mesh: Mesh, whole: bool = True, hides: bool = False):
        self.cluster, self.mesh, self.whole, self.hides = cluster, mesh, whole, hides

    def compute(self, o: Operator, choices: Choices) -> float:
        """Seconds of one run of the local part of an operator, including the communication inside it."""
        if o.is_input or not o.bytes:
            return 0.0
        if self.whole and o.brings_gradients and self.shapes(o, choices)[1] == o.operands[1].shape:
            return 0.0
        parts = prod(self.ways(o, c, axis) for axis, c in choices.items() if c.factor)
        parts /= prod(
            max(WORK[o.target](o.node, factor, outer, self.mesh[axis]) for factor, outer in c.splits)
            for axis, c in choices.items()
            if c.factor and o.target in WORK
        )
        call = LocalCall(
            o.node,
            [int(spec.bytes / self.parts(input_placement, o, i, choices)) for i, spec in enumerate(o.operands)],
            [self.made_bytes(o, i, choices) for i, s in enumerate(o.outputs) if s.dtype],
            next((s.dtype for s in o.outputs if s.dtype), torch.float32),
            o.operands[0].dtype if o.operands else None,
            o.flops / parts,
            lambda: self.shapes(o, choices),
            o.in_rows,
            o.transposed,
            target=o.one_program if self.whole else None,
        )
        return compute.seconds(self.cluster.device, call) + self.cluster.device.overhead + self.exchanged(o, choices)

    def shapes(self, o: Operator, choices: Choices) -> list[tuple[int, ...]]:
        """Local shapes of the operands."""
        ins, _ = layouts(o.rule, choices)
        return [at.local_shape(spec.shape, self.mesh) for at, spec in zip(ins, o.operands, strict=True)]

    def exchanged(self, o: Operator, choices: Choices) -> float:
        """Seconds of the communication inside an operator: sums of rows of a split softmax, border rows, ..."""
        split = {axis: c.factor for axis, c in choices.items() if c.factor in o.rule.local}
        for factor, other in o.rule.joint:  # the axes that split both are one, in what is sent
            axes = [axis for axis, c in choices.items() if c.also and c.factor == factor]
            split |= {" ".join(sorted(axes, key=list(self.mesh).index)): f"{factor}&{other}"} if axes else {}
        if not split or o.target not in SENDS:
            return 0.0
        ins, outs = layouts(o.rule, choices)
        inputs = [self.local(at, n.meta["val"]) for at, n in zip(ins, operands(o.node), strict=True)]
        outputs = [self.local(at, spec) for at, spec in zip(outs, o.outputs, strict=True)]
        return sum(
            min(
                sum(self.collective(kind, axis, sent) for kind, sent in SENDS[o.target](cut))
                for cut in (Cut(o.node, o.rule, factor, self.size(axis), inputs, outputs, inside)
                            for inside in self.inside(axis, factor))
            )
            for axis, factor in split.items()
        )  # fmt: skip

    def inside(self, axes: str, factor: str) -> list[int]:
        """Values of `Cut.inside`: 0, and the ranks in a node if an axis that splits two factors spans several nodes."""
        if "&" not in factor or " " in axes:
            return [0]
        inside = inside_node(axes, self.mesh, self.cluster.levels[0][0])
        return [0, inside] if inside else [0]

    def size(self, axes: str) -> int:
        """The number of ranks along axes."""
        return prod(self.mesh[axis] for axis in axes.split())

    def local(self, layout: Layout, spec: Spec) -> Spec:
        return Spec(layout.local_shape(spec.shape, self.mesh), spec.dtype)

    def made_bytes(self, o: Operator, output: int, choices: Choices) -> int:
        """Bytes of one output on one rank."""
        return int(o.outputs[output].bytes / self.parts(output_placement, o, output, choices))

    def parts(self, placement: Callable[..., Placement], o: Operator, i: int, choices: Choices) -> float:
        """An operand's (`input_placement`) or output's (`output_placement`) size, over that of its largest part."""
        return prod(self.ways(o, c, a) for a, c in choices.items() if isinstance(placement(o.rule, c, i), Split))

    def ways(self, o: Operator, choice: Choice, axis: str) -> float:
        """A factor's size, over that of the largest part that an axis makes of it."""
        return self.mesh[axis] / (1 + waste(o.rule, choice, self.mesh[axis]))

    def collective(self, kind: str, axis: str, local: int, messages: int = 1) -> float:
        """Seconds of `messages` collectives, for which each rank provides `local` bytes in total, including copies."""
        if kind in ("slice", "mask"):
            return local / self.cluster.device.bandwidth if kind == "mask" else 0.0
        kind, sign, count = axis_part(kind)  # an exchange along a part of the axis
        extents = [extent(f"{a}{sign}{count}" if sign else a, self.mesh) for a in axis.split()]
        k, stride = prod(size for size, _ in extents), min(step for _, step in extents)
        if kind == "exchange" and self.hides:
            return 0.0
        sent = local if kind == "exchange" else sent_bytes(kind, local, k)
        arranged = 2 * local * (k if kind == "all_gather" else 1) / self.cluster.device.bandwidth
        return self.cluster.time(kind, sent, stride, k, messages) + arranged

    def bucketed(self, kind: str, axis: str, local: int) -> float:
        """Seconds of a collective as its share of a bucket."""
        return self.collective(kind, axis, BUCKET) * local / BUCKET
