"""Recomputation: what the forward pass made is made again before the backward pass reads it, and not kept until then.

The step's graph gets copies of forward nodes among those of the backward pass, each just before its first reader.
Operators are functions of their arguments, random ones too, so a copy gives the same bits. What a copy reads is a copy
again where it is not kept either.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from tutti.ir.costs import FREE
from tutti.ir.labels import annotate_labels
from tutti.ir.step_graph import BACKWARD, FORWARD, StepGraph, copy_graph
from tutti.plan.recompute import Activations
from tutti.plan.variant import LAYERS


def recompute(step: StepGraph, again: Collection[str]) -> StepGraph:
    """The step with what these labels of forward nodes name computed again; itself where there are none.

    again: labels, or `layers` for all that layers make and no other reads. What the step does not have, or what reads
    a buffer that it changes, is left as it is.
    """
    if not again:
        return step
    found = Activations(step)
    labels = {*again, *(found.inside_layers if LAYERS in again else ())} - found.never
    graph, mapping = copy_graph(step.graph)
    writer = _Writer(graph, labels)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.meta["phase"] == BACKWARD:
            writer.serve(node)
    writer.in_slices()
    outputs = {name: mapping[node] for name, node in step.outputs.items()}
    graph.output(tuple(outputs.values())).meta = {"path": "", "phase": "", "val": None}
    inputs = {name: mapping[node] for name, node in step.inputs.items()}
    made = StepGraph(graph, inputs, outputs, step.constants, step.device)
    annotate_labels(made)
    return made


def checkpointed(step: StepGraph) -> list[str]:
    """Labels of what the model itself wants to be computed again: nodes of its `torch.utils.checkpoint` regions that
    only the same region reads in the forward pass."""
    regions: dict[str, set] = {}
    for node in step.calls:
        if node.meta["phase"] == FORWARD:
            regions.setdefault(node.meta["label"], set()).add(node.meta.get("checkpoint"))
    inside = {label for label, found in regions.items() if None not in found}
    for node in step.calls:
        for x in node.all_input_nodes if node.meta["phase"] == FORWARD else ():
            if x.meta.get("checkpoint") and x.meta["checkpoint"] != node.meta.get("checkpoint"):
                inside.discard(x.meta["label"])
    return sorted(inside)


class _Writer:
    def __init__(self, graph: fx.Graph, again: set[str]):
        self.graph, self.recompute = graph, again
        self.copies: dict[fx.Node, fx.Node] = {}  # of all nodes looked at; themselves, if they are kept
        self.made: list[fx.Node] = []

    def serve(self, reader: fx.Node) -> None:
        """Let a node read copies of what is not kept."""
        with self.graph.inserting_before(reader):
            for x in reader.all_input_nodes:
                if (copy := self.copy(x)) is not x:
                    reader.replace_input_with(x, copy)

    def copy(self, node: fx.Node) -> fx.Node:
        """The node in the backward pass: itself if it is kept, else a copy, which is made once."""
        todo = [node]
        while todo:
            x = todo[-1]
            if x in self.copies:
                todo.pop()
            elif (
                x.op != "call_function"
                or x.meta["phase"] != FORWARD
                or not (x.meta["label"] in self.recompute or x.target in FREE)
            ):
                self.copies[todo.pop()] = x
            elif missing := [y for y in x.all_input_nodes if y not in self.copies]:
                todo += missing
            else:
                self.copies[todo.pop()] = self.written(x)
        return self.copies[node]

    def written(self, x: fx.Node) -> fx.Node:
        """Views are copied where what they look at is."""
        if x.meta["label"] not in self.recompute and all(self.copies[y] is y for y in x.all_input_nodes):
            return x
        copy = self.graph.node_copy(x, self.copies.__getitem__)
        copy.meta = {**x.meta, "phase": BACKWARD, "recompute": x.meta["name"]}
        self.made.append(copy)
        return copy

    def in_slices(self) -> None:
        """Let copies belong to the first chunk of the sequence in the backward pass, the last, that reads them."""
        for copy in reversed(self.made):
            if "slice" in copy.meta:
                copy.meta["slice"] = max(user.meta["slice"] for user in copy.users)
