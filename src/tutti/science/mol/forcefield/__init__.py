"""Force fields: sums of classical terms, built from files or for water."""

from tutti.science.mol.forcefield.field import ForceField, Nonbonding
from tutti.science.mol.forcefield.files import load_amber, load_openmm
from tutti.science.mol.forcefield.system_xml import read_system
from tutti.science.mol.forcefield.water import WATER, water_box

__all__ = ["WATER", "ForceField", "Nonbonding", "load_amber", "load_openmm", "read_system", "water_box"]
