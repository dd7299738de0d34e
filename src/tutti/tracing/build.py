"""Turn the raw trace into a StepGraph: name inputs and outputs, remove dead code, annotate nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from tutti.ir.costs import FREE
from tutti.ir.kind import Kind, kind_of, path_of, split_name
from tutti.ir.labels import annotate_labels
from tutti.ir.spec import Spec
from tutti.ir.step_graph import BACKWARD, FORWARD, GUARD, UPDATE, Call, StepGraph
from tutti.ops.costs import annotate_costs
from tutti.tracing.rewrite.like_operators import make_without_operands
from tutti.tracing.rewrite.pattern_table import PATTERNS
from tutti.tracing.rewrite.patterns import Pattern, fuse_patterns
from tutti.tracing.rewrite.randomness import make_reproducible
from tutti.tracing.rewrite.remove_redundant import simplify
from tutti.tracing.rewrite.workspaces import without_workspaces
from tutti.tracing.trace.trace import Traced


def build(
    traced: Traced,
    inputs: list[str],
    outputs: list[str],
    device: torch.device,
    patterns: Sequence[Pattern] = PATTERNS,
) -> StepGraph:
    """The StepGraph of a functional trace with these names of inputs and outputs, in order.

    patterns: which fused operators replace decomposed ones.
    """
    graph = traced.graph
    placeholders = dict(zip(inputs, (n for n in graph.nodes if n.op == "placeholder"), strict=True))
    for node in graph.nodes:
        meta = node.meta
        node.meta = {
            "phase": meta.get("phase") or FORWARD,
            "path": meta.get("path") or "",
            "val": meta.get("val"),
        }
        if meta.get("checkpoint"):
            node.meta["checkpoint"] = meta["checkpoint"]
    constants = _lift_constants(traced, placeholders)
    (output,) = (n for n in graph.nodes if n.op == "output")
    make_reproducible(graph, placeholders["seed"], placeholders["step"], device)
    without_workspaces(graph)
    make_without_operands(graph, device)
    simplify(graph)
    matches = fuse_patterns(graph, patterns, device)
    _adopt(graph)
    results = dict(zip(outputs, output.args[0], strict=True))
    results = _successors(results, placeholders)
    results = {name: _own(graph, node) for name, node in results.items()}
    output.args = (tuple(results.values()),)
    graph.eliminate_dead_code()
    _keep_old_state(graph, placeholders, results)
    for name in [n for n, x in placeholders.items() if kind_of(n) in (Kind.CONSTANT, Kind.COUNT) and not x.users]:
        constants.pop(name, None)
        graph.erase_node(placeholders.pop(name))
    graph.lint()
    step = StepGraph(graph, placeholders, results, constants, device, matches)
    annotate_costs(step)
    annotate_labels(step)
    return step


def _lift_constants(traced: Traced, placeholders: dict[str, fx.Node]) -> dict[str, torch.Tensor]:
    """Tensors that the model created from Python numbers become inputs of kind `constant`."""
    graph, constants = traced.graph, {}
    first = next(n for n in graph.nodes if n.op != "placeholder")
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        name = Kind.CONSTANT.at(node.target)
        if name not in placeholders:
            constants[name] = traced.constants[node.target]
            with graph.inserting_before(first):
                placeholders[name] = graph.placeholder(node.target)
            placeholders[name].meta = {**node.meta, "val": Spec.of(constants[name])}
        node.replace_all_uses_with(placeholders[name])
        graph.erase_node(node)
    return constants


def _successors(results: dict[str, fx.Node], inputs: dict[str, fx.Node]) -> dict[str, fx.Node]:
    """Drop outputs that are unchanged inputs.

    If forward writes into a parameter and no update replaces it, the written value is its successor.
    """
    successors = {}
    for name, node in results.items():
        kind, path = split_name(name)
        stored = Kind.PARAM.at(path) if kind == Kind.WRITTEN else name
        if node is not inputs.get(stored):
            successors[name if stored in results else stored] = node
    return successors


def _keep_old_state(graph: fx.Graph, inputs: dict[str, fx.Node], results: dict[str, fx.Node]) -> None:
    """Make the backward pass read a copy of state that the forward pass replaces: another microbatch's forward pass may
    run in between."""
    changed = {inputs[Kind.PARAM.at(path_of(name))] for name in results if kind_of(name) == Kind.WRITTEN}
    changed |= {inputs[name] for name, x in results.items() if name in inputs and x.meta["phase"] != UPDATE}
    views = {x: x for x in changed}  # views of such an input -> that input
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        read = [x for x in node.all_input_nodes if x in views]
        if read and node.target in FREE and node.meta["phase"] == FORWARD:
            views[node] = node
        elif read and node.meta["phase"] == BACKWARD:
            for x in read:
                if (copy := views[x]) is x:
                    with graph.inserting_after(x if x.op == "call_function" else list(inputs.values())[-1]):
                        copy = graph.call_function(torch.ops.aten.clone.default, (x,))
                    copy.meta = {**x.meta, "phase": FORWARD, "path": x.meta.get("path", "")}
                    views[x] = copy
                node.replace_input_with(x, copy)


def _adopt(graph: fx.Graph) -> None:
    """Assign update nodes that only depend on one parameter's gradient to that parameter's module."""
    for node in graph.nodes:
        if node.op == "call_function" and node.meta["phase"] == UPDATE and not node.meta["path"]:
            owners = set(_owners(node))
            if len(owners) == 1:
                node.meta["path"] = owners.pop()


def _owners(node: fx.Node) -> Iterator[str]:
    """The modules of a node's operands, ignoring checks for non-finite values."""
    for operand in node.all_input_nodes:
        if operand.op == "call_function" and operand.meta["path"] == GUARD:
            yield from (path for x in operand.all_input_nodes if (path := x.meta.get("path")) and path != GUARD)
        elif operand.op == "call_function" and operand.meta["path"]:
            yield operand.meta["path"]


def _own(graph: fx.Graph, node: Call) -> Call:
    """Copy an output that is a view of an input: the update or the user may write into inputs."""
    looked_at = node
    while looked_at.op == "call_function" and looked_at.target in FREE:
        looked_at = looked_at.args[0]
    if looked_at.op != "placeholder":
        return node
    place = node if node.op == "call_function" else [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(place):
        copy = graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta = {"phase": FORWARD, "path": "", **node.meta}
    return copy
