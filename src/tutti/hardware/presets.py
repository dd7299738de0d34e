"""Known devices and nodes: published figures, with their sources.

Peaks are of dense matrix products. Links are one-way: what a datasheet sums over both directions is halved. Power is
the maximum at which the datasheet rates the device; devices without a published figure have none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tutti.hardware import reached
from tutti.hardware.device import Device, Link, Outer, Way

ASSUMED = "assumed: share of the peak as an A100's"
INFINIBAND = 0.96  # share of a port's bandwidth that collectives reach
REACHED = (
    "share: 24 of 25 GB/s on a port of HDR (NVIDIA/nccl issue 1048), 48 of 50 on four of EDR, 46 to 48 of 50 on one of "
    "NDR (NVIDIA/nccl-tests issues 29 and 290)"
)
NCCL = "NCCL 2.19 src/graph/tuning.cc (latencies, shares of protocols) and topo.h (bandwidth reached)"


@dataclass(frozen=True)
class Preset:
    """A device, the levels of a node (innermost first), and the link between nodes.

    ``model`` is a pattern for the driver's name of the device.
    """

    device: Device
    inside: tuple[tuple[int, Link], ...]
    between: Link
    model: str = ""

    @property
    def node(self) -> int:
        """Devices per node."""
        return prod(members for members, _ in self.inside)


def _nccl(bandwidth: float, ll: float, ring: tuple[float, float, float], tree: tuple[float, float, float]):
    """The algorithms and protocols of NCCL: LL, LL128 and Simple.

    bandwidth: bytes/s at which a ring passes a node. ll: the maximum of LL (``llMaxBws``). ring, tree: seconds per
    message in each protocol (``hwLat``). Starts are ``baseLat``; shares those of ``ncclTopoTuneModel``.
    """
    return (
        Way("ring", "LL", 6.6e-6, ring[0], min(0.5, ll / bandwidth)),
        Way("ring", "LL128", 14.0e-6, ring[1], 0.92),
        Way("ring", "Simple", 8.4e-6, ring[2], 1.0),
        Way("tree", "LL", 6.8e-6, tree[0], min(1 / 3.8, ll / bandwidth)),
        Way("tree", "LL128", 14.0e-6, tree[1], 7 / 9),
        Way("tree", "Simple", 0.0, tree[2], 0.92),
    )


def _nvlink(bandwidth: float, share: float, ll: float, source: str) -> Link:
    ways = _nccl(bandwidth * share, ll, (0.6e-6, 1.9e-6, 3.4e-6), (0.6e-6, 1.25e-6, 28e-6))
    return Link(bandwidth, 3.4e-6, share, f"{source}; {NCCL}", ways=ways)


def _pcie(bandwidth: float, share: float, source: str) -> Link:
    ways = _nccl(bandwidth * share, 87.7e9, (1.0e-6, 2.5e-6, 5.7e-6), (1.0e-6, 1.9e-6, 28e-6))
    return Link(bandwidth, 5.7e-6, share, f"{source}; {NCCL}", ways=ways)


def _net(bandwidth: float, ports: int, ll: float, source: str, shared: bool = False) -> Link:
    """The network ports of a node, one per device or shared."""
    ways = _nccl(bandwidth * INFINIBAND * ports, ll, (2.7e-6, 4.0e-6, 14.0e-6), (5.0e-6, 8.5e-6, 28e-6))
    return Link(bandwidth, 14e-6, INFINIBAND, f"{source}; {REACHED}; {NCCL}", ports=ports if shared else 0, ways=ways)


RING_ONLY = (Way("ring", "", 0.0, 1e-4, 1.0),)  # Gloo
LEVELS = tuple(Way(a, "", 0.0, 10e-6, 1.0) for a in ("ring", "hierarchical"))  # HCCL
HCCL = "HCCL: ring, or level by level; latency assumed"

NVLINK2 = _nvlink(
    150e9, 0.8, 39.0e9, "6 links of 25 GB/s each way: NVIDIA V100 datasheet; share as NVLink 3's, assumed"
)
NVLINK3 = _nvlink(300e9, 0.8, 87.7e9, "12 links of 25 GB/s each way: NVIDIA A100 whitepaper (2020)")
NVLINK4 = _nvlink(450e9, 0.824, 87.7e9, "18 links of 25 GB/s each way: NVIDIA H100 whitepaper (2022)")
NVLINK5 = _nvlink(900e9, 0.67, 87.7e9, "18 links of 50 GB/s each way: NVIDIA DGX B200 datasheet; share: all-gathers "
                  "and reduce-scatters in SimuMax, configs/system/b200_bf16_ceperm.json")  # fmt: skip
NVLINK4_H800 = _nvlink(200e9, 0.824, 87.7e9, "400 GB/s both ways: DeepSeek-V3 (arXiv 2412.19437) and NVIDIA H800")
PCIE4 = _pcie(32e9, 0.7, "PCI Express 4.0 x16: NVIDIA L40S datasheet; share assumed")
PCIE4_HOST = _pcie(32e9, 0.4, "PCI Express 4.0 x16, through the host's memory: NVIDIA Ada GPU architecture (2022); "
                   "share assumed")  # fmt: skip
XGMI = Link(
    448e9,
    3.4e-6,
    0.7,
    "7 links of 64 GB/s each way, one to each other device: AMD Instinct MI300X platform datasheet (2023); "
    "share and latency assumed",
    kind="mesh",
)
HCCS = Link(
    90e9,
    10e-6,
    0.8,
    "3 links of 30 GB/s, one to each other of four: H. Liao et al., Ascend (HPCA 2021); share assumed; " + HCCL,
    kind="mesh",
    ways=LEVELS,
)
HCCS2 = Link(
    196e9,
    10e-6,
    0.8,
    "392 GB/s both ways, a link to each other of eight: Huawei Atlas 800T A2; share assumed; " + HCCL,
    kind="mesh",
    ways=LEVELS,
)
HALVES = Link(
    32e9, 10e-6, 0.8, "PCI Express 4.0 x16: H. Liao et al., Ascend (HPCA 2021); share assumed; " + HCCL, ports=4,
    ways=LEVELS,
)  # fmt: skip
EDR = _net(12.5e9, 4, 20.4e9, "four 100 Gb/s InfiniBand ports a node: NVIDIA DGX-1 datasheet", shared=True)
EDR8 = _net(12.5e9, 8, 20.4e9, "eight 100 Gb/s InfiniBand ports a node: NVIDIA DGX-2 datasheet", shared=True)
HDR = _net(25e9, 8, 19.0e9, "one 200 Gb/s InfiniBand port for each GPU: NVIDIA DGX A100 datasheet")
NDR = _net(50e9, 8, 19.0e9, "one 400 Gb/s InfiniBand port for each GPU: NVIDIA DGX H100 datasheet")
NDR_72 = _net(50e9, 72, 19.0e9, "one 400 Gb/s InfiniBand port for each GPU: NVIDIA GB200 NVL72 reference design")
PORT_200 = _net(25e9, 8, 19.0e9, "one 200 Gb/s port for each GPU, assumed")
PORT_100 = _net(12.5e9, 1, 20.4e9, "one 100 Gb/s port a node, assumed", shared=True)
ROCE100 = Link(12.5e9, 14e-6, 0.9, f"one 100 Gb/s RoCE port a device: Ascend (HPCA 2021); {HCCL}", ways=LEVELS)
ROCE200 = Link(25e9, 14e-6, 0.9, f"one 200 Gb/s RoCE port a device: Huawei Atlas 800T A2; {HCCL}", ways=LEVELS)
LOOPBACK = Link(
    1.1e9, 1e-4, source="Gloo over loopback TCP, two processes, measured on a Xeon with AMX", ways=RING_ONLY
)
ETHERNET = Link(
    1.25e9, 1e-4, source="one 10 Gb/s Ethernet port a node; latency of Gloo over TCP as on loopback", ports=1,
    ways=RING_ONLY,
)  # fmt: skip

VOLTA = {"float64": 7.8e12, "float32": 15.7e12, "float16": 125e12}
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
BLACKWELL = {
    "float64": 37e12,
    "float32": 75e12,
    "tfloat32": 1.125e15,
    "bfloat16": 2.25e15,
    "float16": 2.25e15,
    "float8_e4m3fn": 4.5e15,
    "float8_e5m2": 4.5e15,
    "mxfp8": 4.5e15,
    "nvfp4": 9e15,
    "int8": 4.5e15,
}
BLACKWELL_NVL72 = {
    "float64": 40e12, "float32": 80e12, "tfloat32": 1.25e15, "bfloat16": 2.5e15, "float16": 2.5e15,
    "float8_e4m3fn": 5e15, "float8_e5m2": 5e15, "mxfp8": 5e15, "nvfp4": 1e16, "int8": 5e15,
}  # fmt: skip
ADA_L40S = {
    "float32": 91.6e12, "tfloat32": 183e12, "bfloat16": 362e12, "float16": 362e12, "float8_e4m3fn": 733e12,
    "float8_e5m2": 733e12, "int8": 733e12,
}  # fmt: skip
ADA_4090 = {  # products of half precision and FP8 with sums in float32
    "float32": 82.6e12, "tfloat32": 82.6e12, "bfloat16": 165.2e12, "float16": 165.2e12, "float8_e4m3fn": 330.3e12,
    "float8_e5m2": 330.3e12, "int8": 660.6e12,
}  # fmt: skip
CDNA3 = {
    "float64": 163.4e12,
    "float32": 163.4e12,
    "tfloat32": 653.7e12,
    "bfloat16": 1307.4e12,
    "float16": 1307.4e12,
    "float8_e4m3fnuz": 2614.9e12,
    "float8_e5m2fnuz": 2614.9e12,
    "int8": 2614.9e12,
}


def _half(share: float) -> dict[str, float]:
    return {"bfloat16": share, "float16": share}


REACHED_THERE = "three quarters of the link and two thirds of the memory's bandwidth reached, assumed"


def _host(node: str, memory: float, devices: int, link: float, sharing: int, bandwidth: float) -> Outer:
    """A device's share of its node's host. memory: GiB. link: bytes/s, shared by `sharing` devices. bandwidth: bytes/s
    of the host's memory."""
    return Outer(
        memory * 2**30 / devices, 0.75 * link / sharing, bandwidth / devices * 2 / 3, f"{node}; {REACHED_THERE}"
    )


