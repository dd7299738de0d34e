"""Normal random numbers that depend on the seed, the step, the replica and the atom alone.

So a run has the same noise however its atoms or replicas are distributed, and a resumed run needs no state of a
generator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.science.mol import native

VELOCITIES, THERMOSTAT, BAROSTAT, EXCHANGE = range(4)
"""Streams: numbers for different purposes do not repeat each other."""


def normal(seed: int, stream: int, step: int, replicas: int, atoms: int, numbers: Tensor | None = None) -> Tensor:
    """Normal random numbers (R, N, 3), float64. numbers (N) int64: numbers of the atoms, from 0 on by default."""
    out = torch.empty(replicas, atoms, 3, dtype=torch.float64)
    which = None if numbers is None else numbers.data_ptr()
    native.library().normal_numbers(seed, stream, step, 0, replicas, atoms, which, out.data_ptr())
    return out
