"""Magnetotelluric data: values, errors and masks on the grid (mode, frequency, site, 2) of the responses of `MT2D`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tutti.science.em.mt.mesh import Mesh2D, positive_frequencies
from tutti.science.em.mt.response.forward import MODES, MT2D, OUTPUTS
from tutti.science.em.mt.response.stencil import LN10
from tutti.science.em.mt.surveys import datafile
from tutti.science.em.mt.surveys.datafile import LOG10_RHO
from tutti.science.em.shown import Brief

NOISE = 0.01, 0.286, 0.01  # apparent resistivity, relative; phase, degrees; tipper


@dataclass(frozen=True, eq=False, repr=False)
class Data(Brief):
    """Observations. frequencies: Hz. sites: x in metres. values, errors, mask: float64 (mode, frequency, site, 2).

    The last dim is as in `MT2D`: log10 apparent resistivity and phase in degrees, or real and imaginary part. errors:
    standard deviations. mask: 1 for what is used, 0 for what is not; all is used by default. Raises ValueError for
    values that are not finite, apparent resistivities that are not log10 of ohm-m, and errors that are not positive,
    where the mask is not 0.
    """

    frequencies: tuple[float, ...]
    sites: tuple[float, ...]
    modes: tuple[str, ...]
    values: Tensor
    errors: Tensor
    mask: Tensor = None  # type: ignore[assignment]
    outputs: str = "apparent"

    leading = ("count",)

    def __post_init__(self) -> None:
        put = object.__setattr__.__get__(self)
        put("frequencies", positive_frequencies(self.frequencies))
        put("sites", tuple(float(x) for x in self.sites))
        put("modes", tuple(self.modes))
        if self.outputs not in OUTPUTS or not set(self.modes) <= set(MODES):
            raise ValueError(f"modes are {MODES}, outputs one of {OUTPUTS}; got {self.modes} and {self.outputs!r}")
        put("mask", torch.ones(self.shape) if self.mask is None else self.mask)
        for name in ("values", "errors", "mask"):
            array = torch.as_tensor(getattr(self, name)).double()
            if array.numel() != math.prod(self.shape):
                raise ValueError(
                    f"{name} must have the shape (mode, frequency, site, 2) = {self.shape}; got {tuple(array.shape)}"
                )
            put(name, array.reshape(self.shape))
        if not ((self.mask == 0) | (self.mask == 1)).all():
            raise ValueError("mask must be 0 or 1 everywhere; errors say how much a value counts")
        used = self.mask == 1
        bad = used & ~torch.isfinite(self.values)
        if bad.any():
            raise ValueError(f"{self._examples(bad)} not finite: set their mask to 0 (Data.masked_nan does it)")
        bad = used & ~((self.errors > 0) & torch.isfinite(self.errors))
        if bad.any():
            raise ValueError(f"{self._examples(bad)} with an error not positive and finite: set a floor or mask 0")
        bad = used & ((self.values < LOG10_RHO[0]) | (self.values > LOG10_RHO[1]))
        bad[..., 1] = False
        bad[[mode == "tipper" or self.outputs != "apparent" for mode in self.modes]] = False
        if bad.any():
            wrong = f"log10_rho = {self.values[bad][0]:g} is not a log10 of ohm-m"
            raise ValueError(f"{self._examples(bad)} wrong: {wrong}")
        put("values", torch.where(used, self.values, 0.0))
        put("errors", torch.where(used, self.errors, 1.0))

    def _examples(self, bad: Tensor) -> str:
        mode, f, site, _ = bad.nonzero()[0].tolist()
        where = f"{self.modes[mode]} at {self.frequencies[f]:g} Hz, site {site} (x = {self.sites[site]:g} m)"
        return f"{int(bad.sum())} of {bad.numel()} values, the first of {where}, are"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return len(self.modes), len(self.frequencies), len(self.sites), 2

    @property
    def count(self) -> int:
        """The number of values that are used."""
        return int(self.mask.sum())

    @property
    def weights(self) -> Tensor:
        """mask / errors, flat: the diagonal of W."""
        return (self.mask / self.errors).flatten()

    def chi(self, response: Tensor) -> float:
        """Root mean square of (value - response) / error: 1 if the errors are right."""
        r = self.weights * (self.values.flatten() - response.flatten())
        return math.sqrt((r @ r).item() / max(self.count, 1))

    def misfit(self, response: Tensor) -> float:
        """|d - F| / |d| over used values, without errors: what Zhou et al. (2024) call the residual."""
        mask = self.mask.flatten()
        return (((self.values.flatten() - response.flatten()) * mask).norm() / self.values.norm()).item()

    def problem(self, mesh: Mesh2D, **options: Any) -> MT2D:
        """The forward problem whose responses compare with these values. options: options of `MT2D`."""
        return MT2D(mesh, self.frequencies, self.sites, self.modes, outputs=self.outputs, **options)

    @classmethod
    def masked_nan(cls, frequencies: Sequence[float], sites: Sequence[float], modes: Sequence[str], values: Tensor,
                   errors: Tensor, outputs: str = "apparent") -> Data:  # fmt: skip
        """Values or errors that are not finite get mask 0."""
        mask = (torch.isfinite(values) & torch.isfinite(errors)).double()
        return cls(tuple(frequencies), tuple(sites), tuple(modes), values, errors, mask, outputs)

    @classmethod
    def synthetic(cls, problem: MT2D, log_rho: Tensor, *, rho: float = NOISE[0], phase: float = NOISE[1],
                  tipper: float = NOISE[2], seed: int = 0) -> Data:  # fmt: skip
        """Responses of a known section with Gaussian noise: `rho` relative, `phase` in degrees, `tipper` absolute. With
        0 they are exact, and the errors are those of the default: 0.01, 0.286 and 0.01."""
        if not problem.log:
            raise ValueError("synthetic data need a problem with outputs='apparent'")
        values = problem(log_rho).detach().cpu().view(problem.shape)
        relative = {"rho": rho, "phase": phase, "tipper": tipper}
        if negative := [f"{name} = {x}" for name, x in relative.items() if not x >= 0]:
            raise ValueError(f"noise must not be negative; got {negative[0]}")
        errors = _floors(problem.modes, values, rho or NOISE[0], phase or NOISE[1], tipper or NOISE[2])
        added = _floors(problem.modes, values, rho, phase, tipper)
        noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return cls(problem.frequencies, problem.sites, problem.modes, values + added * noise, errors)

    def with_floor(self, *, rho: float = 0.01, phase: float = 0.286, tipper: float = 0.01) -> Data:
        """Return data whose errors are at least these. rho: relative error of apparent resistivity. phase: error of the
        phase in degrees. tipper: absolute error of the tipper."""
        if self.outputs != "apparent":
            raise ValueError("floors are those of apparent resistivity and phase; these data are impedances")
        if min(rho, phase, tipper) < 0:
            raise ValueError(f"floors must not be negative; got rho {rho}, phase {phase}, tipper {tipper}")
        floors = _floors(self.modes, self.values, rho, phase, tipper)
        return dataclasses.replace(self, errors=torch.maximum(self.errors, floors))

    def without_shift(self, shift: Tensor) -> Data:
        """Corrected for a known static shift: log10 factors of apparent resistivity, (mode, site)."""
        values = self.values.clone()
        values[..., 0] -= self._shifts(shift)[:, None]
        return dataclasses.replace(self, values=values)

    def shifted(self, response: Tensor, shift: Tensor) -> Tensor:
        """A response with static shift (mode, site), differentiable by both: for shifts as unknowns."""
        both = torch.stack([self._shifts(shift), torch.zeros_like(shift)], -1)  # (mode, site, 2)
        return (response.view(self.shape) + both[:, None]).flatten()

    def shift_jacobian(self) -> Tensor:
        """Derivatives of the data by static shifts, (data, mode * site): columns to append to a Jacobian."""
        shift = torch.eye(len(self.modes) * len(self.sites), dtype=torch.float64)
        shift = shift.view(-1, len(self.modes), len(self.sites))
        zero = torch.zeros(self.values.numel(), dtype=torch.float64)
        return torch.stack([self.shifted(zero, s) for s in shift * self._can_shift()], 1)

    def _can_shift(self) -> Tensor:
        if self.outputs != "apparent":
            raise ValueError("static shift adds to log10 apparent resistivity; these data are impedances")
        return torch.tensor([[float(mode != "tipper")] for mode in self.modes], dtype=torch.float64)

    def _shifts(self, shift: Tensor) -> Tensor:
        if shift.shape != (len(self.modes), len(self.sites)):
            raise ValueError(
                f"shift must have the shape (mode, site) = {len(self.modes), len(self.sites)}; got {tuple(shift.shape)}"
            )
        return shift * self._can_shift().to(shift)

    def save(self, path: str | Path) -> None:
        """As .npz, or as .csv with a row for each value; a masked value has weight 0 (`datafile`)."""
        datafile.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Data:
        """What `save` wrote. Rows of a .csv may be in any order, and are masked where they are missing. Raises
        ValueError that names the file, and the line of a .csv."""
        try:
            return cls(**datafile.load(path))
        except ValueError as error:
            raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from None


def _floors(modes: Sequence[str], values: Tensor, rho: float, phase: float, tipper: float) -> Tensor:
    out = torch.empty_like(values)
    for i, mode in enumerate(modes):
        out[i] = tipper if mode == "tipper" else out.new_tensor([rho / LN10, phase])
    return out