DGX1 = _host("NVIDIA DGX-1: 512 GiB, two sockets of 4 channels DDR4-2133, two GPUs on a PCI Express 3.0 x16", 512, 8,
             16e9, 2, 137e9)  # fmt: skip
DGX2 = _host("NVIDIA DGX-2: 1.5 TiB, two sockets of 6 channels DDR4-2666, two GPUs on a PCI Express 3.0 x16", 1536, 16,
             16e9, 2, 256e9)  # fmt: skip
DGX_A100_40 = _host("NVIDIA DGX A100: 1 TiB, two sockets of 8 channels DDR4-3200, two GPUs on a PCI Express 4.0 x16",
                    1024, 8, 32e9, 2, 410e9)  # fmt: skip
DGX_A100_80 = _host("NVIDIA DGX A100 640GB: 2 TiB, two sockets of 8 channels DDR4-3200, two GPUs on a PCI Express 4.0 "
                    "x16", 2048, 8, 32e9, 2, 410e9)  # fmt: skip
DGX_H100 = _host("NVIDIA DGX H100: 2 TiB, two sockets of 8 channels DDR5-4800, PCI Express 5.0 x16", 2048, 8, 64e9, 1,
                 614e9)  # fmt: skip
ATLAS = _host("Huawei Atlas 800 (9000): 768 GiB, four sockets of 8 channels DDR4-2933, PCI Express 4.0 x16", 768, 8,
              32e9, 1, 751e9)  # fmt: skip

