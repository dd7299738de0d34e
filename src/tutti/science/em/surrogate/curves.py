"""A basis of curves: a real vector that stands for S is  mean + sum_k c_k v_k,  v_k: singular vectors of samples.

Representations, `Geometry.representation`:

- "complex": real and imaginary parts.
- "phases": phases of S11 + S21 and S11 - S21, unwrapped along frequency. These sums are the reflections of the two
  symmetric excitations of a lossless reciprocal symmetric two-port, and lie on the unit circle (D. M. Pozar, Microwave
  Engineering, 4.3). Where resonances move, phases need far fewer vectors than complex curves, and every prediction is
  lossless.

In both, the squared error of coefficients is proportional to that of curves (of phases, for small errors).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import pi
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tutti.science.em.shown import Brief


@dataclass(frozen=True)
class Complex:
    """Real and imaginary parts of curves of any shape."""

    shape: tuple[int, int]

    @staticmethod
    def of(s: Tensor) -> Complex:
        return Complex(tuple(s.shape[1:]))  # pyright: ignore

    def vector(self, s: Tensor) -> Tensor:
        return torch.view_as_real(s.to(torch.complex128)).flatten(1)

    def curves(self, x: Tensor) -> Tensor:
        return torch.view_as_complex(x.unflatten(-1, (*self.shape, 2)).contiguous())

    def facts(self) -> dict[str, Any]:
        return {"shape": self.shape}


@dataclass(frozen=True)
class Phases:
    """anchor: index of the frequency from which phases are unwrapped. middle: mean phases there of both excitations."""

    anchor: int
    middle: tuple[float, float]

    @staticmethod
    def of(s: Tensor) -> Phases:
        """Raises ValueError for samples of no lossless symmetric two-port, and if phases vary by a whole turn."""
        if s.shape[1] != 2:
            raise ValueError(f"phases stand for S11 and S21, not for {s.shape[1]} traces")
        gamma = excitations(s)
        if float((gamma.abs() - 1).abs().max()) > 0.05:
            raise ValueError("phases stand for lossless symmetric two-ports, with |S11 +- S21| = 1; there is "
                             f"{float(gamma.abs().min()):.3f} to {float(gamma.abs().max()):.3f}")  # fmt: skip
        unit = gamma / gamma.abs()
        middle = unit.mean(0).angle()
        away = (unit * torch.polar(torch.ones(()).double(), -middle)).angle().abs().amax((0, 1))
        anchor = int(away.argmin())
        if float(away[anchor]) > 0.95 * pi:
            raise ValueError("phases of samples vary by a whole turn at every frequency: use complex curves")
        return Phases(anchor, tuple(middle[:, anchor].tolist()))  # pyright: ignore

    def vector(self, s: Tensor) -> Tensor:
        gamma, middle = excitations(s), torch.tensor(self.middle, dtype=torch.float64)
        start = (gamma[..., self.anchor] * torch.polar(torch.ones(()).double(), -middle)).angle() + middle
        x = torch.from_numpy(np.unwrap(gamma.angle().numpy(), axis=-1))
        return (x - x[..., self.anchor, None] + start[..., None]).flatten(1)

    def curves(self, x: Tensor) -> Tensor:
        even, odd = torch.polar(torch.ones_like(x), x).unflatten(-1, (2, -1)).unbind(-2)
        return torch.stack([even + odd, even - odd], -2) / 2

    def facts(self) -> dict[str, Any]:
        return {"anchor": self.anchor, "middle": self.middle}


REPRESENTATIONS: dict[str, type[Complex] | type[Phases]] = {"complex": Complex, "phases": Phases}


def excitations(s: Tensor) -> Tensor:
    """S11 + S21 and S11 - S21: (n, 2, frequencies)."""
    s = s.to(torch.complex128)
    return torch.stack([s[:, 0] + s[:, 1], s[:, 0] - s[:, 1]], 1)


@dataclass(frozen=True, repr=False)
class Basis(Brief):
    """mean: (values,). vectors: (modes, values), orthonormal. scale: standard deviations of coefficients (modes,)."""

    form: Complex | Phases
    mean: Tensor
    vectors: Tensor
    scale: Tensor

    @staticmethod
    def of(s: Tensor, representation: str = "complex", error: float = 1e-3, most: int = 64) -> Basis:
        """The fewest vectors that leave less than `error` of the norm of samples, and at most `most`."""
        form = REPRESENTATIONS[representation].of(s)
        x = form.vector(s)
        mean = x.mean(0)
        _, values, vectors = torch.linalg.svd(x - mean, full_matrices=False)
        left = values.square().flip(0).cumsum(0).flip(0).sqrt() / x.norm()
        modes = max(1, min(most, int((left > error).sum())))
        scale = values[:modes] / max(1, len(x) - 1) ** 0.5
        return Basis(form, mean, vectors[:modes], scale.clamp(min=1e-12))

    def encode(self, s: Tensor) -> Tensor:
        """Coefficients in units of `scale`: (n, modes)."""
        return (self.form.vector(s) - self.mean) @ self.vectors.T / self.scale

    def decode(self, coefficients: Tensor) -> Tensor:
        """Complex curves (..., traces, frequencies)."""
        return self.form.curves((coefficients.double() * self.scale) @ self.vectors + self.mean)


def passive(s: Tensor) -> Tensor:
    """The nearest column of a passive S-matrix: scaled where sum_i |S_i1|^2 > 1. (..., traces, frequencies)"""
    return s / s.abs().square().sum(-2, keepdim=True).sqrt().clamp(min=1.0)
