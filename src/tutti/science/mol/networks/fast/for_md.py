"""Networks for dynamics: filters of distance in tables, and energies and forces in one C++ kernel.

fast = compile_for_md(network)  # SchNet or PaiNN
energy, forces = fast.energy_and_forces(batch)
"""

from __future__ import annotations

from typing import Any

import torch

from tutti.science.mol.networks.ensemble import CompiledEnsemble, Ensemble
from tutti.science.mol.networks.fast.compiled import Compiled
from tutti.science.mol.networks.fast.tables import tabulate
from tutti.science.mol.networks.fast.tabulated_painn import TabulatedPaiNN
from tutti.science.mol.networks.fast.tabulated_schnet import TabulatedSchNet
from tutti.science.mol.networks.network import Network
from tutti.science.mol.networks.painn import PaiNN
from tutti.science.mol.networks.schnet import SchNet


def compile_for_md(
    network: Network | Ensemble, tolerance: float = 1e-5, dtype: torch.dtype = torch.float32
) -> Compiled:
    """Compile a trained SchNet or PaiNN, or an ensemble, for dynamics on a CPU: energies and forces many times as fast.

    tolerance: largest relative error of filters and their slopes. dtype: dtype of features; energies, forces and
    distances are float64. Weights are copied: compile again after training.
    """
    if isinstance(network, Ensemble):
        members: Any = network.members
        return CompiledEnsemble(network, [compile_for_md(x, tolerance, dtype) for x in members])
    kinds: dict[type, Any] = {SchNet: TabulatedSchNet, PaiNN: TabulatedPaiNN}
    if type(network) not in kinds:
        raise ValueError(f"compile_for_md has no kernel for {type(network).__name__}, only for "
                         f"{', '.join(x.__name__ for x in kinds)}: use the network itself")  # fmt: skip
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype of compile_for_md: torch.float32 or torch.float64, not {dtype}")
    return kinds[type(network)](network, tabulate(network, tolerance), dtype)  # pyright: ignore
