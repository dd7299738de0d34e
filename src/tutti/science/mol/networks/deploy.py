"""Networks, ensembles and what `compile_for_md` made, in other programs.

atoms.calc = calculator(network)  # ASE: energy, forces, stress
system.addForce(openmm_force(network, species))  # OpenMM
torch.export.save(export(network, batch), "water.pt2")  # energies and forces without Python code of ours
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tutti.extras import extra
from tutti.science.mol import cell as cells
from tutti.science.mol.neighbors import NeighborList
from tutti.science.mol.networks.batch import Batch
from tutti.science.mol.networks.ensemble import Ensemble
from tutti.science.mol.networks.fast.compiled import Compiled
from tutti.science.mol.networks.network import Network
from tutti.science.mol.networks.potential import Differentiable, NetworkPotential, trained_species
from tutti.science.mol.networks.ragged import sum_at, take
from tutti.science.mol.potential import Evaluation
from tutti.science.mol.units import ELECTRONVOLT, MD, Units

OPENMM = "openmm>=8.4"


class Evaluator:
    """A network at positions of one set of atoms after another, with a neighbor list that is kept between calls."""

    def __init__(self, network: Differentiable | Compiled, units: Units, skin: float) -> None:
        self.network, self.units, self.skin = network, units, skin
        self.cached: Any = None

    def __call__(self, species: Tensor, positions: Tensor, cell: Tensor | None, pbc: cells.Periodic,
                 virial: bool = False) -> Evaluation:  # fmt: skip
        key = species.tolist(), pbc
        if self.cached is None or self.cached[0] != key:
            potential = NetworkPotential(self.network, species, self.units)
            self.cached = key, potential, NeighborList(potential.cutoff, self.skin, pbc=pbc)
        _, potential, neighbors = self.cached
        h = None if cell is None else cell[None]
        neighbors.update(positions[None], h)
        return potential.evaluate(positions[None], h, neighbors, virial)


def calculator(network: Differentiable | Compiled, skin: float = 0.5) -> Any:
    """An ASE calculator. skin: skin of its neighbor list in angstrom. There is a stress, -virial / volume, where three
    axes are periodic.

    As `openmm_force`, it raises ValueError for species that the network's training has not had.
    """
    with extra("mol"):
        from ase.calculators.calculator import Calculator, PropertyNotImplementedError, all_changes
        from ase.stress import full_3x3_to_voigt_6_stress

    class NetworkCalculator(Calculator):
        implemented_properties = ["energy", "free_energy", "forces", "stress"]  # noqa: RUF012

        def __init__(self) -> None:
            super().__init__()
            self.evaluate = Evaluator(network, ELECTRONVOLT, skin)

        def calculate(
            self, atoms: Any = None, properties: Any = ("energy",), system_changes: Any = all_changes
        ) -> None:
            super().calculate(atoms, properties, system_changes)
            now: Any = self.atoms
            cell, strained = torch.from_numpy(now.cell[:].copy()), "stress" in properties
            pbc = cells.periodic(now.pbc, cell)
            if strained and not all(pbc):
                raise PropertyNotImplementedError("the stress needs three periodic axes")
            species, positions = torch.from_numpy(now.numbers.astype("int64")), torch.from_numpy(now.get_positions())
            evaluation = self.evaluate(species, positions, cell if any(pbc) else None, pbc, strained)
            energy = float(evaluation.energy)
            self.results = {"energy": energy, "free_energy": energy, "forces": evaluation.forces[0].numpy()}
            if evaluation.virial is not None:
                stress = -evaluation.virial[0].numpy() / now.get_volume()
                self.results["stress"] = full_3x3_to_voigt_6_stress(stress)

    return NetworkCalculator()


def openmm_force(network: Differentiable | Compiled, species: Any, periodic: bool = False, skin: float = 0.05) -> Any:
    """An `openmm.PythonForce` of all atoms, or of those that its `setParticles` names: `species` are theirs.

    skin: skin of the neighbor list in nm. Raises ModuleNotFoundError where OpenMM is missing or has no PythonForce.
    """
    try:
        import openmm
    except ModuleNotFoundError:
        raise ModuleNotFoundError(f"there is no package openmm; pip install '{OPENMM}'", name="openmm") from None
    if not hasattr(openmm, "PythonForce"):
        raise ModuleNotFoundError(f"openmm {openmm.__version__} has no PythonForce; pip install '{OPENMM}'")
    numbers, evaluate, pbc = (
        trained_species(network, species),
        Evaluator(network, MD, skin),
        (periodic, periodic, periodic),
    )

    def compute(state: Any) -> tuple[float, Any]:
        """kJ/mol and kJ/mol/nm."""
        positions = torch.from_numpy(state.getPositions(asNumpy=True)._value.copy()).double()
        cell = torch.from_numpy(state.getPeriodicBoxVectors(asNumpy=True)._value.copy()) if periodic else None
        evaluation = evaluate(numbers, positions, cell, pbc)
        return float(evaluation.energy), evaluation.forces[0].numpy()

    force = openmm.PythonForce(compute)
    force.setUsesPeriodicBoundaryConditions(periodic)
    return force


class EnergiesAndForces(nn.Module):
    """What is exported: tensors in, energies (B) and forces (A, 3) out."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, species: Tensor, positions: Tensor, molecule: Tensor, i: Tensor, j: Tensor, offsets: Tensor,
                sizes: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
        network, weight = self.network, next(self.network.parameters())
        with torch.enable_grad():
            x = positions.detach().requires_grad_()
            vectors = take(x, j) - take(x, i) + offsets
            each = network.atomic(species, vectors.to(weight.dtype), i, j).double() * network.scale
            energy = sum_at(each + network.references.index_select(0, species), molecule, sizes.shape[0])
            (gradient,) = torch.autograd.grad(energy.sum(), x)
        return energy.detach(), -gradient


def export(network: Network, batch: Batch) -> torch.export.ExportedProgram:
    """Energies and forces as a program of `torch.export`: the backward pass is part of its graph.

    batch: an example with at least two structures; numbers of structures, atoms and edges are free. The program takes
    `arguments(batch)`, and does not check their species. Ensembles and compiled networks are refused: export the
    members.
    """
    if not isinstance(network, Network):
        raise ValueError(f"export: a network, not {type(network).__name__}"
                         + (": export each of its members" if isinstance(network, Ensemble) else ""))  # fmt: skip
    if batch.count < 2 or len(batch.i) < 2:
        raise ValueError("export: an example of at least two structures and two edges, so that their numbers are free")
    from torch.fx.experimental.proxy_tensor import make_fx

    example = arguments(batch)
    frozen = [p for p in network.parameters() if p.requires_grad]
    try:
        for p in frozen:
            p.requires_grad_(False)
        graph = make_fx(EnergiesAndForces(network), tracing_mode="symbolic", _allow_non_fake_inputs=True)(*example)
    finally:
        for p in frozen:
            p.requires_grad_(True)
    free = tuple({0: torch.export.Dim.AUTO} for _ in example)
    return torch.export.export(graph, example, dynamic_shapes=free, strict=False)


def arguments(batch: Batch) -> tuple[Tensor, ...]:
    """species, positions, molecule (A), i, j (E), offsets (E, 3), sizes (B): what exported programs take."""
    return batch.species, batch.positions, batch.molecule, batch.i, batch.j, batch.offsets(), batch.sizes
