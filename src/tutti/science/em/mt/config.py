"""Configs of `tutti mt`: which survey, which earth, which prior, which inversion."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from glob import glob
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tutti.science.em.mt.columns import PRIORS
from tutti.science.em.mt.data import Data
from tutti.science.em.mt.edi import read_edi, survey
from tutti.science.em.mt.mesh import Mesh2D
from tutti.science.em.mt.parameters import Region
from tutti.science.em.mt.synthetic import SETTINGS, Setting
from tutti.train.configfile import build, read


@dataclass(frozen=True)
class Survey:
    """setting: "basin" or "samtex" gives mesh, sites, frequencies, region and prior. frequencies: Hz. sites: x in
    metres. The ranges make evenly spaced ones, of frequencies in log: [first, last].
    modes: by default TE and TM, or those of the data."""

    setting: Literal["", "basin", "samtex"] = ""
    modes: tuple[str, ...] = ()
    frequencies: tuple[float, ...] = ()
    frequency_range: tuple[float, float] | None = None
    frequency_count: int = 16
    sites: tuple[float, ...] = ()
    site_range: tuple[float, float] | None = None
    site_count: int = 25

    def all_frequencies(self) -> tuple[float, ...]:
        if self.frequency_range is None:
            return self.frequencies
        low, high = self.frequency_range
        if not (low > 0 and high > 0):
            raise ValueError(f"frequencies are in Hz and must be positive; survey.frequency_range is {low:g}, {high:g}")
        return tuple(np.geomspace(low, high, self.frequency_count).tolist())

    def all_sites(self) -> tuple[float, ...]:
        return tuple(np.linspace(*self.site_range, self.site_count).tolist()) if self.site_range else self.sites


@dataclass(frozen=True)
class MeshTable:
    """By the rule of `Mesh2D.for_survey` for resistivities in rho_range (ohm-m), or of explicit edges in metres."""

    rho_range: tuple[float, float] = (1.0, 1000.0)
    growth: float = 1.15
    width: float | None = None
    depth: float | None = None
    margin: float | None = None
    x_edges: tuple[float, ...] = ()
    z_edges: tuple[float, ...] = ()


@dataclass(frozen=True)
class LayerTable:
    """A layer between two depths in metres. rho: ohm-m."""

    top: float
    bottom: float
    rho: float


@dataclass(frozen=True)
class BodyTable:
    """A rectangle. x, z: from and to, metres. rho: ohm-m."""

    x: tuple[float, float]
    z: tuple[float, float]
    rho: float


@dataclass(frozen=True)
class ModelTable:
    """The earth of a forward run or a synthetic inversion. draw: the number of a section drawn from the prior of the
    setting. file: a .npz with `log_rho` (nz, nx). Otherwise a half-space of `background` ohm-m with layers and bodies,
    later ones over earlier ones."""

    background: float = 100.0
    layers: tuple[LayerTable, ...] = ()
    bodies: tuple[BodyTable, ...] = ()
    draw: int | None = None
    file: str = ""


@dataclass(frozen=True)
class NoiseTable:
    """rho: relative, of apparent resistivity. phase: degrees. tipper: absolute."""

    rho: float = 0.01
    phase: float = 0.286
    tipper: float = 0.01
    seed: int = 0


@dataclass(frozen=True)
class DataTable:
    """Observations: a .npz or .csv of `Data`, or EDI files by a pattern such as "sites/*.edi". strike: degrees
    clockwise from north. floor_rho, floor_phase, floor_tipper: least errors, relative, in degrees and
    absolute; 0 for none."""

    path: str = ""
    strike: float = 0.0
    tipper: bool = False
    floor_rho: float = 0.0
    floor_phase: float = 0.0
    floor_tipper: float = 0.0


@dataclass(frozen=True)
class PriorTable:
    """What codes are learned from. columns: "basin" or "samtex", by default that of the setting. left, right, top,
    bottom: the coded region in metres. file: a VAE that is loaded if it exists, and saved."""

    columns: Literal["", "basin", "samtex"] = ""
    left: float = -math.inf
    right: float = math.inf
    top: float = 0.0
    bottom: float = math.inf
    codes: int = 16
    network: Literal["dense", "convolutional"] = "dense"
    samples: int = 40_000
    epochs: int = 30
    lateral: float = 10.0
    deviation: float | None = None
    file: str = ""


@dataclass(frozen=True)
class InversionTable:
    """parameters: "cells", "codes", or "checked": codes, and cells where the diagnostics suspect the prior. start:
    ohm-m. The others are those of `Inversion` and `Pixel`. uncertainty: standard deviations and resolution."""

    parameters: Literal["cells", "codes", "checked"] = "cells"
    start: float = 100.0
    target: float = 1.05
    steps: int = 15
    strategy: Literal["occam", "multiplicative"] = "occam"
    weight: float = 1e-3
    shifts: float = 0.0
    along: float = 1.0
    down: float = 1.0
    uncertainty: bool = True
    samples: int = 0


@dataclass(frozen=True)
class MTConfig:
    """A file of `tutti mt`. out: the folder of results, by default out/mt/NAME. solver: "splu" or "block"."""

    survey: Survey = field(default_factory=Survey)
    mesh: MeshTable = field(default_factory=MeshTable)
    model: ModelTable | None = None
    noise: NoiseTable = field(default_factory=NoiseTable)
    data: DataTable = field(default_factory=DataTable)
    prior: PriorTable = field(default_factory=PriorTable)
    inversion: InversionTable = field(default_factory=InversionTable)
    solver: Literal["splu", "block"] = "splu"
    out: str = ""

    @staticmethod
    def load(path: Path) -> MTConfig:
        """Raises ValueError that names the file, the key and what is expected."""
        found: MTConfig = build(MTConfig, read(path), str(path))
        return found

    def setting(self) -> Setting | None:
        return SETTINGS[self.survey.setting]() if self.survey.setting else None

    def observations(self) -> Data | None:
        """The data of the file, if it names some."""
        if not self.data.path:
            return None
        if self.data.path.lower().endswith(".edi"):
            files = sorted(glob(self.data.path))
            if not files:
                raise ValueError(f"no file matches data.path = {self.data.path!r}")
            wanted = self.survey.all_frequencies() or None
            found = survey([read_edi(f) for f in files], self.data.strike, wanted, tipper=self.data.tipper)
        else:
            if self.survey.all_frequencies() or self.survey.all_sites():
                raise ValueError(f"frequencies and sites are those of {self.data.path}: leave them out of [survey]")
            found = Data.load(self.data.path)
        if self.survey.modes:
            found = _of_modes(found, self.survey.modes)
        floors = {"rho": self.data.floor_rho, "phase": self.data.floor_phase, "tipper": self.data.floor_tipper}
        return found.with_floor(**{name: x or 1e-300 for name, x in floors.items()}) if any(floors.values()) else found

    def geometry(self, data: Data | None) -> tuple[Mesh2D, tuple[float, ...], tuple[float, ...]]:
        """Mesh, frequencies and sites."""
        setting = self.setting()
        frequencies, sites = self.survey.all_frequencies(), self.survey.all_sites()
        if data is not None:
            frequencies, sites = data.frequencies, data.sites
        elif setting:
            frequencies, sites = frequencies or setting.frequencies, sites or setting.sites
        if not frequencies or not sites:
            missing = "frequencies" if not frequencies else "sites"
            raise ValueError(f"the survey has no {missing}: give survey.{missing}, a range, a setting, or data.path")
        m = self.mesh
        if setting:
            if m != MeshTable():
                raise ValueError("[mesh] has no effect with survey.setting, which has a mesh of its own: leave one out")
            return setting.mesh, frequencies, sites
        if m.x_edges or m.z_edges:
            return Mesh2D(m.x_edges, m.z_edges), frequencies, sites
        mesh = Mesh2D.for_survey(frequencies, sites, m.rho_range, growth=m.growth, width=m.width, depth=m.depth,
                                 margin=m.margin)  # fmt: skip
        return mesh, frequencies, sites

    def truth(self, mesh: Mesh2D) -> Tensor:
        """log10 ohm-m of cells (nz, nx)."""
        table = self.model or ModelTable()
        if table.draw is not None:
            if not (setting := self.setting()):
                raise ValueError("model.draw needs a survey.setting: its prior is drawn from")
            return setting.truths(1, table.draw)[0]
        if table.file:
            with np.load(table.file) as arrays:
                if "log_rho" not in arrays:
                    raise ValueError(f"{table.file} has no array log_rho; it has {', '.join(arrays)}")
                return torch.from_numpy(arrays["log_rho"]).double()
        model = torch.full(mesh.shape, _log(table.background, "model.background"), dtype=torch.float64)
        x, z = mesh.x[None, :], mesh.z[:, None]
        for layer in table.layers:
            value = torch.tensor(_log(layer.rho, "rho of a layer"), dtype=torch.float64)
            inside = (z >= layer.top) & (z < layer.bottom)
            if not inside.any():
                raise ValueError(
                    f"the layer from {layer.top:g} to {layer.bottom:g} m holds the centre of no row of cells"
                )
            model = torch.where(inside, value, model)
        for body in table.bodies:
            inside = (x >= body.x[0]) & (x < body.x[1]) & (z >= body.z[0]) & (z < body.z[1])
            if not inside.any():
                raise ValueError(f"the body at x {body.x}, z {body.z} m holds the centre of no cell of the mesh")
            model = torch.where(inside, torch.tensor(_log(body.rho, "rho of a body"), dtype=torch.float64), model)
        return model

    def region(self, mesh: Mesh2D) -> Region:
        prior = self.prior
        bounds, whole = (prior.left, prior.right, prior.top, prior.bottom), (-math.inf, math.inf, 0.0, math.inf)
        if bounds == whole and (setting := self.setting()):
            return setting.region
        return Region.of(mesh, prior.left, prior.right, prior.top, prior.bottom)

    def columns(self) -> str:
        """The name of the prior's distribution."""
        name = self.prior.columns or self.survey.setting
        if not name:
            raise ValueError(f"inversion.parameters = {self.inversion.parameters!r} needs prior.columns: one of"
                             f" {', '.join(PRIORS)}")  # fmt: skip
        return name


def _of_modes(data: Data, modes: tuple[str, ...]) -> Data:
    if missing := [mode for mode in modes if mode not in data.modes]:
        raise ValueError(f"the data have no mode {missing[0]!r}; they have {', '.join(data.modes)}")
    at = [data.modes.index(mode) for mode in modes]
    return replace(data, modes=modes, values=data.values[at], errors=data.errors[at], mask=data.mask[at])


def _log(rho: float, name: str) -> float:
    if not (rho > 0 and math.isfinite(rho)):
        raise ValueError(f"{name} must be a positive resistivity in ohm-m; got {rho}")
    return math.log10(rho)
