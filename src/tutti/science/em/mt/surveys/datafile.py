"""Files of `science.em.mt.surveys.data.Data`: .npz with its arrays, .csv with a row for each value."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from tutti.checkpoint.array_file import read_arrays, write_arrays
from tutti.science.em.mt.response.forward import MODES

if TYPE_CHECKING:
    from tutti.science.em.mt.surveys.data import Data

LOG10_RHO = -4.0, 8.0  # values beyond were given in ohm-m
COLUMNS = ("mode", "frequency_hz", "site_m", "quantity", "value", "error", "weight")
QUANTITIES = {"apparent": ("log10_rho", "phase_deg"), "impedance": ("re_ohm", "im_ohm"), "tipper": ("re", "im")}
ARRAYS = ("frequencies", "sites", "modes", "outputs", "values", "errors", "mask")


class Key(NamedTuple):
    """What a row of a .csv is about."""

    mode: str
    frequency: float
    site: float
    quantity: str


def save(data: Data, path: str | Path) -> None:
    path = _checked(path)
    if path.suffix == ".npz":
        arrays = {name: getattr(data, name).numpy() for name in ("values", "errors", "mask")}
        write_arrays(path, frequencies=data.frequencies, sites=data.sites, modes=data.modes, outputs=data.outputs,
                     **arrays)  # fmt: skip
        return
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(COLUMNS)
        for mode, f, site, part in np.ndindex(*data.shape):
            name = data.modes[mode]
            quantity = QUANTITIES["tipper" if name == "tipper" else data.outputs][part]
            numbers = [getattr(data, x)[mode, f, site, part].item() for x in ("values", "errors", "mask")]
            table.writerow([name, data.frequencies[f], data.sites[site], quantity, *numbers[:2], int(numbers[2])])


def load(path: str | Path) -> dict[str, Any]:
    """The fields of the `Data` in a file, by name."""
    path = _checked(path)
    return _of_arrays(read_arrays(path, *ARRAYS)) if path.suffix == ".npz" else _of_rows(path)


def _of_arrays(content: dict[str, np.ndarray]) -> dict[str, Any]:
    tensors = {name: torch.from_numpy(content[name]) for name in ("values", "errors", "mask")}
    axes = {name: tuple(content[name].tolist()) for name in ("frequencies", "sites", "modes")}
    return {**axes, **tensors, "outputs": str(content["outputs"])}


def _of_rows(path: Path) -> dict[str, Any]:
    with path.open(newline="", encoding="utf-8-sig") as file:  # Excel begins files with a byte order mark
        table = csv.DictReader(file)
        if missing := [name for name in COLUMNS if name not in (table.fieldnames or ())]:
            header = f"got {','.join(table.fieldnames)}" if table.fieldnames else "the file is empty"
            raise ValueError(
                f"{path}: there is no column {missing[0]}; the first line must be {','.join(COLUMNS)}; {header}"
            )
        rows = [(f"{path}, line {table.line_num}", row) for row in table]
    if not rows:
        raise ValueError(f"{path} has no row below the first line")
    entries = [_read(where, row) for where, row in rows]
    modes = tuple(dict.fromkeys(key.mode for key, _ in entries))
    frequencies = tuple(dict.fromkeys(key.frequency for key, _ in entries))
    sites = tuple(dict.fromkeys(key.site for key, _ in entries))
    kinds = {key.quantity for key, _ in entries if key.mode != "tipper"}
    outputs = "impedance" if kinds & set(QUANTITIES["impedance"]) else "apparent"
    shape = len(modes), len(frequencies), len(sites), 2
    values, errors, mask = torch.zeros(shape).double(), torch.ones(shape).double(), torch.zeros(shape).double()
    place = [{x: i for i, x in enumerate(of)} for of in (modes, frequencies, sites)]
    seen: dict[Key, str] = {}
    for (where, _), (key, numbers) in zip(rows, entries, strict=True):
        names = QUANTITIES["tipper" if key.mode == "tipper" else outputs]
        if key.quantity not in names:
            raise ValueError(f"{where}: quantity {key.quantity!r} of {key.mode} must be one of {', '.join(names)}")
        if key in seen:
            raise ValueError(f"{where}: {key.quantity} of {key.mode} at {key.frequency:g} Hz and x = {key.site:g} m was"
                             f" in {seen[key]} already")  # fmt: skip
        seen[key] = where.rpartition(", ")[2]
        at = *(of[x] for of, x in zip(place, key[:3], strict=True)), names.index(key.quantity)
        values[at], errors[at], mask[at] = numbers
    return {"frequencies": frequencies, "sites": sites, "modes": modes, "values": values, "errors": errors,
            "mask": mask, "outputs": outputs}  # fmt: skip


def _read(where: str, row: dict[str, str]) -> tuple[Key, tuple[float, float, float]]:
    """What a row is about, and (value, error, weight)."""

    def number(name: str) -> float:
        try:
            return float(row[name])
        except (TypeError, ValueError):
            raise ValueError(f"{where}: {name} must be a number; got {row[name]!r}") from None

    def check(name: str, good: bool, rule: str) -> None:
        if not good:
            raise ValueError(f"{where}: {name} must be {rule}; got {row[name]}")

    frequency, site, value, error, weight = map(number, ("frequency_hz", "site_m", "value", "error", "weight"))
    check("mode", row["mode"] in MODES, f"one of {', '.join(MODES)}")
    check("frequency_hz", 0 < frequency < math.inf, "positive, in Hz")
    check("site_m", math.isfinite(site), "a position in metres")
    check("weight", weight in (0, 1), "0 or 1")
    check("value", math.isfinite(value) or not weight, "finite where weight is 1")
    if weight and row["quantity"] == "log10_rho" and not LOG10_RHO[0] <= value <= LOG10_RHO[1]:
        raise ValueError(f"{where}: log10_rho = {value:g} is not a log10 of ohm-m")
    check("error", 0 < error < math.inf or not weight, "positive where weight is 1")
    return Key(row["mode"], frequency, site, row["quantity"]), (value, error, weight)


def _checked(path: str | Path) -> Path:
    path = Path(path)
    if path.suffix not in (".npz", ".csv"):
        raise ValueError(f"data are saved as .npz or .csv; got {path.name}")
    return path
