"""Program: what one rank runs. The runtime and the simulator execute the same object."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from torch import fx

from tutti.ir import text
from tutti.ir.kind import kind_of
from tutti.ir.spec import Spec
from tutti.ir.step_graph import Call
from tutti.lower.collectives import COLLECTIVES, parse_ppermute, peer, sent_by
from tutti.plan.layouts.layout import Layout, Mesh, coordinates_of


class Collective(NamedTuple):
    """One communication of a Program."""

    kind: str
    axis: str
    bytes: int  # sent by each rank; on average, if they depend on data
    label: str  # label of the operator that made the operand


@dataclass(repr=False)
class Program:
    """A graph of local operators and collectives with named inputs and outputs. `print(program)` lists them.

    inputs, outputs: name -> (layout, Spec of the full tensor).
    overlap_chunks: number of parts in which regions between collectives are computed (`lower.overlap.regions`).
    """

    graph: fx.Graph
    mesh: Mesh
    rank: int
    inputs: dict[str, tuple[Layout, Spec]]
    outputs: dict[str, tuple[Layout, Spec]]
    overlap_chunks: int = 1

    @property
    def where(self) -> dict[str, int]:
        """The coordinates of the rank."""
        return coordinates_of(self.rank, self.mesh)

    def __repr__(self) -> str:
        calls = sum(node.op == "call_function" for node in self.graph.nodes)
        mesh = "x".join(f"{axis}{n}" for axis, n in self.mesh.items())
        return f"Program(rank {self.rank} of {mesh}, {calls} operators, {len(self.collectives)} collectives)"

    def __str__(self) -> str:
        def local(layout: Layout, spec: Spec) -> str:
            return text.described(Spec(layout.local_shape(spec.shape, self.mesh, self.where), spec.dtype))

        places = [node for node in self.graph.nodes if node.op == "placeholder"]
        inputs = [
            (f"%{node.name}", local(layout, spec), str(layout), name)
            for node, (name, (layout, spec)) in zip(places, self.inputs.items(), strict=True)
        ]
        notes = {}
        for node in self.graph.nodes:
            if node.target in COLLECTIVES:
                sent = self.collective(node)
                notes[node] = f"{sent.kind} over {sent.axis}, {sent.bytes} bytes sent, for {sent.label}"
        outputs = [(local(layout, spec), str(layout), name) for name, (layout, spec) in self.outputs.items()]
        return "\n".join([repr(self), "inputs (local shape, layout)", *text.columns(inputs),
                          "operators", *text.lines(self.graph.nodes, notes),
                          "outputs (local shape, layout)", *text.columns(outputs)])  # fmt: skip

    @property
    def collectives(self) -> list[Collective]:
        return [self.collective(node) for node in self.graph.nodes if node.target in COLLECTIVES]

    def collective(self, node: Call) -> Collective:
        """The communication of a call of the graph."""
        kind, axis, sent = COLLECTIVES[node.target], node.args[1], sent_by(node, self.mesh)
        if kind == "ppermute":
            by, edge = parse_ppermute(node.args[2])
            sent = 0 if peer(self.rank, axis, by, edge is None, self.mesh) in (None, self.rank) else sent
        return Collective(kind, axis, sent, node.meta.get("label", ""))

    @property
    def sent(self) -> int:
        """Bytes that this rank sends in one run."""
        return sum(c.bytes for c in self.collectives)

    def input_bytes(self, *kinds: str) -> int:
        """Local bytes of the inputs of these kinds (`param`, `exp_avg`, ...), or of all inputs without arguments."""
        return sum(
            prod(layout.local_shape(spec.shape, self.mesh, self.where)) * spec.dtype.itemsize
            for name, (layout, spec) in self.inputs.items()
            if not kinds or kind_of(name) in kinds
        )
