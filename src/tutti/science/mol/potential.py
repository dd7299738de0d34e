"""Potentials: an energy of positions in torch operators is the definition; `evaluate` is what simulations call.

Conventions: forces are -dU/dx. The virial is W = -sum over pairs of r (x) dU/dr = -dU/d(strain), so that the pressure
is (2 KE + tr W) / (3 V). NIST's tables for Lennard-Jones list tr W.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from tutti.science.mol.neighbors import NeighborList, Pairs, unique_pairs
from tutti.science.mol.part import Part
from tutti.science.mol.system import System

T = TypeVar("T", bound="Potential")


@dataclass
class Evaluation:
    """What a potential says of R replicas."""

    energy: Tensor  # (R)
    forces: Tensor  # (R, N, 3)
    virial: Tensor | None  # (R, 3, 3)
    terms: dict[str, Tensor]  # (R) each; they add up to the energy


class Potential:
    """Subclasses define `energy`; those with a kernel also `accumulate`.

    cutoff: how far pairs reach, 0 for terms without pairs. exclusions: (X, 2) atoms that are not to be among the pairs,
    None if that does not matter. half: whether each pair is wanted once, False for twice, None for either (then
    `energy` looks at `pairs.half`). surroundings: whether contributions of an atom depend on more than its pairs, so
    that a process which divides the potential needs all pairs of the atoms it has.
    """

    name = "potential"
    cutoff: float = 0.0
    half: bool | None = True
    exclusions: Tensor | None = None
    surroundings = False

    @property
    def reach(self) -> float:
        """How far an atom may be that a contribution of another one depends on."""
        return self.cutoff

    def energy(self, positions: Tensor, cell: Tensor | None, pairs: Pairs) -> Tensor:
        """(R), differentiable with respect to positions (R, N, 3) and cell (R, 3, 3)."""
        raise NotImplementedError

    def accumulate(
        self, positions: Tensor, cell: Tensor | None, neighbors: NeighborList, forces: Tensor, virial: Tensor | None
    ) -> dict[str, Tensor]:
        """Add to forces (R, N, 3) and virial (R, 3, 3); return energies (R) by name. By default by differentiation."""
        energy, of_positions, of_strain = differentiate(self, positions, cell, neighbors.pairs, virial is not None)
        forces -= of_positions
        if virial is not None:
            virial -= of_strain
        return {self.name: energy}

    def evaluate(
        self, positions: Tensor, cell: Tensor | None, neighbors: NeighborList, virial: bool = False
    ) -> Evaluation:
        """Energy and forces, and the virial if wanted. The neighbour list must be up to date."""
        if neighbors.suits is not self:
            self._check(neighbors)
        with torch.no_grad():
            forces = torch.zeros_like(positions, memory_format=torch.contiguous_format)
            w = positions.new_zeros(positions.shape[0], 3, 3) if virial else None
            terms = self.accumulate(positions, cell, neighbors, forces, w)
            energy = sum(terms.values(), start=positions.new_zeros(positions.shape[0]))
        return Evaluation(energy, forces, w, terms)

    def _check(self, neighbors: NeighborList) -> None:
        if neighbors.cutoff < self.cutoff:
            raise ValueError(
                f"{self.name} needs pairs within {self.cutoff}, but the neighbor list has a cutoff of"
                f" {neighbors.cutoff}; take the list from .neighbors(system)"
            )
        if self.exclusions is not None and not torch.equal(unique_pairs(self.exclusions), neighbors.exclusions):
            raise ValueError(
                f"{self.name} excludes other pairs than the neighbor list; take the list from .neighbors(system)"
            )
        neighbors.suits = self

    def join(self, other: Potential) -> Potential | None:
        """One potential that computes this term and another together, if there is such a kernel."""
        return None

    def divide(self, part: Part) -> Potential:
        """What a process computes of this potential, of the atoms it has; all processes together compute it once."""
        raise ValueError(f"{self.name} cannot be divided among processes; run it in one process")

    def neighbors(self, system: System, skin: float = 0.0, part: Part | None = None) -> NeighborList:
        """The list that `evaluate` wants, up to date. part: the part whose atoms the system has, if it is divided."""
        shared = None if self.surroundings else part
        return NeighborList.of(system, self.cutoff, skin, self.half is not False, self.exclusions, shared)


def parts(potential: Any) -> Iterator[Any]:
    """A potential and all that it consists of: the terms of sums, and what other potentials wrap as `potential`."""
    yield potential
    wrapped = getattr(potential, "potential", None)
    for part in [*getattr(potential, "terms", ()), *([] if wrapped is None else [wrapped])]:
        yield from parts(part)


def check_part(bias: Potential, potential: Potential) -> None:
    """Raise ValueError where a bias that adapts as a callback is no part of the simulation's potential."""
    if not any(part is bias for part in parts(potential)):
        raise ValueError(
            f"{bias.name} is a callback of a simulation whose potential, {potential.name}, does not include it: the run"
            " would not feel it; make the simulation with a potential that has it as a part"
        )


