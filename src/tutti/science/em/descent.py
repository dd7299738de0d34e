"""Training of small networks on batches that are drawn anew in each step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tutti.api.parallelize import parallelize
from tutti.hardware.threads import threads
from tutti.launch.progress import progress
from tutti.science.em.bounds import check_whole

REPORT_EVERY = 100  # steps between reports


def check_rate(rate: float) -> None:
    if not rate > 0:
        raise ValueError(f"rate of the training: positive, not {rate}")


def descend(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler,
            draw: Callable[[], Any], loss: Callable[[Any, Any], Tensor], steps: int,
            after: Callable[[int, float], None] | None = None, captured: bool = True,
            what: str = "training a network") -> None:  # fmt: skip
    """Train a model in place, on one thread. draw: the next batch. after: is called with a step's number and its loss,
    every 100 steps and at the end. captured: as a graph, which takes half the time of eager steps; not for optimizers
    without a pure form. what: label of the progress line. Raises ValueError if the loss is not finite, or without
    steps."""
    check_whole("the training", steps=steps)

    def eager(batch: Any) -> Tensor:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        return value.detach()

    step = parallelize(model, optimizer, draw(), loss=loss, plan="single", level="O0") if captured else None
    with threads(1), progress(what) as tell:  # layers are small
        for i in range(steps):
            value = (step or eager)(draw())
            schedule.step()
            if i % REPORT_EVERY == 0 or i == steps - 1:
                if not math.isfinite(number := float(value)):
                    raise ValueError(f"training diverged: lower the rate; the loss after {i + 1} steps is {number}")
                tell.count(i, steps, f"loss {number:.3g}")
                if after:
                    after(i, number)
