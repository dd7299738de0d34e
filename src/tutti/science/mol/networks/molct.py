"""The Molecular Configuration Transformer (J. Zhang et al., arXiv 2012.11816).

Attention of each atom i over itself and its neighbours j. Keys and values are the *neighbours'* features, filtered by
distance, x_j o g(d_ij); the query is x_i o g(self). (Released versions that filter x_i in their keys see no species of
neighbours.) Weights are c_j exp(q k_j) / sum_k c_k exp(q k_k) with the smooth cutoff c: a factor after the softmax, as
published, would make energies jump when an atom crosses the cutoff.

With cycles > 1 an interaction is repeated, and each atom halts once its pondering exceeds a threshold (A. Graves, arXiv
1603.08983). The number of cycles of an atom is discrete, so energies are then smooth only piecewise.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tutti.science.mol.networks.batch import SPECIES
from tutti.science.mol.networks.network import Network, distances
from tutti.science.mol.networks.radial import LogGaussians, polynomial_cutoff
from tutti.science.mol.networks.ragged import largest_at, sum_at, take
from tutti.science.mol.networks.schnet import initialize

SELF = 0.05  # the distance of an atom from itself, as a fraction of the cutoff
HALT = 0.9  # the sum of pondering at which an atom halts


class Filter(nn.Module):
    """Radial basis -> features, with a residual network."""

    def __init__(self, basis: int, features: int) -> None:
        super().__init__()
        self.first = nn.Linear(basis, features)
        self.rest = nn.Sequential(nn.Linear(features, features), nn.SiLU(), nn.Linear(features, features))

    def forward(self, basis: Tensor) -> Tensor:
        x = self.first(basis)
        return x + self.rest(x)


class Attention(nn.Module):
    """An interaction: `cycles` rounds of attention with the same weights."""

    def __init__(self, features: int, heads: int, cycles: int, feedforward: bool) -> None:
        super().__init__()
        self.heads, self.cycles = heads, cycles
        self.norm = nn.LayerNorm(features)
        self.query = nn.Linear(features, features, bias=False)
        self.key = nn.Linear(features, features, bias=False)
        self.value = nn.Linear(features, features, bias=False)
        self.out = nn.Linear(features, features, bias=False)
        self.ponder = nn.Linear(3 * features, 1) if cycles > 1 else None
        self.feedforward = nn.Sequential(
            nn.LayerNorm(features), nn.Linear(features, features), nn.SiLU(), nn.Linear(features, features)
        ) if feedforward else None  # fmt: skip

    def forward(self, x: Tensor, own: Tensor, pair: Tensor, cut: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if self.ponder is None:
            return self.cycle(x, 0, own, pair, cut, i, j)
        start, out = x, torch.zeros_like(x)
        spent = x.new_zeros(*x.shape[:-1], 1)
        for t in range(self.cycles):
            running = spent < HALT
            x = torch.where(running, self.cycle(x, t, own, pair, cut, i, j), x)
            time = _signal(t, x).expand_as(x)
            p = torch.sigmoid(self.ponder(torch.cat([x, start, time], -1)))
            stops = (spent + p >= HALT) | (t == self.cycles - 1)
            weight = torch.where(running, torch.where(stops, 1 - spent, p), 0.0)
            out, spent = out + weight * x, spent + weight
        return out

    def cycle(self, x: Tensor, t: int, own: Tensor, pair: Tensor, cut: Tensor, i: Tensor, j: Tensor) -> Tensor:
        time = _signal(t, x)
        mine, theirs = self.norm(x * own + time), self.norm(take(x, j) * pair + time)
        query = self._split(self.query(mine)) * (x.shape[-1] // self.heads) ** -0.5
        logit = (take(query, i) * self._split(self.key(theirs))).sum(-1)
        at_self = (query * self._split(self.key(mine))).sum(-1)
        near = cut.unsqueeze(-1)
        with torch.no_grad():
            most = largest_at(logit.masked_fill(near == 0, -torch.inf), i, at_self)
        weight, weight_self = near * torch.exp((logit - take(most, i)).clamp(max=0)), torch.exp(at_self - most)
        total = weight_self + sum_at(weight, i, x.shape[-2])
        values = weight_self.unsqueeze(-1) * self._split(self.value(mine))
        values = values + sum_at(weight.unsqueeze(-1) * self._split(self.value(theirs)), i, x.shape[-2])
        x = x + self.out((values / total.unsqueeze(-1)).flatten(-2))
        return x if self.feedforward is None else x + self.feedforward(x)

    def _split(self, x: Tensor) -> Tensor:
        """(..., F) -> (..., heads, F / heads)"""
        return x.unflatten(-1, (self.heads, x.shape[-1] // self.heads))


class MolCT(Network):
    """heads: number of attention heads, which divides the features. cycles: most cycles of an interaction.

    network = MolCT(features=64, interactions=3, heads=8, cutoff=5.0)
    """

    def __init__(self, features: int = 128, interactions: int = 3, heads: int = 8, cycles: int = 1,
                 cutoff: float = 10.0, feedforward: bool = False) -> None:  # fmt: skip
        super().__init__(cutoff, features=features, interactions=interactions, heads=heads, cycles=cycles)
        if features % heads:
            raise ValueError(f"MolCT: {heads} heads do not divide {features} features")
        self.options["feedforward"] = feedforward
        self.basis = LogGaussians(cutoff)
        self.embedding = nn.Embedding(SPECIES, features)
        self.filter = Filter(self.basis.number, features)
        self.interactions = nn.ModuleList(Attention(features, heads, cycles, feedforward) for _ in range(interactions))
        half = max(features // 2, 1)
        self.readout = nn.Sequential(nn.Linear(features, half), nn.SiLU(), nn.Linear(half, 1))
        initialize(self)

    def atomic(self, species: Tensor, vectors: Tensor, i: Tensor, j: Tensor) -> Tensor:
        d = distances(vectors)
        cut, pair = polynomial_cutoff(d, self.cutoff), self.filter(self.basis(d))
        own = self.filter(self.basis(d.new_full((1,), SELF * self.cutoff)))
        x = self.embedding(species)
        for interaction in self.interactions:
            x = interaction(x, own, pair, cut, i, j)
        return self.readout(x).squeeze(-1)


def _signal(t: int, like: Tensor) -> Tensor:
    """Sines and cosines of cycle t (F)."""
    half = (like.shape[-1] + 1) // 2
    rate = torch.exp(torch.arange(half, dtype=like.dtype, device=like.device) * (-math.log(10000.0) / max(half - 1, 1)))
    return torch.cat([torch.sin(t * rate), torch.cos(t * rate)])[: like.shape[-1]]
