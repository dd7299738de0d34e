"""Options of a parameter group around its optimizer's update: centralized gradients, and averaged weights.

| key of a group | effect |
|---|---|
| `centralize` | the gradient of a matrix or kernel loses its mean over the fan-in |
| `ema_decay` | state `ema`: a <- d a + (1 - d) p after each update; a begins as p |

`tutti.optim.centralize_gradients` and `tutti.optim.with_ema` set them. The rules of optimizers do not depend on them.

Yong et al., "Gradient centralization: a new optimization technique for deep neural networks" (2020); Polyak and
Juditsky, "Acceleration of stochastic approximation by averaging" (1992).
"""

from typing import Any

import torch
from torch import Tensor

from tutti.tracing.optimizers.precision import wide, wide_dtype
from tutti.tracing.optimizers.table import Group

CENTRALIZE, EMA_DECAY, EMA = "centralize", "ema_decay", "ema"


def check_marks(group: Group) -> None:
    """Raise ValueError for a decay outside of [0, 1)."""
    decay: Any = group.get(EMA_DECAY)
    if decay is not None and not 0 <= decay < 1:
        raise ValueError(f"ema_decay is {decay!r}; it must be at least 0 and less than 1, such as 0.999")


def centralized(grad: Tensor) -> Tensor:
    """g minus its mean over all dims but the first; a vector as it is."""
    if grad.ndim < 2:
        return grad
    g = wide(grad)
    return (g - g.mean(dim=tuple(range(1, g.ndim)), keepdim=True)).to(grad.dtype)


def first_average(value: Tensor) -> Tensor:
    """The average of a parameter without updates: a copy of it, at least in float32."""
    return torch.empty_like(value, dtype=wide_dtype(value)).copy_(value)


def averaged(decay: float, average: Tensor, param: Tensor, skip: Tensor | None = None) -> Tensor:
    """The average after an update to `param`; as it was if `skip` is 1."""
    new = torch.lerp(param.to(average.dtype), average, decay)
    return new if skip is None else torch.where(skip != 0, average, new)
