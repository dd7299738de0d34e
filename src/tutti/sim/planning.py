"""Choose plans by simulating the Programs that would run, and cache what was found.

A search runs once for a graph, a cluster and its other arguments, budget included. The plan is cached in a file in the
user's cache folder, by a hash of these, of the operators' rules and of this package's source. `TUTTI_PLANS=off`
disables the cache.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tutti.hardware import Cluster, machine
from tutti.ir.costs import flat
from tutti.ir.garbage import uncollected
from tutti.ir.op_info import LOCAL, RULES
from tutti.ir.step_graph import Call, StepGraph
from tutti.launch.progress import progress
from tutti.plan.layouts.layout import Mesh
from tutti.plan.layouts.pin import Pin
from tutti.plan.plan import Plan, Prediction
from tutti.plan.planner import Planner
from tutti.plan.search.search import BUDGET, Judge, Search
from tutti.plan.textbook import refined, with_recompute
from tutti.plan.variant import PLAIN, Variant
from tutti.sim.dryrun import dry_run
from tutti.sim.forward import forward_seconds
from tutti.whole_files import write_text

ROOM = 2  # times all tensors of a step's graph: an upper bound that includes workspaces
SAID = "taken from the plans that were found before: the same graph, cluster and options"


@dataclass(frozen=True)
class Simulator(Judge):
    """A judge that simulates Programs at a level."""

    level: str

    def __call__(self, graph: StepGraph, plan: Plan, cluster: Cluster) -> Prediction:
        with uncollected():  # the Programs are garbage before the collector looks at them
            return dry_run(graph, plan, cluster, self.level).prediction()

    def forward_seconds(self, graph: StepGraph, cluster: Cluster) -> Callable[[Call], float]:
        return forward_seconds(graph, cluster, self.level)


def choose(
    plan: Plan | str | Path,
    graph_of: Callable[[int, Variant], StepGraph],
    batch: int,
    cluster: Cluster,
    level: str,
    pins: Sequence[Pin],
    mesh: Mesh | None,
    accumulate: int | Literal["auto"],
    budget: float,
    recompute: Collection[str] = (),
) -> Plan:
    """The plan given, loaded from a file, looked up by name, or searched. Arguments as for `tutti.parallelize`.

    graph_of: the step of one of so many microbatches. batch: rows of the global batch.
    """
    if recompute and (not isinstance(plan, str) or plan == "auto" or plan.endswith(".json")):
        raise ValueError(f"recompute={list(recompute)} goes with a plan's name, such as plan='zero3'; others decide it")
    plan = loaded(plan)
    if isinstance(plan, Plan):
        if pins or mesh:
            raise ValueError("pins and mesh have no effect on a given plan: leave them out, or edit the plan")
        if accumulate not in ("auto", plan.accumulate):
            raise ValueError(
                f"the plan accumulates {plan.accumulate} microbatches, not {accumulate}: give "
                f"accumulate={plan.accumulate}, or 'auto' to take it from the plan"
            )
        return plan
    if plan == "auto":
        count = None if accumulate == "auto" else accumulate
        axes = refined(mesh) if mesh else None
        return best_plan(graph_of, batch, cluster, level, pins=pins, mesh=axes, budget=budget, accumulate=count)
    if mesh:
        raise ValueError(f"plan {plan!r} already fixes the mesh: leave out mesh, or give plan='auto'")
    if accumulate == "auto":
        raise ValueError(f"plan {plan!r} does not fix the number of microbatches: give accumulate, or plan='auto'")
    variant = with_recompute(plan, cluster.size, recompute)
    return Planner(graph_of(accumulate, variant), cluster, pins, accumulate, variant).named(plan)


def loaded(plan: Plan | str | Path) -> Plan | str:
    """The plan in a file, if this is the path of one, else the plan or its name."""
    if isinstance(plan, Plan) or not (isinstance(plan, Path) or plan.endswith(".json")):
        return plan
    if not Path(plan).is_file():
        raise FileNotFoundError(f"there is no plan {str(plan)!r}: `step.plan.save(path)` writes one")
    return Plan.load(plan)


def best_plan(
    graph_of: Callable[[int, Variant], StepGraph],
    batch: int,
    cluster: Cluster,
    level: str,
    *,
    pins: Iterable[Pin] = (),
    accumulate: int | None = 1,
    mesh: Mesh | None = None,
    budget: float = BUDGET,
) -> Plan:
    """The fastest plan that fits into memory, searched or cached. Arguments as for `plan.search.search.Search`.

    If all tensors of a step fit on one device, the only plan is returned without a simulation.
    """
    graph = graph_of(accumulate or 1, PLAIN)
    if cluster.size == 1 and not mesh and not pins and ROOM * _all_bytes(graph) <= cluster.device.memory:
        why = "one device, whose memory holds all that a step makes"
        return Plan({"dp": 1}, accumulate=accumulate or 1, name="auto-single", graph=graph.fingerprint,
                    cluster=str(cluster), reasons=(why,))  # fmt: skip
    asked = (graph.fingerprint, cluster.to_json(), level, *pins, accumulate, mesh, budget)
    file = _file(asked)
    cached = _cached(file)
    if cached:
        return cached.replace(reasons=(*cached.reasons, SAID))
    with progress("planning") as tell:
        search = Search(
            graph_of, batch, cluster, Simulator(level), pins=pins, accumulate=accumulate, mesh=mesh, budget=budget,
            progress=lambda what: tell(f"planning: {what}"),
        )  # fmt: skip
        plan = search.best()
    if file:
        try:
            write_text(file, plan.to_json() + "\n")
        except OSError as error:
            warnings.warn(f"the plan that was found is not kept: {error}", stacklevel=2)
    return plan


def _all_bytes(graph: StepGraph) -> int:
    """Bytes of all inputs and all values."""
    return sum(spec.bytes for node in graph.graph.nodes for spec in flat(node.meta.get("val")))


def _cached(file: Path | None) -> Plan | None:
    """The plan in a file, or None if there is none that can be read."""
    try:
        return Plan.load(file) if file and file.is_file() else None
    except (OSError, ValueError):
        return None


def _file(asked: tuple) -> Path | None:
    """The cache file for these arguments, or None if the cache is off."""
    if os.environ.get("TUTTI_PLANS") == "off":
        return None
    rules = sorted((str(target), rule if isinstance(rule, str) else "") for target, rule in RULES.items())
    digest = hashlib.sha256(repr((machine.sources(), rules, sorted(map(str, LOCAL)), asked)).encode()).hexdigest()
    return machine.FOLDER / "plans" / f"{digest[:24]}.json"