DEVICES = (
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
    Device("v100-32", VOLTA, 32 * 2**30, 900e9, {"float16": 0.75}, 5e-6,
           "NVIDIA V100 datasheet, SXM2 32 GB; share of the peak assumed", units=80, beside=DGX1, power=300),
    Device("v100-32-sxm3", VOLTA, 32 * 2**30, 900e9, {"float16": 0.75}, 5e-6,
           "NVIDIA V100 datasheet, as in DGX-2; share of the peak assumed", units=80, beside=DGX2),
    Device("a100-40", AMPERE, 40 * 2**30, 1555e9, reached.A100, 5e-6,
           f"NVIDIA A100 datasheet, SXM4 40 GB; {reached.SOURCE}",
           units=108, attention=reached.FLASH_A100, yields=reached.YIELDS, varies=reached.VARIES, beside=DGX_A100_40,
           power=400),
    Device("a100-80", AMPERE, 80 * 2**30, 2039e9, reached.A100, 5e-6,
           f"NVIDIA A100 datasheet, SXM4 80 GB; {reached.SOURCE}",
           units=108, attention=reached.FLASH_A100, yields=reached.YIELDS, varies=reached.VARIES, beside=DGX_A100_80,
           power=400),
    Device("h100", HOPPER, 80 * 2**30, 3352e9, reached.HOPPER, 5e-6,
           f"NVIDIA H100 datasheet, SXM5; {reached.SOURCE}",
           units=132, attention=reached.FLASH_HOPPER, yields=reached.YIELDS, varies=reached.VARIES, beside=DGX_H100,
           power=700),
    Device("h200", HOPPER, 141e9, 4800e9, reached.HOPPER, 5e-6,
           f"NVIDIA H200 datasheet, SXM; as an H100: {reached.SOURCE}",
           units=132, attention=reached.FLASH_HOPPER, yields=reached.YIELDS, varies=reached.VARIES, beside=DGX_H100,
           power=700),
    Device("b200", BLACKWELL, 180e9, 8000e9, reached.B200, 5e-6,
           "NVIDIA DGX B200 and HGX B200 datasheets, an eighth, dense; power: NVIDIA Blackwell architecture technical "
           f"brief (2024); {reached.SOURCE}",
           units=148, attention=reached.FLASH_B200, yields=reached.YIELDS, varies=reached.VARIES, beside=DGX_H100,
           power=1000),
    Device("h800", HOPPER, 80 * 2**30, 3352e9, reached.HOPPER, 5e-6,
           f"an H100 with other links: DeepSeek-V3 (arXiv 2412.19437); {reached.SOURCE}",
           units=132, attention=reached.FLASH_HOPPER, yields=reached.YIELDS, varies=reached.VARIES, beside=DGX_H100,
           power=700),
    Device("gb200", BLACKWELL_NVL72, 186e9, 8000e9, reached.B200, 5e-6,
           "NVIDIA GB200 NVL72 datasheet, a 72nd, dense; power of a GPU: NVIDIA Blackwell architecture technical brief "
           f"(2024); as a B200: {reached.SOURCE}",
           units=148, attention=reached.FLASH_B200, yields=reached.YIELDS, varies=reached.VARIES, power=1200),
    Device("l40s", ADA_L40S, 48e9, 864e9, _half(0.8), 5e-6,
           f"NVIDIA L40S datasheet (2023), dense; {ASSUMED}", units=142, power=350),
    Device("rtx-4090", ADA_4090, 24e9, 1008e9, _half(0.8), 5e-6,
           f"NVIDIA Ada GPU architecture (2022), dense; {ASSUMED}", units=128, power=450),
    Device("mi300x", CDNA3, 192e9, 5325e9, _half(0.5), 5e-6,
           "AMD Instinct MI300X datasheet (2023), matrix peaks; share of the peak assumed", units=304, beside=DGX_H100,
           power=750),
    Device("ascend-910", {"float32": 4.1e12, "float16": 256e12, "int8": 512e12}, 32 * 2**30, 1200e9,
           {"float16": 0.7}, 10e-6,
           "Huawei, DaVinci (Hot Chips 31, 2019); float32: 32 vector units of 64 numbers at 1 GHz; power: Huawei, "
           "launch of Ascend 910 (August 2019); share assumed",
           units=32, beside=ATLAS, power=310),
    Device("ascend-910b", {"float32": 75e12, "bfloat16": 313e12, "float16": 313e12, "int8": 626e12}, 64 * 2**30,
           1600e9, _half(0.7), 10e-6, "Huawei Atlas 800T A2 (Ascend 910B3), figures of resellers; share assumed",
           beside=ATLAS),
)  # fmt: skip

