"""Gradient centralization."""

from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from tutti.optim.pure import PureOptimizer
from tutti.tracing.optimizers import check
from tutti.tracing.optimizers.marks import CENTRALIZE, centralized

T = TypeVar("T", bound=Optimizer)


def centralize_gradients(optimizer: T) -> T:
    """Make an optimizer subtract from each gradient its mean over the fan-in, and return the optimizer.

        optimizer = tutti.optim.centralize_gradients(torch.optim.SGD(model.parameters(), lr=0.1))

    A gradient of shape (out, in, ...) loses its mean over all dims but the first: g <- g - mean(g). Vectors stay as
    they are. It happens after clipping, and before weight decay and the optimizer's own formula. `step()` does the same
    as a captured step.

    To centralize some parameters only, set `"centralize": True` in their group instead; plain `step()` of an optimizer
    of `torch.optim` ignores that key.

    Raises ValueError for an optimizer whose update cannot be captured.

    Yong et al., "Gradient centralization: a new optimization technique for deep neural networks" (2020).
    """
    check(optimizer)
    for group in optimizer.param_groups:
        group[CENTRALIZE] = True
    if not isinstance(optimizer, PureOptimizer):
        optimizer.register_step_pre_hook(_centralize)
    return optimizer


@torch.no_grad()
def _centralize(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and group.get(CENTRALIZE):
                p.grad.copy_(centralized(p.grad))


_centralize.captured = True  # pyright: ignore[reportFunctionMemberAccess]
