"""PaiNN: equivariant messages (K. Schuett, O. Unke, M. Gastegger, ICML 2021).

Atoms have scalars s (F) and vectors v (3, F). A message from j to i is split in three: (a, b, c) = phi(s_j) o W(d),
s_i += sum a, v_i += sum b r/d + c o v_j. Then scalars and vectors of an atom mix: with Uv, Vv linear,
(a, b, c) = MLP(s, |Vv|): s += a + b <Uv, Vv>, v += c Uv.
"""

from __future__ import annotations

from torch import Tensor, cat, nn

from tutti.science.mol.networks.batch import SPECIES
from tutti.science.mol.networks.network import Network, distances
from tutti.science.mol.networks.radial import Gaussians, cosine_cutoff
from tutti.science.mol.networks.ragged import sum_at, take
from tutti.science.mol.networks.schnet import initialize

SMALL = 1e-8  # added to squared norms of vectors, so that their root has a gradient at 0


class Message(nn.Module):
    def __init__(self, features: int, gaussians: int) -> None:
        super().__init__()
        self.filter = nn.Linear(gaussians, 3 * features)
        self.context = nn.Sequential(nn.Linear(features, features), nn.SiLU(), nn.Linear(features, 3 * features))

    def forward(self, s: Tensor, v: Tensor, basis: Tensor, cut: Tensor, unit: Tensor, i: Tensor, j: Tensor
                ) -> tuple[Tensor, Tensor]:  # fmt: skip
        w = self.filter(basis) * cut.unsqueeze(-1)
        a, b, c = (take(self.context(s), j) * w).chunk(3, -1)
        moved = b.unsqueeze(-2) * unit.unsqueeze(-1) + c.unsqueeze(-2) * take(v, j)
        return s + sum_at(a, i, s.shape[-2]), v + sum_at(moved, i, s.shape[-2])


class Mixing(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.vectors = nn.Linear(features, 2 * features, bias=False)
        self.context = nn.Sequential(nn.Linear(2 * features, features), nn.SiLU(), nn.Linear(features, 3 * features))

    def forward(self, s: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.vectors(v).chunk(2, -1)
        norm = (left.square().sum(-2) + SMALL).sqrt()
        a, c, b = self.context(cat([s, norm], -1)).chunk(3, -1)
        return s + a + b * (left * right).sum(-2), v + c.unsqueeze(-2) * right


class PaiNN(Network):
    """features: number of scalars of an atom, and of vectors.

    network = PaiNN(features=64, interactions=3, cutoff=5.0)
    """

    def __init__(self, features: int = 128, interactions: int = 3, gaussians: int = 20, cutoff: float = 5.0) -> None:
        super().__init__(cutoff, features=features, interactions=interactions, gaussians=gaussians)
        self.basis = Gaussians(gaussians, cutoff)
        self.embedding = nn.Embedding(SPECIES, features)
        self.messages = nn.ModuleList(Message(features, gaussians) for _ in range(interactions))
        self.mixings = nn.ModuleList(Mixing(features) for _ in range(interactions))
        half = max(features // 2, 1)
        self.readout = nn.Sequential(nn.Linear(features, half), nn.SiLU(), nn.Linear(half, 1))
        initialize(self)

    def represent(self, species: Tensor, vectors: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        """Scalars (..., A, F) and vectors (..., A, 3, F), which turn with the structure."""
        d = distances(vectors)
        unit = vectors / d.unsqueeze(-1)
        basis, cut = self.basis(d), cosine_cutoff(d, self.cutoff)
        s = self.embedding(species)
        v = s.new_zeros(*s.shape[:-1], 3, s.shape[-1])
        for message, mixing in zip(self.messages, self.mixings, strict=True):
            s, v = mixing(*message(s, v, basis, cut, unit, i, j))
        return s, v

    def atomic(self, species: Tensor, vectors: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return self.readout(self.represent(species, vectors, i, j)[0]).squeeze(-1)

    def filters(self, distance: Tensor) -> list[Tensor]:
        """W fc of each interaction (n, 3 features) at distances (n)."""
        basis, cut = self.basis(distance), cosine_cutoff(distance, self.cutoff).unsqueeze(-1)
        return [x.filter(basis) * cut for x in self.messages]  # pyright: ignore
