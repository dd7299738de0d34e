"""`step = tutti.parallelize(model, optimizer, batch)`: lift a training step to a cluster."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tutti import compat
from tutti.analysis.allocator import give_back_freed_memory, keep_freed_memory
from tutti.api.planned import Planned
from tutti.checkpoint.checkpoints import Checkpoints
from tutti.checkpoint.of_store import read_store, write_store
from tutti.checkpoint.peer_checkpoint import PeerCheckpoint
from tutti.exec.executables import Executables, Key
from tutti.exec.executor import Executor
from tutti.exec.kernels.gradual import planned
from tutti.exec.nonfinite import Inspector, NonFinite
from tutti.exec.observed import Observed, how_to_combine
from tutti.exec.parallel_config import ParallelConfig
from tutti.exec.runtimes.replicas import compare
from tutti.exec.runtimes.runtime import check_same_everywhere, cluster_of, from_rank_0, in_group
from tutti.exec.runtimes.same_job import check_same_job, facts_of
from tutti.exec.stores import model_state
from tutti.exec.stores.live_store import LiveStore
from tutti.exec.stores.memory_budget import bytes_of
from tutti.exec.stores.offload_store import OffloadStore
from tutti.exec.stores.weights import has_weights
from tutti.ir.kind import Kind, kind_of, path_of, split_name
from tutti.ir.step_graph import StepGraph
from tutti.launch.heartbeat import HEARTBEAT
from tutti.lower.parts.schedule_parts import homes_of
from tutti.lower.variants.rebatch import Steps
from tutti.lower.variants.vary import vary
from tutti.observe.predicted import write_predicted
from tutti.observe.recorder import Recorder
from tutti.plan.layouts.layout import devices
from tutti.plan.plan import Plan
from tutti.plan.planner import replan
from tutti.plan.tier import check_devices_have
from tutti.plan.variant import PLAIN
from tutti.sim.dryrun import dry_run
from tutti.sim.planning import choose, loaded
from tutti.tracing import optimizers
from tutti.tracing.batch import Batch, FlatBatch
from tutti.tracing.capture import device_of
from tutti.tracing.capture_spec import CaptureSpec, autocast_state
from tutti.tracing.criteria import with_criteria
from tutti.tracing.holdings import groups_of
from tutti.tracing.trace.slots import Slots


class Step(Planned):
    """A training step on a cluster: `loss = step(batch)`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: Batch,
        config: ParallelConfig,
        follow: Plan | None = None,
    ):
        """Capture, plan, place and lower, in this order. follow: the plan of the model before it was changed."""
        self.model, self.optimizer, self.seed = model, optimizer, config.seed
        self._config, self._example = config, batch
        self._root = model if config.loss is None else with_criteria(model, config.loss, optimizer)
        self.max_nonfinite_steps, self.skipped, self._in_a_row = config.max_nonfinite_steps, 0, 0
        self._how, metric_names = how_to_combine(config.metrics)
        self.metrics: dict[str, torch.Tensor] = {}  # of the last batch
        self._recorder: Recorder | None = None
        self._last: Executor | None = None  # of a training step
        self.device = device_of(model)
        self._settle(config.level, self.device, compiles=config.memory is not None)  # O0 may need more memory
        self.cluster = cluster_of(config.cluster, self.device)
        self.memory = None if config.memory is None else bytes_of(config.memory)
        if self.memory is not None:
            self.cluster = replace(self.cluster, device=replace(self.cluster.device, memory=self.memory))

        example = FlatBatch(batch)
        self._recipe = CaptureSpec(
            self._root, optimizer, config.loss, config.clip_norm, config.fp32_master_weights,
            config.stochastic_rounding, config.max_nonfinite_steps is not None, autocast_state(self.device),
            metric_names,
        )  # fmt: skip
        steps = Steps(lambda count: self._recipe.training(example.parts(count)[0].batch, count))
        self._plan = plan = self._chosen(steps, example, follow)
        self._check_size(plan)
        self.accumulate, self.graph = plan.accumulate, vary(steps.captured(plan.accumulate), plan.variant)
        plan.check(self.graph)
        check_devices_have(plan.tiers, self.cluster.device)
        self._compared, self._dtypes = False, {name: x.dtype for name, x in example.tensors.items()}
        self._constants, self._groups = optimizers.constants_of(optimizer), groups_of([optimizer])
        self._params = dict(self._root.named_parameters())
        homes = self._place()
        self._inspector = Inspector()
        first = Key(example.parts(self.accumulate)[0].signature)
        self._executables = Executables(
            self._recipe, {first: (self.graph, plan)}, self.cluster, self.level, self.store, homes, self._inspector
        )

    def _chosen(self, steps: Steps, example: FlatBatch, follow: Plan | None) -> Plan:
        """The plan, which rank 0 chooses for all."""
        config, accumulate, pins = self._config, self._config.accumulate, tuple(self._config.pins or ())
        graph_of = cache(lambda count, variant: vary(steps.planned(count), variant))
        graph = graph_of(1 if accumulate == "auto" else accumulate, PLAIN)  # by all ranks at once
        if in_group():
            check_same_job(facts_of(self._root, self.optimizer, self._example, config, graph))

        def plan() -> Plan:
            if follow:
                return replan(graph_of(follow.accumulate, follow.variant), follow, self.cluster)
            return choose(config.plan, graph_of, example.rows or 1, self.cluster, planned(self.level), pins,
                          config.mesh, accumulate, config.budget, config.recompute)  # fmt: skip

        return from_rank_0(plan)

    def _place(self) -> dict[str, int]:
        """Move the tensors of the model and the optimizer to where the plan keeps them. Returns the pipeline stage that
        keeps each input."""
        if self.device.type == "cpu":
            keep_freed_memory()
        homes, devices_of = homes_of(self.graph, self._plan, self.accumulate)
        self.offload_store = OffloadStore(self._config.folder, pinned=self.device.type == "cuda")
        self.store = store = LiveStore(self.device, self.offload_store)
        store.prepare(self._plan, self.memory)
        self.runtime, self.budgets, self.updates, self._live = store.runtime, store.budgets, store.updates, store.live
        self.rank, self.world_size = self.runtime.rank, devices(self._plan.mesh)
        counts = optimizers.update_counts(self.optimizer)
        self.updates.recount({name: counts[p] for name, p in self._params.items() if p in counts})
        store.declare(self.graph, self._plan, devices_of)
        self._live.owners = {name: (self.optimizer, p) for name, p in self._params.items()}
        masters = self._config.fp32_master_weights
        self._live.take(model_state.values_of(self._root, self.optimizer, self.graph, masters))
        if self.device.type == "cpu":
            give_back_freed_memory()
        return homes

    # -- what a training loop calls -----------------------------------------------------------------------------

    def __call__(self, batch: Batch, *more: Any) -> torch.Tensor:
        """Train on a global batch. Returns the mean loss, a 0-d tensor."""
        if more:
            raise TypeError(f"a step takes one batch, as parallelize did; give step((...)) for {1 + len(more)} tensors")
        with self._recorder.recording(self.steps + 1) if self._recorder else nullcontext():
            return self._train(batch)

    def _train(self, batch: Batch) -> torch.Tensor:
        data = FlatBatch(batch)
        self.look()
        optimizers.check_constants(self._constants, self.optimizer)
        HEARTBEAT.go(f"in step {self.steps + 1}")
        if first := not self._compared:  # a data loader that differs between ranks shows at once
            check_same_everywhere(data.tensors)
            self._compared = True
        guarded = self.max_nonfinite_steps is not None
        buffers = self.store.copies(self.graph.changed_by_forward) if guarded else []
        executor = self._run("train", data)
        loss, graph = executor.loss(), executor.graph
        if guarded and executor.skipped():
            self.store.put_back(buffers)
            self._skip(data)
        else:
            self._in_a_row = 0
            self.updates.add(graph.updated)
            self._live.stepped((Kind.PARAM.at(name) for name in graph.updated), graph.updated)
        if first and self.device.type == "cpu":
            give_back_freed_memory()
        HEARTBEAT.go(f"between steps {self.steps} and {self.steps + 1}")
        compat.mark_stepped(self.optimizer)
        self._observe(executor, f"step {self.steps}")
        self._last = executor
        return loss

    def grad_norm(self) -> torch.Tensor:
        """The 2-norm of all gradients of the last step, before they were clipped: a 0-d tensor.

        Every rank of a job must call it. Raises ValueError without `clip_norm`, and before the first step.
        """
        if self._last is None or self._config.clip_norm is None:
            raise ValueError("the norm of the gradients is known after a step of tutti.parallelize(..., clip_norm=...)")
        return self._last.reported("grad_norm")

    def _observe(self, executor: Executor, what: str) -> None:
        """Take metrics of the last run; raise CheckFailed if a check of the model failed in it."""
        observed = executor.observed(Observed(self._how))
        self.metrics = observed.combined()
        observed.check(executor.graph.checks, what)

    @property
    def steps(self) -> int:
        """The number of steps done, with those that were skipped."""
        return self.updates.done + self.skipped

    def _resume(self, steps: int, skipped: int, late: Mapping[str, int]) -> None:
        """Continue from a state that was loaded. late: by how many updates parameters are behind the steps, if any."""
        self.skipped, self.updates.done = skipped, steps - skipped
        self.updates.update({name: self.updates.done - late.get(name, 0) for name in self.updates})
        self.store.replaced()

    def look(self) -> None:
        """Take what the user has changed in the model and the optimizer. Steps begin with it."""
        changed = self._recipe.watch.learns_otherwise or groups_of([self.optimizer]) != self._groups
        if changed or self._live.absorb():
            self._adopt()
        self._executables.look()

    def _adopt(self) -> None:
        """Capture the model again after parameters were frozen, unfrozen, replaced, added or converted. The others keep
        their values, optimizer state and counts of updates: these are in the model and the optimizer."""
        asked = loaded(self._config.plan)
        named = isinstance(asked, str) and asked != "auto"  # which fits any model
        fresh = Step(self.model, self.optimizer, self._example, self._config, None if named else self._plan)
        counts = {p: self.updates[name] for name, p in self._params.items() if name in self.updates}
        counts = {name: counts[p] for name, p in fresh._params.items() if name in fresh.updates and p in counts}
        apart = {self._params[name]: number for name, number in self._executables.apart.items()}
        fresh.updates.done, fresh.skipped, fresh._in_a_row = self.updates.done, self.skipped, self._in_a_row
        fresh.updates.recount({name: n for name, n in counts.items() if n != fresh.updates[name]})
        fresh._recorder = self._recorder
        if apart := {name: apart[p] for name, p in fresh._params.items() if p in apart}:
            fresh._executables.count_apart(apart)
        self._live.leave()
        self.__dict__.update(fresh.__dict__)

    def _skip(self, batch: FlatBatch) -> None:
        """Count a skipped step. Raises NonFinite after too many in a row."""
        if self._in_a_row == self.max_nonfinite_steps:
            self._inspector.begin()
            self._run("inspect", batch)
            again = f", after {self.max_nonfinite_steps} in a row that were skipped" if self.max_nonfinite_steps else ""
            raise NonFinite(f"the loss or a gradient of step {self.steps + 1} is not finite{again}: "
                            f"{self._inspector.first()}; parameters and optimizer state are as before it")  # fmt: skip
        self._in_a_row += 1
        self.skipped += 1

    def train_only(self, names: Collection[str] | None) -> None:
        """Train only these parameters from the next step on; None: all that require gradients.

        The first step with a set of parameters captures the model for it; later ones with the same set use that again.
        The backward pass ends where no earlier parameter is trained. Parameters that are left out keep their values,
        optimizer state and counts of updates, as in PyTorch with gradients that are None.

        Raises ValueError for an unknown name, for an empty set, and for a pipeline, whose stages run fixed programs.
        """
        if self._plan.stages and names is not None:
            raise ValueError("train_only does not work with a pipeline; choose a plan without one")
        trainable = {name for name, p in self._root.named_parameters() if p.requires_grad}
        if names is not None and (not names or not trainable.issuperset(names)):
            missing = sorted(set(names) - trainable)
            raise ValueError(f"{missing[0]!r} is no parameter that requires gradients" if missing else
                             "names is empty; a step trains at least one parameter")  # fmt: skip
        self._executables.train_only(None if names is None or trainable == set(names) else frozenset(names))

    def count_apart(self, classes: Mapping[str, int]) -> None:
        """Expect that `train_only` will leave out whole classes of parameters, so that their numbers of updates differ.

        classes: parameter name -> class, from 1. Parameters that each step updates are left out. A captured step then
        has an input for the number of updates of each class. Without it, the model is captured again whenever
        parameters that had equally many updates no longer have.
        """
        self._executables.count_apart(classes)

    def record(self, folder: str | Path, every: int = 1) -> None:
        """Record every `every`-th step from now on, for `tutti diagnose`: when each call ended on each rank.

        folder: gets one file per rank; earlier recordings in it are removed. Every rank of a job must call it. Raises
        ValueError for virtual devices: they take turns in one process, so their times mean nothing.
        """
        self._recorder = Recorder(Path(folder), self.runtime, self.device, every)
        if self.rank == 0:
            with HEARTBEAT.working("simulates the step"):
                write_predicted(dry_run(self.graph, self._plan, self.cluster, planned(self.level)), Path(folder))

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """Compute the mean loss of a batch in evaluation mode, without an update. Returns a 0-d tensor."""
        self.look()
        executor = self._run("evaluate", FlatBatch(batch))
        loss = executor.loss()
        self._observe(executor, "evaluation")
        return loss

    def gradients(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Compute the gradients of a batch before clipping. Returns full CPU tensors by parameter name."""
        self.look()
        return self._run("gradients", FlatBatch(batch)).gradients()

    def compare_replicas(self) -> None:
        """Compare checksums of everything that several ranks store.

        Raises RuntimeError on all ranks, with the tensor and the rank, if one rank's memory differs. Every rank of a
        job must call it.
        """
        self.look()
        compare(self.store)

    def state_dict(self, sharded: bool = False) -> dict[str, torch.Tensor]:
        """Parameters and buffers under the model's names: full CPU tensors, or this rank's parts if `sharded`.

        Every rank of a job must call it.
        """
        self.look()
        if sharded:
            named = ((*split_name(name), part) for name, part in self.store.parts[0].items())
            return {path: part for kind, path, part in named if kind in (Kind.PARAM, Kind.BUFFER)}
        return model_state.state_dict(self.store, self.model, Slots(self._root, self._recipe.attributes).named())

    def save(
        self,
        checkpoints: Checkpoints,
        facts: Mapping[str, Any] | None = None,
        fill: Callable[[Path], None] = lambda folder: None,
        in_memory: bool = False,
    ) -> None:
        """Start a checkpoint of all state that resuming bit for bit needs. Writing continues in the background.

        facts: more entries for its manifest. fill: writes more files into its folder, on rank 0. in_memory: write to
        the memory of the machines instead of disk. Every rank of a job must call it. Raises SaveError if an earlier
        checkpoint could not be written.
        """
        self.look()
        counts: dict[str, Any] = {"skipped": self.skipped, "in_a_row": self._in_a_row, "behind": self.updates.behind()}
        counts["levels"] = self._executables.level_changes()
        manifest = {"seed": self.seed, **counts, "plan": json.loads(self._plan.to_json()), **(facts or {})}
        write_store(self.store, checkpoints, self.steps, manifest, fill, in_memory)

    @HEARTBEAT.working("loads a checkpoint")
    def load(self, folder: str | Path | PeerCheckpoint) -> int:
        """Load a checkpoint of any plan, on any number of devices. Returns the bytes that were read.

        From a folder with a model of `transformers` (safetensors), only parameters and buffers are read. Raises
        ValueError if the checkpoint belongs to another model or optimizer, or if files are missing or differ from their
        checksums; nothing has changed then. All ranks together load what `Checkpoints.latest` finds in memory.
        """
        self.look()  # or what the user has replaced would win
        if not isinstance(folder, PeerCheckpoint) and has_weights(Path(folder)):
            count = model_state.read_weights(self.store, self.graph, Path(folder), self.model)
            self._live.release()
            return count
        about, _, count = read_store(self.store, folder, exactly=True)
        self._in_a_row = about.get("in_a_row", 0)
        self._executables.follow(about.get("levels", {}))
        self._resume(about["step"], about.get("skipped", 0), about.get("behind", {}))
        return count

    def put(self, values: Mapping[str, torch.Tensor]) -> None:
        """Replace stored tensors by full ones, by the names of `step.store`; model and optimizer have them then."""
        self.look()
        for name, value in values.items():
            self.store.place(name, value)
        self._live.release()

    def training_state(self) -> dict[str, torch.Tensor]:
        """All state that resuming bit for bit needs, as full CPU tensors. Every rank of a job must call it."""
        self.look()
        counts = {"step": self.steps, **({"skipped": self.skipped} if self.skipped else {})}
        counts |= {f"behind:{name}": n for name, n in self.updates.behind().items()}
        return self.store.wholes() | {name: torch.tensor(count) for name, count in counts.items()}

    def load_training_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """The inverse of `training_state`; from any plan to any other."""
        self.look()
        counts = {name: int(x) for name, x in state.items() if kind_of(name) in ("step", "skipped", "behind")}
        self.store.place_all({name: value for name, value in state.items() if name not in counts})
        late = {path_of(name): n for name, n in counts.items() if name.startswith("behind:")}
        self._resume(counts["step"], counts.get("skipped", 0), late)

    # -- what one can ask ------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        name, more = type(self.model).__name__, f", {self.accumulate} microbatches" if self.accumulate > 1 else ""
        return (
            f"Step({name} with {type(self.optimizer).__name__}, plan {self._plan.name or dict(self._plan.mesh)} on "
            f"{self.cluster}, level {self.level}{more}, {len(self.graph.calls)} operators, {self.steps} steps done)"
        )

    @property
    def _planned_graph(self) -> StepGraph:
        return self.graph

    @property
    def _executor(self) -> Executor:
        return self._executables.executor("train", self._executables.first, self.accumulate)

    @property
    def recaptures(self) -> list[str]:
        """Why the model was captured again: other shapes, values, modes or attributes."""
        return list(self._executables.reasons)

    @property
    def flops(self) -> int:
        """Floating-point operations of one global step, all devices together."""
        return self.graph.flops * self.accumulate

    # -- how it is done ----------------------------------------------------------------------------------------------

    def _run(self, what: str, batch: FlatBatch) -> Executor:
        """Run a computation on all microbatches of a batch; the executor holds its results."""
        batch.check_like(self._dtypes)
        HEARTBEAT.moves += 1
        divides = what != "evaluate" and batch.rows % self.accumulate == 0  # a smaller last batch may not
        parts = batch.parts(self.accumulate if divides else 1)
        keys, each = self._executables.of_microbatches(what, parts, self.steps + 1)

        def inputs_of(number: int) -> dict[str, torch.Tensor]:
            return self._inputs(parts[number], number, each[number].graph)

        recorder = self._recorder
        with self._executables.timed(what, keys, self.steps + 1):
            each[0].run(inputs_of, recorder if recorder and recorder.active and what != "inspect" else None, each)
        return each[0]

    def _inputs(self, batch: FlatBatch, draw: int, graph: StepGraph) -> dict[str, torch.Tensor]:
        """The inputs that are not stored: the batch, and numbers of this step. Each `draw` has other random numbers."""
        numbers = {"step": torch.tensor(self.updates.done + 1), "seed": torch.tensor(self.seed + (draw << 32))}
        rates = {Kind.LR.at(i): optimizers.rate_of(group) for i, group in enumerate(self.optimizer.param_groups)}
        numbers |= {name: torch.tensor(rate, dtype=torch.float64) for name, rate in rates.items()}
        numbers |= {key: torch.tensor(self.updates[names[0]] + 1) for key, names in graph.counts.items()}
        return numbers | batch.inputs | graph.constants