_WIRED: dict[str, tuple[tuple[tuple[int, Link], ...], Link, str]] = {
    "cpu": (((256, LOOPBACK),), ETHERNET, ""),
    "v100-32": (((8, NVLINK2),), EDR, r"V100-SXM2-32GB"),
    "v100-32-sxm3": (((16, NVLINK2),), EDR8, r"V100-SXM3-32GB"),
    "a100-40": (((8, NVLINK3),), HDR, r"A100-SXM4-40GB"),
    "a100-80": (((8, NVLINK3),), HDR, r"A100-SXM4-80GB"),
    "h100": (((8, NVLINK4),), NDR, r"H100 80GB HBM3"),
    "h200": (((8, NVLINK4),), NDR, r"H200$"),
    "b200": (((8, NVLINK5),), NDR, r"\bB200$"),
    "h800": (((8, NVLINK4_H800),), NDR, r"H800$"),
    "gb200": (((72, NVLINK5),), NDR_72, r"GB200$"),
    "l40s": (((8, PCIE4),), PORT_200, r"L40S$"),
    "rtx-4090": (((8, PCIE4_HOST),), PORT_100, r"RTX 4090$"),
    "mi300x": (((8, XGMI),), NDR, r"MI300X"),
    "ascend-910": (((4, HCCS), (2, HALVES)), ROCE100, ""),
    "ascend-910b": (((8, HCCS2),), ROCE200, ""),
}
PRESETS = {d.name: Preset(d, *_WIRED[d.name]) for d in DEVICES}


def register_device(device: Device, *, inside: Sequence[tuple[int, Link]], between: Link, model: str = "") -> None:
    """Register a device, so that `cluster="<device.name>:16x8"` names a cluster of it.

    Args:
        device: its figures. If the name starts with "cpu", its memory is the host's.
        inside: (members, link) of each level of a node, innermost first.
        between: the link between nodes.
        model: a regular expression for the name that `torch.cuda.get_device_name()` returns. If it matches,
            `cluster="auto"` uses this device.

    Raises ValueError for a name that is taken, or that `tutti.Cluster.parse` cannot read, and for a node without
    levels.
    """
    if not re.fullmatch(r"[\w.-]+", device.name) or device.name.endswith(".json"):
        raise ValueError(f"device {device.name!r}: a name is letters, digits, '.', '_' and '-'")
    if device.name in PRESETS:
        raise ValueError(f"device {device.name!r} is already registered; choose another name")
    if not inside or any(members < 1 for members, _ in inside):
        raise ValueError(f"device {device.name!r}: a node needs levels of at least one member, not {inside!r}")
    PRESETS[device.name] = Preset(device, tuple(inside), between, model)
