"""EDI files of magnetotelluric sites, the exchange format of the SEG (Wight, 1988, MT/EMAP data interchange standard).

A file is a sequence of blocks, each begun by a line `>NAME options // count`. Impedances are E/B in mV/km/nT, time
factor e^{+i w t}, x to the azimuth `ZROT` (degrees clockwise from north), y 90 degrees on, z down. Square roots of
variances are taken as standard deviations of the real and of the imaginary part, as MTpy does. Read are impedance,
tipper, their variances and rotation; not spectra, nor apparent resistivities alone.
"""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tutti.science.em.mt.data import Data
from tutti.science.em.mt.layered import apparent
from tutti.science.em.mt.stencil import LN10
from tutti.science.em.shown import Brief

OHM = 4e-4 * math.pi  # mV/km/nT: mu0 * 1e-6 V/m / 1e-9 T
EARTH = 6371e3  # m, radius
EMPTY = 1e32
SHORT = 0.01  # of the sites' extent along strike: a profile that has no length
AXES = "XY"
SHAPES = {  # for each frequency
    "frequencies": (), "impedance": (2, 2), "variance": (2, 2), "azimuth": (),
    "tipper": (2,), "tipper_variance": (2,), "tipper_azimuth": (),
}  # fmt: skip
COMPLEX = {"impedance": torch.complex128, "tipper": torch.complex128}


@dataclass(frozen=True, eq=False, repr=False)
class Edi(Brief):
    """One site. Missing numbers are NaN.

    frequencies: Hz (f). impedance: ohm, complex128 (f, 2, 2), E_i/H_j. tipper: (f, 2), Hz/H_j, or None. Variances
    have the shape of what they belong to; NaN by default for the tipper. azimuth: of the x axis, degrees clockwise
    from north (f); that of the tipper is the same by default. Raises ValueError for other shapes and real impedances.
    """

    station: str
    latitude: float
    longitude: float
    elevation: float
    frequencies: Tensor
    impedance: Tensor
    variance: Tensor
    azimuth: Tensor
    tipper: Tensor | None = None
    tipper_variance: Tensor | None = None
    tipper_azimuth: Tensor | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__.__get__(self)
        count = torch.as_tensor(self.frequencies).numel()
        if self.tipper is not None and self.tipper_variance is None:
            put("tipper_variance", torch.full((count, 2), torch.nan))
        if self.tipper is not None and self.tipper_azimuth is None:
            put("tipper_azimuth", self.azimuth)
        for name, shape in SHAPES.items():
            if getattr(self, name) is None and name.startswith("tipper"):
                continue
            given, kind = torch.as_tensor(getattr(self, name)), COMPLEX.get(name, torch.float64)
            if given.shape != (count, *shape):
                raise ValueError(
                    f"site {self.station}: {name} must have the shape {(count, *shape)} for {count} frequencies;"
                    f" got {tuple(given.shape)}"
                )
            if given.is_complex() != kind.is_complex:
                raise ValueError(
                    f"site {self.station}: {name} must be {'complex' if kind.is_complex else 'real'}; got {given.dtype}"
                )
            put(name, given.to(kind))

    def rotated(self, azimuth: float) -> Edi:
        """With the x axis at this azimuth. Variances as if components were independent."""
        same = (self.azimuth == azimuth)[:, None, None]  # there missing components leave others alone
        r = _rotations(azimuth - self.azimuth)
        z = r.to(self.impedance.dtype) @ self.impedance @ r.mT.to(self.impedance.dtype)
        variance = r**2 @ self.variance @ (r**2).mT
        turned = {
            "impedance": torch.where(same, self.impedance, z),
            "variance": torch.where(same, self.variance, variance),
            "azimuth": torch.full_like(self.azimuth, azimuth),
        }
        if self.tipper is not None:
            assert self.tipper_azimuth is not None and self.tipper_variance is not None
            same = (self.tipper_azimuth == azimuth)[:, None]
            r = _rotations(azimuth - self.tipper_azimuth)
            t = torch.einsum("fij,fj->fi", r.to(self.tipper.dtype), self.tipper)
            variance = torch.einsum("fij,fj->fi", r**2, self.tipper_variance)
            turned["tipper"] = torch.where(same, self.tipper, t)
            turned["tipper_variance"] = torch.where(same, self.tipper_variance, variance)
            turned["tipper_azimuth"] = turned["azimuth"]
        return dataclasses.replace(self, **turned)

    def write(self, path: str | Path) -> None:
        """As an EDI file with impedances in mV/km/nT. Missing numbers of the place are left out."""
        n, place = len(self.frequencies), {}
        for key, angle in (("LAT", self.latitude), ("LONG", self.longitude)):
            if math.isfinite(angle):
                place[key] = _degrees(angle)
        if math.isfinite(self.elevation):
            place["ELEV"] = f"{self.elevation:.3f}"
        lines = [
            ">HEAD", f"  DATAID={self.station}", *(f"  {key}={x}" for key, x in place.items()),
            "  STDVERS=SEG 1.0", f"  EMPTY={EMPTY:.1E}", "",
            ">=DEFINEMEAS", *(f"  REF{key}={x}" for key, x in place.items()), "  UNITS=M", "",
            ">=MTSECT", f"  SECTID={self.station}", f"  NFREQ={n}", "",
        ]  # fmt: skip
        blocks = {"FREQ": self.frequencies, "ZROT": self.azimuth}
        for i, a in enumerate(AXES):
            for j, b in enumerate(AXES):
                z = self.impedance[:, i, j] / OHM
                blocks |= {f"Z{a}{b}R ROT=ZROT": z.real, f"Z{a}{b}I ROT=ZROT": z.imag}
                blocks[f"Z{a}{b}.VAR ROT=ZROT"] = self.variance[:, i, j] / OHM**2
        if self.tipper is not None:
            assert self.tipper_azimuth is not None and self.tipper_variance is not None
            blocks["TROT"] = self.tipper_azimuth
            for j, b in enumerate(AXES):
                blocks |= {f"T{b}R.EXP ROT=TROT": self.tipper[:, j].real, f"T{b}I.EXP ROT=TROT": self.tipper[:, j].imag}
                blocks[f"T{b}VAR.EXP ROT=TROT"] = self.tipper_variance[:, j]
        for name, numbers in blocks.items():
            lines.append(f">{name} // {n}")
            told = [f"{x if math.isfinite(x) else EMPTY: .12E}" for x in numbers.tolist()]
            lines += ["  ".join(["", *told[i : i + 5]]) for i in range(0, n, 5)]
        Path(path).write_text("\n".join([*lines, ">END", ""]))


