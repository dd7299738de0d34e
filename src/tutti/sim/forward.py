"""The seconds of a forward pass's operators on one device, fused as at a level."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

from tutti.analysis.passes import improve
from tutti.hardware import Cluster
from tutti.ir.costs import FREE, flat
from tutti.ir.step_graph import Call, StepGraph
from tutti.lower.shard import shard
from tutti.plan.plan import Plan
from tutti.sim.simulate import simulate


def forward_seconds(step: StepGraph, cluster: Cluster, level: str) -> Callable[[Call], float]:
    """A function that returns the seconds of a call, unsplit. A fused kernel's time is divided over its calls by the
    bytes they write.

    step: a graph with a loss. Calls outside any kernel, such as views, take 0.
    """
    one = cluster.of(1)
    program = improve(shard(step.keep(["loss"]), Plan({"dp": 1}), 0), level)
    simulation = simulate([program], one, level)
    seconds, calls = defaultdict[str, float](float), Counter[str]()
    for node in step.calls:
        calls[node.meta["label"]] += 1
    for task in simulation.tasks[0]:
        sizes = {n: sum(x.bytes for x in flat(n.meta["val"])) for n in simulation.replays[0].events[task.event].nodes
                 if n.target not in FREE}  # fmt: skip
        whole = sum(sizes.values())
        for node, size in sizes.items():
            seconds[node.meta["label"]] += task.seconds * (size / whole if whole else 1 / len(sizes))
    return lambda node: seconds[node.meta["label"]] / calls[node.meta["label"]]