def copy_without_caches(potential: T) -> T:
    """A shallow copy, which computes its cached properties again."""
    copied = copy.copy(potential)
    for name in list(copied.__dict__):
        if isinstance(getattr(type(copied), name, None), cached_property):
            del copied.__dict__[name]
    return copied


def differentiate(
    potential: Potential, positions: Tensor, cell: Tensor | None, pairs: Pairs, strain: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The energy (R) and its derivatives with respect to positions and, if wanted, strain (R, 3, 3), by autograd."""
    with torch.enable_grad():
        x = positions.detach().requires_grad_()
        e = positions.new_zeros(positions.shape[0], 3, 3).requires_grad_(strain)
        deformed, h = x, cell
        if strain:
            deformed = x + x @ e
            h = None if cell is None else cell.detach() + cell.detach() @ e
        energy = potential.energy(deformed, h, pairs)
        if not energy.requires_grad:  # nothing depends on the positions, as without pairs
            return energy, torch.zeros_like(x), torch.zeros_like(e)
        wanted = [x, e] if strain else [x]
        gradients = torch.autograd.grad(energy.sum(), wanted, allow_unused=True)
    gradients = [torch.zeros_like(y) if g is None else g for g, y in zip(gradients, wanted, strict=True)]
    return energy.detach(), gradients[0], gradients[1] if strain else torch.zeros_like(e)


class Sum(Potential):
    """Terms that share one neighbour list.

    >>> from tutti.science.mol.terms import HarmonicBonds
    >>> whole = Sum([HarmonicBonds([[0, 1]], length=0.1, stiffness=1000.0)])
    >>> system = System([[0.0, 0, 0], [0.12, 0, 0]])
    >>> whole.evaluate(system.positions, None, whole.neighbors(system)).terms
    {'bonds': tensor([0.2000], dtype=torch.float64)}
    """

    name = "sum"

    def __init__(self, terms: Sequence[Potential]) -> None:
        self.terms = list(terms)
        self.cutoff = max((term.cutoff for term in self.terms), default=0.0)
        halves = {term.half for term in self.terms if term.cutoff and term.half is not None}
        if len(halves) > 1:
            raise ValueError("some terms want each pair once and some twice; evaluate them with a list of each kind")
        self.half = halves.pop() if halves else None
        self.exclusions = _shared_exclusions(self.terms)
        self.computed = _joined(self.terms)  # what is evaluated: some terms together

    def energy(self, positions: Tensor, cell: Tensor | None, pairs: Pairs) -> Tensor:
        zero = positions.new_zeros(positions.shape[0])
        return sum((term.energy(positions, cell, pairs) for term in self.terms), start=zero)

    def accumulate(
        self, positions: Tensor, cell: Tensor | None, neighbors: NeighborList, forces: Tensor, virial: Tensor | None
    ) -> dict[str, Tensor]:
        terms: dict[str, Tensor] = {}
        for term in self.computed:
            for name, energy in term.accumulate(positions, cell, neighbors, forces, virial).items():
                terms[name] = terms[name] + energy if name in terms else energy
        return terms

    def divide(self, part: Part) -> Sum:
        if alone := [term.name for term in self.terms if term.surroundings]:
            raise ValueError(f"{alone[0]} cannot be divided among processes together with other terms")
        divided = copy_without_caches(self)
        divided.terms = [term.divide(part) for term in self.terms]
        divided.exclusions = _shared_exclusions(divided.terms)
        divided.computed = _joined(divided.terms)
        return divided


def _shared_exclusions(terms: Sequence[Potential]) -> Tensor | None:
    chosen: Potential | None = None
    for term in terms:
        if not term.cutoff:
            continue
        if chosen is not None and not torch.equal(unique_pairs(chosen.exclusions), unique_pairs(term.exclusions)):
            raise ValueError(
                f"the terms {chosen.name!r} and {term.name!r} exclude different pairs, but share one neighbor list;"
                " give them the same exclusions"
            )
        chosen = term
    return None if chosen is None else chosen.exclusions


def _joined(terms: Sequence[Potential]) -> list[Potential]:
    """Each term with the first that it can be computed together with."""
    result: list[Potential] = []
    for term in terms:
        for k, other in enumerate(result):
            if (both := other.join(term) or term.join(other)) is not None:
                result[k] = both
                break
        else:
            result.append(term)
    return result
