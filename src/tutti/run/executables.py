"""What runs a step: Programs or a pipeline, for all that is asked of it and for each shape of its batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tutti.cluster import Cluster
from tutti.graph.capture import Batch
from tutti.graph.garbage import uncollected
from tutti.graph.step_graph import StepGraph
from tutti.lower.program import Program
from tutti.lower.regions import check_divided
from tutti.lower.shard import shard
from tutti.lower.unroll import unroll
from tutti.lower.vary import vary
from tutti.plan.layout import Layout, devices
from tutti.plan.plan import PIPELINE, Plan
from tutti.plan.planner import replan
from tutti.run.batches import Signature
from tutti.run.carrier import Carrier
from tutti.run.ledger import Ledger
from tutti.run.levels import Prepared, prepare
from tutti.run.memory import platform
from tutti.run.nonfinite import Inspector
from tutti.run.pipeline import Pipeline
from tutti.run.position import HERE
from tutti.run.recipe import Recipe
from tutti.run.runtime import Distributed, Virtual, from_rank_0
from tutti.run.state import State
from tutti.run.telling import telling


@dataclass
class Executable:
    """The Programs of the held ranks, ready to run."""

    graph: StepGraph
    programs: list[Program]
    ready: list[Prepared]


@dataclass
class Executables:
    """Made when they are first needed, each by what is asked ("train"; "accumulate" and "update"; "gradients",
    "evaluate", "inspect") and the signature of a batch; all ranks of a job make them at once.

    homes: the stages of a pipeline that keep the inputs. plans: the graph and the plan of a step of training by its
    batch's signature; the first of them is what other graphs of the model are planned after.
    """

    recipe: Recipe
    plans: dict[Signature, tuple[StepGraph, Plan]]
    cluster: Cluster
    level: str
    runtime: Virtual | Distributed
    state: State
    homes: Mapping[str, int]
    carrier: Carrier | None
    ledgers: Sequence[Ledger]
    inspector: Inspector
    made: dict[tuple[str, Signature], Executable] = field(default_factory=dict)
    pipelines: dict[tuple[str, Signature], Pipeline] = field(default_factory=dict)

    def __post_init__(self):
        self.first, (self.graph, self.plan) = next(iter(self.plans.items()))
        self.hidden = self.cluster if self.cluster.device.computes_on else None  # where communication is

    def executable(self, what: str, signature: Signature, batch: Batch | None = None) -> Executable:
        """The Programs for a batch of these shapes, which is to be given where they are new."""
        if (what, signature) not in self.made:
            with HERE.working("lowers the plan"), telling("lowering the plan"), uncollected():
                self.made[what, signature] = self._lowered(what, *self._planned(what, signature, batch))
        return self.made[what, signature]

    def pipeline(self, what: str, signature: Signature, microbatches: int, batch: Batch | None = None) -> Pipeline:
        """The pipeline for so many microbatches of these shapes, one of which is to be given where they are new."""
        if (what, signature) not in self.pipelines:
            with HERE.working("lowers the plan"), telling("lowering the plan"), uncollected():
                graph, plan = self._planned(what, signature, batch)
                level, hidden, inspector = self._how(what)
                self.pipelines[what, signature] = Pipeline(
                    graph, plan, microbatches, level, self.state, self.homes, self.carrier, hidden,
                    platform(self.cluster.device), inspector,
                )  # fmt: skip
        return self.pipelines[what, signature]

    def _how(self, what: str) -> tuple[str, Cluster | None, Inspector | None]:
        """At which level, on what communication is hidden, who looks at all that is made."""
        return ("O0", None, self.inspector) if what == "inspect" else (self.level, self.hidden, None)

    def _lowered(self, what: str, graph: StepGraph, plan: Plan) -> Executable:
        programs = [shard(graph, plan, rank, self._asked(what, graph, plan)) for rank in self.runtime.ranks]
        level, hidden, inspector = self._how(what)
        ready = prepare(programs, level, hidden, self.runtime.agree, self.carrier, () if inspector else self.ledgers,
                        platform(self.cluster.device), inspector)  # fmt: skip
        if what in ("train", "accumulate"):
            check_divided(programs[0], plan.regions)
        return Executable(graph, programs, ready)

    def _asked(self, what: str, graph: StepGraph, plan: Plan) -> dict[str, Layout]:
        """While gradients accumulate they lie as the plan says."""
        if what != "accumulate":
            return {}
        labels = {name: self.graph.gradient_label(name.removeprefix("grad:")) for name in graph.gradient_names}
        return {name: plan.input_layout(label) for name, label in labels.items()}

    def _planned(self, what: str, signature: Signature, batch: Batch | None) -> tuple[StepGraph, Plan]:
        if what == "evaluate":
            assert batch is not None
            graph = unroll(self.recipe.evaluation(batch).keep(["loss"]), self.plan.slices)
            graph.name_inputs_as(self.graph)
            return graph, from_rank_0(lambda: self._replanned(graph))
        if signature not in self.plans:
            assert batch is not None
            graph = vary(self.recipe.training(batch), self.plan.variant)
            graph.name_inputs_as(self.graph)
            self.plans[signature] = graph, from_rank_0(lambda: self._replanned(graph))
        graph, plan = self.plans[signature]
        return _part(graph, what, bool(plan.stages)), plan

    def _replanned(self, graph: StepGraph) -> Plan:
        """The plan for another graph of the model."""
        plan = self.plan
        if not plan.stages:
            made = replan(graph, plan, self.cluster)
            return made.replace(again=plan.again, tiers=plan.tiers, copies=plan.copies, regions=plan.regions)
        name = "x".join(part for part in plan.name.split("x") if not part.startswith(PIPELINE)) or "single"
        made = replan(graph, plan.replace(mesh=plan.inner, name=name), self.cluster.of(devices(plan.inner)))
        return made.replace(
            mesh=plan.mesh,
            stages=plan.stages,
            schedule=plan.schedule,
            slices=plan.slices,
            again=plan.again,
            tiers=plan.tiers,
            copies=plan.copies,
            durations=plan.durations,
        )


def _part(graph: StepGraph, what: str, piped: bool) -> StepGraph:
    if what == "train" and piped:
        return graph
    if what == "train":
        return graph.without_gradients()
    if what == "gradients":
        return graph.keep(graph.gradient_names)
    if what == "inspect":
        return graph.keep(["loss", *graph.gradient_names])
    before, after = graph.at_gradients()
    return before if what == "accumulate" else after
