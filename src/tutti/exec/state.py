"""What a training step keeps between calls: parameters, buffers and optimizer state, as the plan lays them out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from tutti.exec.memory_budget import MemoryBudget
from tutti.exec.offload_store import OffloadStore
from tutti.exec.runtime import Runtime, own_slice, same_everywhere
from tutti.exec.sharded_tensor import ShardedTensor
from tutti.exec.weights import Wanted, load_weights
from tutti.ir.step_graph import GIVEN, Spec, StepGraph
from tutti.plan.layout import Layout, coordinates_of, devices
from tutti.plan.plan import Plan
from tutti.plan.tier import DEVICE
from tutti.tracing import optimizers
from tutti.tracing.slots import attribute


class State:
    """The kept inputs of a graph, by name. `parts` holds, for each rank of this process, what is that rank's.

    homes: the device of a pipeline that keeps an input; inputs that it does not name are on all. offload_store: keeps
    what the plan places outside of the device. budgets: one for each held rank.
    """

    def __init__(self, graph: StepGraph, plan: Plan, runtime: Runtime, homes: Mapping[str, int] | None = None,
                 offload_store: OffloadStore | None = None, budgets: Sequence[MemoryBudget] = ()):  # fmt: skip
        self.graph, self.plan, self.runtime, self.homes = graph, plan, runtime, homes or {}
        self.offload_store, self.budgets = offload_store or OffloadStore(), budgets
        self.width = devices(plan.inner)
        self.names = [name for name in graph.inputs if name.partition(":")[0] not in GIVEN]
        self.parts: list[dict[str, torch.Tensor]] = [{} for _ in runtime.ranks]

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, fp32_master_weights: bool) -> State:
        """Take the tensors of model and optimizer, on every rank those of rank 0."""
        params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        buffers |= {path: attribute(model, path) for path in self.graph.names("buffer") if path not in buffers}
        for kind, tensors in (("param", params), ("buffer", buffers)):
            for key, value in tensors.items():
                self.begin_with(f"{kind}:{key}", value.detach())
        for key, state in optimizers.states_of(optimizer, {p: name for name, p in params.items()}, fp32_master_weights):
            for kind, value in state.items():
                self.begin_with(f"{kind}:{key}", value)
        return self

    def begin_with(self, name: str, value: torch.Tensor) -> None:
        if name in self.graph.inputs:
            self.place(name, same_everywhere(value.to(self.graph.device)))

    def place(self, name: str, whole: torch.Tensor) -> None:
        """Give each rank its part of a whole tensor."""
        label = self.graph.inputs[name].meta["label"]
        layout, tier = self.plan.input_layout(label), self.plan.tiers.get(label, DEVICE)
        for i, (held, rank) in enumerate(zip(self.parts, self.runtime.ranks, strict=True)):
            if rank // self.width != self.homes.get(name, rank // self.width):
                continue
            if tier != DEVICE:
                part = layout.local_slice(whole, self.plan.mesh, coordinates_of(rank, self.plan.mesh))
                held[name] = held[name].copy_(part) if name in held else self.offload_store.place(part, tier)
                continue
            if self.budgets and name not in held:
                local = Spec(layout.local_shape(tuple(whole.shape), self.plan.mesh), whole.dtype)
                self.budgets[i].need(local.bytes, name)
            held[name] = own_slice(whole.to(self.graph.device), layout, self.plan.mesh, rank)
            if self.budgets:
                self.budgets[i].hold(held[name])

    def holds(self, name: str, whole: torch.Tensor) -> bool:
        """Whether the parts of this process are those of a whole tensor."""
        layout, mesh = self.plan.input_layout(self.graph.inputs[name].meta["label"]), self.plan.mesh
        parts = self._parts(name).items()
        return all(torch.equal(own_slice(whole.to(x.device), layout, mesh, rank), x) for rank, x in parts)

    def keep(self, outputs: list[dict[str, torch.Tensor]]) -> None:
        """Take from the outputs of each rank what succeeds a kept tensor."""
        for held, new in zip(self.parts, outputs, strict=True):
            held.update({name: value for name, value in new.items() if name in held})

    def copies_of_buffers(self) -> list[dict[str, torch.Tensor]]:
        """Of buffers, and of parameters that forward writes into, by rank."""
        names = list(self.graph.changed_by_forward)
        return [{name: held[name].clone() for name in names if name in held} for held in self.parts]

    def give_back(self, copies: list[dict[str, torch.Tensor]]) -> None:
        for held, before in zip(self.parts, copies, strict=True):
            for name, x in before.items():
                held[name].copy_(x)

    def whole(self, name: str) -> torch.Tensor:
        """A full CPU tensor. Every rank of a job has to ask for it."""
        node = self.graph.inputs[name]
        layout = self.plan.input_layout(node.meta["label"])
        return self.assemble(self._parts(name), self.homes.get(name), layout, node.meta["val"])

    def _parts(self, name: str) -> dict[int, torch.Tensor]:
        """What ranks of this process hold of a kept input."""
        return {rank: held[name] for rank, held in zip(self.runtime.ranks, self.parts, strict=True) if name in held}

    def assemble(self, parts: Mapping[int, torch.Tensor], home: int | None, layout: Layout, spec: Spec) -> torch.Tensor:
        """A full CPU tensor from what held ranks have of it: those of one device of a pipeline, or all."""
        if home is None:
            return self.runtime.whole(list(parts.values()), layout, spec)
        ranks = range(home * self.width, (home + 1) * self.width)
        mesh = self.plan.inner
        own = Spec(layout.local_shape(spec.shape, mesh), spec.dtype)
        return layout.assemble([self.runtime.of_rank(r, parts.get(r), own) for r in ranks], spec.shape, mesh)

    def held(self) -> dict[str, ShardedTensor]:
        """What the ranks of this process hold of each kept input; in a pipeline nothing of other devices'."""
        found = {}
        for number, name in enumerate(self.names):
            layout, parts = self.plan.input_layout(self.graph.inputs[name].meta["label"]), self._parts(name)
            mesh, width = (self.plan.inner, self.width) if name in self.homes else (self.plan.mesh, None)
            own = {rank % width if width else rank: part for rank, part in parts.items()}
            found[name] = ShardedTensor(self.graph.spec(name), layout, mesh, own, number)
        return found

    def load_weights(self, folder: Path, model: nn.Module) -> int:
        """Read parameters, the copies that stand for them in float32, and buffers from safetensors; how many bytes."""
        held = self.held()
        wanted = [
            Wanted(name, held[f"{kind}:{name}"], optional=kind == "buffer")
            for kind in ("param", "master", "buffer") for name in self.graph.names(kind)
        ]  # fmt: skip
        return load_weights(folder, wanted, _aliases(model))

    def of_model(self, model: nn.Module, sharded: bool) -> dict[str, torch.Tensor]:
        """Parameters and buffers under the model's names: full CPU tensors, or with `sharded` this rank's parts."""
        tensors = {}
        for kind in ("param", "buffer"):
            for name in self.graph.names(kind):
                key = f"{kind}:{name}"
                if not sharded:
                    tensors[name] = self.whole(key)
                elif key in self.parts[0]:
                    tensors[name] = self.parts[0][key]
        if not sharded:  # tied parameters appear under all their names, as in the model's own state dict
            tensors |= {alias: tensors[name] for alias, name in _aliases(model).items() if name in tensors}
            tensors = {name: tensors[name] for name in model.state_dict() if name in tensors}
        return tensors

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take full tensors under all the kept names, and no others; ValueError leaves everything as it was."""
        check_names(self.names, state)
        for name in self.names:
            spec = self.graph.spec(name)
            if Spec.of(state[name]) != spec:
                raise ValueError(f"{name} has {tuple(state[name].shape)} {state[name].dtype} in the state, "
                                 f"{spec.shape} {spec.dtype} here")  # fmt: skip
        for name in self.names:
            self.place(name, state[name])


def check_names(wanted: Collection[str], given: Collection[str]) -> None:
    """ValueError where a state has other tensors than those wanted."""
    missing, unknown = set(wanted) - set(given), set(given) - set(wanted)
    if missing or unknown:
        odd = min(missing or unknown)
        what = f"lacks {odd!r}" if missing else f"has {odd!r}, which is unknown"
        why = "; masters, stochastic_rounding or dtypes are not those of then" if odd.startswith("master:") else ""
        raise ValueError(f"the state does not belong to this model and optimizer: it {what}{why}")


def _aliases(model: nn.Module) -> dict[str, str]:
    """Other names of tied parameters and buffers -> the first."""
    first: dict[int, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: first.setdefault(id(t), name) for name, t in named if first.setdefault(id(t), name) != name}
