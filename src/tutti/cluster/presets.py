"""Known devices and how they are wired, with published figures and where they were published."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from tutti.cluster.device import Device, Link
from tutti.cluster.topology import Cluster

NCCL = "NCCL 2.19 src/graph/tuning.cc (latency of the ring, Simple protocol) and topo.h (bandwidth reached)"
MATMUL = "share of the peak: S. Bekman, Machine Learning Engineering, maximum achievable matmul FLOPS"


@dataclass(frozen=True)
class Preset:
    """A device, how many share a node, and the links inside a node and between nodes.

    ``model`` is a pattern for the name by which a driver knows the device.
    """

    device: Device
    node: int
    inside: Link
    between: Link
    model: str = ""


NVLINK3 = Link(300e9, 3.4e-6, 0.8, f"12 links of 25 GB/s each way: NVIDIA A100 whitepaper (2020); {NCCL}")
NVLINK4 = Link(450e9, 3.4e-6, 0.824, f"18 links of 25 GB/s each way: NVIDIA H100 whitepaper (2022); {NCCL}")
HDR = Link(25e9, 14e-6, source=f"one 200 Gb/s InfiniBand port for each GPU: NVIDIA DGX A100 datasheet; {NCCL}")
NDR = Link(50e9, 14e-6, source=f"one 400 Gb/s InfiniBand port for each GPU: NVIDIA DGX H100 datasheet; {NCCL}")
LOOPBACK = Link(1.1e9, 1e-4, source="Gloo over loopback TCP, two processes, measured on a Xeon with AMX")
ETHERNET = Link(1.25e9, 1e-4, source="10 Gb/s Ethernet; latency of Gloo over TCP as on loopback")

AMPERE = {
    "float64": 19.5e12,
    "float32": 19.5e12,
    "tfloat32": 156e12,
    "bfloat16": 312e12,
    "float16": 312e12,
    "int8": 624e12,
}
HOPPER = {
    "float64": 66.9e12,
    "float32": 66.9e12,
    "tfloat32": 494.7e12,
    "bfloat16": 989.4e12,
    "float16": 989.4e12,
    "float8_e4m3fn": 1978.9e12,
    "float8_e5m2": 1978.9e12,
    "int8": 1978.9e12,
}

PRESETS: dict[str, Preset] = {
    "cpu": Preset(
        Device(
            "cpu",
            peak={"float64": 96e9, "float32": 192e9, "bfloat16": 6.1e12, "float16": 192e9},
            memory=8 * 2**30,
            bandwidth=5.5e9,
            efficiency={"float64": 0.85, "float32": 0.85, "bfloat16": 0.21},
            overhead=3e-6,
            source="one core of a Xeon 8480+ at 3.0 GHz (datasheet, all cores busy): 64 (AVX-512, two FMAs) "
            "and 2048 (AMX) FLOP a cycle, Intel optimization manual; 307 GB/s over 56 cores, datasheet; "
            "share of the peak measured with oneDNN; 8 GiB of memory assumed",
        ),
        node=256,
        inside=LOOPBACK,
        between=ETHERNET,
    ),
    "a100-40": Preset(
        Device(
            "a100-40",
            peak=AMPERE,
            memory=40 * 2**30,
            bandwidth=1555e9,
            efficiency={"bfloat16": 0.86, "float16": 0.86},
            overhead=5e-6,
            source=f"NVIDIA A100 datasheet, SXM4 40 GB; {MATMUL}",
        ),
        node=8,
        inside=NVLINK3,
        between=HDR,
        model=r"A100-SXM4-40GB",
    ),
    "a100-80": Preset(
        Device(
            "a100-80",
            peak=AMPERE,
            memory=80 * 2**30,
            bandwidth=2039e9,
            efficiency={"bfloat16": 0.86, "float16": 0.86},
            overhead=5e-6,
            source=f"NVIDIA A100 datasheet, SXM4 80 GB; {MATMUL}",
        ),
        node=8,
        inside=NVLINK3,
        between=HDR,
        model=r"A100-SXM4-80GB",
    ),
    "h100": Preset(
        Device(
            "h100",
            peak=HOPPER,
            memory=80 * 2**30,
            bandwidth=3352e9,
            efficiency={"bfloat16": 0.8, "float16": 0.8},
            overhead=5e-6,
            source=f"NVIDIA H100 datasheet, SXM5; {MATMUL}",
        ),
        node=8,
        inside=NVLINK4,
        between=NDR,
        model=r"H100 80GB HBM3",
    ),
    "h200": Preset(
        Device(
            "h200",
            peak=HOPPER,
            memory=141e9,
            bandwidth=4800e9,
            efficiency={"bfloat16": 0.8, "float16": 0.8},
            overhead=5e-6,
            source=f"NVIDIA H200 datasheet, SXM; the H100's {MATMUL}",
        ),
        node=8,
        inside=NVLINK4,
        between=NDR,
        model=r"H200$",
    ),
}


def cluster(text: str) -> Cluster:
    """What ``Cluster.parse`` does: "name", "name:devices" or "name:nodesxdevices"."""
    match = re.fullmatch(r"([\w.-]+)(?::(\d+)(?:x(\d+))?)?", text.strip())
    if match is None:
        raise ValueError(f"no cluster {text!r}; write name:devices or name:nodesxdevices, such as h100:8 or h100:16x8")
    name, preset = match[1], preset_of(match[1])
    first, second = int(match[2] or 1), int(match[3] or 0)
    nodes, inside = (first, second) if match[3] else (1, first)
    if nodes < 1 or inside < 1:
        raise ValueError(f"cluster {text!r} has no devices; at least {name}:1 is needed")
    if not match[3] and inside > preset.node:
        nodes, inside = inside // preset.node, preset.node
        if nodes * inside != first:
            raise ValueError(
                f"{first} devices do not fill nodes of {preset.node}; nearest are {name}:{nodes}x{inside}"
                f" and {name}:{nodes + 1}x{inside}, or write nodes x devices with fewer a node"
            )
    if inside > preset.node:
        raise ValueError(f"cluster {text!r}: a node has {preset.node} {name}; write {name}:{nodes}x{preset.node}")
    levels = ((inside, preset.inside),) + (((nodes, preset.between),) if nodes > 1 else ())
    return Cluster(preset.device, levels)


def preset_of(name: str) -> Preset:
    """The preset of this name. ``ValueError`` with the nearest name where there is none."""
    if name not in PRESETS:
        longer = [known for known in PRESETS if known.startswith(name.lower())]
        near = longer or difflib.get_close_matches(name.lower(), PRESETS, n=1, cutoff=0.0)
        raise ValueError(f"no device {name!r}; nearest is {near[0]!r}, known are {', '.join(PRESETS)}")
    return PRESETS[name]
