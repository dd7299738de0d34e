"""Molecular dynamics: a `System`, potentials (`terms`, `forcefield`, `networks`), and what moves the atoms."""

from tutti.science.mol.neighbors import NeighborList
from tutti.science.mol.potential import Evaluation, Potential, Sum
from tutti.science.mol.system import System

__all__ = ["Evaluation", "NeighborList", "Potential", "Sum", "System"]
