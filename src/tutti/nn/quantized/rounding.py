"""Rounding to bfloat16.

`tutti::round_to_nearest` is `x.to(torch.bfloat16)`, except that a compiler never skips it: Inductor computes a chain of
bfloat16 operators in float32 and rounds its result only. A partial sum is reduced before it is rounded.

Stochastic rounding (Gupta et al., "Deep learning with limited numerical precision", 2015, section 3).

`tutti::round_stochastically` is (x, u) -> y: x and u float32 of one shape, y bfloat16. Of the two bfloat16 numbers
around x it is the one further from zero if u, uniform in [0, 1), is at least the remaining fraction of the way to it,
so y equals x on average. Representable values are unchanged, infinity and NaN too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.nn.dense import register

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define("round_to_nearest(Tensor x) -> Tensor")
_library.define("round_stochastically(Tensor x, Tensor u) -> Tensor")


def forward(x: Tensor, u: Tensor) -> Tensor:
    """The operator in plain ATen: bfloat16 is the upper half of float32; adding u to the lower half carries into it."""
    carried = (x.view(torch.int32) + (u * 65536).to(torch.int32)) & -65536
    return torch.where(x.isfinite(), carried.view(torch.float32), x).to(torch.bfloat16)


register(_library, "round_to_nearest", lambda x: x.to(torch.bfloat16, copy=True))
register(_library, "round_stochastically", forward)
