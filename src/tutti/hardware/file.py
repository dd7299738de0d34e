"""Clusters as JSON: the fields of the dataclasses, without those at their default.

`Cluster.to_json` and `Cluster.from_json` are the interface.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from typing import Any

from tutti.hardware.curve import Curve, Grid, Ramp
from tutti.hardware.device import Device, Link, Outer, Way


def dump(cluster: Any) -> str:
    """The JSON of a `Cluster`."""
    return json.dumps(_plain(cluster), indent=1)


def load(text: str) -> tuple[Device, tuple[tuple[int, Link], ...]]:
    """The device and the levels of a cluster. Raises ValueError that says what is wrong with the text, and how to get a
    right one."""
    try:
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ValueError(f"an object with 'device' and 'levels' is needed, not {type(data).__name__}")
        levels = data["levels"]
        return _device(data["device"]), tuple((int(size), _link(link)) for size, link in levels)
    except (KeyError, TypeError, ValueError) as error:
        missing = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"not a cluster: {missing}. `tutti calibrate` writes the file of this machine, and "
                         "Cluster.parse('h100:2x8').to_json() one to change by hand") from error  # fmt: skip


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        shown = [f for f in fields(value) if f.init and getattr(value, f.name) != _default(f)]
        return {f.name: _plain(getattr(value, f.name)) for f in shown}
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    return {k: _plain(v) for k, v in value.items()} if hasattr(value, "items") else value


def _default(f) -> Any:
    return f.default_factory() if f.default_factory is not MISSING else f.default


def _device(data: dict) -> Device:
    return _build(Device, data, products=lambda v: {k: _grid(g) for k, g in v.items()},
                 streams=lambda v: {k: _curve(c) for k, c in v.items()},
                 attention=lambda v: {k: _build(Ramp, r) for k, r in v.items()},
                 beside=lambda v: _build(Outer, v))  # fmt: skip


def _link(data: dict) -> Link:
    return _build(Link, data, ways=lambda v: tuple(_build(Way, w) for w in v),
                 measured=lambda v: tuple((kind, k, _curve(c)) for kind, k, c in v))  # fmt: skip


def _curve(data: dict) -> Curve:
    return _build(Curve, data, points=lambda v: tuple((x, y) for x, y in v))


def _grid(data: dict) -> Grid:
    return _build(Grid, data, sizes=tuple, seconds=tuple)


def _build(kind: type, data: dict, **readers: Callable[[Any], Any]) -> Any:
    """An instance of a dataclass from its fields. readers: by field, what reads its value."""
    names = [f.name for f in fields(kind)]
    for key in data:
        if key not in names:
            near = get_close_matches(key, names, 1, cutoff=0.0)
            raise ValueError(f"a {kind.__name__} has no {key!r}; the nearest is {near[0]!r}")
    return kind(**{key: readers.get(key, lambda v: v)(value) for key, value in data.items()})
