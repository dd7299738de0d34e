"""What an algorithm of Boost may do, and when."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from tutti.checkpoint.checkpoints import Checkpoints
from tutti.plan.plan import Plan
from tutti.tracing.batch import Batch
from tutti.train.values import NamedValues, Outputs

if TYPE_CHECKING:
    from tutti.api.step import Step
    from tutti.checkpoint.peer_checkpoint import PeerCheckpoint

Loss = Callable[[nn.Module, Batch], Outputs]  # a 0-d tensor, or it and metrics by name


class NothingToDo(ValueError):
    """The model has nothing that an algorithm could change, or the algorithm lacks what it must know of the run."""


class Algorithm:
    """One algorithm. A training run calls its methods in this order; by default they do nothing.

    An instance belongs to one run. acts: whether it has a `before` or an `after`.
    """

    @property
    def acts(self) -> bool:
        return type(self).before is not Algorithm.before or type(self).after is not Algorithm.after

    def prepare_model(self, model: nn.Module, batch: Batch, loss: Loss, steps: int | None = None) -> None:
        """Change the model in place, before an optimizer is made of its parameters. Raises NothingToDo.

        steps: number of steps of the whole run, if it is known.
        """

    def loss(self, loss: Loss) -> Loss:
        """The loss to train with. loss: `loss(model, batch)`, as in `tutti.parallelize`."""
        return loss

    def classes(self, model: nn.Module) -> Mapping[str, int]:
        """Parameter -> class, from 1, if some steps train only some of the classes (`tutti.Step.count_apart`)."""
        return {}

    def before(self, step: Step, number: int) -> None:
        """Called before a `tutti.Step` is trained. number: number of steps done so far."""

    def after(self, step: Step, batch: Batch) -> None:
        """Called after a `tutti.Step` was trained on a batch, also if that raised an error."""

    def options(self) -> NamedValues:
        """Options of `tutti.parallelize` that it needs, unless they are given."""
        return {}

    def replaced(self, step: Training, batch: Batch, loss: Loss, options: NamedValues) -> Training:
        """The step that training calls, in place of a step made with these arguments."""
        return step


class Training(Protocol):
    """What `Boost.make_step` returns: the part of `tutti.Step` that every algorithm keeps."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    metrics: dict[str, Tensor]

    @property
    def steps(self) -> int: ...
    @property
    def skipped(self) -> int: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def accumulate(self) -> int: ...
    @property
    def flops(self) -> int: ...
    def __call__(self, batch: Batch) -> Tensor: ...
    def evaluate(self, batch: Batch) -> Tensor: ...
    def grad_norm(self) -> Tensor: ...
    def state_dict(self) -> dict[str, Tensor]: ...
    def training_state(self) -> dict[str, Tensor]: ...
    def load_training_state(self, state: Mapping[str, Tensor]) -> None: ...
    def save(self, checkpoints: Checkpoints, facts: NamedValues | None = None) -> None: ...
    def load(self, folder: str | Path | PeerCheckpoint) -> int | None: ...


def default_loss(model: nn.Module, batch: Batch) -> Outputs:
    """The loss of `tutti.parallelize(..., loss=None)`: the model's output, or its `.loss`."""
    output = model(**batch) if isinstance(batch, Mapping) else model(*batch)
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)


def loss_with(tensors: Mapping[str, Tensor], model: nn.Module, batch: Batch, loss: Loss) -> Outputs:
    """`loss(model, batch)` with these tensors, by name, in place of the model's parameters and buffers."""
    parameters = {f"model.{name}": x for name, x in tensors.items()}
    return torch.func.functional_call(_Bound(model, loss), parameters, (batch,))


class _Bound(nn.Module):
    """A loss as a module, so that the parameters of its model can be replaced for one call."""

    def __init__(self, model: nn.Module, loss: Loss):
        super().__init__()
        self.model, self.of = model, loss

    def forward(self, batch: Batch) -> Outputs:
        return self.of(self.model, batch)
