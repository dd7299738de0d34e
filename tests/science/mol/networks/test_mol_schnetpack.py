"""Energies and forces of SchNetPack 2.1.1 with the same weights (make_schnetpack_fixture.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mol_structures import molecule
from safetensors.torch import load_file

from tutti.science.mol.networks import MolCT, PaiNN, SchNet, from_schnetpack, pack

STORED = load_file(Path(__file__).with_name("schnetpack.safetensors"))
KINDS = {"schnet": SchNet, "painn": PaiNN}


def weights(kind: str) -> dict[str, torch.Tensor]:
    start = f"{kind}/weights/"
    return {name.removeprefix(start): x for name, x in STORED.items() if name.startswith(start)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_weights_give_the_same_energies_and_forces(kind):
    network = KINDS[kind](12, 2, 8, 4.0).double()
    network.load_state_dict(from_schnetpack(network, weights(kind)))
    cell = 3.6 * torch.eye(3, dtype=torch.float64)
    energy, forces = network.energy_and_forces(pack([molecule(7, 1, 4.0), molecule(5, 2, 4.0),
                                                     molecule(4, 3, 4.0, cell, 3.0)]))  # fmt: skip
    assert float(STORED[f"{kind}/forces"].abs().max()) > 1e-2
    assert torch.allclose(energy, STORED[f"{kind}/energy"], rtol=0, atol=1e-11)
    assert torch.allclose(forces, STORED[f"{kind}/forces"], rtol=0, atol=1e-11)


def test_weights_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"embedding.weight of SchNet has the shape|build the network with its sizes"):
        from_schnetpack(SchNet(8, 2, 8), weights("schnet"))
    with pytest.raises(ValueError, match="has no place for"):
        from_schnetpack(SchNet(12, 2, 8), weights("painn"))
    with pytest.raises(ValueError, match="SchNetPack has no MolCT"):
        from_schnetpack(MolCT(8, heads=2), {})
