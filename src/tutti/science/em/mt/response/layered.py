"""The response of a layered earth, exact: Wait's recursion.

From the half-space upwards, with time factor e^{+i w t}, k = sqrt(i w mu0 / rho) and zeta = i w mu0 / k:

    Z_N = zeta_N,    Z_j = zeta_j (Z_{j+1} + zeta_j tanh(k_j h_j)) / (zeta_j + Z_{j+1} tanh(k_j h_j))

Wait (1954), Geophysics 19, 281.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tutti.science.em.mt.mesh import MU0, positive_frequencies


def log_resistivity(resistivity: Tensor | Sequence[float]) -> Tensor:
    """log10 of resistivities in ohm-m, float64. Raises ValueError for values that are not positive and finite."""
    values = torch.as_tensor(resistivity, dtype=torch.float64)
    wrong = ~((values > 0) & torch.isfinite(values))
    if wrong.any():
        example = values[wrong].flatten()[0].item()
        raise ValueError(
            f"resistivity must be positive and finite, in ohm-m: {int(wrong.sum())} of {values.numel()} values are not,"
            f" as {example:g}; for air use a large value, as 1e9"
        )
    return values.log10()


def log10_of_ohm_m(log_rho: Tensor) -> None:
    """Raises ValueError for resistivities that were given in ohm-m, not as log10: for values beyond 10."""
    if (wrong := log_rho.abs() > 10).any():
        raise ValueError(
            f"log_rho must be log10 of ohm-m; got {log_rho[wrong].flatten()[0].item():g} (log_resistivity() converts)"
        )


def impedance(log_rho: Tensor, thickness: Tensor, frequencies: Sequence[float] | Tensor) -> Tensor:
    """Impedance E/H in ohm at the surface, complex128 of shape (frequencies,); differentiable.

    log_rho: log10 ohm-m of the layers (n), the last one a half-space. thickness: metres (n - 1).
    """
    log_rho, thickness = log_rho.double(), thickness.double()
    if log_rho.dim() != 1 or thickness.shape != (len(log_rho) - 1,):
        raise ValueError(
            f"n layers need n values of log_rho and n - 1 of thickness, the last layer being a half-space; got shapes"
            f" {tuple(log_rho.shape)} and {tuple(thickness.shape)}"
        )
    if not torch.isfinite(log_rho).all() or not (thickness > 0).all():
        raise ValueError("log_rho must be finite and thickness positive, in metres")
    iwmu = 2j * math.pi * MU0 * torch.tensor(positive_frequencies(frequencies), device=log_rho.device).double()
    k = (iwmu[:, None] / 10**log_rho).sqrt()  # (frequency, layer)
    zeta = iwmu[:, None] / k
    z = zeta[:, -1]
    for j in reversed(range(len(thickness))):
        t = (k[:, j] * thickness[j]).tanh()
        z = zeta[:, j] * (z + zeta[:, j] * t) / (zeta[:, j] + z * t)
    return z


def apparent(z: Tensor, frequencies: Sequence[float] | Tensor) -> tuple[Tensor, Tensor]:
    """Apparent resistivity |Z|^2 / (w mu0) in ohm-m and phase of Z in degrees. z: ohm, (..., frequency)."""
    w = 2 * math.pi * torch.tensor(positive_frequencies(frequencies), device=z.device).double()
    return z.abs() ** 2 / (w * MU0), z.angle().rad2deg()


def layered(resistivity: Tensor | Sequence[float], thickness: Tensor | Sequence[float],
            frequencies: Sequence[float] | Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Apparent resistivity (ohm-m) and phase (degrees) over layers of these resistivities (ohm-m) and thicknesses (m).

    >>> rho, phase = layered([100, 10, 1000], [500, 1500], [100, 1, 0.01])
    >>> [round(x, 5) for x in rho.tolist()]
    [112.15549, 13.91376, 211.20856]
    """
    z = impedance(log_resistivity(resistivity), torch.as_tensor(thickness, dtype=torch.float64), frequencies)
    return apparent(z, frequencies)
