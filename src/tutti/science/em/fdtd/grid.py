"""Uniform Yee grids in two and three dimensions.

Component E_p lies in the middle of edges along p, H_p in the middle of faces across p (K. S. Yee, IEEE Trans. Antennas
Propag. 14, 302, 1966). All components are stored in arrays with one place per node; those that lie between nodes have
the index of the node before them. The outermost nodes are perfectly conducting walls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from numbers import Real

from scipy import constants

C0, EPS0, MU0 = constants.speed_of_light, constants.epsilon_0, constants.mu_0
ETA0 = sqrt(MU0 / EPS0)
MODES = {
    "TM": ("Ez", "Hx", "Hy"),
    "TE": ("Hz", "Ex", "Ey"),
    "3D": ("Ex", "Ey", "Ez", "Hx", "Hy", "Hz"),
}


@dataclass(frozen=True)
class Grid:
    """`shape`: cells along x, y and, in three dimensions, z. `spacing`: their lengths in metres, or one for all.

    mode: "TM" (Ez, Hx, Hy) or "TE" (Hz, Ex, Ey) in two dimensions; "3D" in three.
    """

    shape: tuple[int, ...]
    spacing: float | tuple[float, ...]
    mode: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.shape, Sequence) or not all(hasattr(n, "__index__") for n in self.shape):
            raise ValueError(f"shape of a grid: numbers of cells by axis, such as (60, 60), not {self.shape}")
        dims = len(self.shape)
        if dims not in (2, 3):
            raise ValueError(f"a grid has two or three axes, not {dims}")
        if any(n < 1 for n in self.shape):
            raise ValueError(f"a grid needs at least one cell along each axis, not {self.shape}")
        lengths = tuple(self.spacing) if isinstance(self.spacing, tuple | list) else (self.spacing,) * dims
        if len(lengths) != dims or not all(isinstance(x, Real) and 0 < x < inf for x in lengths):
            raise ValueError(f"spacing: {dims} positive lengths in metres, or one, not {self.spacing}")
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        object.__setattr__(self, "spacing", tuple(float(x) for x in lengths))
        mode = self.mode or ("TM" if dims == 2 else "3D")
        if mode not in MODES or (mode == "3D") != (dims == 3):
            raise ValueError(f"mode of {dims} dimensions: {'3D' if dims == 3 else 'TM or TE'}, not {mode!r}")
        object.__setattr__(self, "mode", mode)

    @property
    def lengths(self) -> tuple[float, ...]:
        """The lengths of a cell along each axis, in metres."""
        assert isinstance(self.spacing, tuple)
        return self.spacing

    @property
    def flat(self) -> bool:
        return len(self.shape) == 2

    @property
    def components(self) -> tuple[str, ...]:
        return MODES[self.mode]

    @property
    def nodes(self) -> tuple[int, ...]:
        """Shape of the arrays of components."""
        return tuple(n + 1 for n in self.shape)

    @property
    def cells(self) -> int:
        total = 1
        for n in self.shape:
            total *= n
        return total

    def courant_limit(self, eps_r: float = 1.0, mu_r: float = 1.0) -> float:
        """The longest stable time step in seconds, for the least permittivity and permeability of a model."""
        return sqrt(eps_r * mu_r) / (C0 * sqrt(sum(1 / x**2 for x in self.lengths)))

    # Axes of the kernels: the last is contiguous and long. In two dimensions x is 0 and y is 2; this reflection turns
    # the sign of H.

    @property
    def axes(self) -> tuple[int, int, int]:
        """The kernel's axis of x, y and z."""
        return (0, 2, 1) if self.flat else (0, 1, 2)

    @property
    def h_sign(self) -> int:
        """Kernels store H with this sign."""
        return -1 if self.flat else 1

    @property
    def array(self) -> tuple[int, int, int]:
        """Shape of a component in the kernels."""
        return (self.nodes[0], 1, self.nodes[1]) if self.flat else tuple(self.nodes)  # pyright: ignore

    def component(self, name: str) -> int:
        """Number of a component in the kernels: E0 E1 E2 H0 H1 H2. Raises ValueError if the mode lacks it."""
        if name not in self.components:
            raise ValueError(f"a grid in mode {self.mode} has {', '.join(self.components)}, not {name!r}")
        return 3 * (name[0] == "H") + self.axes["xyz".index(name[1])]


def changing(array: Sequence[int], component: int) -> list[tuple[int, int]]:
    """Places where steps change a component, (from, to) by axis of the kernels: not tangential E and normal H on walls,
    nor what lies beyond the last node. The kernels in C++ have the same rule."""
    h, p = divmod(component, 3)
    return [(0, 1) if n == 1 else (int((h == 0) == (d != p)), n - 1) for d, n in enumerate(array)]
