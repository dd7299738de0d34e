"""Molecules and their parameters from files of OpenMM and Amber, read by the package openmm (`pip install openmm`).

OpenMM's force-field files may contain Python that it executes; files that do are refused.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import torch

from tutti.science.mol.forcefield.field import ForceField, Nonbonding
from tutti.science.mol.forcefield.system_xml import parse, read_system
from tutti.science.mol.system import System

SCRIPTS = ("Script", "InitializationScript")


def load_openmm(
    structure: str | os.PathLike[str],
    parameters: Sequence[str | os.PathLike[str]],
    nonbonding: Nonbonding | None = None,
    constraints: str | None = None,
    rigid_water: bool = True,
    solvate: float = 0.0,
    water: str = "tip3p",
) -> tuple[System, ForceField]:
    """Load a PDB file with hydrogens and OpenMM force-field files, its own by their names ("amber14-all.xml").

    constraints: None, "HBonds", "AllBonds" or "HAngles". nonbonding: PME of 1 nm by default if the file has a cell,
    no cutoff otherwise. solvate: nm of water, as `openmm.app.Modeller` adds it, between periodic copies of the
    molecule, with ions that neutralise it; 0 for none. water: model of this water, "tip3p" or "spce"; a force-field
    file must have its parameters.
    """
    app = _openmm()
    with _reading(structure):
        pdb = app.PDBFile(str(structure))
    for name in parameters:
        _refuse_scripts(_find(name, Path(app.__file__).parent / "data"), set())
    choices = _choices(app, constraints)
    with _reading(*parameters):
        fields = app.ForceField(*[str(name) for name in parameters])
    with _reading(structure, *parameters):
        whole = app.Modeller(pdb.topology, pdb.positions)
        if solvate:
            _solvate(whole, fields, water, solvate)
        system = fields.createSystem(whole.topology, **choices, rigidWater=rigid_water)
    return _convert(system, whole.topology, whole.positions, whole.topology.getPeriodicBoxVectors(), nonbonding)


def _solvate(modeller: Any, fields: Any, water: str, padding: float) -> None:
    """The same water and ions each time: OpenMM draws the places of ions from Python's generator."""
    from openmm import unit  # pyright: ignore[reportMissingImports]

    state = random.getstate()
    random.seed(0)
    try:
        modeller.addSolvent(fields, model=water, padding=padding * getattr(unit, "nanometer"))  # noqa: B009
    finally:
        random.setstate(state)


def load_amber(
    prmtop: str | os.PathLike[str],
    inpcrd: str | os.PathLike[str],
    nonbonding: Nonbonding | None = None,
    constraints: str | None = None,
    rigid_water: bool = True,
) -> tuple[System, ForceField]:
    """Amber's parameters (prmtop) and coordinates (inpcrd or rst7)."""
    app = _openmm()
    choices = _choices(app, constraints)
    with _reading(inpcrd):
        coordinates = app.AmberInpcrdFile(str(inpcrd))
    with _reading(prmtop):
        topology = app.AmberPrmtopFile(str(prmtop), periodicBoxVectors=coordinates.boxVectors)
        system = topology.createSystem(**choices, rigidWater=rigid_water)
    return _convert(system, topology.topology, coordinates.positions, coordinates.boxVectors, nonbonding)


@contextmanager
def _reading(*paths: str | os.PathLike[str]) -> Iterator[None]:
    """Errors of OpenMM in the block become a ValueError of one line with the files."""
    try:
        yield
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"OpenMM cannot take {', '.join(map(str, paths))}: {reason}") from None


def _openmm() -> Any:
    try:
        from openmm import app  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "these files are read by the package openmm; pip install openmm, or write the system by"
            " openmm.XmlSerializer elsewhere and use read_system"
        ) from None
    return app


def _choices(app: Any, constraints: str | None) -> dict[str, Any]:
    options = {None: None, "HBonds": app.HBonds, "AllBonds": app.AllBonds, "HAngles": app.HAngles}
    if constraints not in options:
        raise ValueError(f"constraints {constraints!r} are not known; there are None, HBonds, AllBonds, HAngles")
    return {"constraints": options[constraints], "nonbondedMethod": app.NoCutoff, "removeCMMotion": False}


def _find(name: str | os.PathLike[str], data: Path, beside: Path | None = None) -> Path:
    """As OpenMM finds it: as a path, beside the file that includes it, in its data."""
    for path in (Path(name), *([beside.parent / name] if beside else []), data / name):
        if path.is_file():
            return path
    raise ValueError(f"there is no force-field file {str(name)!r}, neither here nor among those of OpenMM ({data})")


def _refuse_scripts(path: Path, seen: set[Path]) -> None:
    if path in seen:
        return
    seen.add(path)
    root: Element = parse(path.read_text())
    for tag in SCRIPTS:
        if root.find(tag) is not None:
            raise ValueError(
                f"{path} contains a <{tag}>, Python that OpenMM would execute, and is not read; choose another force"
                " field, or create the system yourself and use read_system(openmm.XmlSerializer.serialize(system), ...)"
            )
    data = next((parent for parent in path.parents if parent.name == "data"), path.parent)
    for include in root.findall("Include"):
        _refuse_scripts(_find(include.get("file", ""), data, path), seen)


def _convert(
    system: Any, topology: Any, positions: Any, vectors: Any, nonbonding: Nonbonding | None
) -> tuple[System, ForceField]:
    from openmm import XmlSerializer, unit  # pyright: ignore[reportMissingImports]

    nanometer: Any = getattr(unit, "nanometer")  # noqa: B009
    cell = None if vectors is None else [[float(x) for x in v.value_in_unit(nanometer)] for v in vectors]
    nonbonding = nonbonding or Nonbonding("none" if cell is None else "pme")
    if cell is None and nonbonding.method in ("ewald", "pme"):
        raise ValueError(
            f"the files have no cell, which method {nonbonding.method!r} needs; use 'none' or 'reaction_field'"
        )
    atoms = list(topology.atoms())
    converted, field = read_system(
        XmlSerializer.serialize(system),
        [[float(x) for x in p] for p in positions.value_in_unit(nanometer)],
        cell,
        nonbonding,
        [0 if atom.element is None else atom.element.atomic_number for atom in atoms],
    )
    converted.names = [atom.name for atom in atoms]
    converted.residues = [f"{atom.residue.name} {atom.residue.id}" for atom in atoms]
    converted.bonds = torch.tensor([[a.index, b.index] for a, b in topology.bonds()], dtype=torch.int64).reshape(-1, 2)
    return converted, field
