"""What moves the atoms: integrators, thermostats, a barostat, minimisers, constraints; and runs."""

from tutti.science.mol.dynamics.barostat import CellRescaling
from tutti.science.mol.dynamics.constraints import Constraints
from tutti.science.mol.dynamics.decomposed import DecomposedSimulation
from tutti.science.mol.dynamics.guard import Guard, Unstable
from tutti.science.mol.dynamics.integrators import Langevin, LeapFrog, VelocityVerlet
from tutti.science.mol.dynamics.log import Log
from tutti.science.mol.dynamics.minimize import Descent, Fire, minimize
from tutti.science.mol.dynamics.nose_hoover import NoseHooverChain
from tutti.science.mol.dynamics.simulation import Simulation
from tutti.science.mol.dynamics.trajectory import Trajectory, read_h5md

__all__ = [
    "CellRescaling",
    "Constraints",
    "DecomposedSimulation",
    "Descent",
    "Fire",
    "Guard",
    "Langevin",
    "LeapFrog",
    "Log",
    "NoseHooverChain",
    "Simulation",
    "Trajectory",
    "Unstable",
    "VelocityVerlet",
    "minimize",
    "read_h5md",
]
