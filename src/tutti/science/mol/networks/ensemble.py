"""Networks that were trained alike from different initial weights: their mean, and how far they disagree.

ensemble = Ensemble([SchNet(), SchNet(), SchNet()])  # each trained by `fit`
found = ensemble.predict(batch)
found.force_spread.max()  # large where the training set has nothing similar
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tutti.science.mol.networks.batch import Batch
from tutti.science.mol.networks.fast.compiled import Compiled
from tutti.science.mol.networks.network import Network


@dataclass(frozen=True)
class Prediction:
    """Means over members, and root-mean-square distances from them: |F_m - mean F| for forces."""

    energy: Tensor  # (B)
    forces: Tensor  # (A, 3)
    energy_spread: Tensor  # (B)
    force_spread: Tensor  # (A)


class Ensemble(nn.Module):
    """The mean of networks with the same units: a `Network` in all that simulations and other programs need of one."""

    def __init__(self, members: Sequence[Network]) -> None:
        super().__init__()
        if len(members) < 2:
            raise ValueError(f"an ensemble has at least two members, not {len(members)}")
        self.units = _shared_units(members)
        self.members = nn.ModuleList(members)
        self.cutoff, self.reach = (max(getattr(x, name) for x in members) for name in ("cutoff", "reach"))

    def energy(self, batch: Batch, positions: Tensor | None = None) -> Tensor:
        """Mean energies (B), differentiable."""
        energies = [x.energy(batch, positions) for x in self.members]  # pyright: ignore
        return torch.stack(energies).mean(0)

    def check_species(self, species: Tensor) -> None:
        """Raise ValueError for atomic numbers (N) that the training of a member has not had."""
        for member in self.members:
            member.check_species(species)  # pyright: ignore

    def energy_and_forces(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Means: (B), (A, 3), detached."""
        prediction = self.predict(batch)
        return prediction.energy, prediction.forces

    def predict(self, batch: Batch) -> Prediction:
        return _predict(self.members, batch)


class CompiledEnsemble:
    """What `compile_for_md` makes of an ensemble: the mean of its compiled members."""

    def __init__(self, ensemble: Ensemble, members: Sequence[Compiled]) -> None:
        self.members, self.network = members, deepcopy(ensemble)
        self.cutoff, self.units = ensemble.cutoff, ensemble.units

    def evaluate(self, batch: Batch, half: bool = False, virial: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        """As `Compiled.evaluate`."""
        energies, forces, virials = zip(*(x.evaluate(batch, half, virial) for x in self.members), strict=True)
        mean = torch.stack(virials).mean(0) if virial else None
        return torch.stack(energies).mean(0), torch.stack(forces).mean(0), mean

    def energy_and_forces(self, batch: Batch) -> tuple[Tensor, Tensor]:
        energy, forces, _ = self.evaluate(batch)
        return energy, forces

    def predict(self, batch: Batch) -> Prediction:
        return _predict(self.members, batch)


def _predict(members: Any, batch: Batch) -> Prediction:
    predictions = [x.energy_and_forces(batch) for x in members]
    energies, forces = torch.stack([e for e, _ in predictions]), torch.stack([f for _, f in predictions])
    apart = (forces - forces.mean(0)).square().sum(-1)
    return Prediction(energies.mean(0), forces.mean(0), energies.std(0, correction=0), apart.mean(0).sqrt())


def _shared_units(members: Sequence[Network]) -> str:
    units = {x.units for x in members}
    if len(units) > 1:
        raise ValueError(f"the members of an ensemble have the units {', '.join(sorted(units))}: give them the same")
    return units.pop()
