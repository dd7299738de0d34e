"""A training run that begins as a `tutti.Step` and continues as a function over a store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tutti.api.function import Function, function
from tutti.api.store import Store
from tutti.checkpoint.checkpoints import Checkpoints
from tutti.checkpoint.peer_checkpoint import PeerCheckpoint, opened
from tutti.ir.kind import Kind
from tutti.plan.plan import Plan
from tutti.tracing.batch import Batch
from tutti.train.boost.algorithm import Loss
from tutti.train.values import NamedValues

if TYPE_CHECKING:
    from tutti.api.step import Step
    from tutti.train.boost.dim_reduce import DimReduce

OPTIONS = ("cluster", "plan", "level", "pins", "budget", "seed")  # those of `parallelize` that functions have
MARK = "dim_reduce:"  # of entries of the training state


class Reduced:
    """First an ordinary step that keeps copies of the weights, then steps of `DimReduce`.

    It has the methods of a `tutti.Step` that training loops call. Before the switch everything else is the step's, too.
    `step` is None afterwards.
    """

    def __init__(self, step: Step, algorithm: DimReduce, batch: Batch, loss: Loss, options: NamedValues):
        self.step: Any = step  # None after the switch
        self.model, self.optimizer = step.model, step.optimizer
        self._algorithm, self._example, self._loss = algorithm, batch, loss
        self._clips = options.get("clip_norm") is not None
        self._options = {key: options[key] for key in OPTIONS if key in options}
        if isinstance(self._options.get("plan"), Plan | Path):
            self._options["plan"] = "auto"  # a plan of the other graph
        self._cluster = step.cluster
        self._copies: list[Tensor] = []
        self.store: Any = step.store  # a `tutti.Store` after the switch
        self._train: Function | None = None
        self._evaluations: dict[tuple[object, ...], Function] = {}  # by what the loss returns besides its value
        self._norm_at_switch: Tensor | None = None  # of the step that switched
        self.metrics: dict[str, Tensor] = {}

    @property
    def _trained(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def steps(self) -> int:
        """Number of steps done, of both kinds."""
        return self.store.calls if self.step is None else self.step.steps

    @property
    def skipped(self) -> int:
        """Number of skipped steps: none after the switch."""
        return 0 if self.step is None else self.step.skipped

    @property
    def plan(self) -> Plan:
        """The plan that runs, with its prediction."""
        return self.step.plan if self._train is None else self._train.plan

    @property
    def accumulate(self) -> int:
        """Number of microbatches: after the switch a batch is one."""
        return 1 if self.step is None else self.step.accumulate

    @property
    def flops(self) -> int:
        """Floating-point operations of one step, all devices together."""
        return self.step.flops if self._train is None else self._train.graph.flops

    def grad_norm(self) -> Tensor:
        """The 2-norm of all gradients of the last step; after the switch, of their projections. 0-d."""
        if self.step is not None:
            return self.step.grad_norm()
        if self._norm_at_switch is not None:
            return self._norm_at_switch
        return self.store.whole(Kind.CACHE.at("state.last_gradient")).norm()

    def __call__(self, batch: Batch) -> Tensor:
        """Train on a global batch. Returns the mean loss, a 0-d tensor."""
        if self._train is not None:
            self._norm_at_switch = None
            return self._train(batch)
        value, algorithm = self.step(batch), self._algorithm
        self.metrics = self.step.metrics
        if self.step.steps % algorithm.every == 0:
            self._copies.append(torch.cat([self.store.whole(Kind.PARAM.at(name)).flatten() for name in self._trained]))
            if len(self._copies) > algorithm.components:
                if self._clips:
                    self._norm_at_switch = self.step.grad_norm()
                self._switch(algorithm.basis_of(self._copies))
        return value

    def _switch(self, rows: Tensor) -> None:
        """Continue in the subspace. rows: its basis, (k, number of weights)."""
        shapes = [p.shape for p in self._trained.values()]
        parts = rows.split([shape.numel() for shape in shapes], dim=1)
        device = next(iter(self._trained.values())).device
        basis = [part.reshape(-1, *shape).contiguous().to(device) for part, shape in zip(parts, shapes, strict=True)]
        state, done = self._algorithm.first_state(basis), self.step.steps
        self.store = Store(model=self.model, state=state)
        self.store.calls = done
        algorithm, model, loss = self._algorithm, self.model, self._loss
        self.step, self._copies = None, []

        def reduced_step(batch: Batch) -> Tensor:
            return algorithm.update(state, model, batch, loss)

        self._train = function(reduced_step, self._example, store=self.store, **self._options)

    def evaluate(self, batch: Batch) -> Tensor:
        """Compute the mean loss of a batch in evaluation mode, without an update. Returns a 0-d tensor."""
        if self.step is not None:
            value = self.step.evaluate(batch)
            self.metrics = self.step.metrics
            return value
        model, loss = self.model, self._loss

        @torch.no_grad()
        def evaluation(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
            result = loss(model, batch)
            return result if isinstance(result, tuple) else (result, {})

        modes, calls = {module: module.training for module in model.modules()}, self.store.calls
        model.eval()
        try:
            key = getattr(loss, "wanted", None), getattr(loss, "ignored", None)
            if key not in self._evaluations:
                self._evaluations[key] = function(evaluation, batch, store=self.store, **self._options)
            value, self.metrics = self._evaluations[key](batch)
            return value
        finally:
            self.store.calls = calls  # counts steps
            for module, mode in modes.items():
                module.training = mode

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers under the model's names: full CPU tensors."""
        return self.store.state_dict("model") if self.step is None else self.step.state_dict()

    def training_state(self) -> dict[str, Tensor]:
        """All state that resuming needs, as full CPU tensors, with the copies of weights so far."""
        if self.step is None:
            return {f"{MARK}{name}": x for name, x in self.store.training_state().items()}
        copies = {f"{MARK}copies": torch.stack(self._copies)} if self._copies else {}
        return {**self.step.training_state(), **copies}

    def load_training_state(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `training_state`. A run that has switched can only load the state of one that has."""
        own = {name.removeprefix(MARK): x for name, x in state.items() if name.startswith(MARK)}
        if "calls" in own:
            self._prepare()
            self.store.load_training_state(own)
            return
        if self.step is None:
            raise ValueError("the state is of a run before dim_reduce has switched to its subspace, this run is after")
        self._copies = list(own.get("copies", ()))
        self.step.load_training_state({name: x for name, x in state.items() if not name.startswith(MARK)})

    def save(self, checkpoints: Checkpoints, facts: NamedValues | None = None, *args: Any, **kwargs: Any) -> None:
        """Start a checkpoint, as `tutti.Step.save`. Copies of weights are not in it: a resumed run begins them anew."""
        if self.step is None:
            self.store.save(checkpoints, {**(facts or {}), "dim_reduce": True}, *args, **kwargs)
        else:
            self.step.save(checkpoints, facts, *args, **kwargs)

    def load(self, folder: str | Path | PeerCheckpoint) -> None:
        """Load a checkpoint of `save`, of before or after the switch."""
        if opened(folder)[0].get("dim_reduce"):
            self._prepare()
            self.store.load(folder)
        else:
            self.step.load(folder)

    def _prepare(self) -> None:
        """Switch, to load all state afterwards."""
        if self.step is not None:
            sizes = sum(p.numel() for p in self._trained.values())
            self._switch(torch.zeros(self._algorithm.components, sizes))

    def __getattr__(self, name: str) -> Any:
        step = self.__dict__.get("step")
        if step is None:
            raise AttributeError(f"a step in the subspace of dim_reduce has no {name!r}")
        return getattr(step, name)
