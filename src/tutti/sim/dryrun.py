"""The dry run: predict the time and memory of a step without running it."""

from __future__ import annotations

from tutti.hardware import Cluster
from tutti.ir.garbage import uncollected
from tutti.ir.step_graph import StepGraph
from tutti.plan.layout import devices
from tutti.plan.plan import Plan
from tutti.plan.search import Progress
from tutti.sim import pipeline, step
from tutti.sim.step import DryRun


@uncollected()
def dry_run(
    graph: StepGraph,
    plan: Plan,
    cluster: Cluster,
    level: str = "O0",
    *,
    overlaps: bool | None = None,
    progress: Progress = lambda what: None,
) -> DryRun:
    """Lower a plan for one rank, as `tutti.parallelize` would, and simulate it. For a pipeline, one rank per device.

    graph: of one microbatch. overlaps: whether to hide communication (`analysis.overlap`); by default if the devices
    compute during collectives. progress: called with what is being done. Raises ValueError if plan, graph and cluster
    do not fit together.
    """
    if devices(plan.mesh) != cluster.size:
        raise ValueError(f"the plan is for {devices(plan.mesh)} devices, {cluster} has {cluster.size}")
    plan.check(graph)
    overlaps = cluster.device.computes_on if overlaps is None else overlaps
    return (pipeline if plan.stages else step).dry_run(graph, plan, cluster, level, overlaps, progress)
