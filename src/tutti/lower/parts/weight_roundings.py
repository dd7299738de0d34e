"""Roundings of weights for products in low precision, which microbatches share.

They depend on weights alone, so they are computed once a step, before the first microbatch, and kept until the last one
has read them, as in Transformer Engine. That takes the memory of two rounded forms of each weight, in the layout in
which the plan rounds them. A step of one microbatch rounds each weight where it is used; so does every microbatch under
autocast, which casts weights to the dtype of products first.
"""

from __future__ import annotations

from torch import fx

from tutti.ir.kind import Kind, kind_of
from tutti.ir.step_graph import FORWARD, Call, StepGraph, copy_graph
from tutti.ops.products.scaled_mm import ROUND_OPERAND
from tutti.plan.search.recompute import made_by


def weight_roundings(step: StepGraph) -> list[Call]:
    """The roundings of parameters, except those that the forward pass writes into: they change with each microbatch."""
    changed = step.changed_by_forward
    params = {node for name, node in step.inputs.items() if kind_of(name) == Kind.PARAM and name not in changed}
    nodes = step.graph.find_nodes(op="call_function", target=ROUND_OPERAND)
    return [node for node in nodes if made_by(node.args[0])[0] in params]


def merged(step: StepGraph) -> StepGraph:
    """The step with one rounding of each weight along each dim, also where the backward pass computes again what reads
    it. The step itself if it has no such roundings."""
    if not weight_roundings(step):
        return step
    graph, mapping = copy_graph(step.graph)
    outputs = {name: mapping[node] for name, node in step.outputs.items()}
    graph.output(tuple(outputs.values())).meta = {"path": "", "phase": "", "val": None}
    inputs = {name: mapping[node] for name, node in step.inputs.items()}
    result = StepGraph(graph, inputs, outputs, step.constants, step.device, step.matches, step.guards, step.checks,
                     step.counts)  # fmt: skip
    firsts: dict[tuple, fx.Node] = {}
    for node in weight_roundings(result):
        part: Call
        for part in list(node.users):
            first = firsts.setdefault((node.args, part.args[1]), part)
            if first is not part:
                part.replace_all_uses_with(first)
                graph.erase_node(part)
        if not node.users:
            graph.erase_node(node)
    return result


def divided(step: StepGraph) -> tuple[StepGraph | None, StepGraph]:
    """The work of a microbatch in two: the roundings of weights if it has any, and the rest, which reads their results
    as inputs."""
    nodes = weight_roundings(step)
    if not nodes:
        return None, step
    copy, mapping = copy_graph(step.graph)
    results = {Kind.VALUE.at(part.name): part for node in nodes for part in node.users}
    rounded = {name: mapping[part] for name, part in results.items()}
    for node in nodes:
        for x in (mapping[node], *(mapping[part] for part in node.users)):
            x.meta["phase"] = FORWARD
    copy.output(tuple(rounded.values()))
    copy.eliminate_dead_code(_stays)
    inputs = {name: mapping[node] for name, node in step.inputs.items()}
    for name in [name for name, node in inputs.items() if not node.users]:
        copy.erase_node(inputs.pop(name))
    before = StepGraph(copy, inputs, rounded, step.constants, step.device)
    graph, mapping = copy_graph(step.graph)
    inputs = {name: mapping[node] for name, node in step.inputs.items()}
    outputs = {name: mapping[node] for name, node in step.outputs.items()}
    graph.output(tuple(outputs.values()))
    places = list(inputs.values())
    for name, part in results.items():
        with graph.inserting_after(places[-1]):
            inputs[name] = graph.placeholder(part.name)
        inputs[name].meta = {**part.meta, "label": name, "flops": 0, "bytes": 0}
        places.append(inputs[name])
        mapping[part].replace_all_uses_with(inputs[name])
    graph.eliminate_dead_code(_stays)
    return before, StepGraph(
        graph, inputs, outputs, step.constants, step.device, checks=step.checks, counts=step.counts
    )


def _stays(node: fx.Node) -> bool:
    """Return whether a node without readers stays. torch would keep attention, which may draw random numbers."""
    return node.op != "call_function"
