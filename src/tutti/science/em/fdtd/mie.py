"""Scattering of a plane wave by circular cylinders and spheres: the series, exact.

Cylinder with E along its axis: with a = radius, m = sqrt(eps_r), x = k a, and time factor exp(+i w t), the
coefficients are

    a_n = (m J_n(x) J_n'(m x) - J_n'(x) J_n(m x)) / (H_n(x) J_n'(m x) m - H_n'(x) J_n(m x)), H of the second kind,

and k sigma(phi) = 4 |sum a_n exp(i n phi)|^2, phi = 0 forward (C. Bohren and D. Huffman, section 8.4).

Sphere: with the Riccati-Bessel functions psi(x) = x j_n(x), xi(x) = x h_n(x), h of the first kind (time factor
exp(-i w t)),

    a_n = (m psi(m x) psi'(x) - psi(x) psi'(m x)) / (m psi(m x) xi'(x) - xi(x) psi'(m x)),
    b_n = (psi(m x) psi'(x) - m psi(x) psi'(m x)) / (psi(m x) xi'(x) - m xi(x) psi'(m x)),

a_n = psi' / xi', b_n = psi / xi for a perfect conductor (section 4.4).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import special

from tutti.science.em.bounds import check_positive

__all__ = ["Sphere", "cylinder", "sphere"]


def cylinder(ka: float, eps_r: float, angles: np.ndarray) -> np.ndarray:
    """k times the scattering width, a number without unit, at angles in rad. ka: 2 pi radius / wavelength."""
    check_positive("the cylinder", ka=ka, eps_r=eps_r)
    m, orders = np.sqrt(eps_r), np.arange(-int(ka + 20), int(ka + 20) + 1)
    j, dj = special.jv(orders, ka), special.jvp(orders, ka)
    h, dh = special.hankel2(orders, ka), special.h2vp(orders, ka)
    inner, d_inner = special.jv(orders, m * ka), special.jvp(orders, m * ka)
    a = (m * j * d_inner - dj * inner) / (m * h * d_inner - dh * inner)
    return 4 * np.abs((a * np.exp(1j * orders * np.asarray(angles)[..., None])).sum(-1)) ** 2


@dataclass(frozen=True)
class Sphere:
    """Efficiencies: cross-sections over pi a^2. back: radar cross-section at 180 degrees; forward: at 0 degrees."""

    extinction: float
    scattering: float
    back: float
    forward: float


def sphere(ka: float, index: complex | None) -> Sphere:
    """The Mie coefficients of a sphere with a refractive index (imaginary part positive with loss), or of perfect
    conductor (None).

    ka: 2 pi radius / wavelength.
    """
    check_positive("the sphere", ka=ka)
    n = np.arange(1, int(ka + 4.05 * ka ** (1 / 3) + 8))

    def riccati(z: complex) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """psi, psi', chi, chi' with xi = psi - i chi."""
        j, y = special.spherical_jn(n, z), special.spherical_yn(n, z)
        dj, dy = special.spherical_jn(n, z, True), special.spherical_yn(n, z, True)
        return z * j, j + z * dj, -z * y, -(y + z * dy)

    psi, d_psi, chi, d_chi = riccati(ka)
    xi, d_xi = psi - 1j * chi, d_psi - 1j * d_chi
    if index is None:
        a, b = d_psi / d_xi, psi / xi
    else:
        inner, d_inner, _, _ = riccati(index * ka)
        a = (index * inner * d_psi - psi * d_inner) / (index * inner * d_xi - xi * d_inner)
        b = (inner * d_psi - index * psi * d_inner) / (inner * d_xi - index * xi * d_inner)
    weight = 2 * n + 1
    return Sphere(
        extinction=float(2 / ka**2 * (weight * (a + b).real).sum()),
        scattering=float(2 / ka**2 * (weight * (abs(a) ** 2 + abs(b) ** 2)).sum()),
        back=float(abs((weight * (-1.0) ** n * (a - b)).sum()) ** 2 / ka**2),
        forward=float(abs((weight * (a + b)).sum()) ** 2 / ka**2),
    )
