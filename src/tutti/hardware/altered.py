"""A cluster with other figures, to see what they would change: "link=2x,memory=141GiB"."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from math import inf

from tutti.hardware.device import Device, Link
from tutti.hardware.topology import Cluster

UNITS = {"": 1.0, "GB": 1e9, "GiB": 2**30, "TB": 1e12, "GB/s": 1e9, "TB/s": 1e12, "GFLOP/s": 1e9, "TFLOP/s": 1e12,
         "us": 1e-6,
         "W": 1.0, "kW": 1e3}  # fmt: skip
FIGURES = {  # by name: what it is, and the units that an amount may have
    "memory": ("a device's memory", ("GB", "GiB", "TB")),
    "bandwidth": ("of a device's memory", ("GB/s", "TB/s")),
    "peak": ("FLOP/s of matrix products", ()),
    "overhead": ("of launching an operator", ("us",)),
    "power": ("of a device, for energy", ("W", "kW")),
    "link": ("bandwidth of all links", ()),
    "node": ("bandwidth inside a node", ("GB/s",)),
    "network": ("bandwidth between nodes", ("GB/s",)),
}
ATTENTION = "attention"  # the kernel of fused attention, by the prefix of its rates


def altered(cluster: Cluster, text: str) -> Cluster:
    """The cluster with figures multiplied ("2x") or replaced ("141GiB"), separated by commas.

    Raises ValueError for what is no figure or no amount of it, and for links whose times are measured.
    """
    for part in filter(None, text.split(",")):
        name, _, amount = part.strip().partition("=")
        if name == ATTENTION:
            cluster = replace(cluster, device=_with_attention(cluster.device, amount))
            continue
        if name not in FIGURES:
            raise ValueError(
                f"no figure {name!r} to change; there are {', '.join((*FIGURES, ATTENTION))}, as in "
                "link=2x,memory=141GiB"
            )
        cluster = _changed(cluster, name, _change(name, amount))
    return cluster


def without_effect(cluster: Cluster, text: str) -> list[str]:
    """A line for each part of the text that leaves the cluster as it is."""
    lines = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if altered(cluster, part) == cluster:
            why = ", which has one node" if part.startswith("network") and cluster.size > 1 else ""
            lines.append(f"{part} changes nothing on {cluster}{why}")
    return lines


def _with_attention(device: Device, kernel: str) -> Device:
    prefix = f"{kernel} "
    rates = {key.removeprefix(prefix): ramp for key, ramp in device.attention.items() if key.startswith(prefix)}
    if not rates:
        kernels = sorted({key.split()[0] for key in device.attention if " " in key})
        raise ValueError(f"attention={kernel}: {device.name} has rates of {', '.join(kernels) or 'no other kernel'}")
    return replace(device, attention=rates)


def _change(name: str, amount: str) -> Callable[[float], float]:
    """What becomes of a figure."""
    units = FIGURES[name][1]
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(.*)", amount)
    value = float(match[1]) if match else 0.0
    if match is None or not 0 < value < inf or match[2] not in ("x", *units):
        wanted = " or ".join(["a factor such as 2x", *(f"an amount in {unit}" for unit in units)])
        raise ValueError(f"{name}={amount}: {name} ({FIGURES[name][0]}) is {wanted}")
    if match[2] == "x":
        return lambda figure: figure * value
    return lambda figure: value * UNITS[match[2]]


def _changed(cluster: Cluster, name: str, change: Callable[[float], float]) -> Cluster:
    device = cluster.device
    if name == "peak":
        return replace(cluster, device=replace(device, peak={k: change(v) for k, v in device.peak.items()}))
    if name == "power":
        if not device.power and change(0.0) == 0.0:
            raise ValueError(f"the power of {device.name} is not known: give an amount, such as power=300W")
        return replace(cluster, device=replace(device, power=change(device.power)))
    if name in ("memory", "bandwidth", "overhead"):
        if device.products or device.streams:
            raise ValueError(f"{name} of {device.name} is measured; what-if questions are for known devices")
        return replace(cluster, device=replace(device, **{name: change(getattr(device, name))}))
    inside = _inside(cluster, device)
    levels = [
        (members, _link(link, change) if name == "link" or (name == "node") == (i < inside) else link)
        for i, (members, link) in enumerate(cluster.levels)
    ]
    return replace(cluster, levels=tuple(levels))


def _inside(cluster: Cluster, device: Device) -> int:
    """The number of levels inside a node."""
    from tutti.hardware.presets import PRESETS

    preset = PRESETS.get(device.name)
    return min(len(preset.inside) if preset else 1, len(cluster.levels))


def _link(link: Link, change: Callable[[float], float]) -> Link:
    if link.measured:
        raise ValueError("the times of this cluster's links are measured; what-if questions are for known devices")
    return replace(link, bandwidth=change(link.bandwidth))
