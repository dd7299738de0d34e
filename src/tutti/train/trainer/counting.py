"""A callback of trainers that shows how many steps are done, for training inside of other work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.trainer_callback import TrainerCallback

from tutti.progress import Count


class Counting(TrainerCallback):
    """Counts steps, with the last loss. after: is called with step and loss whenever the trainer logs a loss."""

    def __init__(self, count: Count, after: Callable[[int, float], None] | None = None):
        self.count, self.after, self.loss = count, after, ""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        if logs and "loss" in logs:
            self.loss = f"loss {logs['loss']:.3g}"
            self.count(state.global_step, state.max_steps, self.loss)
            if self.after:
                self.after(state.global_step, logs["loss"])

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.count(state.global_step, state.max_steps, self.loss)
