"""Enhanced sampling: collective variables, restraints, metadynamics, replica exchange, integrated tempering."""

from tutti.science.mol.biases.exchange import ReplicaExchange, ladder
from tutti.science.mol.biases.harmonic import Restraint
from tutti.science.mol.biases.metadynamics import Metadynamics
from tutti.science.mol.biases.tempering import IntegratedTempering
from tutti.science.mol.biases.variables import (
    Angle,
    Coordination,
    Distance,
    RadiusOfGyration,
    Torsion,
    Variable,
)

__all__ = [
    "Angle",
    "Coordination",
    "Distance",
    "IntegratedTempering",
    "Metadynamics",
    "RadiusOfGyration",
    "ReplicaExchange",
    "Restraint",
    "Torsion",
    "Variable",
    "ladder",
]
