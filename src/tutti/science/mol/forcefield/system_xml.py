"""Force fields from OpenMM's serialized systems: XML that lists every term of every atom, and no code.

`openmm.XmlSerializer.serialize(system)` writes it. Units are those of `units.MD`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from torch import Tensor

from tutti.science.mol.forcefield.field import ForceField, Nonbonding
from tutti.science.mol.potential import Potential
from tutti.science.mol.system import System
from tutti.science.mol.terms import (
    HarmonicAngles,
    HarmonicBonds,
    PeriodicTorsions,
    RyckaertBellemansTorsions,
    SpecialPairs,
)

Element = ElementTree.Element
METHODS = {0: "none", 1: "reaction_field", 2: "reaction_field", 3: "ewald", 4: "pme"}
IGNORED = {"CMMotionRemover"}  # no forces: simulations remove the drift themselves


def read_system(
    source: str | os.PathLike[str], positions: Any, cell: Any = None, nonbonding: Nonbonding | None = None,
    species: Any = None,
) -> tuple[System, ForceField]:  # fmt: skip
    """A system and its force field from a file, or the text, of a serialized system.

    positions: (N, 3) in nm; the file has none. cell: in place of the file's. nonbonding: in place of the file's method,
    cutoff and tolerance.
    """
    text = source if isinstance(source, str) and source.lstrip().startswith("<") else Path(source).read_text()
    root = parse(text)
    if root.tag != "System":
        raise ValueError(
            f"the XML holds a {root.tag}, not a System; write it by openmm.XmlSerializer.serialize(system)"
        )
    masses = [_number(x, "mass") for x in _children(root, "Particles")]
    for k, particle in enumerate(_children(root, "Particles")):
        if len(particle):
            raise ValueError(
                f"particle {k} is a virtual site ({particle[0].tag}), which is not supported; use a model of atoms"
            )
    positions = torch.as_tensor(positions, dtype=torch.float64)
    if positions.shape[-2] != len(masses):
        raise ValueError(f"there are positions of {positions.shape[-2]} atoms, but the force field is of {len(masses)}")
    terms, chosen = [], Nonbonding("none")
    forces = {kind: [f for f in _children(root, "Forces") if f.get("type") == kind] for kind in _kinds(root)}
    for kind, make in FORCES.items():
        for force in forces.get(kind, []):
            terms += make(force)
    if len(nonbonded := forces.get("NonbondedForce", [])) > 1:
        raise ValueError(f"there are {len(nonbonded)} NonbondedForces; one is supported")
    periodic = False
    if nonbonded:
        chosen = nonbonding or _nonbonding(nonbonded[0])
        periodic = int(nonbonded[0].get("method", 0)) >= 2 if nonbonding is None else nonbonding.method != "none"
    if periodic and cell is None:
        vectors = root.find("PeriodicBoxVectors")
        cell = None if vectors is None else [[_number(v, c) for c in "xyz"] for v in vectors]
    charges = _column(nonbonded[0], "Particles", "q") if nonbonded else torch.zeros(len(masses), dtype=torch.float64)
    if nonbonded and cell is not None and chosen.method == "none":
        raise ValueError(
            "the coordinates have a cell, and method 'none' is for molecules without one; use 'pme', or remove the cell"
            " (CRYST1 of a PDB file, the box of Amber's)"
        )
    system = System(positions, species, masses, charges, cell, bonds=_bonds(forces))
    if nonbonded:
        terms += _nonbonded(nonbonded[0], system, chosen)
    rigid = _children(root, "Constraints")
    pairs = [[int(x.get(p, -1)) for p in ("p1", "p2")] for x in rigid]
    return system, ForceField(terms, pairs, [_number(x, "d") for x in rigid])


def parse(text: str) -> Element:
    """XML without document types, whose entities could grow without bound."""
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise ValueError("the XML declares a document type or entities, which force fields do not need; remove them")
    try:
        return ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(f"this is no XML of a force field: {error}") from None


def _kinds(root: Element) -> list[str]:
    kinds = [f.get("type", "") for f in _children(root, "Forces")]
    for kind in kinds:
        if kind not in (*FORCES, *IGNORED, "NonbondedForce"):
            raise ValueError(
                f"the force field has a {kind}, which is not supported; there are"
                f" {', '.join((*FORCES, 'NonbondedForce'))}. Choose a force field without it"
            )
    return kinds


def _children(parent: Element, tag: str) -> list[Element]:
    element = parent.find(tag)
    return [] if element is None else list(element)


def _number(element: Element, name: str) -> float:
    try:
        return float(element.attrib[name])
    except (KeyError, ValueError):
        raise ValueError(f"<{element.tag}> has no number {name!r}: {element.attrib}") from None


def _column(force: Element, tag: str, name: str) -> Tensor:
    return torch.tensor([_number(x, name) for x in _children(force, tag)], dtype=torch.float64)


def _atoms(force: Element, tag: str, size: int) -> Tensor:
    rows = [[int(_number(x, f"p{k + 1}")) for k in range(size)] for x in _children(force, tag)]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, size)


def _bonded(
    tag: str, size: int, names: tuple[str, ...], make: Callable[..., Potential]
) -> Callable[[Element], list[Potential]]:
    def terms(force: Element) -> list[Potential]:
        atoms = _atoms(force, tag, size)
        return [make(atoms, *[_column(force, tag, name) for name in names])] if len(atoms) else []

    return terms


def _ryckaert_bellemans(atoms: Tensor, *columns: Tensor) -> Potential:
    return RyckaertBellemansTorsions(atoms, torch.stack(columns, 1))


FORCES: dict[str, Callable[[Element], list[Potential]]] = {
    "HarmonicBondForce": _bonded("Bonds", 2, ("d", "k"), HarmonicBonds),
    "HarmonicAngleForce": _bonded("Angles", 3, ("a", "k"), HarmonicAngles),
    "PeriodicTorsionForce": _bonded("Torsions", 4, ("periodicity", "phase", "k"), PeriodicTorsions),
    "RBTorsionForce": _bonded("Torsions", 4, ("c0", "c1", "c2", "c3", "c4", "c5"), _ryckaert_bellemans),
}


def _bonds(forces: dict[str, list[Element]]) -> Tensor | None:
    atoms_of_forces = [_atoms(force, "Bonds", 2) for force in forces.get("HarmonicBondForce", [])]
    return torch.cat(atoms_of_forces) if atoms_of_forces else None


def _nonbonding(force: Element) -> Nonbonding:
    method = int(force.get("method", 0))
    if method not in METHODS:
        raise ValueError("PME of Lennard-Jones interactions is not supported; give nonbonding=Nonbonding(method='pme')")
    for tag in ("GlobalParameters", "ParticleOffsets", "ExceptionOffsets"):
        if _children(force, tag):
            raise ValueError(f"the NonbondedForce has {tag}, which are not supported")
    switched = force.get("useSwitchingFunction") == "1" and method != 0
    return Nonbonding(
        METHODS[method],
        _number(force, "cutoff"),
        _number(force, "switchingDistance") if switched else None,
        force.get("dispersionCorrection") == "1",
        _number(force, "ewaldTolerance"),
        dielectric=_number(force, "rfDielectric"),
    )


def _nonbonded(force: Element, system: System, chosen: Nonbonding) -> list[Potential]:
    charges, sigma, epsilon = (_column(force, "Particles", name) for name in ("q", "sig", "eps"))
    sigma = torch.where(epsilon == 0, 1.0, sigma)  # so that there are few types
    exceptions = _children(force, "Exceptions")
    pairs = _atoms(force, "Exceptions", 2)
    if not system.pbc[0]:
        chosen = replace(chosen, tail=False)
    terms = chosen.terms(charges, sigma, epsilon, system.cell, pairs)
    values = torch.tensor([[_number(x, n) for n in ("sig", "eps", "q")] for x in exceptions], dtype=torch.float64)
    values = values.reshape(-1, 3)
    scaled = (values[:, 1] != 0) | (values[:, 2] != 0)
    if bool(scaled.any()):
        terms.append(SpecialPairs(pairs[scaled], *values[scaled].T, coulomb=chosen.units.coulomb))
    return terms
