"""The learning rate as a pure function of the step, so a checkpoint need not store it."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tutti.train.text.config import Schedule


def learning_rate(step: int, peak: float, schedule: Schedule) -> float:
    """The learning rate of step 0, 1, ..., steps - 1.

    Linear from peak / warmup to peak, then peak * (floor + (1 - floor) * (1 + cos(pi * t)) / 2), with t from 0 at the
    end of warm-up to 1 at the last step (Loshchilov and Hutter 2017, without restarts).
    """
    if step < schedule.warmup:
        return peak * (step + 1) / schedule.warmup
    t = (step - schedule.warmup) / max(1, schedule.steps - 1 - schedule.warmup)
    return peak * (schedule.floor + (1 - schedule.floor) * (1 + math.cos(math.pi * min(t, 1.0))) / 2)


class WarmupCosine(LRScheduler):
    """`learning_rate` as a schedule of torch. The peak of each parameter group is its `lr`."""

    def __init__(self, optimizer: Optimizer, schedule: Schedule):
        self.schedule = schedule
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [learning_rate(self.last_epoch, float(peak), self.schedule) for peak in self.base_lrs]

    def go_to(self, step: int) -> None:
        """Set the learning rates of a step."""
        self.last_epoch, self._last_lr = step, []
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate
            self._last_lr.append(rate)
