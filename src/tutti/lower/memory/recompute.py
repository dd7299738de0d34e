"""Recomputation: forward values are computed again right before the backward pass reads them, instead of being stored.

Copies of forward nodes are inserted in the backward pass, each just before its first reader. Operators are pure
functions of their arguments, random ones too, so a copy gives the same bits. Operands that are not stored either are
copied as well.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from tutti.ir.costs import FREE
from tutti.ir.labels import annotate_labels
from tutti.ir.step_graph import BACKWARD, FORWARD, StepGraph, copy_graph
from tutti.plan.search.recompute import Activations, chosen


def recompute(step: StepGraph, again: Collection[str]) -> StepGraph:
    """Recompute forward nodes in the backward pass. Returns the step itself if there are none.

    again: labels and other words (`plan.search.recompute.chosen`). Raises ValueError for operators that the step lacks.
    """
    if not again:
        return step
    activations = Activations(step)
    labels = chosen(step, activations, again)
    graph, mapping = copy_graph(step.graph)
    writer = _Writer(graph, labels)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.meta["phase"] == BACKWARD:
            writer.serve(node)
    writer.in_slices()
    outputs = {name: mapping[node] for name, node in step.outputs.items()}
    graph.output(tuple(outputs.values())).meta = {"path": "", "phase": "", "val": None}
    writer.erase_unread()
    inputs = {name: mapping[node] for name, node in step.inputs.items()}
    result = StepGraph(graph, inputs, outputs, step.constants, step.device)
    annotate_labels(result)
    return result


def checkpointed(step: StepGraph) -> list[str]:
    """Return the labels that the model itself checkpoints.

    These nodes are in its `torch.utils.checkpoint` regions, and the forward pass reads them only within the region,
    directly or through views.
    """
    regions: dict[str, set] = {}
    for node in step.calls:
        if node.meta["phase"] == FORWARD:
            regions.setdefault(node.meta["label"], set()).add(node.meta.get("checkpoint"))
    inside = {label for label, checkpoints in regions.items() if None not in checkpoints}
    for node in step.calls:
        for x in node.all_input_nodes if node.meta["phase"] == FORWARD else ():
            region = x.meta.get("checkpoint")
            while region and x.meta.get("checkpoint") == region != node.meta.get("checkpoint"):
                inside.discard(x.meta["label"])
                if x.target not in FREE:
                    break
                x = x.all_input_nodes[0]
    return sorted(inside)


class _Writer:
    def __init__(self, graph: fx.Graph, again: set[str]):
        self.graph, self.recompute = graph, again
        self.copies: dict[fx.Node, fx.Node] = {}  # of all visited nodes; a stored node maps to itself
        self.inserted: list[fx.Node] = []  # copies in the backward pass

    def serve(self, reader: fx.Node) -> None:
        """Make a node read copies of operands that are not stored."""
        with self.graph.inserting_before(reader):
            for x in reader.all_input_nodes:
                if (copy := self.copy(x)) is not x:
                    reader.replace_input_with(x, copy)

    def copy(self, node: fx.Node) -> fx.Node:
        """The node in the backward pass: itself if it is stored, else its copy."""
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
        """Return a copy of a node if it is recomputed, or is a view of a copy; else the node."""
        if x.meta["label"] not in self.recompute and all(self.copies[y] is y for y in x.all_input_nodes):
            return x
        copy = self.graph.node_copy(x, self.copies.__getitem__)
        copy.meta = {**x.meta, "phase": BACKWARD, "recompute": x.meta["name"]}
        self.inserted.append(copy)
        return copy

    def in_slices(self) -> None:
        """Assign copies to the chunk of the sequence that reads them first in the backward pass: the last chunk."""
        for copy in reversed(self.inserted):
            if "slice" in copy.meta:
                copy.meta["slice"] = max(user.meta["slice"] for user in copy.users)

    def erase_unread(self) -> None:
        """Erase forward nodes that only the backward pass has read."""
        for x, copy in reversed(self.copies.items()):
            if copy is not x and not x.users:
                self.graph.erase_node(x)
