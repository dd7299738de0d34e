"""Names of clusters: "h100:8", "h100:16x8", "h100:64/3x16x8". `Cluster.parse` reads them."""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from math import prod

from tutti.hardware.device import Device, Link
from tutti.hardware.presets import PRESETS, Preset

SPINE = 2  # times the latency between nodes: messages between pods pass more switches (assumed)
_LEVEL = r"(\d+)(?:/(\d+(?:\.\d+)?))?"


def device_and_levels(text: str) -> tuple[Device, tuple[tuple[int, Link], ...]]:
    """The device and levels of "name", or "name:" and devices, nodes x devices, or pods x nodes x devices.

    "/3" after pods or nodes: their link carries a third of what the devices below can send.
    """
    match = re.fullmatch(rf"([\w.-]+)(?::({_LEVEL}(?:x{_LEVEL}){{0,2}}))?", text.strip())
    if match is None:
        raise ValueError(
            f"no cluster {text!r}; write name:devices, name:nodesxdevices or name:podsxnodesxdevices, such as h100:8, "
            "h100:16x8 or h100:64/3x16x8, or a path that ends in .json"
        )
    name, preset = match[1], preset_of(match[1])
    counts = [(int(n), float(over or 1)) for n, over in re.findall(_LEVEL, match[2] or "1")]
    if any(n < 1 for n, _ in counts):
        raise ValueError(f"cluster {text!r} has no devices; at least {name}:1 is needed")
    if any(over < 1 for _, over in counts) or counts[-1][1] != 1:
        raise ValueError(f"cluster {text!r}: only the links between nodes or pods can be oversubscribed, by 1 or more")
    if len(counts) == 1 and counts[0][0] > preset.node:
        counts = [(n, 1.0) for n in _nodes(name, counts[0][0], preset.node)]
    *outside, (inside, _) = counts
    if inside > preset.node:
        rest = "x".join(str(n) for n, _ in outside)
        raise ValueError(f"cluster {text!r}: a node has {preset.node} {name}; write {name}:{rest}x{preset.node}")
    spine = replace(preset.between, latency=SPINE * preset.between.latency,
                    ways=tuple(replace(w, latency=SPINE * w.latency) for w in preset.between.ways))  # fmt: skip
    links = (preset.between, spine)
    levels = [(n, replace(link, oversubscription=over))
              for (n, over), link in zip(reversed(outside), links, strict=False)]  # fmt: skip
    while levels and levels[-1][0] == 1:
        levels.pop()
    return preset.device, (*_inside(name, preset, inside), *levels)


def _nodes(name: str, devices: int, node: int) -> tuple[int, int]:
    nodes = devices // node
    if nodes * node != devices:
        raise ValueError(
            f"{devices} devices do not fill nodes of {node}; nearest are {name}:{nodes}x{node}"
            f" and {name}:{nodes + 1}x{node}, or write nodes x devices with fewer a node"
        )
    return nodes, node


def _inside(name: str, preset: Preset, devices: int) -> tuple[tuple[int, Link], ...]:
    """The levels of a node with this many devices, the inner ones filled first."""
    levels = []
    for members, link in preset.inside:
        if devices > members and devices % members:
            raise ValueError(f"{devices} {name} in a node do not fill its groups of {members}; nearest is {members}")
        levels.append((min(devices, members), link))
        devices //= levels[-1][0]
        if devices == 1:
            break
    assert prod(n for n, _ in levels) <= preset.node
    return tuple(levels)


def preset_of(name: str) -> Preset:
    """The preset of this name. Raises ``ValueError`` with the nearest name if there is none."""
    if name not in PRESETS:
        longer = [preset for preset in PRESETS if preset.startswith(name.lower())]
        near = longer or difflib.get_close_matches(name.lower(), PRESETS, n=1, cutoff=0.0)
        counted = re.fullmatch(r"(.+?)x(\d+)", name.lower())
        if counted and counted[1] in PRESETS:
            raise ValueError(f"unknown device {name!r}; {counted[2]} devices are {counted[1]}:{counted[2]}")
        raise ValueError(f"unknown device {name!r}; nearest is {near[0]!r}, known are {', '.join(PRESETS)}")
    return PRESETS[name]
