"""Scattering of a plane wave by a circular cylinder with E along its axis: the series, exact.

With a = radius, m = sqrt(eps_r), x = k a, and time factor exp(+i w t), the coefficients are

    a_n = (m J_n(x) J_n'(m x) - J_n'(x) J_n(m x)) / (H_n(x) J_n'(m x) m - H_n'(x) J_n(m x)), H of the second kind,

and k sigma(phi) = 4 |sum a_n exp(i n phi)|^2, phi = 0 forward (C. Bohren and D. Huffman, section 8.4).
"""

from __future__ import annotations

import numpy as np
from scipy import special


def cylinder(ka: float, eps_r: float, angles: np.ndarray) -> np.ndarray:
    """k times the scattering width at angles in rad."""
    m, orders = np.sqrt(eps_r), np.arange(-int(ka + 20), int(ka + 20) + 1)
    j, dj = special.jv(orders, ka), special.jvp(orders, ka)
    h, dh = special.hankel2(orders, ka), special.h2vp(orders, ka)
    inner, d_inner = special.jv(orders, m * ka), special.jvp(orders, m * ka)
    a = (m * j * d_inner - dj * inner) / (m * h * d_inner - dh * inner)
    return 4 * np.abs((a * np.exp(1j * orders * np.asarray(angles)[..., None])).sum(-1)) ** 2
