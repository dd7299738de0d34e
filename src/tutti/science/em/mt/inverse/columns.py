"""A declared distribution of resistivity columns, from which a prior is learned.

A `Columns` is a list of parts, each a function of random numbers in [0, 1) that edits a column of log10 resistivity
from top to bottom. `sample` draws independent columns. `sections` draws columns beside each other whose numbers vary
smoothly along the profile (a Gaussian copula), so that every column of a section is one of the distribution.

>>> columns = basin(torch.linspace(15, 985, 32))
>>> columns.sample(3, torch.Generator().manual_seed(0)).shape
torch.Size([3, 32])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tutti.science.em.shown import Brief


@dataclass(frozen=True)
class Uniform:
    """Uniform between two numbers."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high):
            raise ValueError(f"Uniform needs finite numbers with low <= high; got {self.low}, {self.high}")

    def __call__(self, u: Tensor) -> Tensor:
        return self.low + (self.high - self.low) * u


@dataclass(frozen=True)
class Either:
    """The first with a probability, else the second."""

    first: Uniform
    second: Uniform
    probability: float = 0.5

    def __call__(self, u: Tensor) -> Tensor:
        p = self.probability
        return torch.where(u < p, self.first(u / max(p, 1e-9)), self.second((u - p) / max(1 - p, 1e-9)))


class Part(Protocol):
    """draws: random numbers that a column needs."""

    @property
    def draws(self) -> int: ...

    def __call__(self, columns: Tensor, u: Tensor, z: Tensor) -> Tensor:
        """New columns (n, nz) from columns (n, nz), numbers (n, draws) and the depths of cells (nz) in metres."""
        ...


@dataclass(frozen=True)
class Background:
    """One value everywhere, log10 ohm-m."""

    value: Uniform | Either
    draws: int = 1

    def __call__(self, columns: Tensor, u: Tensor, z: Tensor) -> Tensor:
        return self.value(u).expand_as(columns).clone()


@dataclass(frozen=True)
class Layer:
    """One value from a top (m) over a thickness (m), log10 ohm-m. probability: probability that a column has it."""

    top: Uniform
    thickness: Uniform
    value: Uniform | Either
    probability: float = 1.0
    draws: int = 4

    def __call__(self, columns: Tensor, u: Tensor, z: Tensor) -> Tensor:
        top = self.top(u[:, :1])
        inside = (z >= top) & (z < top + self.thickness(u[:, 1:2])) & (u[:, 3:] < self.probability)
        return torch.where(inside, self.value(u[:, 2:3]), columns)


@dataclass(frozen=True)
class Rising:
    """`count` layers below the last cell that differs from the surface, with sorted values at sorted depths.

    first, last: values of the first and of the last layer, log10 ohm-m. depth: largest depth at which the last one
    begins, metres.
    """

    first: Uniform
    last: Uniform
    depth: float
    count: int = 11

    @property
    def draws(self) -> int:
        return 2 * self.count + 2

    def __call__(self, columns: Tensor, u: Tensor, z: Tensor) -> Tensor:
        n = self.count
        changed = columns != columns[:, :1]
        below = torch.where(changed, z, z.new_zeros(())).amax(1, keepdim=True)
        tops = (below + (self.depth - below).clamp_min(0) * u[:, :n]).sort(1).values
        low, high = self.first(u[:, -2:-1]), self.last(u[:, -1:])
        values = (low + (high - low) * u[:, n : 2 * n]).sort(1).values
        tops = torch.cat([below, tops[:, 1:]], 1)
        index = torch.searchsorted(tops, z.expand(len(u), -1).contiguous(), right=True) - 1
        return torch.where((z > below), values.gather(1, index.clamp_min(0)), columns)


@dataclass(frozen=True)
class Bumps:
    """Up to `most` smooth anomalies: Gaussians of a width in rows, times an amplitude of either sign (decades)."""

    most: int
    width: Uniform
    amplitude: Uniform

    @property
    def draws(self) -> int:
        return 1 + 4 * self.most

    def __call__(self, columns: Tensor, u: Tensor, z: Tensor) -> Tensor:
        rows = torch.arange(len(z), dtype=columns.dtype)
        there = torch.arange(self.most) < (u[:, :1] * (self.most + 1)).floor()
        place, width, size, sign = u[:, 1:].unflatten(1, (4, self.most)).unbind(1)
        centre = (place * len(z))[..., None]
        shape = torch.exp(-0.5 * ((rows - centre) / self.width(width)[..., None]) ** 2)
        size = self.amplitude(size) * torch.where(sign < 0.5, -1.0, 1.0) * there
        return columns + (size[..., None] * shape).sum(1)


