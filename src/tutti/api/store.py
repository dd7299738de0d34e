"""Store: parameters, buffers, optimizer state and caches that functions share, laid out over a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from tutti import compat
from tutti.checkpoint.checkpoints import Checkpoints
from tutti.checkpoint.of_store import read_store, write_store
from tutti.checkpoint.peer_checkpoint import PeerCheckpoint
from tutti.checkpoint.reader import CheckpointReader
from tutti.exec.stores import model_state
from tutti.exec.stores.live_store import LiveStore
from tutti.ir.kind import CALL_INPUTS, Kind, kind_of, path_of
from tutti.ir.spec import Spec
from tutti.ir.step_graph import StepGraph
from tutti.launch.heartbeat import HEARTBEAT
from tutti.plan.layouts.layout import Layout, Mesh
from tutti.plan.plan import Plan
from tutti.tracing import optimizers
from tutti.tracing.capture import device_of
from tutti.tracing.function import Captured, capture_function
from tutti.tracing.holdings import Holdings
from tutti.tracing.trace.remote import home_of, shaped


class Store(LiveStore):
    """Named objects whose tensors functions read and update.

        store = tutti.Store(generator=g, discriminator=d, optimizer_g=..., optimizer_d=...)

    objects: modules (`nn.Module`), optimizers (`torch.optim`) over parameters of these modules, and other objects with
        tensors in attributes, lists and dicts (a KV cache, the state of an environment).
    fp32_master_weights: the optimizers keep and update float32 copies of low-precision parameters.

    live: the objects have the values that functions compute, and functions those that are written into the objects
        (docs/concepts/live.md). Without it the store begins with copies, and the objects stay as they are.
    share_frozen: without `live`, parameters that require no gradients are not copied where a process holds them whole:
        nobody may write into them.

    The first function of a store chooses the mesh. Each tensor gets its layout from the plan of the first function that
    uses it; `relayout` changes layouts. `save` and `load` are checkpoints.
    """

    def __init__(
        self, *, fp32_master_weights: bool = False, live: bool = True, share_frozen: bool = False, **objects: Any
    ):
        self.holdings = Holdings(objects, fp32_master_weights)
        super().__init__(device_of(self.holdings.root))
        self.is_live, self.share_frozen = live, share_frozen
        self.attributes: frozenset[str] = frozenset()
        self.arrangement: tuple = ()  # the mesh and the layouts, if `relayout` has changed them
        self._home: tuple[Mesh, dict[str, Layout]] = {}, {}  # as functions chose them
        self.calls = 0  # of all functions
        self._loaded: CheckpointReader | None = None  # values of tensors that are not placed yet
        self._loaded_values: dict[str, torch.Tensor] = {}  # such values, too
        self.conversions = 0  # how often tensors have got another shape, dtype or device
        self._hold(self.holdings)

    def _hold(self, holdings: Holdings) -> None:
        """Read the parameters of modules and optimizers, at first and when there are others."""
        names, before = {p: name for name, p in holdings.params.items()}, self.holdings.params
        counts = dict.fromkeys(holdings.optimizer_of, 0)
        for optimizer in holdings.optimizers.values():
            counts |= {names[p]: n for p, n in optimizers.update_counts(optimizer).items()}
        counts |= {name: n for name, n in self.updates.items() if before[name] is holdings.params.get(name)}
        self.updates.clear()
        self.updates.update({name: counts[name] for name in holdings.optimizer_of})
        self.holdings = holdings
        if self.is_live:
            self.live.owners = {name: (holdings.optimizers[key], holdings.params[name])
                                for name, key in holdings.optimizer_of.items()}  # fmt: skip

    # -- what functions call --------------------------------------------------------------------------------------

    def look(self) -> tuple[Any, ...]:
        """Take what the user has changed in the objects. Returns what captured functions depend on: which parameters
        require gradients, numbers of their hooks, and layouts."""
        if not self.is_live:
            return self.arrangement
        now = self.holdings.tensors(self.attributes)
        if (holdings := self.holdings.renewed(now)) is not self.holdings:
            self._hold(holdings)
        self._take(now)
        params = self.holdings.params.items()
        learning = tuple((name, p.requires_grad, sum(map(len, compat.hooks_on(p)))) for name, p in params)
        return self.arrangement, self.conversions, learning

    def _take(self, now: Mapping[str, torch.Tensor]) -> None:
        """Take the values of the objects' tensors. now: these, by name; others may have been there before."""
        mine = self.live.tensors
        replaced = {name: x for name, x in now.items() if name in mine and mine[name] is not x}
        missing = {name for name in mine if kind_of(name) in (Kind.PARAM, Kind.BUFFER, Kind.CACHE) and name not in now}
        missing |= {name for name, x in replaced.items() if Spec.of(x) != self.tensors[name].spec}
        if missing:
            self.live.forget(missing)
            self.conversions += 1
        if replaced := {name: x for name, x in replaced.items() if name not in missing}:
            self.live.leave(replaced)
            self.live.take(replaced.items())
        while converted := self.live.absorb():
            self.live.forget(converted)
            self.conversions += 1

    def ran(self, captured: Captured) -> None:
        """Note that a function has run."""
        self.calls += 1
        self.updates.add(captured.updates)
        for key in {self.holdings.optimizer_of[name] for name in captured.updates}:
            compat.mark_stepped(self.holdings.optimizers[key])
        if self.live.tensors and captured.changed:
            self.live.stepped(captured.changed, captured.updates)

    def lay_out(self, graph: StepGraph, plan: Plan, homes: Mapping[str, int]) -> None:
        """Place the tensors that a graph needs and the store has not placed yet. homes: their devices of a pipeline.

        Raises ValueError if the plan is for another mesh, or has another place for a placed tensor.
        """
        if self.mesh and dict(plan.mesh) != self.mesh:
            raise ValueError(f"the plan is for the mesh {plan.mesh}, the store is on {self.mesh}: store.relayout(plan)")
        self.prepare(plan)
        wanted = {name: node for name, node in graph.inputs.items() if kind_of(name) not in CALL_INPUTS}
        for name, node in wanted.items():
            layout = plan.input_layout(node.meta["label"])
            if name in self.tensors and self.tensors[name].layout != layout:
                raise ValueError(f"the plan lays {name} out as {layout}, the store as {self.tensors[name].layout}: "
                                 "store.relayout(plan)")  # fmt: skip
            if name in self.tensors and self.tensors[name].device != homes.get(name):
                raise ValueError(f"the function changes {name}, which all stages of the pipeline store because earlier "
                                 "functions only read it: make the functions that change it first")  # fmt: skip
        if fresh := {name for name in wanted if name not in self.tensors}:
            self.declare(graph, plan, homes)
            self._place(fresh)

    def _place(self, names: set[str]) -> None:
        """Place first values: those of the objects, or of the state that was loaded."""
        paths = {path_of(name) for name in names if kind_of(name) not in (Kind.PARAM, Kind.BUFFER, Kind.CACHE)}
        values = chain(self.holdings.states(paths) if paths else (), self.holdings.tensors(self.attributes).items())
        values = ((name, x) for name, x in values if name in names)
        if self.is_live:
            self.live.take(values)
            self.live.release()  # parameters that an optimizer's first state was made for
        else:
            self.begin((name, x.detach()) for name, x in values if not self._shares(name, x))
        self.begin((name, x) for name, x in self._loaded_values.items() if name in names)
        if self._loaded:
            placed = self.sharded()
            saved = names & self._loaded.tensors.keys()  # others were not used when it was saved
            self._loaded.load({name: placed[name] for name in sorted(saved) if placed[name].spec.bytes})

    def _shares(self, name: str, x: torch.Tensor) -> bool:
        """Share the memory of a parameter, if that is wanted and possible."""
        wanted = self.share_frozen and kind_of(name) == Kind.PARAM and not x.requires_grad and home_of(x) is None
        if wanted := wanted and x.device == self.device and self.can_share(name, x):
            self.share(name, x.detach())
        return wanted

    def stored(self, graph: StepGraph) -> dict[str, Layout]:
        """The layouts of a graph's inputs that are placed already, by label; their labels become those of the store."""
        for name, node in graph.inputs.items():
            if name in self.tensors:
                node.meta["label"] = self.tensors[name].label
        return {x.label: x.layout for name, x in self.tensors.items() if name in graph.inputs}

    def capture(self, f: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
        """Capture a function of the objects."""
        with shaped(self.holdings.in_memory(self.attributes)):
            return capture_function(f, args, kwargs, self.holdings, updates=self.updates, attributes=self.attributes)

    # -- what users call ------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> torch.Tensor:
        """A full CPU tensor, by the name of an input (`param:generator.up.weight`). All ranks must call it."""
        if name not in self.tensors:
            raise KeyError(f"no function has used {name!r} yet; there are {list(self.tensors)[:8]} ...")
        self.look()
        return self.whole(name)

    def names(self, kind: str = "") -> list[str]:
        """The names of placed tensors, of one kind or of all."""
        return [name for name in self.tensors if not kind or name.startswith(f"{kind}:")]

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layouts of placed tensors, by name."""
        return {name: stored.layout for name, stored in self.tensors.items()}

    def relayout(self, plan: Plan) -> int:
        """Move the stored tensors in memory to the layouts of a plan, such as `decode.best_plan()`.

        Tensors that the plan does not name keep their layout; on another mesh they are split into as many parts. Each
        rank receives only blocks that it does not hold. Returns the bytes that this process received from other ranks
        (with virtual devices: all of them together). The functions of the store adapt to the layouts at their next
        call; what they compiled for earlier layouts is kept.

        Every rank of a job must call it. Raises ValueError for pipelines, for another number of devices, and before any
        function has used the store.
        """
        if not isinstance(plan, Plan):
            raise ValueError(f"relayout takes a tutti.Plan, such as fn.best_plan() or fn.plan, not {plan!r}")
        if not self.mesh:
            raise ValueError("no function has used the store yet, so it has no layouts to change")
        self.look()
        if not self.arrangement:
            self._home = self.mesh, self.layouts
        asked = {name: plan.inputs[x.label] for name, x in self.tensors.items() if x.label in plan.inputs}
        self.live.release()
        received = self.move_to(asked, plan.mesh, self.live.moved)
        self.live.share_again()
        mesh, layouts = self._home
        at_home = mesh == self.mesh and all(self.tensors[name].layout == x for name, x in layouts.items())
        self.arrangement = () if at_home else (*self.mesh.items(), *self.layouts.items())
        return received

    def save(
        self,
        checkpoints: Checkpoints,
        facts: Mapping[str, Any] | None = None,
        fill: Callable[[Path], None] = lambda folder: None,
        in_memory: bool = False,
    ) -> None:
        """Start a checkpoint of everything placed. Writing continues in the background.

        Arguments are those of `Step.save`. The checkpoint's number is the number of calls of the store's functions.
        """
        self.look()
        write_store(self, checkpoints, self.calls, {"updates": self.updates, **(facts or {})}, fill, in_memory)

    @HEARTBEAT.working("loads a checkpoint")
    def load(self, folder: str | Path | PeerCheckpoint | None) -> None:
        """Load a checkpoint of this store under any plan. Tensors that no function has used yet are read when one does;
        tensors that are not in the checkpoint then begin with the values of the objects.

        Raises ValueError if there is no checkpoint (None), if placed tensors are missing in it or differ in shape or
        dtype, or if files are missing or have the wrong size; nothing has changed then. Every rank of a job must call
        it.
        """
        if folder is None:
            raise ValueError("there is no checkpoint to load: Checkpoints.latest() returned None")
        self.look()  # or what the user has replaced would win
        about, self._loaded, _ = read_store(self, folder, exactly=False)
        self._loaded_values, self.calls = {}, about["step"]
        self.updates.update({name: n for name, n in about["updates"].items() if name in self.updates})
        self.replaced()

    def state_dict(self, module: str) -> dict[str, torch.Tensor]:
        """Parameters and buffers of a module under its own names: full CPU tensors."""
        self.look()
        return model_state.state_dict(self, self.holdings.modules[module], self.holdings.tensors(self.attributes))

    def training_state(self) -> dict[str, torch.Tensor]:
        """Everything placed, as full CPU tensors by name, and the numbers of calls and of updates."""
        self.look()
        counts = {"calls": self.calls} | {f"updates:{name}": n for name, n in self.updates.items()}
        return self.wholes() | {name: torch.tensor(n) for name, n in counts.items()}

    def load_training_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """The inverse of `training_state`, under any plan. Tensors that no function has used yet are placed later.

        Raises ValueError if a placed tensor is missing or differs in shape or dtype; nothing has changed then.
        """
        self.look()
        counts = {name: int(x) for name, x in state.items() if kind_of(name) in ("calls", "updates")}
        self.place_all({name: x for name, x in state.items() if name in self.tensors})
        self._loaded_values = {name: x for name, x in state.items() if name not in self.tensors and name not in counts}
        self._loaded = None
        self.calls = counts.pop("calls", self.calls)
        self.updates.update({path_of(name): n for name, n in counts.items()})
        self.replaced()
