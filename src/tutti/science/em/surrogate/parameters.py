"""Parameters of a geometry: names, ranges and units, and designs that fill the box of their ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tutti.science.em.bounds import check_kind, check_number, check_whole
from tutti.science.em.shown import brief


@dataclass(frozen=True)
class Parameter:
    """A number between `low` and `high`, in `unit`."""

    name: str
    low: float
    high: float
    unit: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.low, str) or isinstance(self.high, str):
            raise ValueError(f"parameter {self.name}: low and high are numbers, not {self.low!r} and {self.high!r}")
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f"parameter {self.name}: low must be below high, not {self.low:g} and {self.high:g}")


@dataclass(frozen=True)
class Space:
    """The box of several parameters. Points are float64 rows, one column per parameter."""

    parameters: tuple[Parameter, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.parameters, tuple | list):
            raise ValueError(f"parameters: a tuple of them, not {brief(self.parameters)}")
        for x in self.parameters:
            check_kind("parameters", x, Parameter)
        names = [x.name for x in self.parameters]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"parameters need different names: {names}")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(x.name for x in self.parameters)

    @property
    def low(self) -> Tensor:
        return torch.tensor([x.low for x in self.parameters], dtype=torch.float64)

    @property
    def high(self) -> Tensor:
        return torch.tensor([x.high for x in self.parameters], dtype=torch.float64)

    def points(self, values: Tensor | Mapping[str, float] | Sequence[float]) -> Tensor:
        """Points (n, parameters) of a mapping by name, one point, or several.

        Raises ValueError for names or numbers of columns that do not match, and for values that are not finite.
        """
        if isinstance(values, Mapping):
            if set(values) != set(self.names):
                raise ValueError(f"parameters: {', '.join(self.names)}, not {', '.join(values)}")
            for name in self.names:
                check_number(name, values[name])
            values = [float(values[name]) for name in self.names]
        if not isinstance(values, Tensor | np.ndarray | list | tuple):
            raise ValueError(f"points: a tensor or a mapping of {', '.join(self.names)}, not {brief(values)}")
        x = torch.as_tensor(values, dtype=torch.float64)
        x = x[None] if x.ndim == 1 else x
        if x.ndim != 2 or x.shape[1] != len(self.parameters):
            raise ValueError(f"points have shape (n, {len(self.parameters)}) for the parameters "
                             f"{', '.join(self.names)}, not {tuple(x.shape)}")  # fmt: skip
        if not bool(torch.isfinite(x).all()):
            row, column = (~torch.isfinite(x)).nonzero()[0].tolist()
            raise ValueError(f"{self.names[column]} of point {row} is {float(x[row, column])}")
        return x

    def describe(self, point: Tensor) -> str:
        """A point in words: d=0.00675, eps_r=4.17."""
        return ", ".join(f"{name}={x:.6g}" for name, x in zip(self.names, point.tolist(), strict=True))

    def inside(self, points: Tensor) -> Tensor:
        """Which points lie in the box, with a tolerance of rounding: (n,) bool."""
        slack = 1e-9 * (self.high - self.low)
        return ((points >= self.low - slack) & (points <= self.high + slack)).all(1)

    def check(self, points: Tensor) -> None:
        """Raises ValueError for the first value outside of its range."""
        slack = 1e-9 * (self.high - self.low)
        wrong = ((points < self.low - slack) | (points > self.high + slack)).nonzero()
        if len(wrong):
            row, column = wrong[0].tolist()
            x = self.parameters[column]
            raise ValueError(f"{x.name} = {float(points[row, column]):g} {x.unit} is out of its range, {x.low:g} to "
                             f"{x.high:g} {x.unit}".replace("  ", " "))  # fmt: skip

    def unit(self, points: Tensor) -> Tensor:
        """Points scaled to -1 .. 1 in the box."""
        return 2 * (points - self.low) / (self.high - self.low) - 1

    def sobol(self, count: int, seed: int = 0) -> Tensor:
        """A scrambled Sobol sequence: (count, parameters)."""
        check_whole("points", 0, count=count)
        engine = torch.quasirandom.SobolEngine(len(self.parameters), scramble=True, seed=seed)
        return self.low + engine.draw(count, dtype=torch.float64) * (self.high - self.low)

    def random(self, count: int, seed: int = 0) -> Tensor:
        """Independent uniform points: (count, parameters)."""
        check_whole("points", 0, count=count)
        draw = torch.rand(count, len(self.parameters), dtype=torch.float64,
                          generator=torch.Generator().manual_seed(seed))  # fmt: skip
        return self.low + draw * (self.high - self.low)
