"""The forward pass of a `tutti.Trainer` outside of its training step: to evaluate and to predict."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import tutti
from tutti.train.trainer.arguments import option
from tutti.train.trainer.loss import unpacked
from tutti.train.values import Inputs, NamedValues

if TYPE_CHECKING:
    from tutti.train.trainer.trainer import Trainer

Forward = Callable[[Inputs], tuple[Tensor | None, dict[str, Tensor]]]
ForwardPass = tuple[tuple[bool, bool, tuple[str, ...], int], Forward]  # what a function was made for, and it


def forward_pass(trainer: Trainer, batch: Inputs, has_loss: bool) -> Forward:
    """A Function over the model's parameters that returns the loss and the named outputs of batches like this one.

    It is made again when other outputs are wanted.
    """
    objective, model, args = trainer.objective, trainer.model, trainer.args
    key = has_loss, objective.wanted, objective.ignored, id(model)
    if trainer._forward is not None and trainer._forward[0] == key:
        return trainer._forward[1]

    @torch.no_grad()
    def forward(batch: NamedValues) -> tuple[Tensor | None, dict[str, Tensor]]:
        if has_loss:
            result = objective(model, batch)
            return result if objective.wanted else (result, {})
        with unpacked(batch):
            return None, objective.named(model(**batch), batch, trainer)

    def call(inputs: Inputs) -> tuple[Tensor | None, dict[str, Tensor]]:
        was = model.training
        model.eval()
        try:
            with trainer.autocast():
                return compiled(dict(inputs))
        finally:
            model.train(was)

    training = model.training
    model.eval()
    with trainer.autocast():
        compiled = tutti.function(
            forward, dict(batch), store=tutti.Store(model=model), plan=option(args, "plan"),
            level=option(args, "level"), cluster=option(args, "cluster"), seed=args.seed,
        )  # fmt: skip
    model.train(training)
    trainer._forward = key, call
    return call
