"""The executors of a step: one for each computation, each shape of the batch and each number of microbatches."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from tutti.analysis.memory import platform
from tutti.exec.executor import Executor
from tutti.exec.kernels.gradual import AUTO, PLAIN, Changes, Gradual
from tutti.exec.nonfinite import Inspector
from tutti.exec.runtimes.runtime import from_rank_0
from tutti.exec.stores.live_store import LiveStore
from tutti.hardware import Cluster
from tutti.ir.garbage import uncollected
from tutti.ir.kind import Kind
from tutti.ir.spec import Spec
from tutti.ir.step_graph import StepGraph
from tutti.ir.values import Guards
from tutti.launch.heartbeat import HEARTBEAT
from tutti.launch.progress import progress
from tutti.lower.overlap.regions import check_divided
from tutti.lower.variants.unroll import unroll
from tutti.lower.variants.vary import vary
from tutti.plan.plan import Plan
from tutti.plan.planner import replan
from tutti.tracing.batch import FlatBatch, Signature
from tutti.tracing.capture_spec import CaptureSpec
from tutti.tracing.trace.slots import attribute

T = TypeVar("T")
MOST = 16  # graphs for one signature and Python state


class Key(NamedTuple):
    """What a captured graph is for. number: index among the graphs of one signature, in order of capture."""

    signature: Signature
    evaluates: bool = False
    number: int = 0


@dataclass
class Executables:
    """Executors by computation ("train", "gradients", "evaluate", "inspect"), key (`key`) and number of microbatches.

    Each is made when it is first needed; all ranks of a job make it together. At level "auto" they are `Gradual`.

    homes: the stage of a pipeline that keeps each input. plans: graph and plan by key; later graphs follow the plan of
    the first.
    """

    recipe: CaptureSpec
    plans: dict[Key, tuple[StepGraph, Plan]]
    cluster: Cluster
    level: str
    state: LiveStore
    homes: Mapping[str, int]
    inspector: Inspector
    executors: dict[tuple[str, Key, int], Executor] = field(default_factory=dict)
    gradual: dict[tuple[str, Key, int], Gradual] = field(default_factory=dict)
    changes: dict[str, Changes] = field(default_factory=dict)  # of levels in an earlier run, by what it computed
    captured: dict[tuple, list[tuple[Key, Guards]]] = field(default_factory=dict)  # by signature and Python state
    reasons: list[str] = field(default_factory=list)  # why a step was captured again
    apart: dict[str, int] = field(default_factory=dict)  # classes of parameters that are counted apart
    partly: tuple[tuple[str, Any], ...] = ()  # the part of a graph's state that says which parameters it trains

    def __post_init__(self):
        self.first, (self.graph, self.plan) = next(iter(self.plans.items()))
        self.hidden = self.cluster if self.cluster.device.computes_on else None  # where communication is
        self.look()
        first = self.first.signature, False, self.state_of_model, self.plan.accumulate
        self.captured[first] = [(self.first, self.graph.guards)]

    def look(self) -> None:
        """Read what captured graphs depend on besides the batch and the numbers of updates: the model's Python state.
        Call it before each batch."""
        self.state_of_model: tuple[tuple[str, Any], ...] = self.recipe.watch.state()

    def count_apart(self, classes: Mapping[str, int]) -> None:
        """Capture later graphs with a count of updates for each class of parameters, whatever the counts are.

        classes: parameter -> class; 0 or missing for those that every step updates.
        """
        self.apart = dict(classes)

    def train_only(self, names: frozenset[str] | None) -> None:
        """Use graphs that train these parameters only; None: all."""
        self.recipe.only = names
        self.partly = () if names is None else (("the set of trained parameters", tuple(sorted(names))),)

    def key(self, what: str, batch: FlatBatch, microbatches: int | None = None) -> Key:
        """The key of the graph that a batch needs, given the model state that `look` read. Captures it if it is new.

        microbatches: number of batches like this one that are accumulated; by default that of the plan.

        Raises ValueError if one signature has needed too many graphs.
        """
        evaluates = what == "evaluate"
        signature, state = batch.signature, self.state_of_model
        state = state if evaluates else (*state, *self.partly)
        count = 1 if evaluates else microbatches or self.plan.accumulate
        captured_before = self.captured.setdefault((signature, evaluates, state, count), [])
        alike = captured_before if evaluates else [x for x in captured_before if self._counts_hold(self.plans[x[0]][0])]
        key, reason = holding_for(alike, batch, "step")
        if key is not None:
            return key
        what = "evaluation" if evaluates else "step"
        if captured_before or state or not evaluates:  # the first evaluation repeats no capture
            if len(alike) < len(captured_before):
                reason = reason or "other parameters have had equally many updates"
            reason = reason or (
                f"{state[0][0]} is {reprlib.repr(state[0][1])} now" if state else self._other_shape(signature)
            )
            self.reasons.append(reason)
            what += f" again: {reason}"
        with HEARTBEAT.working("captures the step again"), progress(f"capturing the {what}"):
            key = self._capture(evaluates, batch, count)
        captured_before.append((key, self.plans[key][0].guards))
        return key

    def _other_shape(self, signature: Signature) -> str:
        """What differs between a batch and the first one."""
        first = set(self.first.signature)
        name, now, *_ = next((entry for entry in signature if entry not in first), ("", None))
        shape = f": {name} has {now.shape}" if isinstance(now, Spec) else ""
        return f"a batch of another shape{shape}"

    def _counts_hold(self, graph: StepGraph) -> bool:
        """Whether a graph of training still has the right inputs for numbers of updates."""
        return self.state.updates.alike(graph) and self.state.updates.punctual(graph)

    def _capture(self, evaluates: bool, batch: FlatBatch, microbatches: int) -> Key:
        """Capture and plan a graph; return the key of an equal graph if there is one."""
        if evaluates:
            graph = self.recipe.evaluation(batch.batch)
            guards = graph.guards
            for name in graph.names("buffer"):  # an attribute that evaluation alone replaces: it begins from what it is
                if Kind.BUFFER.at(name) not in self.state.tensors:
                    graph.constants[Kind.BUFFER.at(name)] = attribute(self.recipe.model, name).detach().clone()
            graph = unroll(graph.keep(["loss", *graph.observed_names]), self.plan.sequence_chunks)
            graph.guards = guards
        else:
            self.recipe.behind = self.apart or self.state.updates.behind()
            graph = vary(self.recipe.training(batch.batch, microbatches), self.plan.variant)
        graph.name_inputs_as(self.graph)
        alike = [key for key in self.plans if (key.signature, key.evaluates) == (batch.signature, evaluates)]
        for key in alike:
            if equal(self.plans[key][0], graph):
                return key
        key = Key(batch.signature, evaluates, len(alike))
        self.plans[key] = graph, from_rank_0(lambda: replan(graph, self.plan, self.cluster))
        return key

    def executor(self, what: str, key: Key, microbatches: int, call: int = 1) -> Executor:
        """The executor of a captured graph for a number of microbatches. call: its number, from 1, for level "auto"."""
        place = what, key, microbatches
        if self.level == AUTO and what != "inspect":
            if place not in self.gradual:
                earlier = self.changes.get(repr(place), ()) if what == "train" else ()
                self.gradual[place] = Gradual(partial(self._build, *place), earlier)
            return self.gradual[place].executor(call)
        if place not in self.executors:
            self.executors[place] = self._build(*place, self.level)
        return self.executors[place]

    def of_microbatches(self, what: str, parts: Sequence[FlatBatch], call: int) -> tuple[list[Key], list[Executor]]:
        """The keys and executors of the microbatches of a batch.

        Raises ValueError if they lead to different computations that cannot run together.
        """
        keys = [self.key(what, part, len(parts)) for part in parts]
        each = [self.executor(what, key, len(parts), call) for key in keys]
        if all(x is each[0] for x in each):
            return keys, each
        reasons = ", ".join(self.reasons[-1:])
        if self.plan.stages:
            raise ValueError(
                "the microbatches of a batch lead to different computations, which a pipeline does not mix: "
                f"{reasons}; compute with tensors there, or choose a plan without a pipeline"
            )
        if any(set(x.graph.gradient_names) != set(each[0].graph.gradient_names) for x in each):
            raise ValueError(
                "the microbatches of a batch have gradients of different parameters, but share an update: "
                f"{reasons}; compute with tensors there, or give accumulate=1"
            )
        return keys, each

    def timed(self, what: str, keys: Sequence[Key], call: int) -> AbstractContextManager[None]:
        """What times a call of the executor of all microbatches, so that its level may change."""
        gradual = self.gradual.get((what, keys[0], len(keys))) if len(set(keys)) == 1 else None
        return gradual.timed(call) if gradual else nullcontext()

    def level_changes(self) -> dict[str, list[tuple[int, str]]]:
        """The changes of levels of training steps so far, by graph, where a level has been chosen."""
        chosen = {place: x for place, x in self.gradual.items() if place[0] == "train" and x.phase == "decided"}
        return {**{name: list(x) for name, x in self.changes.items()},
                **{repr(place): x.changes for place, x in chosen.items() if x.changes}}  # fmt: skip

    def follow(self, changes: Mapping[str, Changes]) -> None:
        """Change the levels of training steps at the calls at which an earlier run did."""
        self.changes = dict(changes)
        self.gradual = {}

    def _build(self, what: str, key: Key, microbatches: int, level: str) -> Executor:
        with HEARTBEAT.working("lowers the plan"), progress("lowering the plan"), uncollected():
            graph, plan = self.plans[key]
            graph = _part(graph, what)
            plan = plan if what == "evaluate" else plan.replace(accumulate=microbatches)
            inspects = what == "inspect"  # operator by operator, and beyond the budget of memory
            executor = Executor(
                graph, plan, microbatches, PLAIN if inspects else level, self.state, self.homes, self.state.engine,
                None if inspects else self.hidden, platform(self.cluster.device),
                self.inspector if inspects else None,
            )  # fmt: skip
            if what == "train" and not plan.stages:
                check_divided(executor.first.programs[0], plan.overlap_chunks)
            return executor


def holding_for(guarded: Sequence[tuple[T, Guards]], batch: FlatBatch, what: str) -> tuple[T | None, str | None]:
    """The first of the captures for one shape whose guards hold for a batch, or None and the guard that failed last.

    what: "step" or "function". Raises ValueError if there are too many captures.
    """
    reason = None
    for value, guards in guarded:
        if not guards or (reason := guards.broken(batch.tensors)) is None:
            return value, None
    if len(guarded) == MOST:
        raise ValueError(
            f"the {what} has been captured {MOST} times for batches of one shape, because the Python code reads values "
            f"that differ between them: {reason}. Compute with tensors there (torch.where, masks), or give batches "
            "that share these values"
        )
    return None, reason


def equal(a: StepGraph, b: StepGraph) -> bool:
    """Whether two graphs are equal."""
    return (
        a.fingerprint == b.fingerprint
        and list(a.outputs) == list(b.outputs)
        and a.checks == b.checks
        and a.constants.keys() == b.constants.keys()
        and all(x.dtype == b.constants[k].dtype and torch.equal(x, b.constants[k]) for k, x in a.constants.items())
    )


def _part(graph: StepGraph, what: str) -> StepGraph:
    """What a computation needs of the graph of a step."""
    if what == "gradients":
        return graph.keep(graph.gradient_names)
    if what == "inspect":
        return graph.keep(["loss", *graph.gradient_names, *graph.observed_names])
    return graph