@dataclass(frozen=True)
class Blur:
    """A Gaussian filter of `size` rows with a standard deviation in rows; the ends are repeated."""

    size: int
    sd: float
    draws: int = 0

    def __call__(self, columns: Tensor, u: Tensor, z: Tensor) -> Tensor:
        taps = torch.arange(self.size, dtype=columns.dtype) - (self.size - 1) / 2
        kernel = torch.exp(-0.5 * (taps / self.sd) ** 2)
        left = (self.size - 1) // 2
        padded = torch.nn.functional.pad(columns[:, None], (left, self.size - 1 - left), mode="replicate")
        return torch.nn.functional.conv1d(padded, (kernel / kernel.sum())[None, None])[:, 0]


@dataclass(frozen=True, repr=False)
class Columns(Brief):
    """A distribution of columns of log10 resistivity at depths `z` (nz) in metres, made by parts in order."""

    z: Tensor
    parts: Sequence[Part]

    @property
    def draws(self) -> int:
        return sum(part.draws for part in self.parts)

    def render(self, u: Tensor) -> Tensor:
        """The columns (n, nz), float64, of random numbers (n, draws) in [0, 1)."""
        z, at = self.z.double(), 0
        columns = torch.zeros(len(u), len(z), dtype=torch.float64)
        for part in self.parts:
            columns = part(columns, u[:, at : at + part.draws].double(), z)
            at += part.draws
        return columns

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Independent columns (count, nz)."""
        return self.render(torch.rand(count, self.draws, generator=generator, dtype=torch.float64))

    def sections(self, count: int, x: Tensor, length: float, generator: torch.Generator | None = None) -> Tensor:
        """Sections (count, nz, nx) over places x (nx) in metres, smooth over a correlation `length` in metres."""
        x = x.double()
        distance = (x[:, None] - x[None, :]) / length
        covariance = torch.exp(-0.5 * distance**2) + 1e-8 * torch.eye(len(x), dtype=torch.float64)
        normal = torch.randn(count * self.draws, len(x), generator=generator, dtype=torch.float64)
        u = torch.special.ndtr(normal @ torch.linalg.cholesky(covariance).T)
        u = u.view(count, self.draws, len(x)).transpose(1, 2).flatten(0, 1)
        return self.render(u).view(count, len(x), -1).transpose(1, 2).contiguous()


def samtex(z: Tensor) -> Columns:
    """The prior of the published example: a thin, strong conductor over a lithosphere that grows more resistive with
    depth (Zhou et al., Geophysics 89(1), 2024). z: depths of cells in metres, to 84 km."""
    return Columns(z, [
        Background(Uniform(3.0, 4.2)),
        Layer(Uniform(1e3, 15e3), Uniform(2e3, 20e3), Either(Uniform(-1.5, 0.4), Uniform(0.4, 1.5), 0.6)),
        Rising(Uniform(2.6, 2.7), Uniform(4.4, 4.5), 80e3),
        Bumps(8, Uniform(1, 4), Uniform(0.1, 0.4)),
        Blur(8, 5.0),
    ])  # fmt: skip


def basin(z: Tensor) -> Columns:
    """A basin 1 km deep: cover, a conductive layer, and a resistive basement. z: depths of cells in metres."""
    return Columns(z, [
        Background(Uniform(1.6, 2.4)),
        Layer(Uniform(120.0, 350.0), Uniform(80.0, 250.0), Uniform(0.2, 1.0)),
        Layer(Uniform(600.0, 850.0), Uniform(2e4, 2e4), Uniform(2.6, 3.4)),
        Bumps(2, Uniform(1, 3), Uniform(0.05, 0.2)),
        Blur(3, 1.0),
    ])  # fmt: skip


PRIORS = {"samtex": samtex, "basin": basin}
