"""Stages: the pipeline stage of each node of a step.

A plan names the stages of modules or of single forward nodes. The longest path that covers a node applies. The stages
of other nodes follow:

- An unnamed forward node belongs to the last stage that it reads from. If it reads no activations (positions, masks),
  it belongs to the first stage that reads it.
- The home of a parameter, and of everything that its update reads and writes, is the first stage that reads it.
- A backward node belongs to the stage of its gradients if its forward operands are there, else to the earlier stage
  that has them. A sum of gradients of several stages belongs to the first of these.
- An update node belongs to the home of its parameter, else to the stage of its gradient. If it reads several, it
  belongs to the first of their stages.
- A recomputed node belongs to the stage of its forward node.
- A node that only the gradient of one parameter needs belongs to the home of that parameter, if possible.
- Views, and nodes that depend only on the batch and constants, belong to no stage (`Reads`).

So forward values are sent only to later stages and gradients only to earlier ones, across any number of stages. Skip
connections, an encoder's output and tied embeddings need no special treatment.

A function has fewer rules (`plan.pipeline.function_stages`), because only one microbatch is in flight.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping

from torch import fx

from tutti.ir.kind import Kind, path_of
from tutti.ir.step_graph import BACKWARD, FORWARD, UPDATE
from tutti.plan.pipeline.function_stages import function_stages
from tutti.plan.pipeline.reads import Reads, check_names, covering


def stages_of(reads: Reads, named: Mapping[str, int], placed: Mapping[str, int] | None = None) -> dict[fx.Node, int]:
    """The stage of every call that is not copied, and of every input that has a home.

    named: path of a module, or name of a forward node (`meta["name"]`), -> stage.
    placed: name of an input -> its stage, if another graph of the model has placed it already. Names of single nodes
        may then mean other nodes (this graph may lack a dropout), so a forward node belongs at least to the last stage
        that it reads from.

    Raises ValueError, unless `placed` is given, if a name covers nothing. Raises ValueError if a forward node reads a
    value of a later stage.
    """
    if not reads.step.repeats:
        return function_stages(reads, named, placed or {})
    step, stages = reads.step, _forward(reads, named, placed is None)
    homes: dict[fx.Node, int] = {}
    present: dict[fx.Node, set[int]] = {node: {stage} for node, stage in stages.items()}
    for node, stage in stages.items():
        for x in reads.of(node):
            present.setdefault(x, set()).add(stage)
            if x.op == "placeholder":
                homes[x] = min(stage, homes.get(x, stage))
    for name, node in step.inputs.items():
        if name not in reads.everywhere:  # the state of a parameter is in the parameter's stage
            parameter = step.inputs.get(Kind.PARAM.at(path_of(name)), node)
            stages[node] = (placed or {}).get(name, homes.get(parameter, homes.get(node, 0)))
            present.setdefault(node, set()).add(stages[node])
    _backward(reads, stages, present)
    for name, successor in step.changed_by_forward.items():
        _check_buffer(reads, stages, present, name, successor)
    of_state: set[fx.Node] = set()  # update nodes that depend on stored tensors
    for node in reads.calls:
        if node.meta["phase"] == UPDATE:
            read = reads.of(node)
            state = [x for x in read if x.op == "placeholder" or x in of_state]
            of_state |= {node} if state else set()
            gradients = [x for x in read if x.meta["phase"] == BACKWARD]
            stages[node] = min((stages[x] for x in state or gradients or read), default=0)
    return stages


def alone(reads: Reads, stages: Mapping[fx.Node, int] | None = None) -> dict[fx.Node, str]:
    """Backward nodes that only one gradient needs (-> its name) and, if stages are given, no other stage."""
    reaches: dict[fx.Node, set[str]] = defaultdict(set)
    for name in reads.step.gradient_names:
        for x in reads.behind[reads.step.outputs[name]]:
            reaches[x].add(name)
    for node in reversed(reads.calls):
        if node.meta["phase"] == BACKWARD:
            for x in reads.of(node):
                apart = stages is not None and stages[x] != stages[node]
                reaches[x] |= {"here", "elsewhere"} if apart else reaches[node]
    return {node: next(iter(names)) for node, names in reaches.items() if len(names) == 1}


def _again(node: fx.Node, stage: int, read: Iterable[fx.Node], present: Mapping[fx.Node, set[int]]) -> int:
    """The stage of a recomputed node, that of its forward node. Raises ValueError if that stage lacks its operands."""
    if elsewhere := [x for x in read if stage not in present[x]]:
        raise ValueError(f"{node.meta['name']} of stage {stage} reads {elsewhere[0].meta['name']}, which another "
                         "stage recomputes: keep the activations that stages send each other")  # fmt: skip
    return stage


def _check_buffer(reads: Reads, stages: Mapping[fx.Node, int], present: Mapping[fx.Node, set[int]], name: str,
                  successor: fx.Node) -> None:  # fmt: skip
    """Raise ValueError if several stages read or write a buffer that changes with every microbatch.

    successor: the node that computes its new value.
    """
    node = reads.step.inputs[name]
    makers = {stages[x] for x in reads.behind[successor] if x in stages}
    several = sorted(present.get(node, set()) | makers | {stages[node]})
    if len(several) > 1:
        raise ValueError(
            f"{path_of(name)} changes with every microbatch, and stages "
            f"{', '.join(map(str, several))} of the pipeline read or write it: give them one stage"
        )


def _forward(reads: Reads, named: Mapping[str, int], strict: bool) -> dict[fx.Node, int]:
    """The stages of the forward pass. strict: raise ValueError if a name covers nothing."""
    stages: dict[fx.Node, int] = {}
    forward = [n for n in reads.calls if n.meta["phase"] == FORWARD]
    used = {node: key for node in forward if (key := covering(node, named)) is not None}
    if strict:
        check_names(named, used.values())
    for node in forward:
        if node.target is operator.getitem:  # belongs to the stage of its maker
            stages[node] = stages.get(node.args[0], -1)  # pyright: ignore
            continue
        said = [named[used[node]]] if node in used else []
        if candidates := said if said and strict else said + [stages[x] for x in reads.of(node) if x in stages]:
            stages[node] = max(candidates)
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in forward:
        for x in reads.of(node):
            readers.setdefault(x, []).append(node)
    for node in reversed(forward):
        if stages.get(node, -1) < 0:
            stages[node] = min((stages[n] for n in readers.get(node, ())), default=0)
    for node in forward:
        for x in reads.of(node):
            if stages.get(x, 0) > stages[node]:
                raise ValueError(f"{node.meta['name']} of stage {stages[node]} reads {x.meta['name']} of stage "
                                 f"{stages[x]}: values of the forward pass are sent only to later stages")  # fmt: skip
    return stages


def _backward(reads: Reads, stages: dict[fx.Node, int], present: dict[fx.Node, set[int]]) -> None:
    """Add the stages of the backward pass. present: the stages that have each value."""
    of_one = alone(reads)
    waiting: set[fx.Node] = set()  # nodes that read only forward values, which any stage with these can compute

    def settle(node: fx.Node, stage: int) -> None:
        if node in waiting:
            waiting.discard(node)
            stages[node] = stage if stage in present[node] else max(present[node])
            for x in reads.of(node):
                settle(x, stages[node])

    backward = [node for node in reads.calls if node.meta["phase"] == BACKWARD]
    computed = {node.meta["name"]: stage for node, stage in stages.items() if node.op == "call_function"}
    for node in backward:
        read = reads.of(node)
        if node.meta.get("recompute") in computed:
            stages[node] = _again(node, computed[node.meta["recompute"]], read, present)
            present[node] = {stages[node]}
            continue
        gradients = [x for x in read if x in stages and x.meta["phase"] == BACKWARD and "recompute" not in x.meta]
        others = [x for x in read if x not in gradients]
        everywhere = set.intersection(*(present[x] for x in others)) if others else set()
        if not gradients and len(everywhere) > 1:
            present[node] = everywhere
            waiting.add(node)
            continue
        latest = [stages.get(x, max(present[x])) for x in others]
        if gradients:
            first = min(stages[x] for x in gradients)
            there = [stage for stage in (everywhere if others else {first}) if stage <= first]
            stages[node] = max(there, default=min([first, *latest]))
            home = stages[reads.step.inputs[Kind.PARAM.at(path_of(of_one[node]))]] if node in of_one else first
            if home < first and (home in everywhere or not others):
                stages[node] = home
        else:
            stages[node] = max(everywhere or latest, default=0)
        present.setdefault(node, set()).add(stages[node])
        for x in others:
            settle(x, stages[node])
    for node in backward:
        if node in waiting:
            settle(node, max(present[node]))
