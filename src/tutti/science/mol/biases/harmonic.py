"""Restraints of collective variables."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tutti.science.mol.biases.variables import Variable
from tutti.science.mol.neighbors import Pairs
from tutti.science.mol.potential import Potential
from tutti.science.mol.system import check_finite, check_replicas


class Restraint(Potential):
    """k/2 (s - s0)^2 of a variable s; one center for all replicas, or one each, as for umbrella sampling.

    side: "lower" and "upper" act only below or above the center, as walls.
    """

    name = "restraint"
    half = None

    def __init__(self, variable: Variable, center: float | Tensor, stiffness: float, side: str = "both") -> None:
        if side not in ("both", "lower", "upper"):
            raise ValueError(f"side {side!r} of a restraint is not known; there are both, lower, upper")
        if not 0 <= stiffness < math.inf:
            raise ValueError(f"stiffness {stiffness} is negative or not finite")
        self.variable, self.stiffness, self.side = variable, stiffness, side
        self.center = torch.as_tensor(center, dtype=torch.float64)
        check_finite("center of a restraint", self.center.reshape(-1))

    def energy(self, positions: Tensor, cell: Tensor | None, pairs: Pairs) -> Tensor:
        check_replicas("centers of a restraint", self.center, len(positions))
        away = self.variable.difference(self.variable(positions, cell, pairs.pbc), self.center)
        if self.side != "both":
            away = away.clamp(max=0) if self.side == "lower" else away.clamp(min=0)
        return 0.5 * self.stiffness * away.square()
