"""A family of fields for operators: a lossy cavity with a random filling, driven by a given current.

div grad u + k^2 (1 - j loss) eps_r u = -f  in the unit square, u = 0 on its walls, f: a Gaussian bump; second-order
differences on (n + 1)^2 nodes, solved directly. eps_r = 1 + contrast sigmoid(g), g: a random field of few Fourier
modes, the same function at any n.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import pi

import numpy as np
import scipy.sparse as sp
import scipy.sparse.linalg as spl
import torch
from torch import Tensor

from tutti.science.em.bounds import check_positive, check_whole


@dataclass(frozen=True)
class Cavity:
    """k: wave number in vacuum times the width. source: (x, y, radius) of the current."""

    k: float = 6.0
    loss: float = 0.15
    contrast: float = 1.5
    modes: int = 3
    source: tuple[float, float, float] = (0.3, 0.4, 0.08)

    def __post_init__(self) -> None:
        check_whole("the cavity", modes=self.modes)
        check_positive("the cavity", k=self.k, radius=self.source[2])

    def fillings(self, count: int, n: int, seed: int = 0) -> Tensor:
        """eps_r at nodes: float64 (count, n + 1, n + 1)."""
        check_whole("fillings", count=count)
        check_whole("fillings", 2, n=n)
        generator = torch.Generator().manual_seed(seed)
        draw = torch.randn(count, self.modes, self.modes, dtype=torch.float64, generator=generator)
        order = torch.arange(self.modes, dtype=torch.float64)
        draw = 3 * draw / (1 + order[:, None].square() + order.square())
        wave = torch.cos(pi * order[:, None] * torch.linspace(0, 1, n + 1, dtype=torch.float64))
        return 1 + self.contrast * torch.sigmoid(torch.einsum("cij,ix,jy->cxy", draw, wave, wave))

    def current(self, n: int) -> Tensor:
        x = torch.linspace(0, 1, n + 1, dtype=torch.float64)
        x0, y0, radius = self.source
        return torch.exp(-((x[:, None] - x0).square() + (x - y0).square()) / radius**2) * 100

    def solve(self, fillings: Tensor) -> Tensor:
        """u at nodes: complex128 (count, n + 1, n + 1). Raises ValueError unless eps_r is positive."""
        if not bool((fillings > 0).all()) or not bool(torch.isfinite(fillings).all()):
            raise ValueError("eps_r of fillings must be positive and finite")
        n = fillings.shape[-1] - 1
        second = sp.diags([1.0, -2.0, 1.0], [-1, 0, 1], shape=(n - 1, n - 1)) * n**2  # pyright: ignore
        laplace = sp.kronsum(second, second)
        right = -self.current(n)[1:-1, 1:-1].flatten().numpy().astype(np.complex128)
        out = torch.zeros(*fillings.shape, dtype=torch.complex128)
        for i, eps in enumerate(fillings):
            medium = self.k**2 * (1 - 1j * self.loss) * eps[1:-1, 1:-1].flatten().numpy()
            matrix = (laplace + sp.diags(medium)).tocsc()
            out[i, 1:-1, 1:-1] = torch.from_numpy(spl.spsolve(matrix, right).reshape(n - 1, n - 1))
        return out

    def pairs(self, count: int, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """(eps_r (count, 1, n, n), real and imaginary part of u (count, 2, n, n)), float32.

        Without the last nodes, where u = 0: then the grids of all n have the period 1.
        """
        eps = self.fillings(count, n, seed)
        u = self.solve(eps)[:, :-1, :-1]
        return eps[:, None, :-1, :-1].float(), torch.view_as_real(u).permute(0, 3, 1, 2).float().contiguous()