def read_edi(path: str | Path) -> Edi:
    """One site from a file. Raises ValueError for files without impedances."""
    path = Path(path)
    head, blocks = _blocks(path.read_text(encoding="latin-1"))
    empty = _number(head.get("EMPTY", ""), EMPTY, "EMPTY", path)

    def numbers(*names: str) -> Tensor | None:
        """The first of these blocks, NaN where empty."""
        for name in names:
            if name in blocks:
                try:
                    read = [float(x.upper().replace("D", "E")) for x in blocks[name]]
                except ValueError as error:
                    raise ValueError(f"{path}: block >{name} holds what is not a number: {error}") from None
                if len(read) != count:
                    raise ValueError(f"{path}: block >{name} has {len(read)} numbers, >FREQ {count}")
                found = torch.tensor(read, dtype=torch.float64)
                return torch.where((found - empty).abs() <= 1e-6 * abs(empty), torch.nan, found)
        return None

    def filled(*names: str, otherwise: float) -> Tensor:
        found = numbers(*names)
        return torch.full((count,), otherwise, dtype=torch.float64) if found is None else found

    count = len(blocks.get("FREQ", ()))
    parts = {a + b: (f"Z{a}{b}R", f"Z{a}{b}I") for a in AXES for b in AXES}
    missing = [name for pair in parts.values() for name in pair if name not in blocks]
    if not count or missing:
        kinds = "spectra" if "SPECTRA" in blocks else "apparent resistivities" if "RHOXY" in blocks else "other blocks"
        raise ValueError(
            f"{path}: no impedances: it lacks {', '.join(f'>{x}' for x in missing) or '>FREQ'} and has {kinds};"
            " export it with impedances"
        )
    z = torch.stack([torch.complex(filled(r, otherwise=0), filled(i, otherwise=0)) for r, i in parts.values()], 1)
    var = torch.stack([filled(f"Z{p}.VAR", f"Z{p}VAR", otherwise=torch.nan) for p in parts], 1)
    site: dict = {}
    if any(f"T{b}R{end}" in blocks for b in AXES for end in ("", ".EXP")):
        of = [[filled(f"T{b}{part}.EXP", f"T{b}{part}", otherwise=torch.nan) for part in ("R", "I")] for b in AXES]
        site["tipper"] = torch.stack([torch.complex(*pair) for pair in of], 1)
        both = [filled(f"T{b}VAR.EXP", f"T{b}.VAR", f"T{b}VAR", otherwise=torch.nan) for b in AXES]
        site["tipper_variance"] = torch.stack(both, 1)
        site["tipper_azimuth"] = filled("TROT", "TROT.EXP", "ZROT", otherwise=0.0).nan_to_num()
    found = Edi(
        head.get("DATAID", path.stem),
        _angle(_first(head, "LAT", "REFLAT"), path),
        _angle(_first(head, "LONG", "LON", "REFLONG", "REFLON"), path),
        _number(_first(head, "ELEV", "REFELEV"), 0.0, "ELEV", path),
        filled("FREQ", otherwise=0),
        z.view(-1, 2, 2) * OHM,
        var.view(-1, 2, 2) * OHM**2,
        filled("ZROT", otherwise=0.0).nan_to_num(),
        **site,
    )
    if not (found.frequencies > 0).all():
        raise ValueError(f"{path}: >FREQ must hold positive frequencies in Hz; got {found.frequencies.min().item():g}")
    if (found.variance < 0).any():
        raise ValueError(f"{path}: variances of impedances must not be negative; got {var[var < 0][0].item():g}")
    return found


