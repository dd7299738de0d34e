"""The arguments of capture, to capture a model's step again for other batch shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tutti.ir.step_graph import StepGraph
from tutti.tracing.batch import Batch
from tutti.tracing.capture import Loss, capture
from tutti.tracing.holdings import state_tensors
from tutti.tracing.trace.remote import shaped
from tutti.tracing.trace.slots import Slots
from tutti.tracing.trace.watch import Watch


@dataclass
class CaptureSpec:
    """The arguments of `capture`. autocast: those of the enclosing `torch.autocast`.

    attributes: paths of plain tensor attributes of the model that are state, as the first capture found them.
    watch: the model's Python state at that moment.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Loss | None
    clip_norm: float | None
    fp32_master_weights: bool
    stochastic_rounding: bool
    guarded: bool
    autocast: dict[str, Any]
    metrics: tuple[str, ...] = ()
    attributes: frozenset[str] = frozenset()
    behind: dict[str, int] | None = None  # by how many updates parameters lag; None: as in the optimizer's state
    only: frozenset[str] | None = None  # the parameters to train; None: all that require gradients

    def __post_init__(self):
        self.watch = Watch(self.model, users=[self.loss])

    def _tensors(self) -> Iterator[torch.Tensor]:
        """The tensors that may be remote: those of the model and of the optimizer."""
        yield from Slots(self.model, self.attributes).named().values()
        yield from state_tensors(self.optimizer)

    def training(self, batch: Batch, microbatches: int = 1) -> StepGraph:
        """Capture the training step for a batch of these shapes, one of `microbatches` for an update."""
        with _modes_kept(self.model), shaped(self._tensors()), torch.autocast(**self.autocast):
            graph = capture(
                self.model,
                batch,
                self.optimizer,
                self.loss,
                clip_norm=self.clip_norm,
                fp32_master_weights=self.fp32_master_weights,
                stochastic_rounding=self.stochastic_rounding,
                guarded=self.guarded,
                attributes=self.attributes,
                microbatches=microbatches,
                behind=self.behind,
                metrics=self.metrics,
                only=self.only,
            )
        if attributes := set(graph.names("buffer")) - dict(self.model.named_buffers()).keys() - self.attributes:
            self.attributes |= attributes
            self.watch = Watch(self.model, self.attributes, [self.loss])
        self.watch.captured(graph.constants.values())
        return graph

    def evaluation(self, batch: Batch) -> StepGraph:
        """The loss in evaluation mode."""
        with _modes_kept(self.model), shaped(self._tensors()), torch.autocast(**self.autocast):
            self.model.eval()
            return capture(self.model, batch, loss=self.loss, gradients=False, attributes=self.attributes,
                           metrics=self.metrics)  # fmt: skip


@contextmanager
def _modes_kept(model: nn.Module) -> Iterator[None]:
    """Restore the training mode of all modules at the end."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def autocast_state(device: torch.device) -> dict[str, Any]:
    """The arguments of the current `torch.autocast`."""
    kind = device.type
    return {
        "device_type": kind,
        "enabled": torch.is_autocast_enabled(kind),
        "dtype": torch.get_autocast_dtype(kind),
        "cache_enabled": False,
    }
