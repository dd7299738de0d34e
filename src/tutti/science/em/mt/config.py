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

from tutti.checkpoint.array_file import read_arrays
from tutti.config.build import build
from tutti.config.files import read
from tutti.science.em.mt.inverse.columns import PRIORS
from tutti.science.em.mt.inverse.parameters import Region
from tutti.science.em.mt.keys import check
from tutti.science.em.mt.mesh import Mesh2D
from tutti.science.em.mt.painted import cells_within, interfaces
from tutti.science.em.mt.surveys.data import Data
from tutti.science.em.mt.surveys.edi import read_edi, survey
from tutti.science.em.mt.surveys.synthetic import SETTINGS, Setting
from tutti.science.em.mt.tables import (
    DataTable,
    FigureTable,
    InversionTable,
    MeshTable,
    ModelTable,
    NoiseTable,
    PriorTable,
    Survey,
)

RULE = "rho_range", "growth", "width", "depth", "margin"  # keys of [mesh] that edges replace


@dataclass(frozen=True)
class MTConfig:
    """A file of `tutti mt`."""

    survey: Survey = field(default_factory=Survey)
    mesh: MeshTable = field(default_factory=MeshTable)
    model: ModelTable | None = None
    noise: NoiseTable = field(default_factory=NoiseTable)
    data: DataTable = field(default_factory=DataTable)
    prior: PriorTable = field(default_factory=PriorTable)
    inversion: InversionTable = field(default_factory=InversionTable)
    figure: FigureTable = field(default_factory=FigureTable)
    solver: Literal["splu", "block"] = "splu"
    """Solver of the linear systems; block: batched over frequencies."""
    out: str = ""
    """Folder of the results; by default out/mt/NAME."""

    @staticmethod
    def load(path: Path) -> MTConfig:
        """Raises ValueError that names the file, the key and what is expected."""
        config: MTConfig = build(MTConfig, read(path), str(path))
        try:
            check(config)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        return config

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
            wanted = _frequencies(self.survey) or None
            sites = [read_edi(f) for f in files]
            observed = survey(sites, self.data.strike, wanted, tipper=self.data.tipper, error=self.data.error)
        else:
            if _frequencies(self.survey) or _sites(self.survey):
                raise ValueError(f"frequencies and sites are those of {self.data.path}: leave them out of [survey]")
            if not Path(self.data.path).exists():
                raise ValueError(f"no file data.path = {self.data.path!r}")
            observed = Data.load(self.data.path)
        if self.survey.modes:
            observed = _of_modes(observed, self.survey.modes)
        floors = {"rho": self.data.floor_rho, "phase": self.data.floor_phase, "tipper": self.data.floor_tipper}
        return observed.with_floor(**floors) if any(floors.values()) else observed

    def geometry(
        self, data: Data | None, model: ModelTable | None = None
    ) -> tuple[Mesh2D, tuple[float, ...], tuple[float, ...]]:
        """Mesh, with edges at the interfaces of a model, frequencies and sites."""
        setting = self.setting()
        frequencies, sites = _frequencies(self.survey), _sites(self.survey)
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
        if bool(m.x_edges) != bool(m.z_edges):
            raise ValueError("mesh.x_edges and mesh.z_edges are given together, or neither: one is missing")
        if m.x_edges:
            if ruled := [name for name in RULE if getattr(m, name) != getattr(MeshTable(), name)]:
                raise ValueError(f"mesh.{ruled[0]} has no effect with mesh.x_edges and mesh.z_edges: leave one out")
            return Mesh2D(m.x_edges, m.z_edges), frequencies, sites
        depths, sides = interfaces(model) if model else ([], [])
        mesh = Mesh2D.for_survey(frequencies, sites, m.rho_range, growth=m.growth, width=m.width, depth=m.depth,
                                 margin=m.margin, depths=depths, sides=sides)  # fmt: skip
        return mesh, frequencies, sites

    def truth(self, mesh: Mesh2D) -> Tensor:
        """log10 ohm-m of cells (nz, nx)."""
        table = self.model or ModelTable()
        if table.draw is not None:
            if not (setting := self.setting()):
                raise ValueError("model.draw needs a survey.setting: its prior is drawn from")
            return setting.truths(1, table.draw)[0]
        if table.file:
            log_rho = torch.from_numpy(read_arrays(table.file, "log_rho")["log_rho"]).double()
            if log_rho.shape != mesh.shape or not log_rho.isfinite().all():
                raise ValueError(
                    f"log_rho of {table.file} must be finite, log10 ohm-m of the mesh's {mesh.shape} cells (nz, nx);"
                    f" it has the shape {tuple(log_rho.shape)}"
                )
            return log_rho
        model = torch.full(mesh.shape, math.log10(table.background), dtype=torch.float64)
        x, z = mesh.x[None, :], mesh.z[:, None]
        for layer in table.layers:
            value = torch.tensor(math.log10(layer.rho), dtype=torch.float64)
            if not layer.top < layer.bottom:
                raise ValueError(f"a layer has top = {layer.top:g} not above bottom = {layer.bottom:g}")
            inside = cells_within(z, layer.top, layer.bottom)
            if not inside.any():
                raise ValueError(
                    f"the layer from {layer.top:g} to {layer.bottom:g} m holds the centre of no row of cells"
                )
            model = torch.where(inside, value, model)
        for body in table.bodies:
            for name, (first, last) in (("x", body.x), ("z", body.z)):
                if not first < last:
                    raise ValueError(f"a body has {name} = [{first:g}, {last:g}]: write the smaller first")
            inside = cells_within(x, *body.x) & cells_within(z, *body.z)
            if not inside.any():
                raise ValueError(f"the body at x {body.x}, z {body.z} m holds the centre of no cell of the mesh")
            model = torch.where(inside, torch.tensor(math.log10(body.rho), dtype=torch.float64), model)
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


def _frequencies(survey: Survey) -> tuple[float, ...]:
    if survey.frequency_range is None:
        return survey.frequencies
    if survey.frequencies:
        raise ValueError("survey.frequencies and survey.frequency_range: leave one out")
    return tuple(np.geomspace(*survey.frequency_range, survey.frequency_count).tolist())


def _sites(survey: Survey) -> tuple[float, ...]:
    if survey.site_range is None:
        return survey.sites
    if survey.sites:
        raise ValueError("survey.sites and survey.site_range: leave one out")
    return tuple(np.linspace(*survey.site_range, survey.site_count).tolist())


def _of_modes(data: Data, modes: tuple[str, ...]) -> Data:
    if missing := [mode for mode in modes if mode not in data.modes]:
        raise ValueError(f"the data have no mode {missing[0]!r}; they have {', '.join(data.modes)}")
    at = [data.modes.index(mode) for mode in modes]
    return replace(data, modes=modes, values=data.values[at], errors=data.errors[at], mask=data.mask[at])