def profile(sites: Sequence[Edi], strike: float) -> list[float]:
    """x of sites in metres along the profile, to the azimuth strike + 90 degrees; 0 at the first of them in `sites`."""
    if not sites:
        raise ValueError("a profile has one or more sites; got none")
    if missing := [site.station for site in sites if math.isnan(site.latitude + site.longitude)]:
        raise ValueError(f"site {missing[0]} has no LAT or no LONG: its place along the profile is unknown")
    first, along = sites[0], math.radians(strike + 90)
    north = [math.radians(site.latitude - first.latitude) * EARTH for site in sites]
    parallel = EARTH * math.cos(math.radians(sum(site.latitude for site in sites) / len(sites)))
    east = [math.radians(site.longitude - first.longitude) * parallel for site in sites]
    return [n * math.cos(along) + e * math.sin(along) for n, e in zip(north, east, strict=True)]


def survey(
    sites: Sequence[Edi], strike: float, frequencies: Sequence[float] | None = None, *, tipper: bool = False,
    tolerance: float = 0.02, error: float = 0.0,
) -> Data:  # fmt: skip
    """Data of a section across a strike (degrees clockwise from north), TE and TM, and the tipper if asked for.

    TE is Zxy, TM -Zyx, the tipper Tzy, with x along strike. frequencies: those of the first site by default; of each
    site the nearest is taken if it is within `tolerance`, relative; what is missing is masked. Sites are in order of x.
    error: of values whose variance is missing or 0, relative for impedances and absolute for tippers; with 0 they are
    masked, with a warning. Raises ValueError for several sites along strike.
    """
    if not 0 <= error < math.inf:
        raise ValueError(f"error must be finite and not negative; got {error}")
    x, along = profile(sites, strike), profile(sites, strike - 90)
    if len(sites) > 1 and (length := max(x) - min(x)) <= SHORT * (max(along) - min(along)):
        raise ValueError(f"the profile is {length:.0f} m long: is strike the azimuth of the structures?")
    order = sorted(range(len(sites)), key=x.__getitem__)
    wanted = torch.as_tensor(frequencies if frequencies is not None else sites[0].frequencies, dtype=torch.float64)
    modes = ("TE", "TM", "tipper") if tipper else ("TE", "TM")
    values = torch.full((len(modes), len(wanted), len(sites), 2), torch.nan, dtype=torch.float64)
    errors = values.clone()
    for column, i in enumerate(order):
        site = sites[i].rotated(strike)
        ratio = (wanted[:, None] / site.frequencies).log().abs()
        near, at = ratio.min(1)
        good = near <= math.log1p(tolerance)
        at, f = at[good], wanted[good]
        for mode, (a, b, sign) in enumerate(((0, 1, 1), (1, 0, -1))):
            z = sign * site.impedance[at, a, b]
            rho, phase = apparent(z, f.tolist()) if len(f) else (z.real, z.real)
            relative = site.variance[at, a, b].sqrt() / z.abs()
            relative = torch.where(relative > 0, relative, error)
            values[mode, good, column] = torch.stack([rho.log10(), phase], -1)
            errors[mode, good, column] = torch.stack([2 * relative / LN10, relative.rad2deg()], -1)
        if tipper and site.tipper is not None:
            assert site.tipper_variance is not None
            values[2, good, column] = torch.view_as_real(site.tipper[at, 1])
            sd = site.tipper_variance[at, 1].sqrt()[:, None]
            errors[2, good, column] = torch.where(sd > 0, sd, error)
    unknown = torch.isfinite(values).all(-1) & (errors == 0).any(-1)
    if unknown.any():
        station = sites[order[int(unknown.nonzero()[0, 2])]].station
        told = f"{int(unknown.sum())} of {unknown.numel()} values have no variance and are left out, the first of site"
        warnings.warn(f"{told} {station}: state their error (data.error of a config)", stacklevel=2)
        errors[errors == 0] = torch.nan
    return Data.masked_nan(wanted.tolist(), [x[i] for i in order], modes, values, errors)


