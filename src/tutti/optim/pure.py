"""Optimizers whose update is one pure function, which `step()` and a captured step both call."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from tutti.tracing.optimizers import initial_state, rate_of, update
from tutti.tracing.optimizers.lookup import rule_of


class PureOptimizer(Optimizer):
    """A `torch.optim` optimizer that computes with its rule in `tutti.tracing.optimizers`.

    State has the names and dtypes of the rule, and the update count "step". The marks of groups (`ema_decay`,
    `centralize`) are honoured.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all parameters that have a gradient. Returns the result of `closure`, which is called first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr = torch.tensor(rate_of(group), dtype=torch.float64)
            for param in [p for p in group["params"] if p.grad is not None]:
                state = self.state[param]
                if "step" not in state:
                    state.update(initial_state(self, group, param.detach()), step=torch.tensor(0.0))
                state["step"] += 1
                tensors = {key: x for key, x in state.items() if key != "step"}
                count = state["step"].to(torch.int64).cpu()
                new, tensors = update(self, group, param.detach(), param.grad, tensors, count, lr)
                param.copy_(new)
                state.update(tensors)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` returned. Unlike in torch, state keeps the dtype that the rule gives it."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for param in [p for p in group["params"] if p in self.state]:
                like = rule_of(self).state(group, param.detach())
                state = self.state[param]
                state.update({key: state[key].to(x.dtype) for key, x in like.items() if key in state})


def check_range(name: str, value: float, low: float = 0.0, high: float = float("inf")) -> None:
    """Raise ValueError unless low <= value < high."""
    if not low <= value < high:
        raise ValueError(f"{name} is {value!r}; it must be at least {low:g} and less than {high:g}")


def check_betas(betas: tuple[float, float]) -> None:
    """Raise ValueError unless both decay rates are in [0, 1)."""
    for i, beta in enumerate(betas):
        check_range(f"betas[{i}]", beta, high=1.0)
