"""Networks as potentials of simulations.

    potential = NetworkPotential(compile_for_md(network), system.species, system.units)
    neighbors = potential.neighbors(system, skin=0.1)
    found = potential.evaluate(system.positions, system.cell, neighbors, virial=True)

All replicas are one batch. What `compile_for_md` made computes with its kernel; its definition, `energy`, is the
network that was compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from tutti.science.mol.elements import NUMBERS
from tutti.science.mol.neighbors import NeighborList, Pairs
from tutti.science.mol.networks.batch import SPECIES, Batch
from tutti.science.mol.networks.fast.compiled import Compiled
from tutti.science.mol.part import Part
from tutti.science.mol.potential import Potential, copy_without_caches
from tutti.science.mol.units import MD, PRESETS, Units, factor


class Differentiable(Protocol):
    """A `Network`, or an `Ensemble` of them. They may have `check_species`, as those two do."""

    cutoff: float
    units: str

    def energy(self, batch: Batch, positions: Tensor | None = None) -> Tensor: ...


class NetworkPotential(Potential):
    """A network, an ensemble, or what `compile_for_md` made, as a potential of N atoms.

    species (N): atomic numbers or symbols. units: units of the system, into which those of the network are converted.
    Pairs may be listed once or twice. Raises ValueError for species that the network's training has not had; networks
    without a record of them (`Network.seen_species`) take any.

    >>> from tutti.science.mol.networks import SchNet
    >>> from tutti.science.mol.system import System
    >>> water = System([[0.0, 0, 0], [0.1, 0, 0], [0, 0.1, 0]], species=["O", "H", "H"])
    >>> potential = NetworkPotential(SchNet(8, 1, 8, cutoff=5.0), water.species, water.units)
    >>> potential.evaluate(water.positions, None, potential.neighbors(water)).forces.shape
    torch.Size([1, 3, 3])
    """

    name = "network"
    half = None
    surroundings = True

    def __init__(self, network: Differentiable | Compiled, species: Any, units: Units = MD) -> None:
        self.network, self.units = network, units
        self.species = trained_species(network, species)
        if network.units not in PRESETS:
            raise ValueError(f"units of the network: one of {', '.join(PRESETS)}, not {network.units!r}")
        theirs = PRESETS[network.units]
        self.length = factor("length", units, theirs)  # ours in theirs
        self.scale = factor("energy", theirs, units)  # theirs in ours
        self.cutoff = network.cutoff / self.length
        self.exclusions = torch.zeros(0, 2, dtype=torch.int64)  # networks see bonded atoms as well
        self._last: tuple[Pairs, int, Batch] | None = None
        self._counted: int | None = None  # atoms

    @property
    def reach(self) -> float:
        network: Any = getattr(self.network, "network", self.network)
        return network.reach / self.length

    def divide(self, part: Part) -> NetworkPotential:
        """Energies of atoms that the process owns, which need all atoms within the reach of the network."""
        divided = copy_without_caches(self)
        divided.species = part.of_atoms(self.species, "species")
        divided._counted, divided._last = part.owned, None
        return divided

    def energy(self, positions: Tensor, cell: Tensor | None, pairs: Pairs) -> Tensor:
        network: Any = getattr(self.network, "network", self.network)
        near = pairs.within(self.cutoff, positions, None if cell is None else cell.detach())
        if near.half:
            near = Pairs(near.replica.repeat(2), torch.cat([near.i, near.j]), torch.cat([near.j, near.i]),
                         torch.cat([near.shift, -near.shift]), near.pbc, False)  # fmt: skip
        return network.energy(self._moved(self._batch(near, positions), positions, cell)) * self.scale

    def accumulate(
        self, positions: Tensor, cell: Tensor | None, neighbors: NeighborList, forces: Tensor, virial: Tensor | None
    ) -> dict[str, Tensor]:
        network: Any = self.network
        if not hasattr(network, "evaluate"):
            return super().accumulate(positions, cell, neighbors, forces, virial)
        pairs, replicas = neighbors.pairs, len(positions)
        if self._last is None or self._last[0] is not pairs or self._last[1] != replicas:
            self._last = pairs, replicas, self._batch(pairs, positions)
        batch = self._moved(self._last[2], positions, cell)
        energy, of_atoms, tensor = network.evaluate(batch, half=pairs.half, virial=virial is not None)
        forces.add_(of_atoms.view_as(forces), alpha=self.scale * self.length)
        if virial is not None:
            virial.add_(tensor, alpha=self.scale)
        return {self.name: energy * self.scale}

    def _batch(self, pairs: Pairs, positions: Tensor) -> Batch:
        """The atoms of all replicas, and pairs in the order of replicas."""
        replicas, atoms, _ = positions.shape
        if atoms != len(self.species):
            raise ValueError(f"the potential has {len(self.species)} atoms, the positions {atoms}")
        start = pairs.replica * atoms
        return Batch(self.species.repeat(replicas), positions, torch.arange(replicas).repeat_interleave(atoms),
                     pairs.i + start, pairs.j + start, replicas, pairs.shift if any(pairs.pbc) else None,
                     counted=self._counted)  # fmt: skip

    def _moved(self, batch: Batch, positions: Tensor, cell: Tensor | None) -> Batch:
        """In the network's units."""
        x = positions.reshape(-1, 3) * self.length
        return replace(batch, positions=x, cell=None if cell is None or batch.shifts is None else cell * self.length)


def trained_species(network: Any, species: Any) -> Tensor:
    """`atomic_numbers`. Raises ValueError for those that the training of the network has not had."""
    numbers = atomic_numbers(species)
    check = getattr(getattr(network, "network", network), "check_species", None)
    if check is not None:
        check(numbers)
    return numbers


def atomic_numbers(species: Tensor | Sequence[int | str]) -> Tensor:
    """(N) int64 of numbers or symbols that networks can have, from 1 on."""
    if not isinstance(species, Tensor):
        unknown = [x for x in species if isinstance(x, str) and x not in NUMBERS]
        if unknown:
            raise ValueError(f"there is no element {unknown[0]!r}")
        species = torch.tensor([NUMBERS[x] if isinstance(x, str) else int(x) for x in species])
    wrong = ((species < 1) | (species >= SPECIES)).nonzero().flatten().tolist()
    if species.ndim != 1 or wrong:
        raise ValueError(f"species of a network: atomic numbers from 1 to {SPECIES - 1}, one for each atom, not "
                         f"{species[wrong[0]].item() if wrong else tuple(species.shape)}"
                         + (f" of atom {wrong[0]}" if wrong else ""))  # fmt: skip
    return species.to(torch.int64)
