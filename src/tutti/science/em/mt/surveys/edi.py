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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from tutti.science.em.mt.response.layered import apparent
from tutti.science.em.mt.response.stencil import LN10
from tutti.science.em.mt.surveys.data import Data
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
NUMBERS = re.compile(r"FREQ|[ZT]ROT(\.EXP)?|Z[XY]{2}(R|I|\.?VAR)|T[XY](R|I|\.?VAR)(\.EXP)?")  # blocks that are read
COMPLEX = {"impedance": torch.complex128, "tipper": torch.complex128}


@dataclass(frozen=True, eq=False, repr=False)
class Edi(Brief):
    """One site. Missing numbers are NaN.

    frequencies: Hz (f). impedance: ohm, complex128 (f, 2, 2), E_i/H_j. tipper: (f, 2), Hz/H_j, or None. Variances
    have the shape of what they belong to; NaN by default for the tipper. azimuth: azimuth of the x axis in degrees
    clockwise from north (f); that of the tipper is the same by default. Raises ValueError for other shapes and real
    impedances.
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
            array, kind = torch.as_tensor(getattr(self, name)), COMPLEX.get(name, torch.float64)
            if array.shape != (count, *shape):
                raise ValueError(
                    f"site {self.station}: {name} must have the shape {(count, *shape)} for {count} frequencies;"
                    f" got {tuple(array.shape)}"
                )
            if array.is_complex() != kind.is_complex:
                raise ValueError(
                    f"site {self.station}: {name} must be {'complex' if kind.is_complex else 'real'}; got {array.dtype}"
                )
            put(name, array.to(kind))

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
            texts = [f"{x if math.isfinite(x) else EMPTY: .12E}" for x in numbers.tolist()]
            lines += ["  ".join(["", *texts[i : i + 5]]) for i in range(0, n, 5)]
        Path(path).write_text("\n".join([*lines, ">END", ""]))


def read_edi(path: str | Path) -> Edi:
    """One site from a file. Raises ValueError for files without impedances and blocks of a wrong length.

    Values that cannot be used become NaN: EMPTY and NaN silently; and with a warning that names station, frequency and
    component those of a negative variance, infinite ones and overflows (`***`). Frequencies that are not positive are
    left out, components that have no block are NaN, both with a warning.
    """
    path = Path(path)
    head, blocks = _blocks(_text(path))
    station = head.get("DATAID") or path.stem
    empty = _number(head.get("EMPTY", ""), EMPTY, "EMPTY", path)

    def numbers(*names: str) -> Tensor | None:
        """The first of these blocks, NaN where empty."""
        for name in names:
            if name in blocks:
                try:
                    read = [math.inf if re.fullmatch(r"\*+", x) else _float(x) for x in blocks[name]]
                except ValueError as error:
                    raise ValueError(f"{path}: block >{name} holds what is not a number: {error}") from None
                if len(read) != count:
                    raise ValueError(f"{path}: block >{name} has {len(read)} numbers, >FREQ {count}")
                values = torch.tensor(read, dtype=torch.float64)
                return torch.where((values - empty).abs() <= 1e-6 * abs(empty), torch.nan, values)
        return None

    def filled(*names: str, otherwise: float) -> Tensor:
        values = numbers(*names)
        return torch.full((count,), otherwise, dtype=torch.float64) if values is None else values

    def part(*names: str) -> Tensor:
        """The values of a component, NaN where they cannot be used."""
        return usable(filled(*names, otherwise=torch.nan), names[0], torch.isinf, "is infinite")

    def usable(values: Tensor, name: str, wrong: Callable[[Tensor], Tensor], what: str) -> Tensor:
        if (bad := wrong(values)).any():
            i = int(bad.nonzero()[0])
            more = f", and {int(bad.sum()) - 1} more of it" if bad.sum() > 1 else ""
            warnings.warn(
                f"site {station}, {frequencies[i].item():g} Hz: {name} = {values[i].item():g} {what}: masked{more}"
                f" ({path})",
                stacklevel=4,
            )
        return torch.where(bad, torch.nan, values)

    def component(name: str, real: tuple[str, ...], imaginary: tuple[str, ...], variance: tuple[str, ...]
                  ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Values and variances; a value is NaN where its variance is wrong."""
        value = torch.complex(part(*real), part(*imaginary))
        var = filled(*variance, otherwise=torch.nan)
        wrong = (var < 0) | torch.isinf(var)
        usable(var, f"the variance of {name}", lambda x: (x < 0) | torch.isinf(x), "is no variance")
        return torch.where(wrong, torch.nan, value), torch.where(wrong, torch.nan, var)

    count = len(blocks.get("FREQ", ()))
    parts = {a + b: (f"Z{a}{b}R", f"Z{a}{b}I") for a in AXES for b in AXES}
    missing = [name for pair in parts.values() for name in pair if name not in blocks]
    absent = [f"Z{name}" for name, pair in parts.items() if not set(pair) <= set(blocks)]
    if not count or {"ZXY", "ZYX"} <= set(absent):
        kinds = "spectra" if "SPECTRA" in blocks else "apparent resistivities" if "RHOXY" in blocks else "other blocks"
        raise ValueError(
            f"{path}: no impedances: it lacks {', '.join(f'>{x}' for x in missing) or '>FREQ'} and has {kinds};"
            " export it with impedances"
        )
    if absent:
        warnings.warn(
            f"site {station}: {', '.join(absent)} missing, without {', '.join(f'>{x}' for x in missing)}: masked, and"
            f" the site cannot be turned to another strike ({path})",
            stacklevel=2,
        )
    frequencies = filled("FREQ", otherwise=0)
    components = [component(f"Z{p}", (r,), (i,), (f"Z{p}.VAR", f"Z{p}VAR")) for p, (r, i) in parts.items()]
    z, var = (torch.stack(each, 1) for each in zip(*components, strict=True))
    site: dict = {}
    if any(f"T{b}R{end}" in blocks for b in AXES for end in ("", ".EXP")):
        of = [component(f"T{b}", (f"T{b}R.EXP", f"T{b}R"), (f"T{b}I.EXP", f"T{b}I"),
                        (f"T{b}VAR.EXP", f"T{b}.VAR", f"T{b}VAR")) for b in AXES]  # fmt: skip
        site["tipper"], site["tipper_variance"] = (torch.stack(each, 1) for each in zip(*of, strict=True))
        site["tipper_azimuth"] = filled("TROT", "TROT.EXP", "ZROT", otherwise=0.0).nan_to_num()
    good = (frequencies > 0) & torch.isfinite(frequencies)
    if not good.all():
        fault = f">FREQ must hold positive frequencies in Hz; got {frequencies[~good][0].item():g}"
        if not good.any():
            raise ValueError(f"{path}: {fault}")
        warnings.warn(f"site {station}: {fault}: {int((~good).sum())} left out ({path})", stacklevel=2)
    return Edi(
        station,
        _angle(_first(head, "LAT", "REFLAT"), path),
        _angle(_first(head, "LONG", "LON", "REFLONG", "REFLON"), path),
        _number(_first(head, "ELEV", "REFELEV"), 0.0, "ELEV", path),
        frequencies[good],
        z[good].view(-1, 2, 2) * OHM,
        var[good].view(-1, 2, 2) * OHM**2,
        filled("ZROT", otherwise=0.0).nan_to_num()[good],
        **{name: values[good] for name, values in site.items()},
    )


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
    error: error of values whose variance is missing or 0, relative for impedances and absolute for tippers; with 0 they
    are masked, with a warning. Raises ValueError for several sites along strike.
    """
    if not 0 <= error < math.inf:
        raise ValueError(f"error must be finite and not negative; got {error}")
    x, along = profile(sites, strike), profile(sites, strike - 90)
    if len(sites) > 1 and (length := max(x) - min(x)) <= SHORT * (max(along) - min(along)):
        raise ValueError(f"the profile is {length:.0f} m long: is strike the azimuth of the structures?")
    order = sorted(range(len(sites)), key=x.__getitem__)
    for i, j in pairwise(order):
        if abs(x[i] - x[j]) < 1e-3 and abs(along[i] - along[j]) < 1e-3:
            warnings.warn(
                f"sites {sites[i].station} and {sites[j].station} are at the same place, {x[i]:.0f} m along the"
                " profile: both count; leave one file out if it is a copy",
                stacklevel=2,
            )
    wanted = torch.as_tensor(frequencies if frequencies is not None else sites[0].frequencies, dtype=torch.float64)
    modes = ("TE", "TM", "tipper") if tipper else ("TE", "TM")
    values = torch.full((len(modes), len(wanted), len(sites), 2), torch.nan, dtype=torch.float64)
    errors = values.clone()
    for column, i in enumerate(order):
        site = sites[i].rotated(strike)
        if sites[i].impedance.isfinite().any() and not site.impedance.isfinite().any():
            warnings.warn(
                f"site {site.station}: components are missing, so it cannot be turned from its azimuth"
                f" {sites[i].azimuth[0].item():g} to strike {strike:g} degrees: all its impedances are masked",
                stacklevel=2,
            )
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
        fault = f"{int(unknown.sum())} of {unknown.numel()} values have no variance and are left out, the first of site"
        warnings.warn(f"{fault} {station}: state their error (data.error of a config)", stacklevel=2)
        errors[errors == 0] = torch.nan
    return Data.masked_nan(wanted.tolist(), [x[i] for i in order], modes, values, errors)


def _text(path: Path) -> str:
    """In UTF-8, UTF-16 (with its mark) or else Latin-1, with any line breaks and without the end marks of DOS."""
    data = path.read_bytes()
    marked = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    try:
        text = data.decode("utf-16" if marked else "utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    return re.sub(r"\r\n?", "\n", re.sub(r"[\0\x1a]", "", text))


def _float(text: str) -> float:
    """As Fortran writes numbers, too: 1.0D+32, 1.0d32, 1.0+32; NaN of any kind."""
    if re.fullmatch(r"[+-]?(nan.*|\d\.#.*)", text, re.IGNORECASE):
        return math.nan
    text = re.sub(r"[dD]", "e", text)
    return float(re.sub(r"(?<=[\d.])([+-]\d+)$", r"e\1", text))


def _blocks(text: str) -> tuple[dict[str, str], dict[str, list[str]]]:
    """KEY=value pairs of the head and the definitions, and the words of each block of numbers."""
    head: dict[str, str] = {}
    blocks: dict[str, list[str]] = {}
    for part in re.split(r"^[ \t]*>", text, flags=re.MULTILINE)[1:]:
        line, _, body = part.partition("\n")
        name = (line.partition("//")[0].split() or [""])[0].upper()
        if name in ("HEAD", "=DEFINEMEAS"):
            for key, quoted, plain in re.findall(r'\b(\w+)\s*=\s*(?:"([^"\n]*)"|([^\s"]*))', body):
                head.setdefault(key.upper(), quoted or plain)
        elif "//" in line or NUMBERS.fullmatch(name):
            blocks[name] = re.split(r"[\s,]+", body.strip(" \t\n,")) if body.strip(" \t\n,") else []
        elif name.startswith("SPECTRA"):
            blocks["SPECTRA"] = []
    return head, blocks


def _first(head: dict[str, str], *keys: str) -> str:
    return next((head[key] for key in keys if head.get(key)), "")


def _number(text: str, otherwise: float, name: str, path: Path) -> float:
    try:
        return _float(text) if text else otherwise
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
