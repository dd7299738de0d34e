"""Dtypes of updates: low-precision tensors are computed in float32."""

from typing import Any

import torch
from torch import Tensor

from tutti.compat import unset_fake_temporarily

LOW_PRECISION = (torch.bfloat16, torch.float16)


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """float32 for a low-precision tensor, else its own dtype."""
    return torch.float32 if tensor.dtype in LOW_PRECISION else tensor.dtype


def wide(tensor: Tensor) -> Tensor:
    return tensor.to(wide_dtype(tensor))


def value_of(number: Any) -> float:
    """The value of a number or of a one-element tensor, also while tensors are traced as fakes."""
    with unset_fake_temporarily():
        return float(number)


def rate_of(group: dict[str, Any]) -> float:
    """The learning rate of a parameter group; 0 for an optimizer that computes its own (Adafactor's `lr=None`)."""
    return 0.0 if group["lr"] is None else float(group["lr"])


def number(value: float, param: Tensor) -> Tensor:
    """A 0-d state tensor on the device of `param`, in the dtype that torch.optim gives it."""
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    return torch.full((), value, dtype=dtype, device=param.device)
