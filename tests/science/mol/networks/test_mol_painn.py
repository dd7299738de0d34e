"""PaiNN's features turn with the structure."""

from __future__ import annotations

import torch
from mol_structures import molecule, rotation

from tutti.science.mol.networks import PaiNN


def test_vectors_turn_and_scalars_stay():
    torch.manual_seed(0)
    network, x, turn = PaiNN(16, 2, 10, 4.0).double(), molecule(9, 1, 4.0), rotation(2)
    for matrix in (turn, -turn):
        vectors = x.positions[x.j] - x.positions[x.i]
        s, v = network.represent(x.species, vectors, x.i, x.j)
        turned_s, turned_v = network.represent(x.species, vectors @ matrix.T, x.i, x.j)
        assert float(v.detach().abs().max()) > 1e-3
        assert torch.allclose(turned_s, s, atol=1e-10)
        assert torch.allclose(turned_v, torch.einsum("dc,ncf->ndf", matrix, v), atol=1e-10)
