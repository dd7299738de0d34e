"""`fn = tutti.function(f, *examples, store=store)`: lift any function of tensors and of a store to a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tutti.analysis.memory import platform
from tutti.api.planned import Planned
from tutti.api.store import Store
from tutti.exec.executables import holding_for
from tutti.exec.executor import Executor
from tutti.exec.kernels.gradual import AUTO, Gradual, planned
from tutti.exec.observed import Observed
from tutti.exec.runtimes.runtime import cluster_of, from_rank_0
from tutti.exec.single_part import SinglePart
from tutti.hardware import Cluster
from tutti.ir.kind import CALL_INPUTS, Kind, kind_of
from tutti.ir.step_graph import StepGraph
from tutti.launch.heartbeat import HEARTBEAT
from tutti.launch.progress import progress
from tutti.lower.parts.schedule_parts import homes_of
from tutti.lower.variants.vary import vary
from tutti.plan.layouts.layout import Layout
from tutti.plan.layouts.pin import Pin
from tutti.plan.network.together import plan_together
from tutti.plan.pipeline.schedule import Pipe
from tutti.plan.plan import Plan, renamed
from tutti.plan.planner import Planner
from tutti.plan.search.search import BUDGET
from tutti.plan.textbook import Textbook, parse_name
from tutti.sim.planning import choose, loaded
from tutti.tracing import optimizers
from tutti.tracing.batch import FlatBatch
from tutti.tracing.capture_spec import autocast_state
from tutti.tracing.function import Captured, arguments
from tutti.tracing.trace.watch import Watch


def function(
    f: Callable,
    *args: Any,
    store: Store | None = None,
    cluster: Cluster | str = "auto",
    plan: Plan | str | Path = "auto",
    level: str = "O0",
    pins: tuple[Pin, ...] = (),
    budget: float = BUDGET,
    seed: int = 0,
    **kwargs: Any,
) -> Function:
    """Lift a function written for one device to a cluster.

        def update(real, noise):
            fake = g(noise)
            optimizer_d.zero_grad()
            d_loss = loss_of(d(real), d(fake.detach()))
            d_loss.backward()
            optimizer_d.step()
            ...
            return {"d": d_loss, "g": g_loss}

        store = tutti.Store(g=g, d=d, optimizer_g=optimizer_g, optimizer_d=optimizer_d)
        step = tutti.function(update, real, noise, store=store, cluster="h100:8")
        losses = step(real, noise)

    f: ordinary PyTorch code. It may use modules, optimizers and caches of the store, as arguments or by closure, call
        `backward()`, `torch.autograd.grad`, `zero_grad()` and `step()`, and write into caches. It returns a pytree.
    args, kwargs: example arguments: the global batch, as arbitrarily nested tensors. Objects of the store may be
        arguments.
    store: the state that the function reads and updates. Functions may share a store. Without it the function is pure.
    cluster, plan, level, pins, budget, seed: as for `tutti.parallelize`. A call runs each stage of a pipeline once, so
        plans have no schedule and no microbatches (`pp2xtp2`). If the store already has a mesh, layouts and stages, the
        function is planned for them.

    Raises ValueError for code that cannot be captured (docs/guide/capture.md), and for plans that do not fit.
    """
    return Function(f, args, kwargs, store or Store(), cluster, plan, level, pins, budget, seed)


def functions(
    members: Mapping[str, tuple[Callable, tuple, float]],
    *,
    store: Store,
    cluster: Cluster | str = "auto",
    level: str = "O0",
    seed: int = 0,
) -> dict[str, Function]:
    """Functions of one store, planned together: its layouts minimize the weighted sum of their modeled times.

        made = tutti.functions({"train": (train, (x, y), 1), "decode": (decode, (token,), 50)}, store=store)
        loss = made["train"](x, y)

    members: name -> (function, example arguments, how often it runs).
    store: a store that no function has used yet.
    cluster, level, seed: as for `tutti.function`.

    Raises ValueError if the store already has layouts, or if no layout suits all functions.
    """
    if store.layouts:
        raise ValueError("the store is laid out already; plan functions together before any of them is made")
    where = cluster_of(cluster, store.device)
    captured = {name: store.capture(f, args, {}) for name, (f, args, _) in members.items()}
    graphs = [x.graph for x in captured.values()]
    for graph in graphs[1:]:
        for other in graphs:
            graph.name_inputs_as(other)
    plans = from_rank_0(lambda: _together(graphs, [weight for _, _, weight in members.values()], where))
    chosen = dict(zip(members, plans, strict=True))
    return {
        name: Function(f, args, {}, store, where, chosen[name], level, (), BUDGET, seed)
        for name, (f, args, _) in members.items()
    }


def _together(graphs: list[StepGraph], weights: list[float], cluster: Cluster) -> list[Plan]:
    """The cheapest plans on any mesh of one or two axes."""
    stored = [
        {name: node.meta["label"] for name, node in graph.inputs.items() if kind_of(name) not in CALL_INPUTS}
        for graph in graphs
    ]
    planners = [Planner(graph, cluster) for graph in graphs]
    n, best = cluster.size, None
    for mesh in [Textbook(n // k, k).mesh for k in range(1, n + 1) if n % k == 0 and (k < n or n == 1)]:
        together = plan_together([planner.on(mesh) for planner in planners], weights, stored)
        if best is None or together.cost < best.cost:
            best = together
    assert best is not None
    meshes = {tuple(plan.mesh) for plan in best.plans}
    if len(meshes) > 1:  # a single axis that one function calls dp and another tp
        return [renamed(plan, dict(zip(plan.mesh, best.plans[0].mesh, strict=True))) for plan in best.plans]
    return best.plans


@dataclass
class Executable:
    """A captured function with its plan. runs: its executor, or at level "auto" what chooses one."""

    captured: Captured
    plan: Plan
    runs: Executor | Gradual
    calls: int = 0

    @property
    def executor(self) -> Executor:
        """The executor of the next call."""
        return self.runs.executor(self.calls + 1) if isinstance(self.runs, Gradual) else self.runs

    def run(self, inputs: Mapping[str, torch.Tensor]) -> Executor:
        """Run the function. Returns the executor, which has the results."""
        executor = self.executor
        self.calls += 1
        with self.runs.timed(self.calls) if isinstance(self.runs, Gradual) else nullcontext():
            executor.run(lambda _: inputs)
        return executor


class Function(Planned):
    """A function over a store on a cluster. Call it like the original function."""

    def __init__(self, f, args, kwargs, store: Store, cluster, plan, level, pins, budget, seed):
        self._settle(level, store.device)
        self.f, self.store, self.seed, self.calls = f, store, seed, 0
        self.cluster, self.pins, self.budget = cluster_of(cluster, store.device), tuple(pins), budget
        self.asked = loaded(plan)
        self._autocast = autocast_state(store.device)
        self._executables: dict[tuple, list[Executable]] = {}
        self._watch = self._watched()
        data = self._flat(args, kwargs)
        self._rows = data.rows or 1
        self._first = self._executable(args, kwargs, data)
        self._plan = self._first.plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function on global arguments. Returns the same pytree as the original, with full tensors."""
        data = self._flat(args, kwargs)
        return self._run(self._executable(args, kwargs, data), data.inputs)

    def _flat(self, args: tuple, kwargs: Mapping[str, Any]) -> FlatBatch:
        return FlatBatch(arguments(args, kwargs, self.store.holdings))

    def fixed(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """The function for arguments of these shapes, captured now. Its calls take less time: they do not look whether
        arguments, Python attributes of the objects, options of optimizers and layouts are still those of the capture,
        nor whether tensors of the objects have been replaced.
        """
        example = self._flat(args, kwargs)
        executable = self._executable(args, kwargs, example)
        names = dict(zip(example.tensors, example.inputs, strict=True))
        graph = executable.captured.graph
        single = None
        if isinstance(executable.runs, Executor):
            single = SinglePart.of(executable.runs, self._inputs(graph, example.inputs))

        def call(*args: Any, **kwargs: Any) -> Any:
            data = self._flat(args, kwargs).tensors.items()
            if self.store.live.in_use:  # and may be written into
                self.store.look()
            return self._run(executable, {names[name]: x for name, x in data}, single)

        return call

    def _run(self, executable: Executable, data: Mapping[str, torch.Tensor], single: SinglePart | None = None) -> Any:
        HEARTBEAT.moves += 1
        captured, store = executable.captured, self.store
        inputs = self._inputs(captured.graph, data)
        if single:
            single(inputs)
        executor = single.executor if single else executable.run(inputs)
        store.ran(captured)
        self.calls += 1
        executor.observed(Observed({})).check(captured.graph.checks, f"call {self.calls}")
        return result_of(captured, executor)

    def _inputs(self, graph: StepGraph, data: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The inputs that are not stored: data, and numbers of this call."""
        numbers = {"step": torch.tensor(self.store.calls + 1), "seed": torch.tensor(self.seed)}
        for key, optimizer in self.store.holdings.optimizers.items():
            for i, group in enumerate(optimizer.param_groups):
                numbers[f"lr:{key}.{i}"] = torch.tensor(optimizers.rate_of(group), dtype=torch.float64)
        for name, members in graph.counts.items():
            numbers[name] = torch.tensor(self.store.updates[members[0]] + 1)
        return {**numbers, **data, **graph.constants}

    def _executable(self, args: tuple, kwargs: Mapping[str, Any], data: FlatBatch) -> Executable:
        """The executable for a call. Arguments of a new kind are captured and planned."""
        state = self.store.look()
        options = repr([optimizers.constants_of(x) for x in self.store.holdings.optimizers.values()])
        objects = tuple((i, id(x)) for i, x in (*enumerate(args), *kwargs.items()) if self.store.holdings.contains(x))
        key = data.signature, objects, self._watch.state(), options, state
        executables = self._executables.setdefault(key, [])
        counted = [(x, x.captured.graph.guards) for x in executables if self.store.updates.alike(x.captured.graph)]
        executable, _ = holding_for(counted, data, "function")
        if executable is not None:
            return executable
        executables.append(self._new(args, kwargs, data.rows or 1))
        return executables[-1]

    def _watched(self) -> Watch:
        """What captured code reads besides the tensors of the store."""
        caches = [place.tensor for place in self.store.holdings.places]
        return Watch(self.store.holdings.root, self.store.attributes, [self.f], caches)

    def _new(self, args: tuple, kwargs: Mapping[str, Any], rows: int) -> Executable:
        """Capture, plan and lower a call."""
        with HEARTBEAT.working("captures and plans a function"), progress("capturing the function"):
            return self._captured(args, kwargs, rows)

    def _captured(self, args: tuple, kwargs: Mapping[str, Any], rows: int) -> Executable:
        store = self.store
        with torch.autocast(**self._autocast):
            captured = store.capture(self.f, args, kwargs)
        if captured.attributes != store.attributes:
            store.attributes = captured.attributes
            self._watch = self._watched()
        self._watch.captured(captured.graph.constants.values())
        graph, stored = captured.graph, store.stored(captured.graph)
        plan = _complete(from_rank_0(lambda: self._planned(graph, rows, stored)), graph)
        self._check_size(plan)
        graph = vary(graph, plan.variant)
        homes, _ = homes_of(graph, plan, 1, store.homes)
        store.lay_out(graph, plan, homes)
        hidden = self.cluster if self.cluster.device.computes_on else None

        def build(level: str) -> Executor:
            return Executor(graph, plan, 1, level, store, homes, store.engine, hidden, platform(self.cluster.device))

        return Executable(captured, plan, Gradual(build) if self.level == AUTO else build(self.level))

    def _planned(self, graph: StepGraph, size: int, stored: Mapping[str, Layout]) -> Plan:
        """The requested plan, with stored tensors as they are laid out."""
        moved, book = bool(self.store.arrangement), self._textbook
        if isinstance(self.asked, Plan) and self.asked.graph == graph.fingerprint and not moved:
            return self.asked
        if not stored:
            return self._chosen(graph, size)
        return Planner(graph, self.cluster, self.pins).following(book, self.store.mesh, stored, self.store.homes)

    def _chosen(self, graph: StepGraph, size: int) -> Plan:
        """The requested plan, with stored tensors laid out freely."""
        return choose(self.asked, lambda count, variant: vary(graph, variant), size, self.cluster, planned(self.level),
                      self.pins, None, 1, self.budget)  # fmt: skip

    @property
    def _textbook(self) -> Textbook | None:
        """The textbook plan, if one is requested. Raises ValueError for one with a schedule."""
        if isinstance(self.asked, Plan) or self.asked == "auto":
            return None
        book = parse_name(self.asked, self.cluster.size)
        if book.pipe != Pipe(book.pipe.devices):
            raise ValueError(f"plan {self.asked!r}: a call of a function runs each stage of a pipeline once, without a "
                             f"schedule; write pp{book.pipe.devices}, or train with tutti.parallelize")  # fmt: skip
        return book

    # -- what one can ask -----------------------------------------------------------------------------------------

    def best_plan(self) -> Plan:
        """The plan for the example arguments that is best if the store is laid out for this function alone.

        `store.relayout(fn.best_plan())` moves the store to it. Every rank of a job must call it.
        """
        return _complete(from_rank_0(lambda: self._chosen(self.graph, self._rows)), self.graph)

    @property
    def graph(self) -> StepGraph:
        """The captured graph for the example arguments."""
        return self._first.captured.graph

    @property
    def _planned_graph(self) -> StepGraph:
        return self._executor.graph

    @property
    def _executor(self) -> Executor:
        return self._first.executor

    def __repr__(self) -> str:
        name = getattr(self.f, "__qualname__", repr(self.f))
        return f"Function({name}, {self.plan.name} on {self.cluster}, {len(self.graph.calls)} operators)"


def _complete(plan: Plan, graph: StepGraph) -> Plan:
    """The plan with the layouts of all stored inputs, also of those that it replicates."""
    labels = [node.meta["label"] for name, node in graph.inputs.items() if kind_of(name) not in CALL_INPUTS]
    return plan.replace(inputs={**{label: plan.input_layout(label) for label in labels}, **plan.inputs})


def result_of(captured: Captured, executor: Executor) -> Any:
    """The pytree that the function returned in the last run."""
    count = captured.tree.num_leaves
    leaves = [captured.fixed[i] if i in captured.fixed else executor.value(Kind.OUTPUT.at(i)) for i in range(count)]
    return pytree.tree_unflatten(leaves, captured.tree)
