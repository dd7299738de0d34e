"""Stages of a function: the pipeline stage of each node of a graph that a call runs once.

A function computes in any order: forward passes that read updated parameters, several backward passes, writes into
caches. As only one microbatch is in flight, values cross stages in either direction:

- A forward node that a name covers belongs to that stage. So does a backward node, unless it has none of its operands
  there, as the sum of gradients that a stage sends to the one before it.
- The home of a stored tensor is the first stage with a named node that reads it, else the first stage that reads it.
  Optimizer state is at the home of its parameter.
- An update node belongs to the home of the state that it reads.
- A recomputed node belongs to the stage of its forward node.
- Any other node belongs to the stage that lacks the fewest bytes of its operands; of several to the one that made most
  of them, then to the last. A node without operands (random numbers) belongs to the first stage that reads it.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from torch import fx

from tutti.ir.costs import flat
from tutti.ir.kind import Kind, path_of
from tutti.ir.step_graph import FORWARD, UPDATE
from tutti.plan.pipeline.reads import Reads, check_names, covering


def function_stages(reads: Reads, named: Mapping[str, int], placed: Mapping[str, int]) -> dict[fx.Node, int]:
    """The stage of every call that is not copied, and of every input that has a home. Arguments as for `stages_of`.

    Raises ValueError if a name covers nothing.
    """
    return _Stages(reads, named, placed).stages


class _Stages:
    """stages: the stage of each node. present: the stages that have each value. state: the home of the stored tensors
    that each update node depends on."""

    def __init__(self, reads: Reads, named: Mapping[str, int], placed: Mapping[str, int]):
        self.reads, step = reads, reads.step
        used = {node: key for node in reads.calls if (key := covering(node, named)) is not None}
        check_names(named, used.values())
        self.named = {node: named[key] for node, key in used.items()}
        self.stages: dict[fx.Node, int] = {}
        self.present: dict[fx.Node, set[int]] = defaultdict(set)
        self.state: dict[fx.Node, int] = {}
        self.computed: dict[str, int] = {}  # stages by the name of a call
        stored = {name: node for name, node in step.inputs.items() if name not in reads.everywhere}
        # what an input shares its home with: state with its parameter
        self.owner = {x: step.inputs.get(Kind.PARAM.at(path_of(name)), x) for name, x in stored.items()}
        self.members: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for x, owner in self.owner.items():
            self.members[owner].append(x)
        self.homes({self.owner[stored[name]]: stage for name, stage in placed.items() if name in stored})
        first: dict[fx.Node, int] = {}
        for node, stage in self.named.items():
            for x in reads.of(node) if node.meta["phase"] != UPDATE else ():
                if x in self.owner:
                    first[self.owner[x]] = min(stage, first.get(self.owner[x], stage))
        self.homes(first)
        self.calls()
        self.homes(dict.fromkeys(self.members, 0))

    def homes(self, stages: Mapping[fx.Node, int]) -> None:
        """Set the homes of the inputs that have none yet."""
        for owner, stage in stages.items():
            for x in self.members[owner]:
                if x not in self.stages:
                    self.stages[x] = self.state[x] = stage
                    self.present[x].add(stage)

    def calls(self) -> None:
        calls = self.reads.calls
        for node in calls:
            if (stage := self.stage(node)) is not None:
                self.put(node, stage)
        readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in calls:
            for x in self.reads.of(node):
                readers[_maker(x)].append(node)
        for node in reversed(calls):
            if node not in self.stages and _maker(node) is node:
                self.put(node, min((self.stages[n] for n in readers[node] if n in self.stages), default=0))
        for node in calls:  # outputs of random operators
            if node not in self.stages:
                self.put(node, self.stages[_maker(node)])

    def put(self, node: fx.Node, stage: int) -> None:
        self.stages[node] = self.computed[node.meta["name"]] = stage
        self.present[node].add(stage)
        for x in self.reads.of(node):
            self.homes({self.owner[x]: stage} if x in self.owner else {})
            self.present[x].add(stage)

    def stage(self, node: fx.Node) -> int | None:
        """The stage of a call whose operands have theirs. None if it has no operands."""
        phase, named = node.meta["phase"], self.named.get(node)
        if _maker(node) is not node:
            return self.stages.get(_maker(node))
        if (again := self.computed.get(node.meta.get("recompute", ""))) is not None:
            return again
        read = [x for x in self.reads.of(node) if self.present[x]]
        if phase == UPDATE and (homes := [self.state[x] for x in read if x in self.state]):
            self.state[node] = min(homes)
            return self.state[node]
        if not read or (named is not None and (phase == FORWARD or any(named in self.present[x] for x in read))):
            return named
        return self.nearest(read)

    def nearest(self, read: Sequence[fx.Node]) -> int:
        """The stage that lacks the fewest bytes of some values; of several the one that made most, then the last."""
        lacks, computed = Counter[int](), Counter[int]()
        stages = {stage for x in read for stage in self.present[x]}
        for x in read:
            size = sum(spec.bytes for spec in flat(x.meta["val"]))
            computed[self.stages[x]] += size
            lacks.update(dict.fromkeys(stages - self.present[x], size))
        return min(stages, key=lambda stage: (lacks[stage], -computed[stage], -stage))


def _maker(node: fx.Node) -> fx.Node:
    """The call that makes several outputs, of one of them."""
    while node.target is operator.getitem:
        node = node.args[0]  # pyright: ignore[reportAssignmentType]
    return node
