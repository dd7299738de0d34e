"""`step = tutti.parallelize(model, optimizer, batch)`: lift a training step to a cluster."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from tutti import compat
from tutti.analysis.allocator import give_back_freed_memory, keep_freed_memory
from tutti.analysis.passes import check_level
from tutti.checkpoint.checkpoints import Checkpoints
from tutti.checkpoint.peer_checkpoint import PeerCheckpoint, opened
from tutti.exec import model_state
from tutti.exec.batches import batch_size, check_like, microbatches, signature_of
from tutti.exec.executables import Executables, Key
from tutti.exec.executor import Executor
from tutti.exec.gradual import AUTO, COMPILED, planned
from tutti.exec.live import Live
from tutti.exec.memory_budget import MemoryBudget, bytes_of
from tutti.exec.nonfinite import Inspector, NonFinite
from tutti.exec.observed import Observed, how_to_combine
from tutti.exec.offload_store import OffloadStore
from tutti.exec.replicas import compare
from tutti.exec.runtime import check_same_everywhere, from_rank_0, in_group, in_job, join_job, runtime_for
from tutti.exec.same_job import Facts, check_same_job, described, plain
from tutti.exec.tensor_store import TensorStore, check_names
from tutti.exec.transfer_engine import engine_for
from tutti.exec.weights import has_weights
from tutti.hardware import Cluster, local
from tutti.ir.step_graph import StepGraph
from tutti.keywords import names_nearest
from tutti.launch.heartbeat import HEARTBEAT
from tutti.launch.progress import progress
from tutti.lower.program import Collective, Program
from tutti.lower.rebatch import Steps
from tutti.lower.schedule_parts import schedule_of
from tutti.lower.vary import vary
from tutti.observe.predicted import SIMULATED, predicted
from tutti.observe.recorder import Recorder
from tutti.plan.layout import Mesh, devices
from tutti.plan.pin import Pin
from tutti.plan.plan import Plan
from tutti.plan.search import BUDGET
from tutti.plan.textbook import NAMES
from tutti.plan.tier import DEVICE
from tutti.plan.variant import PLAIN
from tutti.sim.dryrun import dry_run
from tutti.sim.planning import Simulator, choose
from tutti.tracing import optimizers
from tutti.tracing.batch import Batch, batch_items, inputs, rows
from tutti.tracing.capture import Loss, device_of
from tutti.tracing.capture_spec import CaptureSpec, autocast_state
from tutti.tracing.criteria import with_criteria

VALUES = (int, float, str, tuple, torch.Tensor)  # of an optimizer's options that ranks compare
ALIKE = (
    "level", "clip_norm", "accumulate", "fp32_master_weights", "stochastic_rounding", "seed", "memory",
    "max_nonfinite_steps",
)  # fmt: skip


@dataclass(frozen=True)
class ParallelConfig:
    """The options of `parallelize`, where they are described."""

    loss: Loss | None
    cluster: Cluster | str
    plan: Plan | str | Path
    level: str
    clip_norm: float | None
    accumulate: int | Literal["auto"]
    fp32_master_weights: bool
    stochastic_rounding: bool
    pins: Iterable[Pin] | None
    mesh: Mesh | None
    budget: float
    recompute: Collection[str]
    seed: int
    memory: float | str | None
    folder: str | Path | None
    max_nonfinite_steps: int | None
    metrics: Mapping[str, str] | Iterable[str]


@names_nearest
def parallelize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    loss: Loss | None = None,
    cluster: Cluster | str = "auto",
    plan: Plan | str | Path = "auto",
    level: str = "auto",
    clip_norm: float | None = None,
    accumulate: int | Literal["auto"] = 1,
    fp32_master_weights: bool = False,
    stochastic_rounding: bool = False,
    pins: Iterable[Pin] | None = (),
    mesh: Mesh | None = None,
    budget: float = BUDGET,
    recompute: Collection[str] = (),
    seed: int = 0,
    memory: float | str | None = None,
    folder: str | Path | None = None,
    max_nonfinite_steps: int | None = None,
    metrics: Mapping[str, str] | Iterable[str] = (),
) -> Step:
    """Lift a model written for one device to a cluster.

    The model and the optimizer stay the user's and are live: after any number of steps their parameters, buffers and
    state have the trained values, and what is written into them between steps takes effect. Tensors that the plan keeps
    whole on a rank are the user's own; others hold no memory until they are used (docs/concepts/live.md).

    model: any module on the CPU or one GPU, with initialized parameters.
    optimizer: a `torch.optim` instance over them. Learning rates are read at every step, so schedulers work.
    batch: an example of the *global* batch: a dict (keyword arguments of the model) or a tuple of tensors, arbitrarily
        nested. An entry whose dim 0 is not the batch size is shared by all rows. Entries that are not tensors, and
        values that the model's Python code reads from the batch, are constants of the captured step: a batch with other
        values triggers a recapture.
    loss: `loss(model, batch)` returns a 0-d tensor, or `(loss, metrics)`. By default the model's output has a `.loss`
        or is the loss.
    cluster: "auto" (the processes of this job, or one device), a `Cluster`, or its name ("cpu:4", "h100:16x8"). If it
        has more devices than the job has processes, they are virtual devices in this process.
    plan: "auto", a `Plan`, the path of one, or a textbook name ("dp", "tp", "zero3", "dp2xtp2").
    level: "O0" runs operator by operator, "O1" compiles fused kernels, "O2" compiles whole layers before the first
        step. "auto" begins with O0, compiles in another process after half a minute of steps, and goes on with O2 if
        it is faster; on a GPU, and with `memory`, it is O2. Levels round differently: give one of the others to compare
        runs bit for bit.
    clip_norm: maximum global gradient norm.
    accumulate: number of microbatches (equal parts of the batch) per update; "auto" uses as few as fit in memory.
    fp32_master_weights: keep and update float32 copies of low-precision parameters.
    stochastic_rounding: update bfloat16 parameters and their optimizer state in float32 and round at random, unbiased.
        It needs less memory than masters.
    pins: layouts of parameters that are fixed by hand (`tutti.pin`).
    mesh: the mesh, if it is fixed, outermost axis first: `{"dp": 2, "tp": 4}`. With `"experts": 8`, an axis `ep` of
        that part of dp that lets experts be spread over 8 of the devices of dp x tp.
    budget: nominal seconds of work, not wall time, after which the search returns the best plan so far.
    recompute: with a plan's name, what the backward pass recomputes: "layers" (activations inside layers), "attention",
        names of operators ("silu", "*norm*") or labels of a plan.
    seed: seed of all random numbers.
    memory: memory of each device, in bytes or as in "2GiB". A step that would exceed it raises MemoryError.
    folder: folder for files of tensors that the plan keeps on disk. The files are deleted with the step.
    max_nonfinite_steps: how many steps in a row may be skipped if their loss or gradients are not finite. One more
        raises an error that names the operator. None: do not check. The check costs the norm of the gradients, unless
        they are clipped anyway.
    metrics: entries of the model's output to keep in `step.metrics`. A mapping says how the values of microbatches are
        combined: "mean", "sum" or "gather" (along dim 0).

    Raises ValueError if arguments do not fit together (a batch that does not divide, a plan for another model or
    number of devices, an optimizer that is not supported), and MemoryError if `memory` is too small.

    If something that the forward pass reads changes later (modes, attributes, the set of trained parameters), the step
    captures the model again.
    """
    with HEARTBEAT.working("captures and plans the step"), progress("capturing the step"):
        config = ParallelConfig(
            loss=loss,
            cluster=cluster,
            plan=plan,
            level=level,
            clip_norm=clip_norm,
            accumulate=accumulate,
            fp32_master_weights=fp32_master_weights,
            stochastic_rounding=stochastic_rounding,
            pins=pins,
            mesh=mesh,
            budget=budget,
            recompute=recompute,
            seed=seed,
            memory=memory,
            folder=folder,
            max_nonfinite_steps=max_nonfinite_steps,
            metrics=metrics,
        )
        return Step(model, optimizer, batch, config)


class Step:
    """A training step on a cluster: `loss = step(batch)`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, config: ParallelConfig):
        self._config = config
        plan, level, accumulate, max_nonfinite_steps = (
            config.plan, config.level, config.accumulate, config.max_nonfinite_steps
        )  # fmt: skip
        if not isinstance(optimizer, torch.optim.Optimizer):
            kind = type(optimizer).__name__
            several = isinstance(optimizer, list | tuple | dict)
            instead = (
                "for several optimizers write the step as a function, tutti.function(f, *batch, store=tutti.Store("
                "model=..., a=..., b=...)) (docs/guide/functions.md), or use one optimizer with parameter groups"
            ) if several else "its update is captured"  # fmt: skip
            raise ValueError(f"the optimizer is a {kind}; it must be one of torch.optim: {instead}")
        if accumulate != "auto" and not (isinstance(accumulate, int) and accumulate >= 1):
            raise ValueError(f"accumulate is {accumulate!r}; it must be a whole number, at least 1, or 'auto'")
        if not isinstance(plan, Plan | str | Path):
            raise ValueError(f"plan is {plan!r}; it may be {NAMES}, the path of a saved plan, or a tutti.Plan")
        if max_nonfinite_steps is not None and not (isinstance(max_nonfinite_steps, int) and max_nonfinite_steps >= 0):
            raise ValueError(
                f"max_nonfinite_steps is {max_nonfinite_steps!r}; it must be a whole number of steps, or None"
            )
        check_level(level, AUTO)
        self.max_nonfinite_steps, self.skipped, self._in_a_row = max_nonfinite_steps, 0, 0
        self._how, names = how_to_combine(config.metrics)
        self.metrics: dict[str, torch.Tensor] = {}  # of the last batch
        self.model, self.optimizer, self.level, self.seed = model, optimizer, level, config.seed
        self._root = root = model if config.loss is None else with_criteria(model, config.loss, optimizer)
        self.device = device_of(model)
        if level == AUTO and (self.device.type != "cpu" or config.memory is not None):  # O0 may need more memory
            self.level = level = COMPILED
        if level not in ("O0", AUTO):
            compat.get_compiler_ready(self.device)
        self.cluster = cluster_of(config.cluster, self.device)
        self.memory = None if config.memory is None else bytes_of(config.memory)
        if self.memory is not None:
            self.cluster = replace(self.cluster, device=replace(self.cluster.device, memory=self.memory))
        recipe = CaptureSpec(
            root,
            optimizer,
            config.loss,
            config.clip_norm,
            config.fp32_master_weights,
            config.stochastic_rounding,
            max_nonfinite_steps is not None,
            autocast_state(self.device),
            names,
        )
        steps = Steps(lambda count: recipe.training(microbatches(batch, count)[0], count))
        graph_of = cache(lambda count, variant: vary(steps.planned(count), variant))
        graph = graph_of(1 if accumulate == "auto" else accumulate, PLAIN)  # by all ranks at once
        if in_group():
            check_same_job(_facts(root, optimizer, batch, config, graph))
        pins = tuple(config.pins or ())
        chosen = from_rank_0(lambda: choose(plan, graph_of, batch_size(batch), self.cluster, planned(level), pins,
                                            config.mesh, accumulate, config.budget, config.recompute))  # fmt: skip
        if devices(chosen.mesh) != self.cluster.size:
            raise ValueError(f"the plan is for {devices(chosen.mesh)} devices, {self.cluster} has {self.cluster.size}")
        self._plan, self.accumulate = chosen, chosen.accumulate
        captured = steps.captured(self.accumulate)
        self.graph, first = vary(captured, chosen.variant), microbatches(batch, self.accumulate)[0]
        chosen.check(self.graph)
        _check_tiers(chosen, self.cluster)
        self.runtime = runtime_for(chosen.mesh)
        self.rank, self.world_size = self.runtime.rank, devices(chosen.mesh)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.steps, self._compared = optimizers.step_count(optimizer), False
        self._dtypes = {key: x.dtype for key, x in batch_items(batch)}
        self._constants, self._groups = _constants(optimizer), _groups(optimizer)
        self._params = params = dict(root.named_parameters())
        self._example = batch
        counts = optimizers.update_counts(optimizer)
        self._behind = {name: self.steps - counts[p] for name, p in params.items() if p in counts}
        self._updated: set[str] = set(self.graph.updated)  # by any graph so far
        self._recipe = recipe
        self._recorder: Recorder | None = None
        self._last: Executor | None = None  # of a training step
        homes: dict[str, int] = {}  # stages of a pipeline that keep the inputs
        devices_of: dict[str, int] = {}
        if chosen.stages:
            made, schedule = schedule_of(self.graph, chosen, self.accumulate)
            homes = made.homes
            devices_of = {name: schedule.place[stage] for name, stage in made.homes.items()}
        self.offload_store = OffloadStore(config.folder, pinned=self.device.type == "cuda")
        self._engine = engine_for(self.device, self.offload_store) if chosen.tiers else None
        self.budgets = (
            [] if self.memory is None else [MemoryBudget(self.offload_store, self.memory) for _ in self.runtime.ranks]
        )
        if self._engine:
            for held in self.budgets:
                held.settle = self._engine.settle
        self.store = TensorStore(self.device, self.offload_store)
        self.store.spread(chosen.mesh, self.runtime)
        self.store.budgets = self.budgets
        self.store.declare(self.graph, chosen, devices_of)
        self._live = Live(self.store, {name: (optimizer, p) for name, p in params.items()}, self)
        self._live.take(model_state.values_of(root, optimizer, self.graph, config.fp32_master_weights))
        if self.device.type == "cpu":
            give_back_freed_memory()
        self._inspector = Inspector()
        self._made = Executables(
            recipe, {Key(signature_of(first)): (self.graph, chosen)}, self.cluster, level, self.runtime, self.store,
            homes, self._engine, self.budgets, self._inspector,
        )  # fmt: skip

    # -- what a training loop calls -----------------------------------------------------------------------------

    def __call__(self, batch: Batch, *more: Any) -> torch.Tensor:
        """Train on a global batch. Returns the mean loss, a 0-d tensor."""
        if more:
            raise TypeError(f"a step takes one batch, as parallelize did; give step((...)) for {1 + len(more)} tensors")
        with self._recorder.recording(self.steps + 1) if self._recorder else nullcontext():
            return self._train(batch)

    def _train(self, batch: Batch) -> torch.Tensor:
        self._absorb()
        self._check_constants()
        HEARTBEAT.go(f"in step {self.steps + 1}")
        if first := not self._compared:  # a data loader that differs between ranks shows at once
            check_same_everywhere(dict(batch_items(batch)))
            self._compared = True
        buffers, skipped = (
            [] if self.max_nonfinite_steps is None else self.store.copies(self.graph.changed_by_forward),
            False,
        )
        executor = self._run("train", batch)
        loss, graph = executor.loss(), executor.graph
        if self.max_nonfinite_steps is not None:
            skipped = executor.skipped()
        if skipped:
            self.store.put_back(buffers)
            self._skip(batch)
        else:
            self._in_a_row = 0
            self._count(graph)
        if first and self.device.type == "cpu":
            give_back_freed_memory()
        self.steps += 1
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
        return self._last.told("grad_norm")

    def _observe(self, executor: Executor, what: str) -> None:
        """Take metrics of the last run; raise CheckFailed if a check of the model failed in it."""
        observed = executor.observed(Observed(self._how))
        self.metrics = observed.combined()
        observed.check(executor.graph.checks, what)

    def _count(self, graph: StepGraph) -> None:
        """Count updates by parameter, as torch does: an update may leave out some parameters."""
        updated = set(graph.updated)
        self._updated |= updated
        for name in self._behind.keys() - updated:
            self._behind[name] += 1
        if any(self._behind.values()) or self._recipe.behind:
            self._made.count(self._behind, self._late())
        self._live.stepped((f"param:{name}" for name in updated), updated)

    def _late(self) -> dict[str, int]:
        """By how many updates each parameter is behind the number of steps, for parameters that have had an update."""
        return {name: n for name, n in self._behind.items() if n and name in self._updated}

    def _set_behind(self, late: Mapping[str, int]) -> None:
        self._behind = dict.fromkeys(self._behind, 0) | {n: late[n] for n in late if n in self._behind}
        self._updated |= set(late)
        self._made.count(self._behind, self._late())

    def count(self, name: str) -> int:
        """The number of updates of a parameter."""
        return self.steps - self.skipped - self._behind[name]

    def recount(self, counts: Mapping[str, int]) -> None:
        """Set the numbers of updates of parameters. If they are those of all, the steps begin after the largest."""
        updates = {name: self.count(name) for name in self._behind} | dict(counts)
        if counts.keys() >= self._behind.keys():
            self.steps = self.skipped + max(updates.values())
        self._behind = {name: self.steps - self.skipped - n for name, n in updates.items()}
        self._updated |= {name for name, n in updates.items() if n}
        self._made.count(self._behind, self._late())

    def _absorb(self) -> None:
        """Take what the user has changed in the model and the optimizer."""
        changed = self._recipe.watch.learns_otherwise or _groups(self.optimizer) != self._groups
        if changed or self._live.absorb():
            self._adopt()
        self._made.look()

    def _adopt(self) -> None:
        """Capture the model again after parameters were frozen, unfrozen, replaced, added or converted. The others keep
        their values, optimizer state and counts of updates: these are in the model and the optimizer."""
        fresh = Step(self.model, self.optimizer, self._example, self._config)
        counts = {p: self.count(name) for name, p in self._params.items() if name in self._behind}
        counts = {name: counts.get(p, fresh.count(name)) for name, p in fresh._params.items() if name in fresh._behind}
        apart = {self._params[name]: number for name, number in self._made.apart.items()}
        fresh.steps, fresh.skipped, fresh._in_a_row = self.steps, self.skipped, self._in_a_row
        fresh.recount({name: n for name, n in counts.items() if n != fresh.count(name)})
        fresh._recorder = self._recorder
        if apart := {name: apart[p] for name, p in fresh._params.items() if p in apart}:
            fresh._made.count_apart(apart)
        self._live.leave()
        self.__dict__.update(fresh.__dict__)
        self._live.counts = self

    def _microbatches(self, batch: Batch) -> int:
        """The number of microbatches of a batch; 1 if it does not divide, such as a smaller last batch."""
        return self.accumulate if rows(batch) % self.accumulate == 0 else 1

    def _skip(self, batch: Batch) -> None:
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
        known = {name for name, p in self._root.named_parameters() if p.requires_grad}
        if names is not None and (not names or not known.issuperset(names)):
            missing = sorted(set(names) - known)
            raise ValueError(f"{missing[0]!r} is no parameter that requires gradients" if missing else
                             "names is empty; a step trains at least one parameter")  # fmt: skip
        self._made.train_only(None if names is None or known == set(names) else frozenset(names))

    def count_apart(self, classes: Mapping[str, int]) -> None:
        """Expect that `train_only` will leave out whole classes of parameters, so that their numbers of updates differ.

        classes: parameter name -> class, from 1. Parameters that each step updates are left out. A captured step then
        has an input for the number of updates of each class. Without it, the model is captured again whenever
        parameters that had equally many updates no longer have.
        """
        self._made.count_apart(classes)

    def record(self, folder: str | Path, every: int = 1) -> None:
        """Record every `every`-th step from now on, for `tutti diagnose`: when each call ended on each rank.

        folder: gets one file per rank; earlier recordings in it are removed. Every rank of a job must call it. Raises
        ValueError for virtual devices: they take turns in one process, so their times mean nothing.
        """
        if len(self.runtime.ranks) > 1:
            raise ValueError(
                f"{len(self.runtime.ranks)} virtual devices take turns in one process, so their times mean nothing"
            )
        self._recorder = Recorder(Path(folder), self.runtime, self.device, every)
        if self.rank == 0:
            with HEARTBEAT.working("simulates the step"):
                made = predicted(dry_run(self.graph, self._plan, self.cluster, planned(self.level)))
            Path(folder, SIMULATED).write_text(json.dumps(made))

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """Compute the mean loss of a batch in evaluation mode, without an update. Returns a 0-d tensor."""
        self._absorb()
        executor = self._run("evaluate", batch)
        loss = executor.loss()
        self._observe(executor, "evaluation")
        return loss

    def gradients(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Compute the gradients of a batch before clipping. Returns full CPU tensors by parameter name."""
        self._absorb()
        return self._run("gradients", batch).gradients()

    def compare_replicas(self) -> None:
        """Compare checksums of everything that several ranks store.

        Raises RuntimeError on all ranks, with the tensor and the rank, if one rank's memory differs. Every rank of a
        job must call it.
        """
        self._absorb()
        compare(self.store)

    def state_dict(self, sharded: bool = False) -> dict[str, torch.Tensor]:
        """Parameters and buffers under the model's names: full CPU tensors, or this rank's parts if `sharded`.

        Every rank of a job must call it.
        """
        self._absorb()
        return model_state.state_dict(self.store, self.graph, self.model, sharded)

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
        if not isinstance(checkpoints, Checkpoints):
            raise ValueError(f"checkpoints is {checkpoints!r}: make `tutti.Checkpoints(folder)` once, and save into it")
        self._absorb()
        labels = {name: stored.label for name, stored in self.store.tensors.items()}
        counts = {"skipped": self.skipped, "in_a_row": self._in_a_row, "behind": self._late()}
        counts["levels"] = self._made.level_changes()
        known = {"seed": self.seed, **counts, "plan": json.loads(self._plan.to_json()), "labels": labels}
        checkpoints.save(self.steps, self.store.held(), {**known, **(facts or {})}, fill, in_memory)

    @HEARTBEAT.working("loads a checkpoint")
    def load(self, folder: str | Path | PeerCheckpoint) -> int:
        """Load a checkpoint of any plan, on any number of devices. Returns the bytes that were read.

        From a folder with a model of `transformers` (safetensors), only parameters and buffers are read. Raises
        ValueError if the checkpoint belongs to another model or optimizer, or if files are missing or differ from their
        checksums; nothing has changed then. All ranks together load what `Checkpoints.latest` finds in memory.
        """
        self._absorb()  # or what the user has replaced would win
        if not isinstance(folder, PeerCheckpoint) and has_weights(Path(folder)):
            count = model_state.read_weights(self.store, self.graph, Path(folder), self.model)
            self._live.release()
            return count
        about, stored = opened(folder)
        held, before = {k: x for k, x in self.store.held().items() if x.spec.bytes}, stored.bytes
        check_names(held, stored.tensors)
        stored.load(held)
        self.steps, self.skipped, self._in_a_row = about["step"], about.get("skipped", 0), about.get("in_a_row", 0)
        self._set_behind(about.get("behind", {}))
        self._made.follow(about.get("levels", {}))
        self._live.stepped(self.store.tensors, {name for name in self._behind if self.count(name)})
        return stored.bytes - before

    def put(self, values: Mapping[str, torch.Tensor]) -> None:
        """Replace stored tensors by full ones, by the names of `step.store`; model and optimizer have them then."""
        self._absorb()
        for name, value in values.items():
            self.store.place(name, value)
        self._live.release()

    def training_state(self) -> dict[str, torch.Tensor]:
        """All state that resuming bit for bit needs, as full CPU tensors. Every rank of a job must call it."""
        self._absorb()
        counts = {"step": self.steps, **({"skipped": self.skipped} if self.skipped else {})}
        counts |= {f"behind:{name}": n for name, n in self._late().items()}
        held = {name: self.store.whole(name) for name in self.store.tensors}
        return held | {name: torch.tensor(count) for name, count in counts.items()}

    def load_training_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """The inverse of `training_state`; from any plan to any other."""
        self._absorb()
        counts = {name: int(x) for name, x in state.items() if name.partition(":")[0] in ("step", "skipped", "behind")}
        self.store.place_all({name: value for name, value in state.items() if name not in counts})
        self._set_behind({n.partition(":")[2]: x for n, x in counts.items() if n.startswith("behind:")})
        self.steps, self.skipped = int(state["step"]), int(state.get("skipped", 0))
        self._live.stepped(self.store.tensors, {name for name in self._behind if self.count(name)})

    # -- what one can ask ------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        name, more = type(self.model).__name__, f", {self.accumulate} microbatches" if self.accumulate > 1 else ""
        return (
            f"Step({name} with {type(self.optimizer).__name__}, plan {self._plan.name or dict(self._plan.mesh)} on "
            f"{self.cluster}, level {self.level}{more}, {len(self.graph.calls)} operators, {self.steps} steps done)"
        )

    @property
    def plan(self) -> Plan:
        """The plan that runs, with its prediction. A plan that was not searched for this cluster is simulated now."""
        if self._plan.prediction is None or self._plan.cluster != str(self.cluster):
            made = Simulator(planned(self.level))(self.graph, self._plan, self.cluster)
            self._plan = self._plan.replace(prediction=made, cluster=str(self.cluster))
        return self._plan

    @property
    def program(self) -> Program:
        """The program of this rank for a training step (with accumulation: for one microbatch).

        Raises ValueError for a pipeline, which has one for each part.
        """
        if self._plan.stages:
            raise ValueError("a pipeline runs a Program for each part of its stages, and so has no single one")
        return self._made.executor("train", self._made.first, self.accumulate).first.programs[0]

    def collectives(self) -> list[Collective]:
        """The collectives of this rank in one run of each of its programs: (kind, axis, bytes sent, label).

        With accumulation, the program of a microbatch counts once. In a pipeline, messages to other stages count, too.
        """
        return self._made.executor("train", self._made.first, self.accumulate).collectives()

    @property
    def recaptures(self) -> list[str]:
        """Why the model was captured again: other shapes, values, modes or attributes."""
        return list(self._made.reasons)

    @property
    def flops(self) -> int:
        """Floating-point operations of one global step, all devices together."""
        return self.graph.flops * self.accumulate

    # -- how it is done ----------------------------------------------------------------------------------------------

    def _run(self, what: str, batch: Batch) -> Executor:
        """Run a computation on all microbatches of a batch; the executor holds its results."""
        check_like(batch, self._dtypes)
        HEARTBEAT.moves += 1
        count = 1 if what == "evaluate" else self._microbatches(batch)
        parts = microbatches(batch, count)
        keys = [self._made.key(what, part, count) for part in parts]
        each = [self._made.executor(what, key, count, self.steps + 1) for key in keys]
        executor, others = each[0], {id(x): x for x in each[1:] if x is not each[0]}
        if others and (self._plan.stages or any(set(x.graph.gradient_names) != set(executor.graph.gradient_names)
                                                for x in others.values())):  # fmt: skip
            reasons = ", ".join(self._made.reasons[-1:])
            if self._plan.stages:
                raise ValueError(
                    "the microbatches of a batch lead to different computations, which a pipeline does not mix: "
                    f"{reasons}; compute with tensors there, or choose a plan without a pipeline"
                )
            raise ValueError(
                "the microbatches of a batch have gradients of different parameters, but share an update: "
                f"{reasons}; compute with tensors there, or give accumulate=1"
            )

        def given(number: int) -> dict[str, torch.Tensor]:
            return self._given(parts[number], number, each[number].graph)

        with self._made.timed(what, keys[0], count, self.steps + 1) if not others else nullcontext():
            executor.run(given, self._recording(what), each)
        return executor

    def _given(self, batch: Batch, draw: int, graph: StepGraph) -> dict[str, torch.Tensor]:
        """The inputs that are not stored: the batch, and numbers of this step. Each `draw` has other random numbers."""
        update = self.steps - self.skipped + 1
        numbers = {"step": torch.tensor(update), "seed": torch.tensor(self.seed + (draw << 32))}
        numbers |= {
            f"lr:{i}": torch.tensor(optimizers.rate_of(g), dtype=torch.float64)
            for i, g in enumerate(self.optimizer.param_groups)
        }
        numbers |= {key: torch.tensor(update - self._behind[names[0]]) for key, names in graph.counts.items()}
        return numbers | inputs(batch) | graph.constants

    def _recording(self, what: str) -> Recorder | None:
        """The recorder, if it records this run."""
        return self._recorder if self._recorder and self._recorder.active and what != "inspect" else None

    def _check_constants(self) -> None:
        """Raise ValueError if an option other than the learning rate has changed: the captured update contains it."""
        optimizers.check_hooks(self.optimizer)
        for i, (then, now) in enumerate(zip(self._constants, _constants(self.optimizer), strict=True)):
            if changed := [key for key in then if now.get(key) != then[key]]:
                key = changed[0]
                raise ValueError(
                    f"{key} of parameter group {i} was {then[key]} when the step was made and is {now.get(key)} now; "
                    "only lr may change (OneCycleLR and CyclicLR change momentum, too, without cycle_momentum=False): "
                    "call tutti.parallelize again"
                )


def _facts(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, config: ParallelConfig, graph: StepGraph
) -> Facts:
    """What must be equal on all ranks of a job. The plan is that of rank 0."""
    updates: dict[str, Any] = {"class": type(optimizer).__name__}
    for i, group in enumerate(optimizer.param_groups):
        updates |= {f"{name} of group {i}": plain(x) for name, x in group.items() if isinstance(x, VALUES)}
        updates[f"the number of parameters of group {i}"] = len(group["params"])
    return {
        "the model": described({**dict(model.named_parameters()), **dict(model.named_buffers())}),
        "the batch": described(dict(batch_items(batch))),
        "the optimizer": updates,
        "the options": {name: getattr(config, name) for name in ALIKE},
        "the program": {"the hash of its operators": graph.fingerprint},
    }


def _groups(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """The parameters of each group, by id."""
    return [[id(p) for p in group["params"]] for group in optimizer.param_groups]


def _constants(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options that the captured update contains as constants, by parameter group."""
    varying = ("params", "lr", "initial_lr")
    return [{k: v for k, v in group.items() if k not in varying} for group in optimizer.param_groups]


def cluster_of(cluster: Cluster | str, device: torch.device) -> Cluster:
    """The cluster for a description, a name, or "auto": the processes of this job, or one device."""
    if in_job():
        processes = join_job(device)
        if isinstance(cluster, str) and cluster == "auto":
            box = [local(processes, device.type).to_json() if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(box)
            return Cluster.from_json(box[0])  # pyright: ignore[reportArgumentType]
    if isinstance(cluster, Cluster):
        return cluster
    if not isinstance(cluster, str):
        raise ValueError(f"cluster is {cluster!r}; it may be 'auto', a name such as 'cpu:4', or a tutti.Cluster")
    return local(1, device.type) if cluster == "auto" else Cluster.parse(cluster)


def _check_tiers(plan: Plan, cluster: Cluster) -> None:
    """Raise ValueError for a tier that the devices do not have."""
    has = (DEVICE, cluster.device.outer)
    if unknown := [label for label, tier in plan.tiers.items() if tier not in has]:
        raise ValueError(
            f"the plan keeps {unknown[0]!r} on tier {plan.tiers[unknown[0]]!r}; a {cluster.device.name} has "
            f"{' and '.join(has)}: write {has[1]!r}"
        )
