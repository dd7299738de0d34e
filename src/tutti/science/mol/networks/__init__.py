"""Neural potentials: `SchNet`, `PaiNN`, `MolCT`; training, tables for dynamics, ensembles, and use from other programs.

Networks compute with `Batch`es of structures of any sizes, packed without padding (`pack`).
"""

from tutti.science.mol.networks.active import Round, learn, select
from tutti.science.mol.networks.batch import Batch, Structure, groups, pack
from tutti.science.mol.networks.deploy import calculator, export, openmm_force
from tutti.science.mol.networks.ensemble import Ensemble, Prediction
from tutti.science.mol.networks.fast.for_md import compile_for_md
from tutti.science.mol.networks.molct import MolCT
from tutti.science.mol.networks.network import Network
from tutti.science.mol.networks.painn import PaiNN
from tutti.science.mol.networks.potential import NetworkPotential
from tutti.science.mol.networks.samples import Samples
from tutti.science.mol.networks.saved import load, load_ensemble, save
from tutti.science.mol.networks.schnet import SchNet
from tutti.science.mol.networks.schnetpack import from_schnetpack
from tutti.science.mol.networks.training import Errors, Fit, Training, errors, fit, fit_references

__all__ = [
    "Batch", "Ensemble", "Errors", "Fit", "MolCT", "Network", "NetworkPotential", "PaiNN", "Prediction", "Round",
    "Samples", "SchNet", "Structure", "Training", "calculator", "compile_for_md", "errors", "export", "fit",
    "fit_references", "from_schnetpack", "groups", "learn", "load", "load_ensemble", "openmm_force", "pack", "save",
    "select",
]  # fmt: skip
