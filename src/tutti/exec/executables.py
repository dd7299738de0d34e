"""What runs a step: Programs or a pipeline, for all that is asked of it and for each shape of its batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from tutti.analysis.memory import platform
from tutti.exec.batches import Signature, signature_of
from tutti.exec.levels import Prepared, prepare
from tutti.exec.memory_budget import MemoryBudget
from tutti.exec.nonfinite import Inspector
from tutti.exec.pipeline import Pipeline
from tutti.exec.runtime import Distributed, Virtual, from_rank_0
from tutti.exec.state import State
from tutti.exec.transfer_engine import TransferEngine
from tutti.hardware import Cluster
from tutti.ir.garbage import uncollected
from tutti.ir.step_graph import StepGraph
from tutti.ir.values import Guards
from tutti.launch.heartbeat import HEARTBEAT
from tutti.launch.progress import progress
from tutti.lower.program import Program
from tutti.lower.regions import check_divided
from tutti.lower.shard import shard
from tutti.lower.unroll import unroll
from tutti.lower.vary import vary
from tutti.plan.layout import Layout, devices
from tutti.plan.plan import PIPELINE, Plan
from tutti.plan.planner import replan
from tutti.tracing.batch import Batch, batch_items
from tutti.tracing.capture import classes_of
from tutti.tracing.capture_spec import CaptureSpec
from tutti.tracing.slots import attribute

T = TypeVar("T")
MOST = 16  # graphs for one signature and Python state


class Key(NamedTuple):
    """What a captured graph is for. number: of those for one signature, in order of their capture."""

    signature: Signature
    evaluates: bool = False
    number: int = 0


@dataclass
class Executable:
    """The Programs of the held ranks, ready to run."""

    graph: StepGraph
    programs: list[Program]
    ready: list[Prepared]


@dataclass
class Executables:
    """Made when they are first needed, each by what is asked ("train"; "accumulate" and "update"; "gradients",
    "evaluate", "inspect") and a key (`key`); all ranks of a job make them at once.

    homes: the stages of a pipeline that keep the inputs. plans: the graph and the plan of a step by key; other graphs
    of the model are planned after the first of them.
    """

    recipe: CaptureSpec
    plans: dict[Key, tuple[StepGraph, Plan]]
    cluster: Cluster
    level: str
    runtime: Virtual | Distributed
    state: State
    homes: Mapping[str, int]
    engine: TransferEngine | None
    budgets: Sequence[MemoryBudget]
    inspector: Inspector
    made: dict[tuple[str, Key], Executable] = field(default_factory=dict)
    pipelines: dict[tuple[str, Key, int], Pipeline] = field(default_factory=dict)
    captured: dict[tuple, list[tuple[Key, Guards]]] = field(default_factory=dict)  # by signature and Python state
    reasons: list[str] = field(default_factory=list)  # why a step was captured again

    def __post_init__(self):
        self.first, (self.graph, self.plan) = next(iter(self.plans.items()))
        self.hidden = self.cluster if self.cluster.device.computes_on else None  # where communication is
        self.late = self.graph.counts
        self.look()
        first = self.first.signature, False, self.state_of_model, self.plan.accumulate
        self.captured[first] = [(self.first, self.graph.guards)]

    def look(self) -> None:
        """Note what captured graphs depend on besides the batch: the model's Python state, and which parameters count
        their own updates. To be called before a batch is run."""
        counts = (("the number of updates", tuple(names)) for names in self.late.values())
        self.state_of_model: tuple[tuple[str, Any], ...] = (*self.recipe.watch.state(), *counts)

    def count(self, behind: Mapping[str, int], late: Mapping[str, int]) -> None:
        """Say by how many updates parameters are behind the number of steps; `late` are those that have had any."""
        self.recipe.behind, self.late = dict(behind), classes_of(late)

    def key(self, what: str, batch: Batch, microbatches: int | None = None) -> Key:
        """Which captured graph a batch needs, at the state of the model that `look` saw; it is captured if it is new.

        microbatches: how many batches like this one are accumulated; by default as the plan says.

        Raises ValueError where one signature has needed too many graphs.
        """
        evaluates = what == "evaluate"
        signature, state = signature_of(batch), self.state_of_model
        count = 1 if evaluates else microbatches or self.plan.accumulate
        known = self.captured.setdefault((signature, evaluates, state, count), [])
        key, reason = holding_for(known, batch, "step")
        if key is not None:
            return key
        if known or state or not evaluates:  # the first evaluation repeats no capture
            self.reasons.append(
                reason or (f"{state[0][0]} is {state[0][1]!r} now" if state else "a batch of another shape")
            )
        key = self._capture(signature, evaluates, batch, count)
        known.append((key, self.plans[key][0].guards))
        return key

    def _capture(self, signature: Signature, evaluates: bool, batch: Batch, microbatches: int) -> Key:
        """Capture and plan a graph; the key of an equal one where there is one."""
        if evaluates:
            graph = self.recipe.evaluation(batch)
            guards = graph.guards
            for name in graph.names("buffer"):  # an attribute that evaluation alone replaces: it begins from what it is
                if f"buffer:{name}" not in self.state.names:
                    graph.constants[f"buffer:{name}"] = attribute(self.recipe.model, name).detach().clone()
            graph = unroll(graph.keep(["loss", *graph.observed_names]), self.plan.sequence_chunks)
            graph.guards = guards
        else:
            graph = vary(self.recipe.training(batch, microbatches), self.plan.variant)
        graph.name_inputs_as(self.graph)
        alike = [key for key in self.plans if (key.signature, key.evaluates) == (signature, evaluates)]
        for key in alike:
            if equal(self.plans[key][0], graph):
                return key
        key = Key(signature, evaluates, len(alike))
        self.plans[key] = graph, from_rank_0(lambda: self._replanned(graph))
        return key

    def executable(self, what: str, key: Key) -> Executable:
        """The Programs of a captured graph."""
        if (what, key) not in self.made:
            with HEARTBEAT.working("lowers the plan"), progress("lowering the plan"), uncollected():
                self.made[what, key] = self._lowered(what, *self._planned(what, key))
        return self.made[what, key]

    def pipeline(self, what: str, key: Key, microbatches: int) -> Pipeline:
        """The pipeline of a captured graph for so many microbatches."""
        if (what, key, microbatches) not in self.pipelines:
            with HEARTBEAT.working("lowers the plan"), progress("lowering the plan"), uncollected():
                graph, plan = self._planned(what, key)
                plan = plan if what == "evaluate" else plan.replace(accumulate=microbatches)
                level, hidden, inspector = self._how(what)
                self.pipelines[what, key, microbatches] = Pipeline(
                    graph, plan, microbatches, level, self.state, self.homes, self.engine, hidden,
                    platform(self.cluster.device), inspector,
                )  # fmt: skip
        return self.pipelines[what, key, microbatches]

    def _how(self, what: str) -> tuple[str, Cluster | None, Inspector | None]:
        """At which level, on what communication is hidden, who looks at all that is made."""
        return ("O0", None, self.inspector) if what == "inspect" else (self.level, self.hidden, None)

    def _lowered(self, what: str, graph: StepGraph, plan: Plan) -> Executable:
        programs = [shard(graph, plan, rank, self._asked(what, graph, plan)) for rank in self.runtime.ranks]
        level, hidden, inspector = self._how(what)
        ready = prepare(programs, level, hidden, self.runtime.agree, self.engine, () if inspector else self.budgets,
                        platform(self.cluster.device), inspector)  # fmt: skip
        if what in ("train", "accumulate"):
            check_divided(programs[0], plan.overlap_chunks)
        return Executable(graph, programs, ready)

    def _asked(self, what: str, graph: StepGraph, plan: Plan) -> dict[str, Layout]:
        """While gradients accumulate they lie as the plan says."""
        if what != "accumulate":
            return {}
        labels = {name: self.graph.gradient_label(name.removeprefix("grad:")) for name in graph.gradient_names}
        return {name: plan.input_layout(label) for name, label in labels.items()}

    def _planned(self, what: str, key: Key) -> tuple[StepGraph, Plan]:
        graph, plan = self.plans[key]
        return graph if what == "evaluate" else _part(graph, what, bool(plan.stages)), plan

    def _replanned(self, graph: StepGraph) -> Plan:
        """The plan for another graph of the model."""
        plan = self.plan
        if not plan.stages:
            made = replan(graph, plan, self.cluster)
            return made.replace(
                recompute=plan.recompute,
                tiers=plan.tiers,
                batch_splits=plan.batch_splits,
                overlap_chunks=plan.overlap_chunks,
            )
        name = "x".join(part for part in plan.name.split("x") if not part.startswith(PIPELINE)) or "single"
        made = replan(graph, plan.replace(mesh=plan.inner, name=name), self.cluster.of(devices(plan.inner)))
        return made.replace(
            mesh=plan.mesh,
            stages=plan.stages,
            schedule=plan.schedule,
            sequence_chunks=plan.sequence_chunks,
            recompute=plan.recompute,
            tiers=plan.tiers,
            batch_splits=plan.batch_splits,
            durations=plan.durations,
        )


def holding_for(known: Sequence[tuple[T, Guards]], batch: Batch, what: str) -> tuple[T | None, str | None]:
    """Of what was captured for batches of one shape, the first that holds for a batch; else why the last does not.

    Raises ValueError where there are too many already. what: was captured.
    """
    tensors, reason = dict(batch_items(batch)), None
    for made, guards in known:
        if not guards or (reason := guards.broken(tensors)) is None:
            return made, None
    if len(known) == MOST:
        raise ValueError(
            f"the {what} has been captured {MOST} times for batches of one shape, because the Python code reads values "
            f"that differ between them: {reason}. Compute with tensors there (torch.where, masks), or give batches "
            "that share these values"
        )
    return None, reason


def equal(a: StepGraph, b: StepGraph) -> bool:
    """Whether two graphs compute the same."""
    return (
        a.fingerprint == b.fingerprint
        and list(a.outputs) == list(b.outputs)
        and a.checks == b.checks
        and a.constants.keys() == b.constants.keys()
        and all(x.dtype == b.constants[k].dtype and torch.equal(x, b.constants[k]) for k, x in a.constants.items())
    )


def _part(graph: StepGraph, what: str, piped: bool) -> StepGraph:
    if what == "train" and piped:
        return graph
    if what == "train":
        return graph.without_gradients()
    if what == "gradients":
        return graph.keep(graph.gradient_names)
    if what == "inspect":
        return graph.keep(["loss", *graph.gradient_names, *graph.observed_names])
    before, after = graph.at_gradients()
    return before if what == "accumulate" else after