def _blocks(text: str) -> tuple[dict[str, str], dict[str, list[str]]]:
    """KEY=value pairs of the head and the definitions, and the words of each block of numbers."""
    head: dict[str, str] = {}
    blocks: dict[str, list[str]] = {}
    for part in re.split(r"^[ \t]*>", text, flags=re.MULTILINE)[1:]:
        line, _, body = part.partition("\n")
        name = (line.partition("//")[0].split() or [""])[0].upper()
        if name in ("HEAD", "=DEFINEMEAS"):
            for key, quoted, plain in re.findall(r'(\w+)\s*=\s*(?:"([^"\n]*)"|([^\s"]*))', body):
                head.setdefault(key.upper(), quoted or plain)
        elif "//" in line:
            blocks[name] = body.split()
        elif name.startswith("SPECTRA"):
            blocks["SPECTRA"] = []
    return head, blocks


def _first(head: dict[str, str], *keys: str) -> str:
    return next((head[key] for key in keys if head.get(key)), "")


def _number(text: str, otherwise: float, name: str, path: Path) -> float:
    try:
        return float(text) if text else otherwise
    except ValueError:
        raise ValueError(f"{path}: {name} must be a number; got {text!r}") from None


def _angle(text: str, path: Path) -> float:
    """Degrees, from a number or from degrees:minutes:seconds; NaN if it is missing."""
    if not text:
        return math.nan
    try:
        parts = [float(x) for x in text.rstrip("NSEWnsew").split(":")]
    except ValueError:
        raise ValueError(f"{path}: a latitude or longitude must be like -23:30:15.5 or -23.504; got {text!r}") from None
    size = sum(abs(x) / 60**i for i, x in enumerate(parts))
    return -size if text.lstrip().startswith("-") or text[-1] in "SWsw" else size


def _degrees(angle: float) -> str:
    """Degrees:minutes:seconds, with 1e-8 degrees."""
    seconds = round(abs(angle) * 3600, 5)
    d, rest = divmod(seconds, 3600)
    m, s = divmod(rest, 60)
    return f"{'-' if angle < 0 else '+'}{int(d):02d}:{int(m):02d}:{s:08.5f}"


def _rotations(angle: Tensor) -> Tensor:
    """From axes to axes turned clockwise by these degrees: (f, 2, 2)."""
    c, s = angle.deg2rad().cos(), angle.deg2rad().sin()
    return torch.stack([torch.stack([c, s], -1), torch.stack([-s, c], -1)], -2)
