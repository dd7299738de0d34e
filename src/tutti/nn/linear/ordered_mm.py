"""A matrix product that adds up in the same order under every plan.

`tutti::ordered_mm` is (added?, a, b, beta, alpha) -> alpha a b + beta added, with a (m, k), b (k, n), added (m, n).

Like `aten.mm` or `aten.addmm`, except that its rule forbids splitting k: in bfloat16, partial sums would be rounded
before they are added, an error of 2^-9 that an iteration such as Newton-Schulz amplifies. m and n can be split. It has
no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.nn.dense import register

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define("ordered_mm(Tensor? added, Tensor a, Tensor b, float beta=1.0, float alpha=1.0) -> Tensor")


def _forward(added: Tensor | None, a: Tensor, b: Tensor, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    if added is None:
        return a @ b if alpha == 1 else alpha * (a @ b)
    return torch.addmm(added, a, b, beta=beta, alpha=alpha)


register(_library, "ordered_mm", _forward)


def ordered_mm(a: Tensor, b: Tensor, added: Tensor | None = None, *, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    return torch.ops.tutti.ordered_mm(added, a, b, beta, alpha)
