"""What all networks share: energies of atoms, summed; forces; references and scale.

E = sum_a scale e_a + reference(Z_a). Energies are float64, as references can be 10^5 times what a force field resolves.
Vectors between atoms are taken in the positions' dtype, then computed with in the dtype of the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tutti.science.mol.elements import SYMBOLS
from tutti.science.mol.networks.batch import SPECIES, Batch
from tutti.science.mol.networks.ragged import take
from tutti.science.mol.units import ELECTRONVOLT


class Network(nn.Module):
    """A neural potential. A kind of network computes `atomic`, and stores its options in `options`.

    cutoff: the largest length of an edge that matters; longer ones change nothing. units: the name of the units
    (`units.PRESETS`) of its data, which are saved with it: "eV" for angstrom and eV, "MD" for nm and kJ/mol.
    seen_species: which atomic numbers training has had, as `fit` records them; none at all means no record, as in
    weights from elsewhere.
    """

    references: Tensor  # (SPECIES) float64
    scale: Tensor  # 0-d float64
    seen_species: Tensor  # (SPECIES) bool

    def __init__(self, cutoff: float, **options: Any) -> None:
        super().__init__()
        if not cutoff > 0:
            raise ValueError(f"cutoff of a network: above 0, not {cutoff}")
        for name, value in options.items():
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name} of a network: at least 1, not {value}")
        self.cutoff = cutoff
        self.units = ELECTRONVOLT.name
        self.options: dict[str, Any] = {"cutoff": cutoff, **options}
        self.register_buffer("references", torch.zeros(SPECIES, dtype=torch.float64))
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        self.register_buffer("seen_species", torch.zeros(SPECIES, dtype=torch.bool))

    @property
    def reach(self) -> float:
        """How far an atom may be that the energy of another one depends on: the cutoff, for each time that messages
        pass."""
        return self.cutoff * self.options.get("interactions", 1) * self.options.get("cycles", 1)

    def atomic(self, species: Tensor, vectors: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Energies of atoms (..., A) before scale and references.

        species (..., A); vectors (..., E, 3) from i to j; i, j (..., E). Leading dims: see `ragged`.
        """
        raise NotImplementedError

    def set_references(self, energies: dict[int, float], scale: float = 1.0) -> None:
        """Set the energy of a lone atom of each species, and what the network's output is multiplied by."""
        self.references.zero_()
        for species, energy in energies.items():
            self.references[species] = energy
        self.scale.fill_(scale)

    def atomic_energies(self, batch: Batch, positions: Tensor | None = None) -> Tensor:
        """Energies of atoms (A), float64, with scale and references."""
        x = batch.positions if positions is None else positions
        vectors = take(x, batch.j) - take(x, batch.i) + batch.offsets()
        weight = next(self.parameters())
        e = self.atomic(batch.species, vectors.to(weight.dtype), batch.i, batch.j)
        return e.double() * self.scale + self.references.index_select(0, batch.species)

    def energy(self, batch: Batch, positions: Tensor | None = None) -> Tensor:
        """Energies (B), float64. positions: instead of the batch's."""
        return batch.sum(self.atomic_energies(batch, positions))

    def energy_and_forces(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Energies (B) and forces (A, 3), detached."""
        with torch.enable_grad():
            x = batch.positions.detach().requires_grad_()
            energy = self.energy(batch, x)
            (gradient,) = torch.autograd.grad(energy.sum(), x)
        return energy.detach(), -gradient

    def check_species(self, species: Tensor) -> None:
        """Raise ValueError for atomic numbers (N) that training has not had. Without a record, all of them pass."""
        seen = self.seen_species.cpu()
        new = species.unique()[~seen[species.unique()]].tolist()
        if new and bool(seen.any()):
            names = ", ".join(SYMBOLS[n] for n in new)
            trained = ", ".join(SYMBOLS[n] for n in seen.nonzero().flatten().tolist())
            raise ValueError(f"the network was not trained on {names}, only on {trained}: its forces on atoms of"
                             f" {names} mean nothing; train it by `fit` on structures with {names}, too")  # fmt: skip

    def _load_from_state_dict(self, state_dict, prefix, *args):
        """States from before the record of species have none."""
        state_dict.setdefault(f"{prefix}seen_species", torch.zeros(SPECIES, dtype=torch.bool))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn, recurse=True):
        """Keep references and scale in float64 when the weights change their dtype."""
        references, scale = self.references, self.scale
        super()._apply(fn, recurse)
        if self.references.dtype != torch.float64:
            self.references = references.to(self.references.device)
            self.scale = scale.to(self.scale.device)
        return self


def distances(vectors: Tensor) -> Tensor:
    """Lengths (..., E) of vectors (..., E, 3), with a finite gradient at 0."""
    return (vectors.square().sum(-1) + 1e-30).sqrt()
