"""Sections whose responses are known: COMMEMI 2D-0, exact in TM, and COMMEMI 2D-1.

The models of the comparison of modelling methods for electromagnetic induction (COMMEMI): Zhdanov et al. (1997),
J. Appl. Geophys. 37, 133.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tutti.science.em.mt.mesh import MU0, Mesh2D
from tutti.science.em.mt.response.layered import apparent

PERIOD = 300.0  # s, of 2D-0
DEPTH, HALF = 50e3, 10e3  # m: of the perfect conductor of 2D-0, and half the width of the middle
RESISTIVITY = 10.0, 1.0, 2.0  # ohm-m, from left to right
CONDUCTOR = 1e-8  # ohm-m, for a perfect one


def commemi_2d0(mesh: Mesh2D) -> Tensor:
    """log10 ohm-m (nz, nx): 10 | 1 | 2 ohm-m with interfaces at -10 and 10 km, a perfect conductor from 50 km on."""
    for x in (-HALF, HALF):
        _at_edge("x_edges", mesh.x_edges, x)
    _at_edge("z_edges", mesh.z_edges, DEPTH)
    left, middle, right = RESISTIVITY
    columns = torch.where(mesh.x < -HALF, left, torch.where(mesh.x < HALF, middle, right))
    return torch.where(mesh.z[:, None] < DEPTH, columns, CONDUCTOR).double().log10()


def commemi_2d0_tm(x: Sequence[float] | Tensor, modes: int = 20_000) -> tuple[Tensor, Tensor]:
    """Apparent resistivity (ohm-m) and phase (degrees) of 2D-0 in TM at x (m): exact.

    The series of d'Erceville and Kunetz (1962), Geophysics 27, 651. In the segment s

        H = cosh(k_s (D - z)) / cosh(k_s D) + sum_n sin(b_n z) X_sn(x),    b_n = (n + 1/2) pi / D

    X_sn is a sum of exp(+-g x), g^2 = b_n^2 + k_s^2. The coefficients of the first term by sin(b_n z) are
    2 b_n / (D g^2); H and rho dH/dx are continuous at both interfaces, for each n by itself.
    """
    x = torch.as_tensor(x, dtype=torch.float64)[:, None]
    iwmu = 2j * math.pi / PERIOD * MU0
    k2 = [iwmu / rho for rho in RESISTIVITY]
    b = (torch.arange(modes, dtype=torch.float64) + 0.5) * math.pi / DEPTH
    g1, g2, g3 = ((b**2 + k).sqrt() for k in k2)
    h1, h2, h3 = (2 * b / (DEPTH * g**2) for g in (g1, g2, g3))
    a1, a2, a3 = (rho * g for rho, g in zip(RESISTIVITY, (g1, g2, g3), strict=True))
    through = (-2 * HALF * g2).exp()
    # X = A exp(g1 (x + w)) | B exp(-g2 (x + w)) + C exp(g2 (x - w)) | F exp(-g3 (x - w)). Without A and F:
    #   (a1 + a2) B + (a1 - a2) through C = a1 (h1 - h2),   (a3 - a2) through B + (a3 + a2) C = a3 (h3 - h2)
    m11, m12, r1 = a1 + a2, (a1 - a2) * through, a1 * (h1 - h2)
    m21, m22, r2 = (a3 - a2) * through, a3 + a2, a3 * (h3 - h2)
    det = m11 * m22 - m12 * m21
    into, back = (r1 * m22 - m12 * r2) / det, (m11 * r2 - m21 * r1) / det  # B, C
    left, right = h2 - h1 + into + back * through, h2 - h3 + into * through + back  # A, F
    in_left = left * (g1 * (x + HALF).clamp(max=0)).exp()
    in_middle = into * (-g2 * (x + HALF).clamp(0, 2 * HALF)).exp() + back * (g2 * (x - HALF).clamp(-2 * HALF, 0)).exp()
    in_right = right * (-g3 * (x - HALF).clamp(min=0)).exp()
    z = x.new_zeros(len(x), dtype=torch.complex128)
    where = torch.where(x[:, 0] < -HALF, 0, torch.where(x[:, 0] < HALF, 1, 2))
    for s, amplitude in enumerate((in_left, in_middle, in_right)):
        k = k2[s] ** 0.5
        sheet = torch.tensor(k * DEPTH, dtype=torch.complex128).tanh() * k
        z = torch.where(where == s, RESISTIVITY[s] * (sheet - (b * amplitude).sum(-1)), z)
    rho, phase = apparent(z[:, None], [1 / PERIOD])
    return rho[:, 0], phase[:, 0]


def commemi_2d1(mesh: Mesh2D) -> Tensor:
    """log10 ohm-m (nz, nx): a body of 0.5 ohm-m, |x| < 500 m and 250 to 2250 m deep, in 100 ohm-m."""
    for name, edges, places in (("x_edges", mesh.x_edges, (-500, 500)), ("z_edges", mesh.z_edges, (250, 2250))):
        for place in places:
            _at_edge(name, edges, place)
    body = (mesh.x.abs() < 500) & ((mesh.z > 250) & (mesh.z < 2250))[:, None]
    return torch.where(body, 0.5, 100.0).double().log10()


def _at_edge(name: str, edges: Sequence[float], place: float) -> None:
    nearest = min(edges, key=lambda edge: abs(edge - place))
    if abs(nearest - place) > 1e-6 * max(abs(place), 1):
        raise ValueError(
            f"the model has an interface at {place:g} m, {name} has none there: the nearest is {nearest:g}"
        )
