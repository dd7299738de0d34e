"""Networks in folders: `config.json` and `weights.safetensors`; ensembles with a folder for each member.

    save(network, "out/water")
    network = load("out/water")

Folders of others are safe to load: no code is run, and nothing is allocated before all sizes agree. Weights from before
networks had a record of the species of their training are read without one: such a network refuses no species.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from pathlib import Path
from typing import Any

import torch

from tutti.checkpoint.tensor_file import read_tensors, write_tensors
from tutti.science.mol.networks.ensemble import Ensemble
from tutti.science.mol.networks.molct import MolCT
from tutti.science.mol.networks.network import Network
from tutti.science.mol.networks.painn import PaiNN
from tutti.science.mol.networks.schnet import SchNet
from tutti.science.mol.units import PRESETS
from tutti.weight_files import opened
from tutti.whole_files import write_text

KINDS: dict[str, type[Network]] = {x.__name__: x for x in (SchNet, PaiNN, MolCT)}
DTYPES = {"float32": torch.float32, "float64": torch.float64}
FORMAT = 1
LIMITS = {"features": 16384, "interactions": 256, "gaussians": 16384, "heads": 1024, "cycles": 1024, "members": 1024}
LARGEST = 1_000_000  # bytes of config.json


def save(network: Network | Ensemble, folder: str | Path) -> None:
    """Write a network, replacing one that is there."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(network, Ensemble):
        for k, member in enumerate(network.members):
            save(member, folder / f"member-{k}")  # pyright: ignore
        config = {"format": FORMAT, "kind": "Ensemble", "members": len(network.members)}
        write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
        return
    name = type(network).__name__
    if KINDS.get(name) is not type(network):
        raise ValueError(f"save: a network of kind {', '.join(KINDS)} or an Ensemble, not {name}")
    dtype = str(next(network.parameters()).dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(f"save: weights of {' or '.join(DTYPES)}, not {dtype}")
    write_tensors(network.state_dict(), folder / "weights.safetensors")
    config = {"format": FORMAT, "kind": name, "units": network.units, "dtype": dtype, "options": network.options}
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")


def load(folder: str | Path) -> Network:
    """A network that `save` wrote. Raises ValueError where config and weights do not fit each other."""
    loaded = load_any(folder)
    if isinstance(loaded, Ensemble):
        raise ValueError(f"{folder} holds an ensemble: use load_ensemble")
    return loaded


def load_ensemble(folder: str | Path) -> Ensemble:
    loaded = load_any(folder)
    if not isinstance(loaded, Ensemble):
        raise ValueError(f"{folder} holds a single network: use load")
    return loaded


def load_any(folder: str | Path) -> Network | Ensemble:
    folder = Path(folder)
    path = folder / "config.json"
    config = _read(path)
    if config.get("kind") == "Ensemble":
        _keys(path, config, {"format", "kind", "members"})
        return Ensemble([load(folder / f"member-{k}") for k in range(_number(path, "members", config["members"]))])
    _keys(path, config, {"format", "kind", "units", "dtype", "options"})
    for name, choices in {"kind": KINDS, "units": PRESETS, "dtype": DTYPES}.items():
        if not isinstance(config[name], str) or config[name] not in choices:
            raise ValueError(f"{path}: {name} is one of {', '.join(choices)}, not {_short(config[name])}")
    kind, dtype = KINDS[config["kind"]], DTYPES[config["dtype"]]
    options = _options(path, kind, config["options"])
    with torch.device("meta"):
        network = kind(**options).to(dtype)
    _fill(network, folder / "weights.safetensors")
    network.units = config["units"]
    return network.eval()


def digest(network: Network | Ensemble) -> str:
    """SHA-256 of all weights, by which a later run sees whether they are the same."""
    sha = hashlib.sha256()
    for name, x in network.state_dict().items():
        sha.update(name.encode() + x.detach().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


def _fill(network: Network, path: Path) -> None:
    """Weights from a file, after the names, shapes and dtypes in its header."""
    expected = network.state_dict()
    with opened(path) as file:
        if "seen_species" not in file.keys():  # noqa: SIM118
            expected.pop("seen_species")
        _names(str(path), set(file.keys()), set(expected))
        for name, x in expected.items():
            part = file.get_slice(name)
            code = {torch.float32: "F32", torch.float64: "F64", torch.bool: "BOOL"}[x.dtype]
            if (part.get_shape(), part.get_dtype()) != (list(x.shape), code):
                raise ValueError(f"{path}: {name} is {code} {list(x.shape)} by the config, but "
                                 f"{part.get_dtype()} {part.get_shape()} in the file")  # fmt: skip
    tensors = {name: x.clone() for name, x in read_tensors(path, unsigned=True).items()}  # aligned as any tensor
    for name, x in tensors.items():
        if not bool(x.isfinite().all()):
            raise ValueError(f"{path}: {name} has numbers that are not finite")
    network.load_state_dict(tensors, assign=True)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"there is no file {path}: give a folder that `save` wrote")
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; configs of networks have at most {LARGEST}")
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise ValueError(f"{path}: an object with format {FORMAT}")
    return config


def _options(path: Path, kind: type[Network], options: Any) -> dict[str, Any]:
    if not isinstance(options, dict):
        raise ValueError(f"{path}: options are an object, not {_short(options)}")
    wanted = inspect.signature(kind).parameters
    _keys(path, options, set(wanted))
    for name, value in options.items():
        default = wanted[name].default
        if isinstance(default, bool):
            if not isinstance(value, bool):
                raise ValueError(f"{path}: {name} is true or false, not {_short(value)}")
        elif isinstance(default, int):
            _number(path, name, value)
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6 or math.isnan(value):
            raise ValueError(f"{path}: {name} is a number above 0 and below 1e6, not {_short(value)}")
    return {name: float(x) if name == "cutoff" else x for name, x in options.items()}


def _number(path: Path, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LIMITS[name]:
        raise ValueError(f"{path}: {name} is a whole number from 1 to {LIMITS[name]}, not {_short(value)}")
    return value


def _keys(path: Path, table: dict[str, Any], wanted: set[str]) -> None:
    _names(str(path), set(table), wanted)


def _names(where: str, names: set[str], wanted: set[str]) -> None:
    if names != wanted:
        missing, more = sorted(wanted - names), sorted(names - wanted)
        raise ValueError(f"{where}: " + ", ".join([*(f"{x} is missing" for x in missing[:3]),
                                                   *(f"{_short(x)} is not known" for x in more[:3])]))  # fmt: skip


def _short(x: Any) -> str:
    text = repr(x) if not isinstance(x, int) or abs(x) < 10**18 else "a number of more than 18 digits"
    return text if len(text) < 60 else text[:60] + "..."
