"""Store: parameters, buffers, optimizer state and caches that functions share, laid out over a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tutti.exec.runtime import Runtime, own_slice, runtime_for, same_everywhere
from tutti.ir.step_graph import GIVEN, Spec, StepGraph
from tutti.plan.layout import Layout, Mesh
from tutti.plan.plan import Plan
from tutti.tracing import optimizers
from tutti.tracing.capture import device_of
from tutti.tracing.holdings import Holdings


class Store:
    """Named objects whose tensors functions read and update.

        store = tutti.Store(generator=g, discriminator=d, optimizer_g=..., optimizer_d=...)

    objects: modules (`nn.Module`), optimizers (`torch.optim`) over parameters of these modules, and other objects with
        tensors in attributes, lists and dicts (a KV cache, the state of an environment).

    The first function of a store chooses the mesh. Each tensor gets its layout from the plan of the first function that
    uses it. The objects themselves are never changed: `state_dict` and `write_back` return the updated state.
    """

    def __init__(self, **objects: Any):
        self.holdings = Holdings(objects)
        self.device = device_of(self.holdings.root)
        self.attributes: frozenset[str] = frozenset()
        self.runtime: Runtime | None = None
        self.mesh: Mesh = {}
        self.layouts: dict[str, Layout] = {}
        self.labels: dict[str, str] = {}
        self.specs: dict[str, Spec] = {}
        self.parts: list[dict[str, torch.Tensor]] = []  # by rank of this process
        names = {p: name for name, p in self.holdings.root.named_parameters()}
        self.updates: dict[str, int] = {}  # of each parameter that an optimizer has
        for optimizer in self.holdings.optimizers.values():
            self.updates |= {names[p]: n for p, n in optimizers.update_counts(optimizer).items()}

    # -- what functions call --------------------------------------------------------------------------------------

    def lay_out(self, graph: StepGraph, plan: Plan) -> None:
        """Place what a graph needs and the store has not placed yet.

        Raises ValueError where the plan is for another mesh, or has a placed tensor lie otherwise.
        """
        if self.runtime is None:
            self.mesh, self.runtime = dict(plan.mesh), runtime_for(plan.mesh)
            self.parts = [{} for _ in self.runtime.ranks]
        if dict(plan.mesh) != self.mesh:
            raise ValueError(f"the plan is for the mesh {plan.mesh}, the store lies on {self.mesh}")
        wanted = {name: node for name, node in graph.inputs.items() if name.partition(":")[0] not in GIVEN}
        fresh = {name for name in wanted if name not in self.layouts}
        whole = self._initial(fresh) if fresh else {}
        for name, node in wanted.items():
            layout = plan.input_layout(node.meta["label"])
            if name in fresh:
                self.labels[name], self.specs[name] = node.meta["label"], node.meta["val"]
                self.place(name, same_everywhere(whole[name].to(self.device)), layout)
            elif self.layouts[name] != layout:
                raise ValueError(f"the plan has {name} lie as {layout}, the store as {self.layouts[name]}")

    def _initial(self, names: set[str]) -> dict[str, torch.Tensor]:
        """What the objects hold."""
        held = {name: x.detach() for name, x in self.holdings.tensors(self.attributes).items() if name in names}
        return held | {name: x for name, x in self.holdings.states() if name in names}

    def stored(self, graph: StepGraph) -> dict[str, Layout]:
        """The layouts of a graph's inputs that are placed already, by label; their labels become those of the store."""
        for name, node in graph.inputs.items():
            node.meta["label"] = self.labels.get(name, node.meta["label"])
        return {node.meta["label"]: self.layouts[name] for name, node in graph.inputs.items() if name in self.layouts}

    def place(self, name: str, whole: torch.Tensor, layout: Layout | None = None) -> None:
        """Give each rank its part of a whole tensor."""
        self.layouts[name] = layout = self.layouts[name] if layout is None else layout
        assert self.runtime is not None
        for held, rank in zip(self.parts, self.runtime.ranks, strict=True):
            held[name] = own_slice(whole.to(self.device), layout, self.mesh, rank)

    def keep(self, outputs: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Take from the outputs of each rank what succeeds a stored tensor."""
        for held, new in zip(self.parts, outputs, strict=True):
            held.update({name: value for name, value in new.items() if name in held})

    def behind(self) -> dict[str, dict[str, int]]:
        """By how many updates each parameter is behind the most of its optimizer."""
        found: dict[str, dict[str, int]] = {}
        most = self.counts()
        for name, owner in self.holdings.optimizer_of.items():
            if name in self.updates:
                found.setdefault(owner, {})[name] = most[owner] - self.updates[name]
        return found

    def counts(self) -> dict[str, int]:
        """The most updates that each optimizer has done on a parameter."""
        of = self.holdings.optimizer_of
        return {key: max((n for name, n in self.updates.items() if of[name] == key), default=0)
                for key in self.holdings.optimizers}  # fmt: skip

    # -- what users call ------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> torch.Tensor:
        """A full CPU tensor, by the name of an input (`param:generator.up.weight`). All ranks must call it."""
        if name not in self.layouts:
            raise KeyError(f"no function has used {name!r} yet; there are {list(self.layouts)[:8]} ...")
        assert self.runtime is not None
        return self.runtime.whole([held[name] for held in self.parts], self.layouts[name], self.specs[name])

    def names(self, kind: str = "") -> list[str]:
        """The names of placed tensors, of one kind or of all."""
        return [name for name in self.layouts if not kind or name.startswith(f"{kind}:")]

    def state_dict(self, module: str) -> dict[str, torch.Tensor]:
        """Parameters and buffers of a module under its own names: full CPU tensors."""
        own = self.holdings.modules[module].state_dict()
        names = {id(t): name for name, t in self.holdings.slots(self.attributes).named().items()}
        held = {key: names.get(id(t)) for key, t in self._tensors_of(module).items() if key in own}
        return {key: self[name] if name in self.layouts else own[key].cpu() for key, name in held.items()}

    def _tensors_of(self, module: str) -> dict[str, torch.Tensor]:
        found = self.holdings.modules[module]
        return dict(found.named_parameters(remove_duplicate=False)) | dict(found.named_buffers(remove_duplicate=False))

    def write_back(self) -> None:
        """Copy the stored parameters, buffers and caches into the objects themselves. Optimizer state is not copied."""
        with torch.no_grad():
            for name, tensor in self.holdings.tensors(self.attributes).items():
                if name in self.layouts:
                    tensor.copy_(self[name])

    def training_state(self) -> dict[str, torch.Tensor]:
        """Everything placed, as full CPU tensors by name, and the number of updates of each parameter."""
        return {name: self[name] for name in self.layouts} | {
            f"updates:{name}": torch.tensor(n) for name, n in self.updates.items()
        }

    def load_training_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """The inverse of `training_state`, under any plan. Raises ValueError if a tensor is missing or unlike."""
        for name in self.layouts:
            if name not in state or Spec.of(state[name]) != self.specs[name]:
                found = "nothing" if name not in state else str(Spec.of(state[name]))
                raise ValueError(f"the state has {found} for {name!r}, which is {self.specs[name]}")
        for name in self.layouts:
            self.place(name, state[name])
        self.updates |= {n.partition(":")[2]: int(x) for n, x in state.items() if n.startswith("updates:")}
