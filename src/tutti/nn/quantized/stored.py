"""``tutti::stored``: a copy that a compiler keeps in memory.

Inductor writes an elementwise expression out again in each operator that reads it. A chain of operators that read their
operand twice, such as a hash, then becomes an expression of exponential size. A stored value is computed once.

Compilers also compute equal expressions once. Copies with unlike numbers are never merged into one tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutti import compat

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define("stored(Tensor x, int number=0) -> Tensor", tags=(torch.Tag.pointwise, torch.Tag.pt2_compliant_tag))
_library.impl("stored", lambda x, number=0: _copy(x), "CompositeExplicitAutograd")
torch.library.register_fake("tutti::stored", lambda x, number=0: _copy(x), lib=_library)
torch.library.register_vmap("tutti::stored", lambda info, dims, x, number=0: (stored(x), dims[0]), lib=_library)
compat.lower_to_memory(torch.ops.tutti.stored.default)


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def stored(x: Tensor) -> Tensor:
    """A copy that is not computed again by those who read it. Has no gradient."""
    return torch.ops.tutti.stored(x)
