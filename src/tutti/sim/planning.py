"""Plans as they are judged: by the simulation of the Programs that would run. What was found is kept.

A search is made once for a graph, a cluster and what else was asked, its budget too; the plan is kept in a file under
the user's cache folder (`TUTTI_PLANS=off` keeps none), by a hash of all that, of the rules of operators and of this
package's source code.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import tutti
from tutti.hardware import Cluster, machine
from tutti.ir.costs import flat
from tutti.ir.step_graph import Call, StepGraph
from tutti.launch.progress import progress
from tutti.ops import LOCAL, RULES
from tutti.plan.layout import Mesh
from tutti.plan.pin import Pin
from tutti.plan.plan import Plan, Prediction
from tutti.plan.planner import Planner
from tutti.plan.search import BUDGET, Judge, Search
from tutti.plan.textbook import parse_name
from tutti.plan.variant import PLAIN, Variant
from tutti.sim.dryrun import dry_run
from tutti.sim.forward import forward_seconds

ROOM = 2  # times all tensors of a step's graph: what a level writes out, or an operator takes within, is less than that
SAID = "taken from the plans that were found before: the same graph, cluster and options"


@dataclass(frozen=True)
class Simulator(Judge):
    """A judge that simulates Programs, at a level."""

    level: str

    def __call__(self, graph: StepGraph, plan: Plan, cluster: Cluster) -> Prediction:
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
) -> Plan:
    """The plan that was given, or is in the file, or has the name, or is best; arguments as of `tutti.parallelize`.

    graph_of: the step of one of so many microbatches. batch: of how many rows the global batch is.
    """
    if not isinstance(plan, Plan) and (isinstance(plan, Path) or plan.endswith(".json")):
        if not Path(plan).is_file():
            raise FileNotFoundError(f"there is no plan {str(plan)!r}: `step.plan.save(path)` keeps one")
        plan = Plan.load(plan)
    if isinstance(plan, Plan):
        if pins or mesh:
            raise ValueError("a plan that is given says all: pins and mesh have no effect on it; edit the plan")
        if accumulate not in ("auto", plan.accumulate):
            raise ValueError(
                f"the plan accumulates {plan.accumulate} microbatches, not {accumulate}: give "
                f"accumulate={plan.accumulate}, or 'auto' for what the plan says"
            )
        return plan
    if plan == "auto":
        count = None if accumulate == "auto" else accumulate
        return best_plan(graph_of, batch, cluster, level, pins=pins, mesh=mesh, budget=budget, accumulate=count)
    if mesh:
        raise ValueError(f"plan {plan!r} says what the mesh is: leave mesh out, or take plan='auto'")
    if accumulate == "auto":
        raise ValueError(f"plan {plan!r} does not say how many microbatches: give accumulate, or take plan='auto'")
    variant = parse_name(plan, cluster.size).variant
    return Planner(graph_of(accumulate, variant), cluster, pins, accumulate, variant).named(plan)


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
    """The fastest plan that fits, searched or as it was found before. Arguments as of `plan.search.Search`.

    What fits on one device even if nothing is ever dropped has one plan, which is not simulated.
    """
    graph = graph_of(accumulate or 1, PLAIN)
    if cluster.size == 1 and not mesh and not pins and ROOM * _all_bytes(graph) <= cluster.device.memory:
        why = "one device, whose memory holds all that a step makes"
        return Plan({"dp": 1}, accumulate=accumulate or 1, name="auto-single", graph=graph.fingerprint,
                    cluster=str(cluster), reasons=(why,))  # fmt: skip
    asked = (graph.fingerprint, cluster.to_json(), level, *pins, accumulate, mesh, budget)
    file = _file(asked)
    known = _known(file)
    if known:
        return known.replace(reasons=(*known.reasons, SAID))
    with progress("planning") as tell:
        search = Search(
            graph_of, batch, cluster, Simulator(level), pins=pins, accumulate=accumulate, mesh=mesh, budget=budget,
            progress=lambda what: tell(f"planning: {what}"),
        )  # fmt: skip
        found = search.best()
    if file:
        try:
            machine.write(file, found.to_json() + "\n")
        except OSError as error:
            warnings.warn(f"the plan that was found is not kept: {error}", stacklevel=2)
    return found


def _all_bytes(graph: StepGraph) -> int:
    """Bytes of all inputs and of all that is made."""
    return sum(spec.bytes for node in graph.graph.nodes for spec in flat(node.meta.get("val")))


def _known(file: Path | None) -> Plan | None:
    """The plan in a file, where there is one that can be read."""
    try:
        return Plan.load(file) if file and file.is_file() else None
    except (OSError, ValueError):
        return None


def _file(asked: tuple) -> Path | None:
    """Where the plan is kept that answers what was asked."""
    if os.environ.get("TUTTI_PLANS") == "off":
        return None
    rules = sorted((str(target), rule if isinstance(rule, str) else "") for target, rule in RULES.items())
    digest = hashlib.sha256(repr((_sources(), rules, sorted(map(str, LOCAL)), asked)).encode()).hexdigest()
    return machine.FOLDER / "plans" / f"{digest[:24]}.json"


@cache
def _sources() -> str:
    """A hash of this package's code: with other rules or prices another plan may be best."""
    digest = hashlib.sha256()
    root = Path(tutti.__file__).parent
    for file in sorted(root.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
