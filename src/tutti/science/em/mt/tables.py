"""The tables of a config of `tutti mt`: every key with its type, unit, default and meaning.

What reads a config (`config.MTConfig.load`) and what documents it (docs/generate.py) read these declarations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from tutti.science.em.mt.keys import Quantity

Metres = Annotated[float, Quantity("m")]
Length = Annotated[float, Quantity("m", "positive")]
OhmM = Annotated[float, Quantity("ohm-m", "positive")]
Hertz = Annotated[float, Quantity("Hz", "positive")]
Degrees = Annotated[float, Quantity("degrees")]
NotNegative = Annotated[float, Quantity("", "not negative")]
Relative = Annotated[float, Quantity("relative", "not negative")]
Angle = Annotated[float, Quantity("degrees", "not negative")]
Decades = Annotated[float, Quantity("decades", "not negative")]
Positive = Annotated[float, Quantity("", "positive")]
Count = Annotated[int, Quantity("", "positive")]
Number = Annotated[int, Quantity("", "not negative")]


@dataclass(frozen=True)
class Survey:
    """Sites and frequencies. Leave them out with data.path, which has its own; EDI files may be resampled."""

    setting: Literal["", "basin", "samtex"] = ""
    """A built-in survey: its mesh, sites, frequencies, coded region and prior. basin: 10 km wide and 1 km deep, 1 Hz to
    5 kHz. samtex: the published geometry of 750 km x 84 km, 0.1 mHz to 100 Hz."""
    modes: tuple[str, ...] = ()
    """Of "TE", "TM" and "tipper"; by default TE and TM, or those of the data."""
    frequencies: tuple[Hertz, ...] = ()
    """A list of frequencies."""
    frequency_range: tuple[Hertz, Hertz] | None = None
    """First and last of frequencies that are evenly spaced in log; instead of frequencies."""
    frequency_count: Count = 16
    """Number of frequencies in the range."""
    sites: tuple[Metres, ...] = ()
    """Positions x along the profile."""
    site_range: tuple[Metres, Metres] | None = None
    """First and last of evenly spaced sites; instead of sites."""
    site_count: Count = 25
    """Number of sites in the range."""


@dataclass(frozen=True)
class MeshTable:
    """Cells, by the rule of `Mesh2D.for_survey` or of explicit edges. Not with survey.setting, which has its own."""

    rho_range: tuple[OhmM, OhmM] = (1.0, 1000.0)
    """The lowest and highest resistivity that the mesh resolves: rows begin with a sixteenth of the smallest skin
    depth. Rows and columns have edges at the interfaces of [model]."""
    growth: Positive = 1.1
    """The ratio of neighbouring cells; of columns beyond the sites 1.15 at least. Errors of apparent resistivity over a
    body of 10 in 100 ohm-m are up to 1 % with 1.15, 8 % with 1.5 and 22 % with 1.8."""
    width: Length | None = None
    """Width of columns between sites; by default a quarter of their median distance."""
    depth: Length | None = None
    """Depth of the mesh; by default 1.5 times the largest skin depth."""
    margin: Length | None = None
    """Margin beyond the outermost sites; by default 1.5 times the largest skin depth."""
    x_edges: tuple[Metres, ...] = ()
    """Edges of columns, instead of the keys above; with z_edges."""
    z_edges: tuple[Metres, ...] = ()
    """Edges of rows, from 0 at the surface downwards; with x_edges."""


@dataclass(frozen=True)
class LayerTable:
    """A layer between two depths."""

    top: Metres
    """Depth of its top."""
    bottom: Metres
    """Depth of its bottom; a large number for a half-space."""
    rho: OhmM
    """Its resistivity."""


@dataclass(frozen=True)
class BodyTable:
    """A rectangle."""

    x: tuple[Metres, Metres]
    """Its left and right side along the profile."""
    z: tuple[Metres, Metres]
    """Depths of its top and bottom."""
    rho: OhmM
    """Its resistivity."""


@dataclass(frozen=True)
class ModelTable:
    """The earth of a forward run or a synthetic inversion: a half-space with layers, then bodies, later ones over
    earlier ones; or a drawn one, or one of a file."""

    background: OhmM = 100.0
    """Resistivity of the half-space."""
    layers: tuple[LayerTable, ...] = ()
    """Each in a section [[model.layers]]."""
    bodies: tuple[BodyTable, ...] = ()
    """Each in a section [[model.bodies]]."""
    draw: Number | None = None
    """The number of a section that is drawn from the prior of survey.setting."""
    file: str = ""
    """A .npz with `log_rho`, log10 ohm-m of cells (nz, nx), as `tutti mt forward` writes."""


@dataclass(frozen=True)
class NoiseTable:
    """Gaussian noise of synthetic data, which state it as their errors. With 0 nothing is added, and the stated errors
    are those of the default."""

    rho: Relative = 0.01
    """Standard deviation of apparent resistivities."""
    phase: Angle = 0.286
    """Standard deviation of phases."""
    tipper: NotNegative = 0.01
    """Standard deviation of real and imaginary parts."""
    seed: Number = 0
    """Seed of the noise."""


@dataclass(frozen=True)
class DataTable:
    """Observations to invert; `tutti mt forward` takes their sites, frequencies and modes."""

    path: str = ""
    """A .npz or .csv of `Data`, or EDI files by a pattern such as "sites/*.edi"."""
    strike: Degrees = 0.0
    """Strike of EDI data, clockwise from north."""
    tipper: bool = False
    """Read the tipper of EDI files too."""
    error: Relative = 0.0
    """Error of values of EDI files that have no variance, relative for impedances and absolute for tippers; with 0
    they are left out."""
    floor_rho: Relative = 0.0
    """Least error of apparent resistivities; 0 for none."""
    floor_phase: Angle = 0.0
    """Least error of phases; 0 for none."""
    floor_tipper: NotNegative = 0.0
    """Least error of tippers; 0 for none."""


@dataclass(frozen=True)
class PriorTable:
    """The distribution that codes of columns are learned from, for inversion.parameters = "codes" and "checked"."""

    columns: Literal["", "basin", "samtex"] = ""
    """The declared distribution of columns (`columns.PRIORS`); by default that of survey.setting. basin: cover, a
    conductor within 600 m, basement within 850 m. samtex: a thin conductor at 1 to 15 km over a resistive lithosphere,
    80 km deep."""
    left: Metres = -math.inf
    """Left side of the coded region."""
    right: Metres = math.inf
    """Right side of the coded region."""
    top: Metres = 0.0
    """Top of the coded region."""
    bottom: Metres = math.inf
    """Bottom of the coded region."""
    codes: Count = 16
    """Latent numbers that encode a column."""
    network: Literal["dense", "convolutional"] = "dense"
    """Network of the variational autoencoder; convolutional needs rows in multiples of 8."""
    samples: Count = 40_000
    """Number of training columns."""
    epochs: Count = 30
    """Training epochs."""
    lateral: NotNegative = 10.0
    """Weight of differences between adjacent columns."""
    deviation: Annotated[float, Quantity("decades", "positive")] | None = None
    """Standard deviation of cells from the decoded columns; by default they do not differ."""
    file: str = ""
    """The autoencoder: loaded if the file exists, else learned and saved there."""


@dataclass(frozen=True)
class InversionTable:
    """The inversion."""

    parameters: Literal["cells", "codes", "checked"] = "cells"
    """Unknowns of the inversion; checked: codes, and cells where the diagnostics suspect the prior."""
    start: OhmM = 100.0
    """The half-space to start from."""
    target: Positive = 1.05
    """chi at which the data are fitted: the root mean square of residuals over errors."""
    steps: Number = 15
    """Gauss-Newton steps at most."""
    strategy: Literal["occam", "multiplicative"] = "occam"
    """How the weight of the penalty is chosen; occam: the largest that fits."""
    weight: Positive = 1e-3
    """Of strategy multiplicative: the penalty's weight is this times chi squared."""
    shifts: Decades = 0.0
    """Standard deviation of unknown static shifts of apparent resistivity; 0 for none."""
    along: NotNegative = 1.0
    """Of cells: weight of differences along the profile."""
    down: NotNegative = 1.0
    """Of cells: weight of differences with depth."""
    uncertainty: bool = True
    """Compute standard deviations and resolution."""
    samples: Number = 0
    """Number of models to draw from the posterior."""


@dataclass(frozen=True)
class FigureTable:
    """Pictures."""

    depth: Length | None = None
    """How deep sections are drawn; by default half as deep again as the deepest boundary of [model], or else to the
    largest skin depth of the apparent resistivities, and at most half the profile's length below that boundary or the
    surface; with survey.setting, its coded region."""
