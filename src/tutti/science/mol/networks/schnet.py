"""SchNet: continuous-filter convolutions (K. Schuett et al., J. Chem. Phys. 148, 241722, 2018).

x_i = embedding(Z_i); in each interaction x_i += MLP(sum_j (A x_j) o W(d_ij)), W = MLP(Gaussians(d)) fc(d);
e_i = MLP(x_i). The message has the features of the *neighbour* j.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tutti.science.mol.networks.batch import SPECIES
from tutti.science.mol.networks.network import Network, distances
from tutti.science.mol.networks.radial import Gaussians, cosine_cutoff, shifted_softplus
from tutti.science.mol.networks.ragged import sum_at, take


class ShiftedSoftplus(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return shifted_softplus(x)


class Interaction(nn.Module):
    def __init__(self, features: int, gaussians: int) -> None:
        super().__init__()
        self.filter = nn.Sequential(nn.Linear(gaussians, features), ShiftedSoftplus(), nn.Linear(features, features))
        self.inward = nn.Linear(features, features, bias=False)
        self.outward = nn.Sequential(nn.Linear(features, features), ShiftedSoftplus(), nn.Linear(features, features))

    def forward(self, x: Tensor, basis: Tensor, cut: Tensor, i: Tensor, j: Tensor) -> Tensor:
        w = self.filter(basis) * cut.unsqueeze(-1)
        return self.outward(sum_at(take(self.inward(x), j) * w, i, x.shape[-2]))


class SchNet(Network):
    """features: number of features of an atom. interactions: number of interactions of neighbours, one after another.
    gaussians: number of Gaussians of the distance.

    network = SchNet(features=64, interactions=3, cutoff=5.0)
    """

    def __init__(self, features: int = 128, interactions: int = 3, gaussians: int = 50, cutoff: float = 5.0) -> None:
        super().__init__(cutoff, features=features, interactions=interactions, gaussians=gaussians)
        self.basis = Gaussians(gaussians, cutoff)
        self.embedding = nn.Embedding(SPECIES, features)
        self.interactions = nn.ModuleList(Interaction(features, gaussians) for _ in range(interactions))
        half = max(features // 2, 1)
        self.readout = nn.Sequential(nn.Linear(features, half), ShiftedSoftplus(), nn.Linear(half, 1))
        initialize(self)

    def atomic(self, species: Tensor, vectors: Tensor, i: Tensor, j: Tensor) -> Tensor:
        d = distances(vectors)
        basis, cut = self.basis(d), cosine_cutoff(d, self.cutoff)
        x = self.embedding(species)
        for interaction in self.interactions:
            x = x + interaction(x, basis, cut, i, j)
        return self.readout(x).squeeze(-1)

    def filters(self, distance: Tensor) -> list[Tensor]:
        """W fc of each interaction (n, features) at distances (n)."""
        basis, cut = self.basis(distance), cosine_cutoff(distance, self.cutoff).unsqueeze(-1)
        return [x.filter(basis) * cut for x in self.interactions]  # pyright: ignore


@torch.no_grad()
def initialize(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
