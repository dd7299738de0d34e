"""Crossings: how often values have crossed stages, which orders the parts of a pipeline that run once.

The level of a node is the number of times that values have crossed stages on the longest path to it. The nodes of one
stage and level form a part: it reads values of other stages only from lower levels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import fx

from tutti.ir.kind import Kind, kind_of
from tutti.ir.step_graph import UPDATE
from tutti.plan.pipeline.reads import Reads


def levels(reads: Reads, stages: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """Return the levels of the calls of a function, or of the update of a step.

    In an update, only crossings after the gradients count. Values that a function computes from stored tensors alone,
    such as decayed optimizer state, have the level of their first reader, so that they are not stored longer than
    necessary.
    """
    step, level = reads.step, {}
    calls = [node for node in reads.calls if not step.repeats or node.meta["phase"] == UPDATE]
    for node in calls:
        before = (level[x] + (stages[x] != stages[node]) for x in reads.of(node) if x in level)
        level[node] = max(before, default=0)
    if step.repeats:
        return level
    last: dict[int, int] = defaultdict(int)  # by stage
    readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in calls:
        last[stages[node]] = max(last[stages[node]], level[node])
        for x in reads.of(node):
            readers[x].append(node)
    fed = _fed(reads)
    for node in reversed(calls):
        if node not in fed:
            after = (level[n] - (stages[n] != stages[node]) for n in readers[node])
            level[node] = min(after, default=last[stages[node]])
    return level


def _fed(reads: Reads) -> set[fx.Node]:
    """The nodes that depend on data of the call."""
    fed = {x for name, x in reads.step.inputs.items() if kind_of(name) in (Kind.BATCH, Kind.COMMON)}
    for node in reads.step.calls:
        if any(x in fed for x in node.all_input_nodes):
            fed.add(node)
    return fed
