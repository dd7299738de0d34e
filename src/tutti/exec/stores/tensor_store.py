"""TensorStore: named tensors laid out over a mesh, each rank of this process holding its parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from tutti.exec.runtimes.relayout import Placed, move
from tutti.exec.runtimes.runtime import Runtime, own_slice, runtime_for, same_everywhere
from tutti.exec.stores.memory_budget import MemoryBudget
from tutti.exec.stores.offload_store import OffloadStore
from tutti.exec.stores.sharded_tensor import ShardedTensor
from tutti.ir.kind import CALL_INPUTS, Kind, kind_of
from tutti.ir.spec import Spec
from tutti.ir.step_graph import StepGraph
from tutti.plan.layouts.layout import Layout, Mesh, Split, coordinates_of, devices
from tutti.plan.plan import PIPELINE, Plan, inner_of
from tutti.plan.tier import DEVICE


@dataclass(frozen=True)
class Stored:
    """How one tensor is stored.

    label: its name in plans. spec: shape and dtype of the full tensor. tier: where the parts are kept. device: the
    device of a pipeline that holds the tensor; None if all do.
    """

    label: str
    spec: Spec
    layout: Layout
    tier: str = DEVICE
    device: int | None = None


class TensorStore:
    """Named tensors, and the parts of them that each rank of this process holds.

    runtime, mesh: set by `spread`. tensors: how each is stored. parts: name -> local part, by local rank. budgets: one
    for each local rank, if memory is limited. shared: names of parts that are the memory of somebody's tensor, which is
    written and never replaced.
    """

    def __init__(self, device: torch.device, offload_store: OffloadStore | None = None):
        self.device, self.offload_store = device, offload_store or OffloadStore()
        self._runtime: Runtime | None = None
        self.mesh: Mesh = {}
        self.tensors: dict[str, Stored] = {}
        self.parts: list[dict[str, torch.Tensor]] = []
        self.shared: set[str] = set()
        self.budgets: Sequence[MemoryBudget] = ()

    # -- placing ---------------------------------------------------------------------------------------------------

    def spread(self, mesh: Mesh, runtime: Runtime | None = None) -> None:
        """Use a mesh. The store must be empty."""
        assert not self.tensors
        self.mesh, self._runtime = dict(mesh), runtime or runtime_for(mesh)
        self.parts = [{} for _ in self.runtime.ranks]

    @property
    def runtime(self) -> Runtime:
        """The runtime of the mesh."""
        assert self._runtime is not None, "the store is not spread over a mesh yet"
        return self._runtime

    @property
    def inner(self) -> Mesh:
        """The mesh of each device of a pipeline."""
        return inner_of(self.mesh)

    @property
    def homes(self) -> dict[str, int]:
        """The devices of a pipeline that hold tensors, by name."""
        return {name: stored.device for name, stored in self.tensors.items() if stored.device is not None}

    def declare(self, graph: StepGraph, plan: Plan, homes: Mapping[str, int] | None = None) -> None:
        """Note how a plan stores the inputs of a graph that are new. homes: devices of a pipeline, by input."""
        for name, node in graph.inputs.items():
            if kind_of(name) not in CALL_INPUTS and name not in self.tensors:
                label = node.meta["label"]
                self.tensors[name] = Stored(label, node.meta["val"], plan.input_layout(label),
                                            plan.tiers.get(label, DEVICE), (homes or {}).get(name))  # fmt: skip

    def begin(self, values: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Place rank 0's values of the tensors that are declared, and ignore others."""
        for name, value in values:
            if name in self.tensors:
                self.place(name, same_everywhere(value.to(self.device)))

    def can_share(self, name: str, whole: torch.Tensor) -> bool:
        """Whether the memory of a full tensor can be that of the only local part. All ranks of a job answer alike, so
        that a read is a collective on all of them or on none."""
        stored = self.tensors[name]
        return (
            len(self._ranks) == 1
            and stored.device is None
            and stored.tier == DEVICE
            and all(self.mesh[axis] == 1 for axis in (*stored.layout.splits, *stored.layout.partials))
            and whole.is_contiguous()
            and Spec.of(whole) == stored.spec
        )

    def share(self, name: str, whole: torch.Tensor) -> None:
        """Use the memory of a full tensor for the only local part."""
        if self.budgets:
            self.budgets[0].need(whole.nbytes, name)
            self.budgets[0].hold(whole)
        self.parts[0][name] = whole
        self.shared.add(name)

    def unshare(self, name: str) -> None:
        """Give a shared tensor memory of its own."""
        self.shared.discard(name)
        self.parts[0][name] = self.parts[0][name].clone()

    def drop(self, names: Iterable[str]) -> None:
        """Store some tensors no more."""
        for name in names:
            self.tensors.pop(name, None)
            self.shared.discard(name)
            for tensors in self.parts:
                tensors.pop(name, None)

    def replace(self, tensors: dict[str, torch.Tensor], name: str, part: torch.Tensor) -> None:
        """Replace the part that a local rank holds."""
        if name not in self.shared:
            tensors[name] = part
        elif part.data_ptr() != tensors[name].data_ptr():
            tensors[name].copy_(part)

    def place(self, name: str, whole: torch.Tensor) -> None:
        """Give each local rank its part of a full tensor."""
        stored = self.tensors[name]
        if name in self.shared:
            self.parts[0][name].copy_(whole)
            return
        for i, (tensors, rank) in enumerate(zip(self.parts, self._ranks, strict=True)):
            if not self._holds(rank, stored):
                continue
            if stored.tier != DEVICE:
                part = stored.layout.local_slice(whole, self.mesh, coordinates_of(rank, self.mesh))
                tensors[name] = (
                    tensors[name].copy_(part) if name in tensors else self.offload_store.place(part, stored.tier)
                )
                continue
            if self.budgets and name not in tensors:
                where = coordinates_of(rank, self.mesh)
                local = Spec(stored.layout.local_shape(tuple(whole.shape), self.mesh, where), whole.dtype)
                self.budgets[i].need(local.bytes, name)
            tensors[name] = own_slice(whole.to(self.device), stored.layout, self.mesh, rank)
            if self.budgets:
                self.budgets[i].hold(tensors[name])

    @property
    def _ranks(self) -> Sequence[int]:
        return self._runtime.ranks if self._runtime else ()

    def _holds(self, rank: int, stored: Stored) -> bool:
        return stored.device in (None, rank // devices(self.inner))

    # -- reading ---------------------------------------------------------------------------------------------------

    def whole(self, name: str) -> torch.Tensor:
        """A full CPU tensor. Every rank of a job must call it."""
        stored = self.tensors[name]
        return self.assemble(self.parts_of(name), stored.device, stored.layout, stored.spec)

    def holds(self, name: str, whole: torch.Tensor) -> bool:
        """Whether the local parts equal those of a full tensor."""
        layout, parts = self.tensors[name].layout, self.parts_of(name).items()
        return all(torch.equal(own_slice(whole.to(x.device), layout, self.mesh, rank), x) for rank, x in parts)

    def parts_of(self, name: str) -> dict[int, torch.Tensor]:
        """The local parts of a tensor by rank."""
        return {rank: tensors[name] for rank, tensors in zip(self._ranks, self.parts, strict=True) if name in tensors}

    def assemble(
        self, parts: Mapping[int, torch.Tensor], device: int | None, layout: Layout, spec: Spec
    ) -> torch.Tensor:
        """A full CPU tensor from local parts by rank. device: pipeline device that has it; None if all do."""
        if device is None:
            return self.runtime.whole(list(parts.values()), layout, spec)
        width = devices(self.inner)
        blocks = []
        for i in range(width):
            own = Spec(layout.local_shape(spec.shape, self.inner, coordinates_of(i, self.inner)), spec.dtype)
            rank = device * width + i
            blocks.append(self.runtime.of_rank(rank, parts.get(rank), own))
        return layout.assemble(blocks, spec.shape, self.inner)

    def sharded(self) -> dict[str, ShardedTensor]:
        """The local blocks of each tensor; no block of a tensor that other devices of a pipeline hold."""
        sharded, width = {}, devices(self.inner)
        for number, (name, stored) in enumerate(self.tensors.items()):
            one, parts = stored.device is not None, self.parts_of(name)
            own = {rank % width if one else rank: part for rank, part in parts.items()}
            mesh = self.inner if one else self.mesh
            sharded[name] = ShardedTensor(stored.spec, stored.layout, mesh, own, number)
        return sharded

    # -- replacing -------------------------------------------------------------------------------------------------

    def copies(self, names: Iterable[str]) -> list[dict[str, torch.Tensor]]:
        """Copies of the local parts of some tensors, by local rank."""
        names = list(names)
        return [{name: tensors[name].clone() for name in names if name in tensors} for tensors in self.parts]

    def put_back(self, copies: list[dict[str, torch.Tensor]]) -> None:
        """Write copies back into the local parts."""
        for tensors, before in zip(self.parts, copies, strict=True):
            for name, x in before.items():
                tensors[name].copy_(x)

    def place_all(self, state: Mapping[str, torch.Tensor]) -> None:
        """Place full tensors under exactly the stored names. ValueError changes nothing."""
        check_names(self.tensors, state)
        for name, stored in self.tensors.items():
            if (spec := Spec.of(state[name])) != stored.spec:
                raise ValueError(f"{name} has {spec.shape} {spec.dtype} in the state, "
                                 f"{stored.spec.shape} {stored.spec.dtype} here")  # fmt: skip
        for name in self.tensors:
            self.place(name, state[name])

    def move_to(
        self, layouts: Mapping[str, Layout], mesh: Mesh, moved: Callable[[str], None] = lambda name: None
    ) -> int:
        """Move all tensors to other layouts, on the same or another mesh of as many devices.

        layouts: by name; tensors without one keep theirs, or are spread alike over a new mesh. moved: called with the
        name of each tensor that has another part. Returns the bytes that this process received from other ranks. Each
        rank receives only blocks that it does not hold yet.
        Every rank of a job must call it. Raises ValueError for pipelines, and for layouts that do not fit.
        """
        if PIPELINE in mesh or PIPELINE in self.mesh:
            raise ValueError("tensors of a pipeline cannot be moved in memory: save a checkpoint and load it")
        wanted = {}
        for name, stored in self.tensors.items():
            same_layout = stored.layout if dict(mesh) == self.mesh else spread_alike(stored, self.mesh, mesh)
            wanted[name] = layouts.get(name, same_layout)
            wanted[name].local_shape(stored.spec.shape, mesh)
        if devices(mesh) != devices(self.mesh):
            raise ValueError(f"the store is on {devices(self.mesh)} devices, the plan is for {devices(mesh)}")
        runtime = self.runtime if dict(mesh) == self.mesh else runtime_for(mesh)
        count = 0
        for name, layout in wanted.items():
            stored = self.tensors[name]
            if layout == stored.layout and dict(mesh) == self.mesh:
                continue
            old = Placed(stored.layout, self.mesh)
            new = Placed(layout, mesh)
            new_parts, received = move(self.runtime, self.parts_of(name), stored.spec, old, new, self.device)
            count += received
            for i, (tensors, rank) in enumerate(zip(self.parts, runtime.ranks, strict=True)):
                part = new_parts[rank]
                tensors[name] = part if stored.tier == DEVICE else self.offload_store.place(part, stored.tier)
                if self.budgets and stored.tier == DEVICE:
                    self.budgets[i].hold(part)
            self.shared.discard(name)
            self.tensors[name] = replace(stored, layout=layout)
            moved(name)
        self.mesh, self._runtime = dict(mesh), runtime
        return count


def spread_alike(stored: Stored, before: Mesh, after: Mesh) -> Layout:
    """A layout on another mesh that splits each dim into as many parts as before, as far as the axes allow."""
    free, splits = [axis for axis, n in after.items() if n > 1], {}
    for dim, size in enumerate(stored.spec.shape):
        parts = prod(before[axis] for axis, split in stored.layout.splits.items() if split.dim == dim)
        outer = 1
        for axis in list(free):
            if parts % (outer * after[axis]) == 0 and size % (outer * after[axis]) == 0:
                splits[axis] = Split(dim, outer)
                outer *= after[axis]
                free.remove(axis)
    return Layout.of(splits)


def check_names(wanted: Collection[str], names: Collection[str]) -> None:
    """Raise ValueError if a state has other tensors than the wanted ones."""
    missing, unknown = set(wanted) - set(names), set(names) - set(wanted)
    if missing or unknown:
        odd = min(missing or unknown)
        what = f"lacks {odd!r}" if missing else f"has {odd!r}, which is unknown"
        why = "; fp32_master_weights, stochastic_rounding or dtypes differ" if kind_of(odd) == Kind.MASTER else ""
        raise ValueError(f"the state does not belong to this model and optimizer: it {what}{why}")
